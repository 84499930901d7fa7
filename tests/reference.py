"""The reference implementation, importable: ``from tests.reference import qwen_tts`` works on a CPU-only torch.

qwen-tts imports torchaudio for its 25 Hz tokenizer, which this project does not use, and the published torchaudio
needs a CUDA build of torch; where it cannot be imported, an empty module stands in for it.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
import warnings


def _stand_in(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    # transformers asks importlib whether the package exists, and a module without a spec raises there.
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    return module


def _ensure_torchaudio() -> None:
    try:
        import torchaudio  # noqa: F401  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
            del sys.modules[name]
        compliance, kaldi = _stand_in("torchaudio.compliance"), _stand_in("torchaudio.compliance.kaldi")
        torchaudio = _stand_in("torchaudio")
        torchaudio.compliance, compliance.kaldi = compliance, kaldi  # pyright: ignore
        sys.modules |= {module.__name__: module for module in (torchaudio, compliance, kaldi)}


_ensure_torchaudio()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import qwen_tts  # noqa: E402

__all__ = ["qwen_tts"]
