"""Every kind, text mode and voice against qwen-tts on the same files: greedy codes token for token, logits, audio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from backend import Sampling, SpeechRequest, Synthesizer, Voice
from tests.reference import qwen_tts

FRAMES = 70
TEXT = "The quick brown fox jumps over the lazy dog, 42 times; isn't that odd?"
GREEDY = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": FRAMES + 1}


@dataclass(frozen=True)
class Case:
    kind: str
    request: dict[str, Any]
    reference: dict[str, Any]


def custom(**both: Any) -> Case:
    request = {"voice": both["speaker"], "language": both.get("language", "auto")}
    return Case("custom_voice", request | {"instruction": both.get("instruct")}, both)


CASES = {
    "named speaker": custom(speaker="ryan", language="english"),
    "named speaker, auto": custom(speaker="Vivian"),
    "dialect": custom(speaker="eric", language="chinese"),
    "dialect, auto": custom(speaker="dylan"),
    "dialect speaker in another language": custom(speaker="dylan", language="german"),
    "instruction": custom(speaker="serena", language="english", instruct="Speak slowly, in a whisper."),
    "design": Case("voice_design", {"instruction": "An old man."}, {"instruct": "An old man."}),
    "design, without instruction": Case("voice_design", {"language": "french"}, {"language": "french", "instruct": ""}),
    "x-vector": Case("base", {"language": "english"}, {"language": "english", "x_vector_only_mode": True}),
    "x-vector, auto": Case("base", {}, {"x_vector_only_mode": True}),
    "icl": Case("base", {"language": "english"}, {"language": "english", "ref_text": "A reference, spoken."}),
    "icl, text shorter than the reference": Case("base", {}, {"ref_text": "Hi.", "seconds": 6.0}),
}


@pytest.fixture(scope="module")
def models(tiny):
    """Both implementations of each kind, loaded from the same files."""
    ours = {}
    theirs = {}

    def load(kind: str):
        if kind not in ours:
            ours[kind] = Synthesizer.from_pretrained(tiny(kind), dtype="float32", lanes=2)
            theirs[kind] = qwen_tts.Qwen3TTSModel.from_pretrained(str(tiny(kind)), dtype=torch.float32)
        return ours[kind], theirs[kind]

    yield load
    for synthesizer in ours.values():
        synthesizer.close()


def recording(seconds: float = 2.4, rate: int = 16000) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(5).standard_normal(len(time))
    return (0.3 * np.sin(2 * np.pi * 180 * time * (1 + 0.1 * np.sin(3 * time))) + 0.02 * noise).astype(np.float32)


def speak_theirs(model: Any, case: Case, whole: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """Codes ``[frames, groups]`` and samples of qwen-tts."""
    options = {**case.reference, **GREEDY, "non_streaming_mode": whole}
    codes: list[torch.Tensor] = []
    generate = model.model.generate

    def spy(*args: Any, **kwargs: Any):
        result = generate(*args, **kwargs)
        codes.extend(result[0])
        return result

    model.model.generate = spy
    try:
        if case.kind == "base":
            audio = recording(options.pop("seconds", 2.4))
            samples, _ = model.generate_voice_clone(TEXT, ref_audio=(audio, 16000), **options)
        else:
            method = model.generate_custom_voice if case.kind == "custom_voice" else model.generate_voice_design
            samples, _ = method(TEXT, **options)
    finally:
        model.model.generate = generate
    return codes[0].numpy(), samples[0]


def voice_of(synthesizer: Synthesizer, case: Case) -> Voice:
    options = case.reference
    return synthesizer.clone(recording(options.get("seconds", 2.4)), 16000, options.get("ref_text"))


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CASES)
def test_greedy_codes_and_audio_equal_qwen_tts(models, name: str, whole: bool) -> None:
    case = CASES[name]
    ours, theirs = models(case.kind)
    voice = {"voice": voice_of(ours, case)} if case.kind == "base" else {}
    request = SpeechRequest(
        TEXT,
        **(case.request | voice),
        sampling=Sampling(greedy=True, max_frames=FRAMES),
        text_mode="whole" if whole else "streamed",
    )
    chunks = list(ours.stream(request))
    codes = np.concatenate([chunk.codes for chunk in chunks])
    samples = np.concatenate([chunk.samples for chunk in chunks])
    expected_codes, expected_samples = speak_theirs(theirs, case, whole)
    assert len(expected_codes) >= 64, "the reference stopped too early to prove anything"
    mismatch = np.argwhere(codes[: len(expected_codes)] != expected_codes[: len(codes)])
    assert codes.shape == expected_codes.shape and not len(mismatch), (
        f"{codes.shape} against {expected_codes.shape}, first difference (frame, group): {mismatch[:1].tolist()}"
    )
    assert samples.shape == expected_samples.shape
    assert np.abs(samples - expected_samples).max() < 1e-4
