"""Every kind, text mode and voice against qwen-tts on the same files: greedy codes token for token, logits, audio."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from backend import Sampling, SpeechRequest, Synthesizer, Voice
from backend.make_checkpoint import make_checkpoint
from megakernel.sampling import Draw
from tests.reference import qwen_tts

FRAMES = 70
TEXT = "The quick brown fox jumps over the lazy dog, 42 times; isn't that odd?"
GREEDY = {"do_sample": False, "subtalker_dosample": False}


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


def speak_theirs(model: Any, case: Case, whole: bool, frames: int = FRAMES) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[frames, groups]`` and samples of qwen-tts; it counts the code after the last frame as one more."""
    options = {**case.reference, **GREEDY, "non_streaming_mode": whole, "max_new_tokens": frames + 1}
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
    assert np.abs(samples - expected_samples).max() < 1e-5


class Spy:
    """Replaces ``owner.name`` by a function that also records."""

    def __init__(self, owner: Any, name: str, record) -> None:
        self.owner, self.name, self.record = owner, name, record

    def __enter__(self) -> None:
        self.original = getattr(self.owner, self.name)

        def spy(*args: Any, **kwargs: Any):
            result = self.original(*args, **kwargs)
            self.record(result, *args, **kwargs)
            return result

        setattr(self.owner, self.name, spy)

    def __exit__(self, *_: object) -> None:
        setattr(self.owner, self.name, self.original)


@pytest.mark.parametrize("name", ["named speaker", "design", "icl"])
def test_logits_of_both_heads_equal_qwen_tts(models, name: str) -> None:
    case = CASES[name]
    ours, theirs = models(case.kind)
    state, frames = ours.decoder.state, 12
    talker_logits, predictor_logits = [], []

    def before_and_after(_: Any, lanes: list[int], *__: Any) -> None:
        predictor_logits.append(state.predictor_logits[lanes[0]].clone())
        talker_logits.append(state.logits[lanes[0]].clone())

    voice = {"voice": voice_of(ours, case)} if case.kind == "base" else {}
    request = SpeechRequest(
        TEXT,
        **(case.request | voice),
        sampling=Sampling(greedy=True, max_frames=frames),
        text_mode="streamed",
    )

    def after_prompt(_: Any, lane: int, __: Any) -> None:
        talker_logits.append(state.logits[lane].clone())

    with Spy(ours.decoder, "prefill", after_prompt), Spy(ours.decoder, "step", before_and_after):
        list(ours.stream(request))

    expected_talker, expected_predictor = [], []
    talker = theirs.model.talker
    hooks = [
        talker.register_forward_hook(lambda _, __, out: expected_talker.append(out.logits[0, -1])),
        talker.code_predictor.register_forward_hook(lambda _, __, out: expected_predictor.append(out.logits[0, -1])),
    ]
    speak_theirs(theirs, case, whole=False, frames=frames)
    for hook in hooks:
        hook.remove()

    groups = ours.config.spec.groups - 1
    for frame in range(frames):
        torch.testing.assert_close(talker_logits[frame], expected_talker[frame], atol=1e-4, rtol=0)
        expected = torch.stack(expected_predictor[frame * groups : (frame + 1) * groups])
        torch.testing.assert_close(predictor_logits[frame], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        (Sampling(), {}),
        (
            Sampling(temperature=1.3, top_k=20, top_p=0.7, repetition_penalty=1.6, predictor_temperature=0.6,
                     predictor_top_k=0, predictor_top_p=0.5),
            {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "repetition_penalty": 1.6,
             "subtalker_temperature": 0.6, "subtalker_top_k": 0, "subtalker_top_p": 0.5},
        ),
    ],
    ids=["defaults", "all filters"],
)  # fmt: skip
def test_distribution_before_the_draw_equals_qwen_tts(models, monkeypatch, sampling, options) -> None:
    """qwen-tts is made to draw our codes; at every draw its probabilities are compared with ours."""
    ours, theirs = models("custom_voice")
    frames = 10
    distributions, draws = [], []

    def record(code: torch.Tensor, draw: Draw, logits: torch.Tensor, _noise: Any) -> None:
        distributions.append(draw.filter(logits)[0].softmax(-1))
        draws.append(int(code[0]))

    original = Draw.sample

    def spy(self: Draw, logits: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        code = original(self, logits, noise)
        record(code, self, logits, noise)
        return code

    monkeypatch.setattr(Draw, "sample", spy)
    request = SpeechRequest(TEXT, voice="ryan", seed=11, sampling=replace(sampling, max_frames=frames))
    list(ours.stream(request))
    monkeypatch.setattr(Draw, "sample", original)

    expected = []

    def multinomial(probabilities: torch.Tensor, num_samples: int, **_: Any) -> torch.Tensor:
        expected.append(probabilities[0])
        code = draws[len(expected) - 1] if len(expected) <= len(draws) else 0
        return torch.tensor([[code]])

    monkeypatch.setattr(torch, "multinomial", multinomial)
    theirs.generate_custom_voice(TEXT, speaker="ryan", max_new_tokens=frames + 1, **options)
    assert len(draws) == frames * ours.config.spec.groups
    for number, (mine, their) in enumerate(zip(distributions, expected, strict=False)):
        frame, group = divmod(number, ours.config.spec.groups)
        assert torch.equal(mine > 0, their > 0), f"another support at frame {frame}, group {group}"
        torch.testing.assert_close(mine, their, atol=1e-5, rtol=0, msg=lambda m, f=frame, g=group: f"{f}, {g}: {m}")


def test_a_cloned_voice_equals_that_of_qwen_tts(models) -> None:
    ours, theirs = models("base")
    audio = recording(3.1, rate=22050)
    voice = ours.clone(audio, 22050, "A transcript.")
    item = theirs.create_voice_clone_prompt((audio, 22050), ref_text="A transcript.")[0]
    np.testing.assert_allclose(voice.x_vector, item.ref_spk_embedding.numpy(), atol=1e-5)
    np.testing.assert_array_equal(voice.codes, item.ref_code.numpy())


@pytest.mark.full
def test_greedy_codes_of_the_full_size_equal_qwen_tts(tmp_path) -> None:
    """The released 0.6B shape, in float32 on both sides, one after the other: together they do not fit everywhere."""
    directory = make_checkpoint(tmp_path / "full", "0.6b", "custom_voice")
    case, frames = CASES["named speaker"], 64
    theirs = qwen_tts.Qwen3TTSModel.from_pretrained(str(directory), dtype=torch.float32)
    expected_codes, expected_samples = speak_theirs(theirs, case, whole=True, frames=frames)
    del theirs
    gc.collect()
    with Synthesizer.from_pretrained(directory, dtype="float32", lanes=1) as ours:
        request = SpeechRequest(TEXT, **case.request, sampling=Sampling(greedy=True, max_frames=frames))
        chunks = list(ours.stream(request))
    assert len(expected_codes) >= 64
    np.testing.assert_array_equal(np.concatenate([chunk.codes for chunk in chunks]), expected_codes)
    samples = np.concatenate([chunk.samples for chunk in chunks])
    assert np.abs(samples - expected_samples).max() < 1e-5
