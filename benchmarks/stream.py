"""When is speech heard, and does it keep up? Through `Synthesizer.stream`, as a listener meets it.

*First audio*: request to first chunk. *Audible first audio*: to the moment at which a player that starts at the
first chunk plays the first 10 ms above -50 dBFS. *RTF*: seconds of waiting for the whole utterance over seconds of
audio. *Underrun*: how long that player would have stood still. ``--lanes`` listeners at a time, each asking again
as soon as it has heard all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import psutil

from backend import Synthesizer
from backend.synthesizer import RAMP
from benchmarks.floors import MILLISECONDS, Floors
from benchmarks.options import checkpoint_directory, numbers, parser, prompt_positions, report, setting, speech_request
from benchmarks.report import Ceiling, Report

QUESTION = "when is speech heard, and does it keep up?"
AUDIBLE_DBFS = -50.0
WINDOW_SECONDS = 0.01


@dataclass(frozen=True)
class Arrival:
    """A chunk's ``samples`` and when they came, in ``seconds`` since the request."""

    seconds: float
    samples: np.ndarray


def playback(arrivals: Sequence[Arrival], rate: int) -> list[float]:
    """When each chunk starts to sound: when it is there and the one before it is over. Seconds since the request."""
    starts, end = [], 0.0
    for arrival in arrivals:
        starts.append(max(arrival.seconds, end))
        end = starts[-1] + len(arrival.samples) / rate
    return starts


def underrun(arrivals: Sequence[Arrival], rate: int) -> float:
    """Seconds that a player which starts at the first chunk stands still before the last one."""
    starts = playback(arrivals, rate)
    ends = [start + len(arrival.samples) / rate for start, arrival in zip(starts, arrivals, strict=True)]
    return sum(start - end for end, start in zip(ends, starts[1:], strict=False))


def longest_gap(arrivals: Sequence[Arrival]) -> float:
    """The longest time between two chunks, seconds; 0 if there is only one."""
    times = [arrival.seconds for arrival in arrivals]
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def audible_first_audio(arrivals: Sequence[Arrival], rate: int) -> float | None:
    """When the first 10 ms whose level passes -50 dBFS start to sound; None if none does. Seconds.

    The level is the root mean square of the window against that of full scale (1.0).
    """
    window = round(WINDOW_SECONDS * rate)
    for start, arrival in zip(playback(arrivals, rate), arrivals, strict=True):
        whole = len(arrival.samples) // window * window
        power = np.square(arrival.samples[:whole].astype(np.float64)).reshape(-1, window).mean(axis=1)
        loud = np.flatnonzero(power > 10 ** (AUDIBLE_DBFS / 10))
        if len(loud):
            return start + int(loud[0]) * window / rate
    return None


@dataclass(frozen=True)
class Heard:
    """One utterance in seconds, without its samples, and the process's bytes just after it."""

    first_audio: float
    audible_first_audio: float | None
    underrun: float
    longest_gap: float
    rtf: float
    resident: int

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], rate: int) -> Heard:
        return cls(
            arrivals[0].seconds,
            audible_first_audio(arrivals, rate),
            underrun(arrivals, rate),
            longest_gap(arrivals),
            arrivals[-1].seconds / (sum(len(arrival.samples) for arrival in arrivals) / rate),
            psutil.Process().memory_info().rss,
        )


def listen(synthesizer: Synthesizer, seed: int, frames: int) -> Heard:
    """Ask for one utterance and note what comes when."""
    start = time.perf_counter()
    chunks = synthesizer.stream(speech_request(synthesizer, seed, frames))
    arrivals = [Arrival(time.perf_counter() - start, chunk.samples) for chunk in chunks]
    return Heard.of(arrivals, synthesizer.sample_rate)


def listen_together(synthesizer: Synthesizer, lanes: int, utterances: int, frames: int) -> list[Heard]:
    """``lanes`` listeners at a time until ``utterances`` have been heard, in the order of the requests."""
    listen(synthesizer, seed=utterances, frames=min(frames, sum(RAMP)))  # the warm-up: every chunk size
    with ThreadPoolExecutor(lanes) as listeners:
        return list(listeners.map(lambda seed: listen(synthesizer, seed, frames), range(utterances)))


def add_heard(result: Report, heard: list[Heard], ceilings: dict[str, Ceiling], where: dict[str, Any]) -> None:
    seconds = {
        "first audio": [one.first_audio for one in heard],
        "audible first audio": [one.audible_first_audio for one in heard if one.audible_first_audio is not None],
        "underrun": [one.underrun for one in heard],
        "longest time between chunks": [one.longest_gap for one in heard],
    }
    for name, values in seconds.items():
        result.add_many(name, [value * MILLISECONDS for value in values], "ms", ceilings.get(name), **where)
    result.add_many("RTF", [one.rtf for one in heard], "s/s", ceilings["RTF"], **where)


def add_memory(result: Report, resident: list[int], where: dict[str, Any]) -> None:
    """The largest resident memory after an utterance, and how much more it is after the last than after the first.

    An allocator takes some dozens of utterances to settle; whether it does is the question of `benchmarks/memory.py`.
    """
    result.add("resident memory, largest", max(resident) / 1e6, "MB", **where)
    result.add("resident memory, growth", (resident[-1] - resident[0]) / 1e6, "MB", **where)


def ceilings(result: Report, synthesizer: Synthesizer, lanes: int) -> dict[str, Ceiling]:
    """Floors for ``lanes`` listeners."""
    machine, floors = result.machine, Floors.of(synthesizer.checkpoint, synthesizer.dtype)
    first = floors.first_audio(prompt_positions(synthesizer), machine)
    largest = max(RAMP)
    frame = floors.frame(lanes).seconds(machine) + floors.codec(largest, lanes).seconds(machine) / largest
    return {
        "first audio": first,
        "audible first audio": first,
        "underrun": Ceiling(0.0, "a player that never stands still"),
        "RTF": Ceiling(frame * synthesizer.config.codec.frame_rate, "floor of frame and codec; below 1 keeps up"),
    }


def measure(result: Report, synthesizer: Synthesizer, given: argparse.Namespace, lanes: int) -> None:
    where = setting(synthesizer, lanes=lanes, frames=given.frames)
    result.title(**where)
    heard = listen_together(synthesizer, lanes, given.utterances * lanes, given.frames)
    add_heard(result, heard, ceilings(result, synthesizer, lanes), where)
    add_memory(result, [one.resident for one in heard], where)


def main(arguments: list[str] | None = None) -> None:
    options = parser(QUESTION)
    options.add_argument("--lanes", type=numbers, default=[1], help="listeners at a time, such as 1,4")
    options.add_argument("--utterances", type=int, default=3, help="heard by each listener")
    options.add_argument("--frames", type=int, default=50, help="the longest that an utterance may be")
    given = options.parse_args(arguments)
    directory = checkpoint_directory(given)
    with report("stream", QUESTION, given) as result:
        for dtype in given.dtype or [None]:  # None: as it is stored, which is what a user gets
            with Synthesizer.from_pretrained(directory, dtype=dtype, lanes=max(given.lanes)) as synthesizer:
                for lanes in given.lanes:
                    measure(result, synthesizer, given, lanes)


if __name__ == "__main__":
    main()
