"""The lanes and their loop: admit, step a frame of every lane that can, decode what is due, hand it out.

One thread runs `Lanes.run` and it alone touches the model. A lane that lacks text, or whose listener has
enough to hear, sits a frame out; the others do not notice, because no lane's numbers depend on another's.

A frame and the chunks that it completes are issued without looking at the codes; then the host waits once for codes,
samples and the decoder's fault. So a frame may be decoded that turns out to be the end and no audio: the codec is
causal, and its samples are cut off.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from backend.codec import Codec
from backend.config import ModelConfig
from backend.embedding import PromptEmbedder
from backend.errors import EngineError, RequestError
from backend.outbox import Outbox
from backend.plan import Plan
from backend.prompt import Prompt
from backend.utterance import Chunk, FinishReason, Utterance
from megakernel import CacheFullError, Decoder, KernelFaultError
from megakernel.graphs import Progress

logger = logging.getLogger(__name__)

# After these nothing that is on the device can be trusted; the second is what torch raises for CUDA's own.
FAULTS = (KernelFaultError, torch.AcceleratorError)

T = TypeVar("T")


@dataclass(eq=False)
class Job:
    """An utterance, its plan and how many undelivered frames it may have (None: any number)."""

    utterance: Utterance
    plan: Plan
    lead_frames: int | None


@dataclass(eq=False)
class Lane:
    """An utterance that is being spoken on lane ``index``."""

    index: int
    job: Job
    prompt: Prompt
    taken_ids: int  # text ids that the prompt and its trailing have used
    frames: int = 0
    chunks: int = 0
    pending: list[Tensor] = field(default_factory=list)  # frames drawn and not yet decoded, on the device
    undelivered: list[Tensor] = field(default_factory=list)  # frames drawn and not yet in a chunk, on the host

    def next_text(self) -> int | None:
        """The text id that follows the frame to come; None if it is not known yet."""
        ids, n = self.job.plan.config.ids, self.frames
        if n < len(self.prompt.trailing):
            return self.prompt.trailing[n]
        if not self.prompt.open:
            return ids.tts_pad
        known, closed = self.job.utterance.text_ids(self.taken_ids + n - len(self.prompt.trailing))
        if known:
            return known[0]
        if not closed:
            return None
        return self._past_open_text()

    def _past_open_text(self) -> int:
        """Live text that has ended: ``tts_eos`` right after its last id, ``tts_pad`` for ever after."""
        ids = self.job.plan.config.ids
        total = len(self.job.utterance.text_ids()[0])
        return ids.tts_eos if self.taken_ids + self.frames - len(self.prompt.trailing) == total else ids.tts_pad

    def limit(self) -> int:
        return self.job.plan.frame_limit(len(self.job.utterance.text_ids()[0]))

    def heard_enough(self) -> bool:
        """Whether the listener is far enough behind; asked between chunks only, so that chunks do not depend on it."""
        lead = self.job.lead_frames
        return lead is not None and not self.pending and self.job.utterance.waiting_frames >= lead


@dataclass(eq=False)
class Speech:
    """Samples ``[len(lanes), samples]`` of the frames that were pending in ``lanes``, on their way to the host."""

    lanes: list[Lane]
    samples: Tensor


class Lanes:
    """``decoder`` and ``codec`` shared by as many utterances as the codec has lanes; the rest wait in order.

    ``ramp`` is how many frames the first, second, … chunk of an utterance holds; its last number holds on.
    ``fault`` says what has broken the engine: from then on it takes no utterance, until it is rebuilt.
    """

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        codec: Codec,
        embed: PromptEmbedder,
        ramp: tuple[int, ...],
    ) -> None:
        self.config, self.decoder, self.codec, self.embed, self.ramp = config, decoder, codec, embed, ramp
        self.lanes: list[Lane | None] = [None] * codec.lanes
        self.outbox = Outbox(codec.device)
        self.fault: str | None = None
        self.waiting: deque[Job] = deque()
        self.calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.lock = threading.Lock()
        self.awake = threading.Event()
        self.closing = False

    # the callers' side

    def submit(self, job: Job) -> None:
        with self.lock:
            if self.closing:
                raise EngineError("the synthesizer is closed")
            if self.fault is not None:
                raise EngineError(f"the engine is broken ({self.fault}): rebuild it, or start it anew")
            self.waiting.append(job)
        self.awake.set()

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the engine's thread between two frames; returns, or raises, what it does."""
        future: Future[T] = Future()
        with self.lock:
            if self.closing:
                raise EngineError("the synthesizer is closed")
            self.calls.append((function, future))
        self.awake.set()
        return future.result()

    def wake(self) -> None:
        self.awake.set()

    def close(self) -> None:
        with self.lock:
            self.closing = True
        self.awake.set()

    @property
    def active(self) -> int:
        return sum(lane is not None for lane in self.lanes)

    # the engine's side

    def warm_up(self, progress: Progress | None = None) -> None:
        """Do now what the first utterance would wait for, and wait for it. Raises the fault if there is one."""
        self.decoder.warm_up(progress)
        self.codec.warm_up(progress)
        self._receive()

    def run(self) -> None:
        """Speak until closed; every utterance still open then fails."""
        with torch.inference_mode():
            while not self.closing:
                self.awake.clear()
                self._answer_calls()
                if not self.tick():
                    self.awake.wait()
        self._fail_all(EngineError("the synthesizer was closed"))

    def rebuild(self) -> None:
        """Start decoder and codec afresh, between two frames. What is being spoken ends with an error."""
        self._fail_lanes(EngineError("the engine was rebuilt"))
        try:
            self.decoder.rebuild()
            self.codec.rebuild()
            self.outbox = Outbox(self.codec.device)
        except Exception as error:
            with self.lock:
                self.fault = f"it could not be rebuilt: {error}"
            raise EngineError(f"the engine could not be rebuilt: {error}") from error
        with self.lock:
            self.fault = None

    def _answer_calls(self) -> None:
        while self.calls:
            function, future = self.calls.popleft()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  it is raised where the caller waits
                future.set_exception(error)

    def tick(self) -> bool:
        """One frame of every lane that can make one. Returns whether anything was done."""
        try:
            changed = self._sweep()
            changed |= self._admit()
            ready = [(lane, text) for lane, text in self._runnable()]
            self._flush({id(lane) for lane, _ in ready})
            if ready:
                self._step(ready)
            return changed or bool(ready)
        except FAULTS as error:
            self._break_down(error)
            return True
        except Exception as error:
            logger.exception("a frame failed; every utterance in a lane ends with an error")
            failure = EngineError(f"the engine failed in a frame: {error}")
            failure.__cause__ = error
            self._fail_lanes(failure)
            return True

    def _sweep(self) -> bool:
        """Free the lanes, and the places in the queue, of utterances that were cancelled."""
        gone = [lane for lane in self.lanes if lane is not None and lane.job.utterance.cancelled]
        for lane in gone:
            self._finish(lane, "cancelled")
        with self.lock:
            dropped = [job for job in self.waiting if job.utterance.cancelled]
            for job in dropped:
                self.waiting.remove(job)
        for job in dropped:
            job.utterance.finish("cancelled")
        return bool(gone or dropped)

    def _admit(self) -> bool:
        """Give free lanes to waiting utterances whose prompt can be built, oldest first."""
        admitted = False
        while None in self.lanes:
            found = self._next_job()
            if found is None:
                return admitted
            admitted = True
            job, ids, closed = found
            if ids:
                self._start(self.lanes.index(None), job, ids, closed)
            else:
                job.utterance.finish("stop")  # live text that ended without a word
        return admitted

    def _next_job(self) -> tuple[Job, list[int], bool] | None:
        with self.lock:
            for job in self.waiting:
                ids, closed = job.utterance.text_ids()
                if job.plan.ready(ids, closed):
                    self.waiting.remove(job)
                    return job, ids, closed
        return None

    def _start(self, index: int, job: Job, ids: list[int], closed: bool) -> None:
        plan = job.plan
        try:
            prompt = plan.prompt(ids, closed)
            self.decoder.begin(index, plan.seed, plan.talker, plan.predictor, plan.penalty)
            self.decoder.prefill(index, self.embed(prompt, plan.x_vector))
            self.codec.reset(index)
            if plan.reference_codes is not None:
                self.codec.prime(plan.reference_codes, index)
        except CacheFullError:
            job.utterance.fail(self._too_long())
        except FAULTS as error:
            job.utterance.fail(_failure(error))
            raise
        except Exception as error:
            logger.exception("an utterance could not be started")
            failure = EngineError(f"the engine failed in a prompt: {error}")
            failure.__cause__ = error
            job.utterance.fail(failure)
        else:
            self.lanes[index] = Lane(index, job, prompt, taken_ids=len(ids))

    def _too_long(self) -> RequestError:
        room = self.decoder.state.positions
        return RequestError(f"the prompt does not fit into {room} positions: send the text in parts", "text")

    def _runnable(self) -> list[tuple[Lane, int]]:
        """The lanes that make a frame now, with the text id that follows it."""
        ready = []
        for lane in self.lanes:
            if lane is None or lane.heard_enough():
                continue
            text = lane.next_text()
            if text is not None:
                ready.append((lane, text))
        return ready

    def _flush(self, running: set[int]) -> None:
        """What a lane has drawn before it sits out is not kept from its listener."""
        idle = [lane for lane in self.lanes if lane is not None and lane.pending and id(lane) not in running]
        self._decode(idle)

    def _step(self, ready: list[tuple[Lane, int]]) -> None:
        ready = self._with_room(ready)
        if not ready:
            return
        lanes = [lane for lane, _ in ready]
        frame = self.decoder.step([lane.index for lane in lanes], self.embed.table([text for _, text in ready]))
        for lane, codes in zip(lanes, frame.unbind(), strict=True):
            lane.frames += 1
            lane.pending.append(codes)
        at_limit = [lane for lane in lanes if lane.frames >= lane.limit()]
        speech = self._issue([lane for lane in lanes if lane in at_limit or len(lane.pending) >= self._due(lane)])
        codes = self.outbox.put(frame)
        self._receive()
        ended = self._read(lanes, codes, at_limit)
        self._deliver(speech)
        self._decode([lane for lane, _ in ended])
        for lane, reason in ended:
            self._finish(lane, reason)

    def _read(self, lanes: list[Lane], codes: Tensor, at_limit: list[Lane]) -> list[tuple[Lane, FinishReason]]:
        """Note what the frame of ``lanes`` has turned out to be; the lanes that end with it."""
        ended: list[tuple[Lane, FinishReason]] = []
        for lane, frame in zip(lanes, codes, strict=True):
            if frame[0] == self.config.spec.eos:
                lane.frames -= 1
                del lane.pending[-1:]  # it is not pending any more if it has been decoded
                ended.append((lane, "stop"))
                continue
            lane.undelivered.append(frame)
            if lane in at_limit:
                ended.append((lane, "length"))
        return ended

    def _with_room(self, ready: list[tuple[Lane, int]]) -> list[tuple[Lane, int]]:
        """End the lanes whose cache is full; that concerns no other lane."""
        state = self.decoder.state
        full = [lane for lane, _ in ready if state.length[lane.index] >= state.positions]
        for lane in full:
            logger.warning("an utterance reached the end of its cache after %d frames", lane.frames)
            self._decode([lane] if lane.pending else [])
            self._finish(lane, "length")
        return [(lane, text) for lane, text in ready if lane not in full]

    def _due(self, lane: Lane) -> int:
        return self.ramp[min(lane.chunks, len(self.ramp) - 1)]

    def _decode(self, lanes: list[Lane]) -> None:
        """Hand out the pending frames of ``lanes``, of which none is an end."""
        speech = self._issue(lanes)
        if speech:
            self._receive()
            self._deliver(speech)

    def _issue(self, lanes: list[Lane]) -> list[Speech]:
        """Have the pending frames of ``lanes`` decoded; those with equally many go together."""
        by_length: dict[int, list[Lane]] = {}
        for lane in lanes:
            if lane.pending:
                by_length.setdefault(len(lane.pending), []).append(lane)
        speech = []
        for frames, group in by_length.items():
            codes = torch.stack([frame for lane in group for frame in lane.pending]).view(len(group), frames, -1)
            samples = self.codec.decode(codes, [lane.index for lane in group])
            speech.append(Speech(group, self.outbox.put(samples)))
            for lane in group:
                lane.pending.clear()
        return speech

    def _receive(self) -> None:
        """Wait for everything that was issued. Raises the decoder's fault if it has one."""
        fault = None if self.decoder.fault is None else self.outbox.put(self.decoder.fault)
        self.outbox.wait()
        if fault is not None:
            self.decoder.check(int(fault))

    def _deliver(self, speech: list[Speech]) -> None:
        """A chunk for every lane: its undelivered frames with their samples, which a last frame's may follow."""
        frame_samples = self.config.codec.samples_per_frame
        for part in speech:
            for lane, samples in zip(part.lanes, part.samples.numpy(), strict=True):
                if lane.undelivered:
                    frames = torch.stack(lane.undelivered).numpy()
                    lane.undelivered.clear()
                    lane.chunks += 1
                    lane.job.utterance.deliver(Chunk(samples[: len(frames) * frame_samples].copy(), frames))

    def _finish(self, lane: Lane, reason: FinishReason) -> None:
        if reason == "length":
            logger.warning("an utterance was stopped at its bound of %d frames", lane.frames)
        self.lanes[lane.index] = None
        lane.job.utterance.finish(reason)

    def _break_down(self, error: Exception) -> None:
        """A fault: everything ends, and nothing begins until the engine is rebuilt."""
        logger.error("the engine is broken and has to be rebuilt", exc_info=error)
        failure = _failure(error)
        with self.lock:
            self.fault = str(failure)
        self._fail_lanes(failure)
        self._fail_waiting(failure)

    def _fail_lanes(self, error: EngineError) -> None:
        for lane in self.lanes:
            if lane is not None:
                self.lanes[lane.index] = None
                lane.job.utterance.fail(error)

    def _fail_all(self, error: EngineError) -> None:
        self._fail_lanes(error)
        self._fail_waiting(error)
        with self.lock:
            calls, self.calls = list(self.calls), deque()
        for _, future in calls:
            future.set_exception(error)

    def _fail_waiting(self, error: EngineError) -> None:
        with self.lock:
            jobs, self.waiting = list(self.waiting), deque()
        for job in jobs:
            job.utterance.fail(error)


def _failure(error: Exception) -> EngineError:
    """What the utterances of a broken engine end with."""
    failure = EngineError(str(error) if isinstance(error, KernelFaultError) else f"the device failed: {error}")
    failure.__cause__ = error
    return failure
