"""A synthesizer on the card: the kernel speaks the twin's codes, alone and in company, and is got over its faults."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernel is written in Triton")

from backend import EngineError, Sampling, SpeechRequest, Synthesizer
from megakernel.barrier import FAULT, STAGES
from tests.gpu.parity import DEVICE, DRY

FRAMES = 1 if DRY else 12
TEXTS = ["It was the best of times,", "it was the worst of times,", "it was the age of wisdom,", "and so on."]
STAGE = 5


def request(number: int) -> SpeechRequest:
    return SpeechRequest(TEXTS[number], voice="ryan", seed=number, sampling=Sampling(max_frames=FRAMES))


def speak(synthesizer: Synthesizer, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[frames, groups]`` and samples."""
    chunks = list(synthesizer.stream(request(number)))
    return np.concatenate([chunk.codes for chunk in chunks]), np.concatenate([chunk.samples for chunk in chunks])


@pytest.fixture(scope="module")
def opened(speaker, spoken, built) -> Iterator[Callable[[str], Synthesizer]]:
    """`opened(engine)`, once each."""
    built(spoken)
    made: dict[str, Synthesizer] = {}

    def open_with(engine: str) -> Synthesizer:
        if engine not in made:
            made[engine] = Synthesizer.from_pretrained(
                speaker,
                device=str(DEVICE),
                engine=engine,
                dtype=spoken.weight_format,
                lanes=spoken.lanes,
                positions=spoken.positions,
            )
        return made[engine]

    yield open_with
    for synthesizer in made.values():
        synthesizer.close()


@pytest.fixture(scope="module")
def expected(opened, spoken) -> list[tuple[np.ndarray, np.ndarray]]:
    return [speak(opened("twin"), number) for number in range(spoken.lanes)]


def assert_spoken(got: list[tuple[np.ndarray, np.ndarray]], expected: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for number, ((codes, samples), (right, sound)) in enumerate(zip(got, expected, strict=True)):
        assert np.array_equal(codes, right), f"utterance {number} has other codes"
        assert np.abs(samples - sound).max() < 1e-3, f"utterance {number} sounds otherwise"


def test_the_engine_is_the_kernel(opened) -> None:
    info = opened("kernel").info()
    assert (info["engine"], info["device"], info["healthy"]) == ("kernel", str(DEVICE), True)
    assert opened("twin").info()["engine"] == "twin"


def test_lanes_together_speak_what_the_twin_speaks_one_by_one(opened, expected) -> None:
    synthesizer, got = opened("kernel"), {}
    threads = [
        threading.Thread(target=lambda n=number: got.update({n: speak(synthesizer, n)}))
        for number in range(len(expected))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(got) == list(range(len(expected))), "an utterance did not end"
    assert_spoken([got[number] for number in sorted(got)], expected)


def test_a_fault_is_told_and_a_rebuild_gets_over_it(opened, expected) -> None:
    synthesizer = opened("kernel")
    decoder = synthesizer.decoder
    assert decoder.fault is not None
    synthesizer.call(lambda: decoder.scratch.sync[FAULT].fill_(STAGE))
    with pytest.raises(EngineError, match=STAGES[STAGE - 1]):
        speak(synthesizer, 0)
    info = synthesizer.info()
    assert info["healthy"] is False and STAGES[STAGE - 1] in info["fault"]
    with pytest.raises(EngineError, match="broken"):
        synthesizer.stream(request(0))
    synthesizer.rebuild()
    assert synthesizer.info()["healthy"] is True
    assert_spoken([speak(synthesizer, 0)], expected[:1])
