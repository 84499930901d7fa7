"""The whole path as one object: a checkpoint opened, requests in, chunks of speech out.

    prompt -> prefill -> [ frame step -> codec step -> samples out ]*

The loop itself is in `backend.lanes`, on a thread of its own; here is what callers hold.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from backend import cloning
from backend.checkpoint import Checkpoint
from backend.codec import Codec
from backend.embedding import PromptEmbedder, TextTable
from backend.errors import EngineError, RequestError
from backend.lanes import FAULTS, Job, Lanes
from backend.plan import Planner
from backend.prompt import default_text_mode
from backend.request import SpeechRequest
from backend.text import TextTokenizer
from backend.utterance import Chunk, Utterance
from backend.voice import Voice
from megakernel import DecoderSpec, choose_engine, make_decoder
from megakernel.graphs import enter_device
from megakernel.linear import WEIGHT_FORMATS
from megakernel.weights import check_format

RAMP = (1, 2, 4, 8)
POSITIONS = 4096
MAX_CHARACTERS = 4096
_SAME: Any = object()

T = TypeVar("T")


class SpeechStream(Iterator[Chunk]):
    """Chunks of one utterance. Closing it, or letting go of it, frees the lane within a frame."""

    def __init__(self, utterance: Utterance) -> None:
        self.utterance = utterance
        self._chunks = iter(utterance)

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def close(self) -> None:
        self.utterance.cancel()

    def __enter__(self) -> SpeechStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Synthesizer:
    """Text to speech from one checkpoint, ``lanes`` utterances at a time.

    Make one with `from_pretrained`; close it, or use it as a context manager, to stop its thread.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "cpu",
        engine: str = "auto",
        dtype: str | None = None,
        lanes: int = 4,
        lead: float | None = None,
        ramp: tuple[int, ...] = RAMP,
        positions: int = POSITIONS,
        max_characters: int = MAX_CHARACTERS,
        progress: bool = False,
        name: str | None = None,
    ) -> None:
        _check_ramp(ramp)
        self.checkpoint, self.config, self.lead = checkpoint, checkpoint.config, lead
        self.name = name or checkpoint.directory.name
        self.device, self.dtype = torch.device(device), dtype or _stored_format(checkpoint)
        self.planner = Planner(self.config, TextTokenizer(checkpoint.directory), max_characters)
        self.cloner: cloning.Cloner | None = None
        self._cloning = threading.Lock()
        _check_engine(engine, self.device)
        _check_dtype(self.dtype, self.config.spec)
        loading = _Loading(checkpoint, self.device, engine, self.dtype, lanes, positions, ramp, progress)
        self._lanes, self._thread = loading.start()
        self.decoder, self.codec = self._lanes.decoder, self._lanes.codec
        # also when the interpreter ends or the synthesizer is let go of: a thread inside torch must not outlive either
        self._stop = weakref.finalize(self, _stop, self._lanes, self._thread)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        offline: bool = False,
        revision: str | None = None,
        progress: bool = False,
        **options: Any,
    ) -> Synthesizer:
        """Open a checkpoint directory, or a hub id, which is downloaded unless ``offline``.

        ``options``: ``device`` ("cpu", "cuda"); ``engine`` ("kernel", its "twin", or "auto": the kernel where it
        can run); ``dtype`` ("float32", "bfloat16", "q8_0", or None for the stored one);
        ``lanes``, how many utterances speak at a time; ``lead``, seconds of untaken audio after which an
        utterance pauses (None: never); ``ramp``, frames in the first, second, … chunk; ``positions``, prompt
        positions plus frames that an utterance may take; ``max_characters`` of a text.

        Returns when everything is compiled and warm. Raises `CheckpointError` if the files are missing, damaged or of
        another model, `RequestError` if the engine cannot run on the device.
        """
        from backend.hub import resolve  # downloads are rare; the hub's client is not light

        directory = resolve(path, revision=revision, offline=offline, progress=progress)
        name = directory.name if Path(path).exists() else str(path)
        return cls(Checkpoint(directory), progress=progress, name=name, **options)

    @property
    def sample_rate(self) -> int:
        """Samples a second of every chunk (24,000 in the released models)."""
        return self.config.codec.sample_rate

    @property
    def kind(self) -> str:
        """``custom_voice``, ``base`` or ``voice_design``."""
        return self.config.kind

    @property
    def voices(self) -> list[str]:
        """The named speakers of the checkpoint."""
        return list(self.config.speakers)

    @property
    def languages(self) -> list[str]:
        """The languages that a request may name, beside ``"auto"``."""
        return self.config.spoken_languages

    @property
    def noise(self) -> bool:
        """Whether the weights are random: the voice is noise then."""
        return self.config.random

    @property
    def lanes(self) -> int:
        return len(self._lanes.lanes)

    def info(self) -> dict[str, Any]:
        """What runs here, as plain values: for logs, ``/health`` and the command line."""
        return {
            "model": self.name,
            "kind": self.kind,
            "size": self.config.size,
            "engine": self.decoder.name,
            "running": self._thread.is_alive(),
            "healthy": self._lanes.fault is None,
            "fault": self._lanes.fault,
            "device": str(self.device),
            "dtype": self.dtype,
            "lanes": self.lanes,
            "active": self._lanes.active,
            "waiting": len(self._lanes.waiting),
            "voices": self.voices,
            "languages": self.languages,
            "takes_instruction": self.config.has_instruction,
            "text_mode": default_text_mode(self.kind),
            "sample_rate": self.sample_rate,
            "frame_seconds": self.config.codec.samples_per_frame / self.sample_rate,
            "voice_is_noise": self.noise,
            "weight_bytes": self.checkpoint.stored_bytes("talker.", "predictor.", "text.", "codec."),
        }

    def stream(self, request: SpeechRequest) -> SpeechStream:
        """Speak ``request``: an iterator of chunks, each as soon as it exists.

        Raises `RequestError` at once if the request cannot be spoken; iterating raises `EngineError` if the
        engine fails on the way.
        """
        if request.text is None:
            raise RequestError("a stream needs its text; for text to come use open(...)", "text")
        return SpeechStream(self.open(request))

    def open(self, request: SpeechRequest, lead: float | None = _SAME) -> Utterance:
        """Speak ``request``, or with ``text=None`` a text that is pushed while it is spoken.

        ``lead`` overrides the synthesizer's. If all lanes are taken the utterance waits its turn. Raises
        `RequestError` at once if the request cannot be spoken, `EngineError` if the synthesizer is closed, or broken
        and not rebuilt.
        """
        plan = self.planner.plan(request)
        feed = self.planner.feed(request.text)
        room = self.decoder.state.positions
        if feed.closed and (taken := len(plan.prompt(feed.ids, closed=True))) >= room:
            raise RequestError(f"the text takes {taken} positions of {room}: send it in parts", "text")
        utterance = Utterance(plan.seed, feed, self._wake)
        self._lanes.submit(Job(utterance, plan, self._lead_frames(self.lead if lead is _SAME else lead)))
        return utterance

    def clone(self, samples: np.ndarray, sample_rate: int, text: str | None = None) -> Voice:
        """A voice from a recording: ``samples`` ``[n]`` mono float within ±1 at ``sample_rate`` Hz.

        With ``text``, the recording's transcript, the model continues the recording (closer, and slower to
        start); without, only its x-vector is used. Needs a ``base`` checkpoint and the package qwen-tts.

        Raises `RequestError` for another kind of checkpoint or an unusable recording, `EngineError` if qwen-tts
        is not installed.
        """
        if self.kind != "base":
            raise RequestError(f"cloning needs a base checkpoint; this one is {self.kind}", "voice")
        with self._cloning:
            self.cloner = self.cloner or cloning.Cloner(self.checkpoint)
            return self.cloner.clone(samples, sample_rate, text)

    def call(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the thread that computes, between two frames; for whoever measures or inspects.

        Returns, or raises, what it does; `EngineError` if the synthesizer is closed.
        """
        return self._lanes.call(function)

    def rebuild(self) -> None:
        """Make the engine usable again after a fault; everything that is being spoken ends with an error.

        Raises `EngineError` if that fails: only a new process helps then.
        """
        self._lanes.call(self._lanes.rebuild)

    def close(self) -> None:
        """End every utterance and the thread. Calling it again does nothing."""
        self._stop()

    def __enter__(self) -> Synthesizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        """What an open utterance holds, and through it the synthesizer: letting go of that alone ends no speech."""
        self._lanes.wake()

    def _lead_frames(self, lead: float | None) -> int | None:
        if lead is None:
            return None
        return max(1, round(lead * self.sample_rate / self.config.codec.samples_per_frame))


def _stop(lanes: Lanes, thread: threading.Thread) -> None:
    lanes.close()
    if threading.current_thread() is not thread:
        thread.join()


@dataclass
class _Loading:
    """Loads a checkpoint on the thread that will speak, and lets it speak.

    The OpenMP threads behind torch belong to the thread that first asks for them. If two threads have asked,
    there are more of them than cores, they stop spinning between operators, and a frame takes a fifth longer
    (docs/notebook.md). So one thread does all the computing, from the first tensor on.
    """

    checkpoint: Checkpoint
    device: torch.device
    engine: str
    dtype: str
    lanes: int
    positions: int
    ramp: tuple[int, ...]
    progress: bool
    abandoned: bool = False

    def start(self) -> tuple[Lanes, threading.Thread]:
        """The lanes, running, and their thread. Raises what loading raises."""
        loaded: Future[Lanes] = Future()
        thread = threading.Thread(target=self._run, args=(loaded,), name="qwen3-tts-lanes", daemon=True)
        thread.start()
        try:
            return loaded.result(), thread
        except BaseException:  # an interrupt, too, must not leave a thread inside torch
            self.abandoned = True
            thread.join()
            raise

    def _run(self, loaded: Future[Lanes]) -> None:
        try:
            enter_device(self.device)
            lanes = self._load()
            self._warm_up(lanes)
        except BaseException as error:  # noqa: BLE001  it is raised where the caller waits
            loaded.set_exception(error)
            return
        loaded.set_result(lanes)
        lanes.run()

    @torch.no_grad()
    def _load(self) -> Lanes:
        config = self.checkpoint.config
        with _Reader(self) as read:
            decoder = make_decoder(
                read,
                config.spec,
                engine=self.engine,
                weight_format=self.dtype,
                device=self.device,
                lanes=self.lanes,
                positions=self.positions,
            )
            table = TextTable(config, read, decoder.weights.dtype, self.device)
            codec = Codec(config.codec, read, self.lanes, self.device)
        return Lanes(config, decoder, codec, PromptEmbedder(table, decoder), self.ramp)

    def _warm_up(self, lanes: Lanes) -> None:
        with tqdm(desc="warming up", unit="graph", disable=not self.progress, leave=False) as bar:

            def report(what: str) -> None:
                if self.abandoned:
                    raise EngineError("loading was interrupted")
                bar.set_postfix_str(what, refresh=False)
                bar.update()

            try:
                lanes.warm_up(report)
            except FAULTS as error:
                raise EngineError(f"the engine failed while it was warming up: {error}") from error


class _Reader:
    """Reads tensors from the checkpoint, showing how far it is if asked."""

    PREFIXES = ("talker.", "predictor.", "text.", "codec.")

    def __init__(self, loading: _Loading) -> None:
        self.loading, self.checkpoint = loading, loading.checkpoint

    def __enter__(self) -> _Reader:
        wanted = sum(name.startswith(self.PREFIXES) for name in self.checkpoint.table)
        hidden = not self.loading.progress
        self.bar = tqdm(total=wanted, desc="loading", unit="tensor", disable=hidden, leave=False)
        return self

    def __call__(self, name: str) -> Tensor:
        if self.loading.abandoned:
            raise EngineError("loading was interrupted")
        self.bar.update()
        return self.checkpoint.read(name)

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        self.checkpoint.release()


def _check_engine(engine: str, device: torch.device) -> None:
    try:
        choose_engine(engine, device)
    except ValueError as error:
        raise RequestError(str(error), "engine") from error


def _check_dtype(dtype: str, spec: DecoderSpec) -> None:
    try:
        check_format(dtype, spec)
    except ValueError as error:
        raise RequestError(str(error), "dtype") from error


def _stored_format(checkpoint: Checkpoint) -> str:
    stored = checkpoint.dtype("talker.head")
    return next((name for name, dtype in WEIGHT_FORMATS.items() if dtype == stored), "float32")


def _check_ramp(ramp: tuple[int, ...]) -> None:
    if not ramp or min(ramp) < 1:
        raise ValueError(f"ramp needs at least one chunk size of at least one frame, got {ramp}")
