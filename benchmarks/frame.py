"""How long do one frame and one codec step take, part by part?

The decoder and the codec of a `Synthesizer` are stepped directly, on its thread, ``--lanes`` utterances at a time; the
parts are timed inside whole frames, so that each meets the caches as the others leave them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from backend import Sampling, Synthesizer
from benchmarks.floors import MILLISECONDS, Floors
from benchmarks.options import checkpoint_directory, numbers, parser, report, setting
from benchmarks.report import Ceiling, Report
from megakernel import Decoder
from megakernel.sampling import Draw

QUESTION = "how long do one frame and one codec step take, part by part?"
PROMPT_POSITIONS = 64
WARM_UP = 2


class PartClock:
    """Adds up, frame by frame, the seconds spent inside the functions that it was wrapped around."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **named)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start
            return result

        return timed

    def take(self) -> dict[str, float]:
        """The seconds since the last call, by part."""
        taken, self.seconds = self.seconds, {}
        return taken


@contextmanager
def parts_of(decoder: Decoder) -> Iterator[PartClock]:
    """The decoder's stages under a clock. What none of them covers is embedding and bookkeeping."""
    clock = PartClock()
    stages = {
        "talk": "talker",
        "predict": "predictor",
        "score": "heads",
        "noise": "sampling",
        "talker_logits": "sampling",
    }
    with ExitStack() as stack:
        for stage, part in stages.items():
            stack.enter_context(patch.object(decoder, stage, clock.wrap(part, getattr(decoder, stage))))
        stack.enter_context(patch.object(Draw, "sample", clock.wrap("sampling", Draw.sample)))
        yield clock


def time_frames(synthesizer: Synthesizer, lanes: list[int], frames: int) -> list[dict[str, float]]:
    """Seconds of each of ``frames`` frames of ``lanes``, by part, with ``frame`` for the whole and ``rest``."""
    decoder = synthesizer.decoder
    text = prepare(synthesizer, lanes)
    times = []
    with parts_of(decoder) as clock:
        for _ in range(WARM_UP + frames):
            clock.take()
            start = time.perf_counter()
            decoder.step(lanes, text)
            whole = time.perf_counter() - start
            parts = clock.take()
            times.append(parts | {"rest": whole - sum(parts.values()), "frame": whole})
    return times[WARM_UP:]


def prepare(synthesizer: Synthesizer, lanes: list[int]) -> torch.Tensor:
    """Begin an utterance in each lane; the text rows ``[lanes, hidden]`` that follow its frames.

    Prompt and text are drawn: no time here depends on what they say.
    """
    decoder, defaults, sampling = synthesizer.decoder, synthesizer.config.sampling, Sampling()
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(PROMPT_POSITIONS, decoder.spec.talker.hidden, generator=draw)
    for lane in lanes:
        talker, predictor = sampling.talker(defaults), sampling.predictor(defaults)
        decoder.begin(lane, lane, talker, predictor, sampling.penalty(defaults))
        decoder.prefill(lane, rows)
    return rows[: len(lanes)]


def time_codec(synthesizer: Synthesizer, lanes: list[int], sizes: list[int], repeats: int) -> dict[int, list[float]]:
    """Seconds of one codec step of each of ``sizes`` frames, the sizes taking turns."""
    codec, config = synthesizer.codec, synthesizer.config
    draw = torch.Generator().manual_seed(0)
    codes = torch.randint(config.spec.predictor.vocab, (len(lanes), max(sizes), config.codec.groups), generator=draw)
    for lane in lanes:
        codec.reset(lane)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(repeats + 1):
        for size in sizes:
            start = time.perf_counter()
            codec.decode(codes[:, :size], lanes)
            if turn:  # the first is the warm-up
                times[size].append(time.perf_counter() - start)
    return times


def add_frames(result: Report, synthesizer: Synthesizer, lanes: int, frames: int) -> None:
    floors = Floors.of(synthesizer.checkpoint, synthesizer.dtype)
    where = setting(synthesizer, lanes=lanes)
    result.title(**where)
    times = synthesizer.call(lambda: time_frames(synthesizer, list(range(lanes)), frames))
    work = floors.parts(lanes) | {"frame": floors.frame(lanes)}
    for part in ("talker", "predictor", "heads", "sampling", "rest", "frame"):
        ceiling = work[part].ceiling(result.machine) if part in work else None
        result.add_many(part, [parts[part] * MILLISECONDS for parts in times], "ms", ceiling, **where)
    _add_rates(result, [parts["frame"] for parts in times], floors.frame(lanes).seconds(result.machine), where)


def _add_rates(result: Report, seconds: list[float], floor: float, where: dict[str, Any]) -> None:
    """Frames and codes a second of all lanes together."""
    basis = "at the floor of a frame"
    for name, each in {"frames": where["lanes"], "codes": where["lanes"] * where["groups"]}.items():
        result.add_many(f"{name} a second", [each / s for s in seconds], "1/s", Ceiling(each / floor, basis), **where)


def add_codec(result: Report, synthesizer: Synthesizer, lanes: int, sizes: list[int], repeats: int) -> None:
    floors = Floors.of(synthesizer.checkpoint, synthesizer.dtype)
    times = synthesizer.call(lambda: time_codec(synthesizer, list(range(lanes)), sizes, repeats))
    for size, seconds in times.items():
        ceiling = floors.codec(size, lanes).ceiling(result.machine)
        where = setting(synthesizer, lanes=lanes, frames=size) | {"dtype": "float32"}
        result.add_many(f"codec, chunk of {size}", [s * MILLISECONDS for s in seconds], "ms", ceiling, **where)


def measure(result: Report, synthesizer: Synthesizer, given: argparse.Namespace, codec: bool) -> None:
    for lanes in given.lanes:
        add_frames(result, synthesizer, lanes, given.frames)
        if codec:
            add_codec(result, synthesizer, lanes, given.sizes, max(2, given.frames // 3))


def main(arguments: list[str] | None = None) -> None:
    options = parser(QUESTION)
    options.add_argument("--lanes", type=numbers, default=[1, 4], help="utterances at a time, such as 1,4")
    options.add_argument("--frames", type=int, default=24, help="how many frames are timed")
    options.add_argument("--sizes", type=numbers, default=[1, 2, 4, 8], help="frames in a codec step")
    given = options.parse_args(arguments)
    directory, dtypes = checkpoint_directory(given), given.dtype or ["bfloat16", "float32"]
    room = {"lanes": max(given.lanes), "positions": PROMPT_POSITIONS + WARM_UP + given.frames}
    with report("frame", QUESTION, given) as result:
        for dtype in dtypes:
            with Synthesizer.from_pretrained(directory, dtype=dtype, **room) as synthesizer:
                # the codec's weights are float32 whatever the decoder's are: once is enough
                measure(result, synthesizer, given, codec=dtype == dtypes[-1])


if __name__ == "__main__":
    main()
