"""A recording to a `Voice`, with the speaker encoder and the codec's encoder of the package qwen-tts.

The only module that imports qwen-tts, and only when a voice is cloned. Knows nothing of prompts.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import soxr
import torch

from backend.checkpoint import Checkpoint
from backend.errors import EngineError, RequestError
from backend.text import check_text
from backend.voice import Voice

MIN_SECONDS, MAX_SECONDS = 1.0, 30.0


def import_qwen_tts() -> types.ModuleType:
    """qwen-tts, also beside a torch that torchaudio does not load with.

    qwen-tts imports torchaudio for its 25 Hz tokenizer alone, which is not used here; where torchaudio cannot be
    imported an empty module stands in for it. Raises `EngineError` saying what to install.
    """
    _ensure_torchaudio()
    try:
        return importlib.import_module("qwen_tts")
    except ImportError as error:
        raise EngineError(
            f"cloning needs the package qwen-tts, which cannot be imported ({error}): "
            "pip install 'qwen3-tts-server[clone]' && pip install --no-deps qwen-tts==0.1.1"
        ) from error


def _ensure_torchaudio() -> None:
    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchaudio"]:
            del sys.modules[name]
        names = ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi")
        modules = [_stand_in(name) for name in names]
        for parent, child in pairwise(modules):
            setattr(parent, child.__name__.rpartition(".")[2], child)
        sys.modules |= {module.__name__: module for module in modules}


def _stand_in(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    # transformers asks importlib whether the package exists, and a module without a spec raises there
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    return module


class Cloner:
    """The two encoders of a ``base`` checkpoint, in float32 on the CPU, loaded when first used."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        import_qwen_tts()
        self.config = checkpoint.config
        models = importlib.import_module("qwen_tts.core.models.modeling_qwen3_tts")
        codec = importlib.import_module("qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2")
        self.mel_spectrogram = models.mel_spectrogram
        with _one_thread():
            speaker = models.Qwen3TTSSpeakerEncoder(_foreign_config(checkpoint, "speaker_encoder_config"))
            self.speaker_encoder = _load(speaker, checkpoint, "speaker_encoder.")
            encoder = codec.Qwen3TTSTokenizerV2Encoder._from_config(_foreign_config(checkpoint, "encoder_config"))
            self.codec_encoder = _load(encoder, checkpoint, "codec_encoder.")

    @torch.inference_mode()
    def clone(self, samples: np.ndarray, sample_rate: int, text: str | None) -> Voice:
        """See `Synthesizer.clone`."""
        wave = self._wave(samples, sample_rate)
        if text is not None:
            check_text(text, "text")
            if not text.strip():
                raise RequestError("the transcript is empty: leave it out to clone from the sound alone", "text")
        with _one_thread():
            return Voice(self._x_vector(wave), None if text is None else self._codes(wave), text)

    def _wave(self, samples: np.ndarray, sample_rate: int) -> np.ndarray:
        wave = np.asarray(samples, dtype=np.float32)
        if wave.ndim != 1 or sample_rate <= 0:
            raise RequestError(
                f"samples must be [n] mono at a positive rate, got {wave.shape} at {sample_rate}", "samples"
            )
        if not np.isfinite(wave).all():
            raise RequestError("samples holds numbers that are not finite", "samples")
        seconds = len(wave) / sample_rate
        if not MIN_SECONDS <= seconds <= MAX_SECONDS:
            raise RequestError(
                f"the recording lasts {seconds:.1f} s: give between {MIN_SECONDS:.0f} and {MAX_SECONDS:.0f} s",
                "samples",
            )
        rate = self.config.codec.sample_rate
        return wave if sample_rate == rate else soxr.resample(wave, sample_rate, rate, quality="HQ")

    def _x_vector(self, wave: np.ndarray) -> np.ndarray:
        """The speaker encoder over a log-mel spectrogram, with the numbers of qwen-tts's extract_speaker_embedding."""
        encoder = self.config.speaker_encoder
        assert encoder is not None, "a base checkpoint has a speaker encoder"
        mel = self.mel_spectrogram(
            torch.from_numpy(wave)[None],
            n_fft=1024,
            num_mels=encoder.mel_dim,
            sampling_rate=encoder.sample_rate,
            hop_size=256,
            win_size=1024,
            fmin=0,
            fmax=encoder.sample_rate // 2,
        )
        return self.speaker_encoder(mel.transpose(1, 2))[0].numpy()

    def _codes(self, wave: np.ndarray) -> np.ndarray:
        encoded = self.codec_encoder.encode(input_values=torch.from_numpy(wave)[None, None], return_dict=True)
        frames = -(-len(wave) // self.config.codec.samples_per_frame)
        return encoded.audio_codes[0, : self.config.spec.groups, :frames].T.contiguous().numpy()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on the calling thread alone: OpenMP threads of its own would slow the lanes' from then on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _load(module: Any, checkpoint: Checkpoint, prefix: str) -> Any:
    state = {name: tensor.float() for name, tensor in checkpoint.read_under(prefix)}
    module.load_state_dict(state, strict=True)
    return module.eval()


def _foreign_config(checkpoint: Checkpoint, section: str) -> Any:
    """The section as qwen-tts's own configuration object, read by qwen-tts from the checkpoint's files."""
    if section == "encoder_config":
        tokenizer = importlib.import_module("qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2")
        return tokenizer.Qwen3TTSTokenizerV2Config.from_pretrained(
            checkpoint.directory / "speech_tokenizer"
        ).encoder_config
    models = importlib.import_module("qwen_tts.core.models.configuration_qwen3_tts")
    return models.Qwen3TTSConfig.from_pretrained(checkpoint.directory).speaker_encoder_config
