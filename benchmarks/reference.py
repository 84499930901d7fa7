"""How much faster than qwen-tts? The same checkpoint, text, machine and dtype, taking turns in one run.

Frames: from the return of one talker step to that of the next, without the codec on either side. Codec: our
streamed decode against qwen-tts's decode of the same frames in the same chunks with 25 frames of left context, in
float32. First audio: our first chunk against qwen-tts's only one. A ratio is theirs over ours.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from backend import Synthesizer
from backend.cloning import import_qwen_tts
from backend.synthesizer import RAMP
from benchmarks.floors import MILLISECONDS, Floors, Work
from benchmarks.options import TEXT, checkpoint_directory, parser, prompt_positions, report, setting, speech_request
from benchmarks.peer import SEEDS, Run, silence, whole_run
from benchmarks.report import Ceiling, Figure, Report

QUESTION = "how much faster than qwen-tts on the same checkpoint, text, machine and dtype?"
LEFT_CONTEXT = 25  # frames that qwen-tts decodes again before each chunk
SIZES = (1, 2, 4, 8)


@dataclass
class Marks:
    """When an utterance's talker steps returned (the prompt first), and the time that the codec took in between."""

    steps: list[float] = field(default_factory=list)
    codec: list[tuple[float, float]] = field(default_factory=list)  # start and end

    def step(self, *_: Any) -> None:
        self.steps.append(time.perf_counter())

    def frame_seconds(self) -> list[float]:
        """Seconds of each frame: from step to step, less the codec's."""
        return [end - start - self._codec_within(start, end) for start, end in pairwise(self.steps)]

    def _codec_within(self, start: float, end: float) -> float:
        return sum(stop - begin for begin, stop in self.codec if start <= begin and stop <= end)


class Ours:
    name = "ours"

    def __init__(self, directory: Path, dtype: str) -> None:
        self.synthesizer = Synthesizer.from_pretrained(directory, dtype=dtype, lanes=1)
        self.voice = self.synthesizer.voices[0]

    def speak(self, seed: int, frames: int) -> Run:
        marks, first = Marks(), None
        with self._marked(marks):
            start = time.perf_counter()
            for _ in self.synthesizer.stream(speech_request(self.synthesizer, seed, frames)):
                first = first or time.perf_counter() - start
        assert first is not None, "an utterance has at least two frames"
        return Run(marks.frame_seconds(), first)

    def _marked(self, marks: Marks) -> ExitStack:
        stack, decoder, codec = ExitStack(), self.synthesizer.decoder, self.synthesizer.codec
        for owner, name, mark in (
            (decoder, "prefill", lambda start: marks.step()),
            (decoder, "step", lambda start: marks.step()),
            (codec, "decode", lambda start: marks.codec.append((start, time.perf_counter()))),
        ):
            stack.enter_context(patch.object(owner, name, _then(getattr(owner, name), mark)))
        return stack

    def close(self) -> None:
        self.synthesizer.close()


class Theirs:
    """qwen-tts, asked for at most as many frames; it counts the code after the last frame as one more."""

    name = "qwen-tts"

    def __init__(self, directory: Path, dtype: str, voice: str) -> None:
        with silence():
            qwen_tts = import_qwen_tts()
            importlib.import_module("transformers").logging.set_verbosity_error()  # else a line a frame
            self.model = qwen_tts.Qwen3TTSModel.from_pretrained(str(directory), dtype=getattr(torch, dtype))
        self.voice = voice

    def speak(self, seed: int, frames: int) -> Run:
        torch.manual_seed(seed)
        marks = Marks()
        hook = self.model.model.talker.register_forward_hook(marks.step)
        try:
            start = time.perf_counter()
            self.model.generate_custom_voice(TEXT, speaker=self.voice, max_new_tokens=frames + 1)
            return Run(marks.frame_seconds(), time.perf_counter() - start)
        finally:
            hook.remove()

    @property
    def decoder(self) -> Any:
        """Codes ``[1, groups, frames]`` to samples ``[1, 1, n]``."""
        return self.model.model.speech_tokenizer.model.decoder


def _then(function: Callable[..., Any], mark: Callable[[float], None]) -> Callable[..., Any]:
    """``function``, after which ``mark`` is told when it started."""

    def marked(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **named)
        mark(start)
        return result

    return marked


def take_turns(ours: Ours, theirs: Theirs, frames: int, runs: int) -> tuple[list[Run], list[Run]]:
    """Utterances of both, one after the other, after a short one each to warm up.

    Both compute on one thread: with two, each would have OpenMP threads of its own and be the slower for it.
    """
    both: tuple[list[Run], list[Run]] = ([], [])
    on_thread = ours.synthesizer.call
    ours.speak(0, 3)
    on_thread(lambda: theirs.speak(0, 3))
    for turn in range(runs):
        both[0].append(whole_run(ours, frames, turn * SEEDS))
        both[1].append(on_thread(lambda first=turn * SEEDS: whole_run(theirs, frames, first)))
    return both


def add_runs(result: Report, ours: Ours, theirs: Theirs, given: argparse.Namespace) -> tuple[Figure, Figure]:
    """Frames and first audio of both with their ratios; returns the figures of the frames."""
    synthesizer = ours.synthesizer
    where = setting(synthesizer, lanes=1, frames=given.frames, runs=given.runs)
    result.title(**where)
    runs = take_turns(ours, theirs, given.frames, given.runs)
    floors = Floors.of(synthesizer.checkpoint, synthesizer.dtype)
    frames = [[s * MILLISECONDS for run in side for s in run.frame_seconds] for side in runs]
    figures = add_pair(result, "frame", frames, floors.frame().ceiling(result.machine), where)
    first = [[run.first_audio * MILLISECONDS for run in side] for side in runs]
    add_pair(result, "first audio", first, floors.first_audio(prompt_positions(synthesizer), result.machine), where)
    return figures


def add_pair(
    result: Report, name: str, values: Sequence[list[float]], floor: Ceiling, where: dict[str, Any]
) -> tuple[Figure, Figure]:
    """Milliseconds of both sides, and the ratio of their medians; its ceiling is theirs over the floor."""
    mine = result.add_many(f"{name}, ours", values[0], "ms", floor, **where)
    reference = result.add_many(f"{name}, qwen-tts", values[1], "ms", floor, **where)
    add_ratio(result, name, mine, reference, where)
    return mine, reference


def add_ratio(result: Report, name: str, mine: Figure, reference: Figure, where: dict[str, Any]) -> None:
    assert mine.value and reference.value and mine.ceiling, f"{name} was not measured"
    ceiling = Ceiling(reference.value / mine.ceiling.value, "if ours were at its floor")
    result.add(f"{name}, ratio", reference.value / mine.value, "x", ceiling, **where)


def add_best(result: Report, frames: dict[str, tuple[Figure, Figure]]) -> None:
    """Each side's faster dtype against the other's."""
    mine = min((pair[0] for pair in frames.values()), key=lambda figure: figure.value or 0)
    reference = min((pair[1] for pair in frames.values()), key=lambda figure: figure.value or 0)
    where = mine.setting | {"reference_dtype": reference.setting["dtype"]}
    result.title(**where)
    add_ratio(result, "frame, better dtype of each", mine, reference, where)


def time_chunks(ours: Ours, theirs: Theirs, sizes: Sequence[int], before: int) -> tuple[list[float], list[float]]:
    """Seconds of each of the chunks of ``sizes`` frames that follow ``before`` frames, for both, in turns."""
    codec, spec = ours.synthesizer.codec, ours.synthesizer.config.spec
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(spec.predictor.vocab, (1, before + sum(sizes), spec.groups), generator=draw)
    codec.reset(0)
    if before:
        codec.decode(codes[:, :before], [0])
    mine, reference, start = [], [], before
    for size in sizes:
        mine.append(_seconds(lambda part: codec.decode(part, [0]), codes[:, start : start + size]))
        context = min(start, LEFT_CONTEXT)
        again = codes[:, start - context : start + size].transpose(1, 2)
        reference.append(_seconds(theirs.decoder, again))
        start += size
    return mine, reference


@torch.inference_mode()
def _seconds(work: Callable[[torch.Tensor], Any], value: torch.Tensor) -> float:
    start = time.perf_counter()
    work(value)
    return time.perf_counter() - start


def add_codec(result: Report, ours: Ours, theirs: Theirs, given: argparse.Namespace) -> None:
    """Milliseconds a frame of both: for each chunk size once the left context is full, and for a whole utterance."""
    where = setting(ours.synthesizer, lanes=1, left_context=LEFT_CONTEXT)
    floors, on_thread = Floors.of(ours.synthesizer.checkpoint, ours.synthesizer.dtype), ours.synthesizer.call
    for size in SIZES:
        chunks = [size] * (1 + given.chunks)
        sides = on_thread(lambda chunks=chunks: time_chunks(ours, theirs, chunks, before=LEFT_CONTEXT))
        values = [[s * MILLISECONDS / size for s in side[1:]] for side in sides]  # the first is the warm-up
        floor = _per_frame(floors.codec(size), size, result)
        add_pair(result, f"codec, chunks of {size}, a frame", values, floor, where | {"chunk_frames": size})
    sizes = ramp_sizes(RAMP, given.frames)
    sides = [on_thread(lambda: time_chunks(ours, theirs, sizes, before=0)) for _ in range(1 + given.runs)][1:]
    values = [[sum(side[which]) * MILLISECONDS / sum(sizes) for side in sides] for which in (0, 1)]
    floor = _per_frame(sum((floors.codec(size) for size in sizes), Work()), sum(sizes), result)
    add_pair(result, "codec, an utterance, a frame", values, floor, where | {"chunk_frames": sizes})


def _per_frame(work: Work, frames: int, result: Report) -> Ceiling:
    whole = work.ceiling(result.machine)
    return Ceiling(whole.value / frames, f"{whole.basis} for {frames}")


def ramp_sizes(ramp: Sequence[int], frames: int) -> list[int]:
    """The frames in each chunk of an utterance of at least ``frames`` frames."""
    sizes = []
    while sum(sizes) < frames:
        sizes.append(ramp[min(len(sizes), len(ramp) - 1)])
    return sizes


def measure(
    result: Report, directory: Path, dtype: str, given: argparse.Namespace, codec: bool
) -> tuple[Figure, Figure]:
    ours = Ours(directory, dtype)
    theirs = ours.synthesizer.call(lambda: Theirs(directory, dtype, ours.voice))
    figures = add_runs(result, ours, theirs, given)
    if codec:
        add_codec(result, ours, theirs, given)
    ours.close()
    return figures


def main(arguments: list[str] | None = None) -> None:
    options = parser(QUESTION)
    options.add_argument("--frames", type=int, default=52, help="frames of an utterance")
    options.add_argument("--runs", type=int, default=2, help="utterances of each side and dtype")
    options.add_argument("--chunks", type=int, default=4, help="timed chunks of each size")
    given = options.parse_args(arguments)
    directory, frames = checkpoint_directory(given), {}
    with report("reference", QUESTION, given) as result:
        for dtype in given.dtype or ["bfloat16", "float32"]:
            # our codec is float32 always, so that is the dtype in which the two are compared
            frames[dtype] = measure(result, directory, dtype, given, codec=dtype == "float32")
            gc.collect()  # one pair of models at a time
        if len(frames) > 1:
            add_best(result, frames)


if __name__ == "__main__":
    main()
