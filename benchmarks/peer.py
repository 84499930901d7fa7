"""One other implementation in this process: load it, let it speak, and note when its frames and its samples came.

Started by `benchmarks/peers.py` with the peer's own packages on the path, so nothing of this project's model is
imported here. The last line printed is the answer as JSON.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import pairwise
from typing import Any, Protocol

import torch

SEEDS = 40  # random weights may end an utterance at any frame; another seed ends it elsewhere
WARM_UP = 8  # frames

# What the peers import for voice cloning, for the 25 Hz tokenizer or for reading files; none of it is used here.
UNUSED = (
    "torchaudio.compliance.kaldi",
    "librosa.filters",
    "soundfile",
    "sox",
    "onnxruntime",
    "einops",
)
PACKAGES = ("qwen-tts", "qwen-tts-hf", "faster-qwen3-tts", "transformers", "torch")


@dataclass(frozen=True)
class Run:
    """One utterance: seconds of each frame, and from the request to the first samples."""

    frame_seconds: list[float]
    first_audio: float


class Speaker(Protocol):
    """Something that can say the benchmark's text."""

    @property
    def name(self) -> str: ...

    def speak(self, seed: int, frames: int) -> Run:
        """An utterance of at most ``frames`` frames."""
        ...


@dataclass(frozen=True)
class Call:
    """What a peer is asked for: ``runs`` utterances of ``frames`` frames."""

    directory: str
    text: str
    voice: str
    device: str = "cuda"
    dtype: str = "bfloat16"
    frames: int = 50
    runs: int = 2


@dataclass(frozen=True)
class Answer:
    """Seconds of every frame, and of every first audio by the number of frames in that first chunk."""

    frame_seconds: list[float]
    first_audio: dict[str, list[float]]
    versions: dict[str, str]
    absent: str | None = None  # why there is no answer


class QwenTts:
    """The reference implementation. It does not stream: its first samples are its last."""

    name = "qwen-tts"

    def __init__(self, call: Call) -> None:
        qwen_tts = importlib.import_module("qwen_tts")
        importlib.import_module("transformers").logging.set_verbosity_error()  # else a line a frame
        options = {"device_map": call.device, "attn_implementation": "sdpa"} if call.device != "cpu" else {}
        dtype = getattr(torch, call.dtype)
        self.call, self.model = call, qwen_tts.Qwen3TTSModel.from_pretrained(call.directory, dtype=dtype, **options)

    def speak(self, seed: int, frames: int) -> Run:
        """It counts the code after the last frame as one more."""
        torch.manual_seed(seed)
        steps: list[float] = []
        hook = self.model.model.talker.register_forward_hook(lambda *_: steps.append(time.perf_counter()))
        try:
            start = time.perf_counter()
            self.model.generate_custom_voice(self.call.text, speaker=self.call.voice, max_new_tokens=frames + 1)
            return Run(_between(steps), time.perf_counter() - start)
        finally:
            hook.remove()

    def first_audio(self, runs: list[Run]) -> dict[str, list[float]]:
        return {f"all {self.call.frames}": [run.first_audio for run in runs]}


class FasterQwen3Tts:
    """Talker step and predictor as two CUDA graphs of transformers' modules; each chunk is decoded with its context."""

    name = "faster-qwen3-tts"
    CHUNKS = (1, 12)  # frames: the least, and its default

    def __init__(self, call: Call) -> None:
        package = importlib.import_module("faster_qwen3_tts")
        importlib.import_module("transformers").logging.set_verbosity_error()
        dtype = getattr(torch, call.dtype)
        self.call = call
        self.model = package.FasterQwen3TTS.from_pretrained(call.directory, device=call.device, dtype=dtype)

    def speak(self, seed: int, frames: int) -> Run:
        """Each frame starts with the predictor's graph, just after the host has waited for the code before it."""
        torch.manual_seed(seed)
        starts: list[float] = []
        graph = self.model.predictor_graph
        run: Callable[..., Any] = graph.run

        def marked(*arguments: Any) -> Any:
            starts.append(time.perf_counter())
            return run(*arguments)

        graph.run = marked
        try:
            start = time.perf_counter()
            self.model.generate_custom_voice(max_new_tokens=frames + 1, **self._request())
            return Run(_between(starts), time.perf_counter() - start)
        finally:
            graph.run = run

    def first_audio(self, runs: list[Run]) -> dict[str, list[float]]:
        """Of utterances of their own, as those of ``runs`` came whole; the first of each is the warm-up."""
        seeds = range(len(runs) + 1)
        return {str(chunk): [self._first_chunk(seed, chunk) for seed in seeds][1:] for chunk in self.CHUNKS}

    def _first_chunk(self, seed: int, frames: int) -> float:
        torch.manual_seed(seed)
        start = time.perf_counter()
        chunks = self.model.generate_custom_voice_streaming(
            chunk_size=frames, max_new_tokens=frames + 1, **self._request()
        )
        next(chunks)
        seconds = time.perf_counter() - start
        chunks.close()
        return seconds

    def _request(self) -> dict[str, Any]:
        return {"text": self.call.text, "speaker": self.call.voice, "language": "Auto"}


SPEAKERS: dict[str, type[QwenTts | FasterQwen3Tts]] = {kind.name: kind for kind in (QwenTts, FasterQwen3Tts)}


def whole_run(speaker: Speaker, frames: int, seed: int) -> Run:
    """The first utterance, from ``seed`` on, that lasts for all of ``frames``."""
    for attempt in range(seed, seed + SEEDS):
        run = speaker.speak(attempt, frames)
        if len(run.frame_seconds) >= frames:
            return run
    raise SystemExit(f"{speaker.name}: none of {SEEDS} seeds speaks {frames} frames; ask for fewer with --frames")


def ask(name: str, call: Call) -> Answer:
    """Load the peer of that ``name``, warm it up and measure it; absent, say why."""
    if call.device == "cuda" and not torch.cuda.is_available():
        return Answer([], {}, {}, absent="there is no CUDA device")
    with silence():
        stand_in_for_unused()
        try:
            speaker = SPEAKERS[name](call)
        except (ImportError, AttributeError) as error:  # AttributeError: transformers of another series
            return Answer([], {}, versions(), absent=f"{type(error).__name__}: {error}")
        speaker.speak(0, min(WARM_UP, call.frames))
        runs = [whole_run(speaker, call.frames, turn * SEEDS) for turn in range(call.runs)]
        seconds = [seconds for run in runs for seconds in run.frame_seconds]
        return Answer(seconds, speaker.first_audio(runs), versions())


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _between(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


class _Unused(types.ModuleType):
    """Has every name that is asked of it; calling any of them is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> Any:
            raise ImportError(f"{self.__name__}.{name} is needed after all, and is not installed")

        return absent


def stand_in_for_unused() -> None:
    """Empty modules for those of `UNUSED` that cannot be imported."""
    for name in UNUSED:
        try:
            importlib.import_module(name)
        except (ImportError, OSError):
            _stand_in(name)


def _stand_in(name: str) -> None:
    parts = name.split(".")
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    for module in [module for module in sys.modules if module.split(".")[0] == parts[0]]:
        del sys.modules[module]
    modules = [_Unused(each) for each in names]
    for module in modules:
        module.__path__ = []
        # transformers asks importlib whether the package exists, and a module without a spec raises there
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, loader=None, is_package=True)
    for parent, child in pairwise(modules):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    sys.modules |= {module.__name__: module for module in modules}


@contextmanager
def silence() -> Iterator[None]:
    """Nothing reaches the terminal, not from libraries beneath Python either: one of them lists a vocabulary."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for number, _ in kept:
            os.dup2(nowhere.fileno(), number)
        try:
            yield
        finally:
            for number, copy in kept:
                os.dup2(copy, number)
                os.close(copy)


if __name__ == "__main__":
    print(json.dumps(asdict(ask(sys.argv[1], Call(**json.loads(sys.argv[2]))))))
