"""A tick from inside: issued without a look at the codes, ends found afterwards, faults that end everything at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from backend import Chunk, EngineError, Sampling, SpeechRequest, Synthesizer, Utterance
from backend.codec import Codec
from megakernel import KernelFaultError

TEXT = "It was the best of times, it was the worst of times."


@pytest.fixture
def synthesizer(tiny) -> Iterator[Synthesizer]:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=3) as synthesizer:
        yield synthesizer


def request(seed: int = 1, frames: int = 20, text: str | None = TEXT, **fields) -> SpeechRequest:
    return SpeechRequest(text, voice="ryan", seed=seed, sampling=Sampling(max_frames=frames), **fields)


class Unseen(Tensor):
    """Codes that the host must not look at while ``sealed``."""

    sealed = False
    LOOKS = frozenset({"cpu", "tolist", "item", "numpy", "__bool__", "__int__", "__index__", "__array__", "equal"})

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert not (Unseen.sealed and func.__name__ in cls.LOOKS), f"the host looked at the codes: {func.__name__}"
        return super().__torch_function__(func, types, args, kwargs or {})


class Script:
    """Has the decoder say what a test wants: lane ``n`` ends with frame ``ends[n]``, counted from 0.

    ``events`` are what a tick issues, in order, ``said`` the codes of every lane.
    """

    def __init__(self, synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch, ends: dict[int, int]) -> None:
        self.spec, self.ends = synthesizer.config.spec, ends
        self.events: list[tuple[str, list[int]]] = []
        self.said: dict[int, list[list[int]]] = {}
        self.generator = torch.Generator().manual_seed(0)
        decoder, codec, outbox = synthesizer.decoder, synthesizer.codec, synthesizer._lanes.outbox
        self.step, self.decode, self.wait = decoder.step, codec.decode, outbox.wait
        monkeypatch.setattr(decoder, "step", self._step)
        monkeypatch.setattr(codec, "decode", self._decode)
        monkeypatch.setattr(outbox, "wait", self._wait)

    def _step(self, lanes: list[int], text: Tensor) -> Tensor:
        shape = (len(lanes), self.spec.groups)
        codes = torch.randint(0, self.spec.suppress_from, shape, generator=self.generator) % 64
        for row, lane in enumerate(lanes):
            said = self.said.setdefault(lane, [])
            if len(said) == self.ends.get(lane, -1):
                codes[row, 0] = self.spec.eos
            said.append(codes[row].tolist())
        self.events.append(("step", list(lanes)))
        codes = self.step(lanes, text, codes)
        Unseen.sealed = True
        return codes.as_subclass(Unseen)

    def _decode(self, codes: Tensor, lanes: list[int]) -> Tensor:
        self.events.append(("decode", list(lanes)))
        sealed, Unseen.sealed = Unseen.sealed, False
        samples = self.decode(codes.as_subclass(Tensor), lanes)
        Unseen.sealed = sealed
        return samples

    def _wait(self) -> None:
        self.events.append(("wait", []))
        Unseen.sealed = False
        self.wait()

    def ticks(self) -> list[list[str]]:
        """What happened from step to step, by name."""
        ticks: list[list[str]] = []
        for name, _ in self.events:
            if name == "step":
                ticks.append([])
            ticks[-1].append(name)
        return ticks


def samples_of(synthesizer: Synthesizer, codes: list[list[int]], chunks: list[int]) -> np.ndarray:
    """The samples of ``codes`` decoded in such chunks and nothing else."""
    codec = Codec(synthesizer.config.codec, synthesizer.checkpoint.read)
    parts = torch.tensor(codes).split(chunks)
    return np.concatenate([codec.decode(part[None], [0])[0].numpy() for part in parts])


def test_a_chunk_is_issued_right_after_its_last_frame_and_waited_for_once(synthesizer, monkeypatch) -> None:
    script = Script(synthesizer, monkeypatch, {})
    chunks = list(synthesizer.stream(request()))
    assert [len(chunk.codes) for chunk in chunks] == [1, 2, 4, 8, 5]
    with_chunk, without = ["step", "decode", "wait"], ["step", "wait"]
    due = {0, 2, 6, 14, 19}  # the last by the limit: the host knows it before it knows the codes
    assert script.ticks() == [with_chunk if frame in due else without for frame in range(20)]


@pytest.mark.parametrize("end", [0, 1, 2, 3, 6, 7, 8, 14, 16, 19])
def test_the_frame_of_an_end_is_no_audio_wherever_it_falls(synthesizer, monkeypatch, end: int) -> None:
    """Due with its chunk (0, 2, 6, 14), at the limit (19), or in the middle of a chunk.

    In the middle the frames before it are decoded alone, bit for bit. One that was due has been decoded with them:
    then a step of one frame more has made their samples, with the rounding of its size and nothing of its codes.
    """
    script = Script(synthesizer, monkeypatch, {0: end})
    utterance = synthesizer.open(request())
    chunks = list(utterance)
    sizes = {0: [], 1: [1], 2: [1, 1], 3: [1, 2], 6: [1, 2, 3], 7: [1, 2, 4], 8: [1, 2, 4, 1]}
    sizes |= {14: [1, 2, 4, 7], 16: [1, 2, 4, 8, 1], 19: [1, 2, 4, 8, 4]}
    assert utterance.finish_reason == "stop"
    assert [len(chunk.codes) for chunk in chunks] == sizes[end]
    assert len(script.said[0]) == end + 1
    if end:
        assert np.concatenate([chunk.codes for chunk in chunks]).tolist() == script.said[0][:end]
        samples, frames = np.concatenate([chunk.samples for chunk in chunks]), script.said[0][:end]
        alone = samples_of(synthesizer, frames, sizes[end])
        assert samples.shape == alone.shape and np.abs(samples - alone).max() < 1e-5
        if end in (2, 6, 14, 19):
            *before, last = sizes[end]
            alone = samples_of(synthesizer, [*frames, frames[0]], [*before, last + 1])[: len(samples)]
        assert np.array_equal(samples, alone)
    synthesizer.call(lambda: None)  # the tick is over
    assert synthesizer.info()["active"] == 0 and synthesizer._lanes.fault is None


def test_lanes_that_end_together_and_lanes_that_go_on(synthesizer, monkeypatch) -> None:
    script = Script(synthesizer, monkeypatch, {0: 6, 1: 9})
    utterances = start_together(synthesizer, [request(seed) for seed in range(3)])
    chunks = [list(utterance) for utterance in utterances]
    assert [utterance.finish_reason for utterance in utterances] == ["stop", "stop", "length"]
    for lane, sizes in enumerate([[1, 2, 3], [1, 2, 4, 2], [1, 2, 4, 8, 5]]):
        assert [len(chunk.codes) for chunk in chunks[lane]] == sizes
        said = script.said[lane][: sum(sizes)]
        assert np.concatenate([chunk.codes for chunk in chunks[lane]]).tolist() == said
        samples = np.concatenate([chunk.samples for chunk in chunks[lane]])
        assert np.abs(samples - samples_of(synthesizer, said, sizes)).max() < 1e-5, f"lane {lane}"
    ways = [["step", "wait"], ["step", "decode", "wait"], ["step", "wait", "decode", "wait"]]
    assert all(tick in ways for tick in script.ticks()), script.ticks()


def start_together(synthesizer: Synthesizer, requests: list[SpeechRequest]) -> list[Utterance]:
    """Opened while the engine holds its breath, so that they share every tick."""
    held, opened = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert opened.wait(30)

    holding = threading.Thread(target=synthesizer.call, args=(hold,))
    holding.start()
    assert held.wait(30)
    utterances = [synthesizer.open(item) for item in requests]
    opened.set()
    holding.join()
    return utterances


def test_a_chunk_keeps_no_other_memory_alive(synthesizer) -> None:
    for chunk in synthesizer.stream(request(frames=3)):
        assert chunk.samples.base is None and type(chunk.codes) is np.ndarray


def test_a_decoder_may_have_more_lanes_than_were_asked_for(tiny, monkeypatch) -> None:
    from backend import synthesizer as module

    make = module.make_decoder
    monkeypatch.setattr(module, "make_decoder", lambda *args, **kw: make(*args, **{**kw, "lanes": 4}))
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=3) as synthesizer:
        assert synthesizer.decoder.state.lanes == 4
        assert synthesizer.lanes == synthesizer.info()["lanes"] == 3
        utterances = [synthesizer.open(request(seed)) for seed in range(5)]
        assert all(list(utterance) for utterance in utterances)


# faults


class Fault:
    """The decoder says after its ``frames``-th frame that a stage has failed, as the frame kernel does."""

    def __init__(self, synthesizer: Synthesizer, monkeypatch: pytest.MonkeyPatch, frames: int) -> None:
        self.decoder, self.left = synthesizer.decoder, frames
        self.step, self.rebuilt = self.decoder.step, 0
        self.monkeypatch = monkeypatch
        rebuild = self.decoder.rebuild
        flag = torch.zeros(1, dtype=torch.int32)

        def step(*args) -> Tensor:
            codes = self.step(*args)
            self.left -= 1
            if self.left == 0:
                flag.fill_(4)
                codes.fill_(-(1 << 60))  # whatever it says now is nonsense
            return codes

        def check(fault: int) -> None:
            if fault:
                raise KernelFaultError(f"number {fault}")

        def fresh() -> None:
            self.rebuilt += 1
            flag.zero_()
            rebuild()

        for name, value in {"step": step, "check": check, "rebuild": fresh, "fault": flag}.items():
            monkeypatch.setattr(self.decoder, name, value)


def outcomes(utterances: list[Utterance], seconds: float = 10.0) -> list[tuple[int, str]]:
    """Of each utterance its frames and the error that ended it; none may take longer."""
    found: list[tuple[int, str]] = [(0, "nothing")] * len(utterances)

    def listen(number: int) -> None:
        frames = 0
        try:
            for chunk in utterances[number]:
                frames += len(chunk.codes)
            found[number] = (frames, "")
        except EngineError as error:
            found[number] = (frames, str(error))

    threads = [threading.Thread(target=listen, args=(number,), daemon=True) for number in range(len(utterances))]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, begun + seconds - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "somebody still waits"
    return found


def heard(chunks: list[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([c.codes for c in chunks]), np.concatenate([c.samples for c in chunks])


def test_a_fault_ends_everything_and_after_a_rebuild_speech_is_as_before(synthesizer, monkeypatch) -> None:
    before = heard(list(synthesizer.stream(request())))
    fault = Fault(synthesizer, monkeypatch, frames=6)
    live = request(text=None, text_mode="streamed")
    utterances = start_together(synthesizer, [*(request(seed, frames=500) for seed in range(5)), live])
    ended = outcomes(utterances)
    assert [frames for frames, _ in ended] == [3, 3, 3, 0, 0, 0], "three spoke, two waited, one had no text yet"
    assert all("stage number 4" in error for _, error in ended)
    info = synthesizer.info()
    assert (info["healthy"], info["running"], info["active"], info["waiting"]) == (False, True, 0, 0)
    assert "stage number 4" in info["fault"]

    begun = time.monotonic()
    for item in (request(), live):
        with pytest.raises(EngineError, match=r"number 4.*rebuild"):
            synthesizer.open(item)
    assert time.monotonic() - begun < 1

    synthesizer.rebuild()
    info = synthesizer.info()
    assert (fault.rebuilt, info["healthy"], info["fault"]) == (1, True, None)
    assert synthesizer.codec.position == [0, 0, 0] and not any(t.any() for t in synthesizer.codec.histories.tensors)
    after = heard(list(synthesizer.stream(request())))
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def raising(error: Exception) -> Callable[..., None]:
    def broken(*_args, **_options) -> None:
        raise error

    return broken


@pytest.mark.parametrize(
    ("error", "words"),
    [(KernelFaultError("talk"), "stage talk"), (torch.AcceleratorError("an illegal access"), "device failed: an ill")],
)
@pytest.mark.parametrize("where", ["step", "prefill", "decode", "wait"])
def test_a_fault_from_anywhere_breaks_the_engine(synthesizer, monkeypatch, where: str, error, words: str) -> None:
    owner = {"step": synthesizer.decoder, "prefill": synthesizer.decoder, "decode": synthesizer.codec}
    with monkeypatch.context() as patch:
        patch.setattr(owner.get(where, synthesizer._lanes.outbox), where, raising(error))
        ended = outcomes(start_together(synthesizer, [request(seed) for seed in range(4)]))
    assert [frames for frames, _ in ended] == [0] * 4 and all(words in error for _, error in ended), ended
    assert not synthesizer.info()["healthy"]
    synthesizer.rebuild()
    assert len(list(synthesizer.stream(request()))) == 5


def test_an_engine_that_cannot_be_rebuilt_stays_broken(synthesizer, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(synthesizer.decoder, "rebuild", raising(RuntimeError("all is lost")))
        with pytest.raises(EngineError, match="could not be rebuilt: all is lost"):
            synthesizer.rebuild()
        with pytest.raises(EngineError, match="all is lost"):
            synthesizer.open(request())
    synthesizer.rebuild()
    assert len(list(synthesizer.stream(request()))) == 5


def test_rebuilding_ends_what_is_being_spoken_and_keeps_what_waits(tiny) -> None:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1, lead=0.08) as synthesizer:
        speaking, waiting = synthesizer.open(request(frames=2000)), synthesizer.open(request())
        next(iter(speaking))
        synthesizer.rebuild()
        assert "rebuilt" in outcomes([speaking])[0][1]
        assert outcomes([waiting]) == [(20, "")]


def test_a_broken_engine_can_be_closed(tiny, monkeypatch) -> None:
    synthesizer = Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1)
    monkeypatch.setattr(synthesizer.decoder, "step", raising(KernelFaultError("talk")))
    outcomes([synthesizer.open(request())])
    synthesizer.close()
    assert not synthesizer.info()["running"]
    with pytest.raises(EngineError, match="closed"):
        synthesizer.rebuild()
