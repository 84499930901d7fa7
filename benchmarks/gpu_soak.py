"""Does the kernel hold out? Thousands of frames in changing company, with the codec on the same stream.

Utterances end and begin in every lane at different times. The fault word is read, and the codes are looked at, every
hundred frames; if a hundred frames take far too long the process says where it is and ends.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backend.checkpoint import Checkpoint
from backend.codec import Codec
from benchmarks.floors import MILLISECONDS
from benchmarks.gpu_engines import check, kernel_decoder
from benchmarks.gpu_run import Bench
from benchmarks.gpu_sections import frame_setting, require_kernel, scale
from benchmarks.report import Report
from megakernel import Decoder, pack_decoder

FRAMES, LANES = 10_000, 4
PROMPT, CHUNK, LOOK = 24, 4, 100
STALL_SECONDS = 20.0


class Watchdog:
    """Calls ``give_up`` if `beat` is not called for ``seconds``."""

    def __init__(self, seconds: float, give_up: Callable[[], None]) -> None:
        self.seconds, self.give_up = seconds, give_up
        self.alive, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watchdog:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.alive.set()
        self.thread.join()

    def beat(self) -> None:
        self.alive.set()

    def _watch(self) -> None:
        while self.alive.wait(self.seconds):
            if self.over.is_set():
                return
            self.alive.clear()
        self.give_up()


def leave() -> None:
    print(f"stalled: no {LOOK} frames in {STALL_SECONDS:.0f} s", flush=True)
    faulthandler.dump_traceback()
    os._exit(3)  # a thread that waits for the device cannot be stopped otherwise


@dataclass
class Company:
    """The lanes of ``decoder``; each speaks utterances of its own lengths, one after the other."""

    decoder: Decoder
    codec: Codec
    positions: int
    begun: int = 0

    def __post_init__(self) -> None:
        self.lanes = list(range(self.decoder.state.lanes))
        self.draw = torch.Generator().manual_seed(0)
        device, hidden = self.decoder.weights.device, self.decoder.spec.talker.hidden
        rows = torch.randn(PROMPT + len(self.lanes), hidden, generator=self.draw).to(device)
        self.prompt, self.text = rows[:PROMPT], rows[PROMPT:]
        self.ends = [0 for _ in self.lanes]
        self.waiting: list[torch.Tensor] = []

    def step(self) -> torch.Tensor:
        """One frame of all lanes, and once there are enough of them the codec's step; the codes ``[lanes, groups]``."""
        for lane in self.lanes:
            if self.decoder.state.length[lane] >= self.ends[lane]:
                self._begin(lane)
        codes = self.decoder.step(self.lanes, self.text)
        self.waiting.append(codes)
        if len(self.waiting) == CHUNK:
            self.samples = self.codec.decode(torch.stack(self.waiting, dim=1), self.lanes)
            self.waiting.clear()
        return codes

    def _begin(self, lane: int) -> None:
        room = self.positions - PROMPT
        self.ends[lane] = PROMPT + 1 + int(torch.randint(room, (1,), generator=self.draw))
        self.begun += 1
        self.decoder.begin(lane, seed=self.begun)
        self.decoder.prefill(lane, self.prompt)
        self.codec.reset(lane)

    def look(self, codes: torch.Tensor) -> None:
        """Raises for a fault, and for codes and samples that cannot be."""
        check(self.decoder)
        spec = self.decoder.spec
        limits = torch.tensor([spec.talker.vocab] + [spec.predictor.vocab] * (spec.groups - 1))
        if not ((codes.cpu() >= 0) & (codes.cpu() < limits)).all():
            raise RuntimeError(f"codes out of range: {codes.tolist()}")
        if not self.samples.isfinite().all():
            raise RuntimeError("samples that are not finite")


def run(company: Company, frames: int, look: int, beat: Callable[[], None]) -> list[float]:
    """Seconds of every ``look`` frames of ``frames``."""
    seconds, begin = [], time.perf_counter()
    codes = company.step()
    for number in range(2, frames + 1):
        codes = company.step()
        if number % look == 0:
            company.look(codes)
            beat()
            seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    return seconds


def soak(bench: Bench) -> None:
    """The section; in a dry run it is the twin that holds out."""
    device, much = bench.torch_device, scale(bench)
    lanes, frames, look = (2, 8, 4) if bench.dry else (LANES, FRAMES, LOOK)
    if not bench.dry:
        require_kernel(bench)
    checkpoint = Checkpoint(bench.checkpoint)
    weights = pack_decoder(checkpoint.read, checkpoint.config.spec, much.formats[0], device, layout="kernel")
    decoder = (Decoder if bench.dry else kernel_decoder)(weights, lanes, much.positions)
    company = Company(decoder, Codec(checkpoint.config.codec, checkpoint.read, lanes, device), much.positions)
    with bench.report() as result, Watchdog(STALL_SECONDS, leave) as watchdog:
        seconds = run(company, frames, look, watchdog.beat)
        where = frame_setting(bench, weights, much.sizes[0], company.decoder.name, lanes) | {"frames": frames}
        add(result, seconds, look, company.begun, where)


def add(result: Report, seconds: list[float], look: int, utterances: int, where: dict[str, Any]) -> None:
    """The first ones hold what is done once, and do not count."""
    milliseconds = [s / look * MILLISECONDS for s in seconds]
    where = where | {"utterances": utterances, "chunk": CHUNK}
    result.add_many(f"soak, a frame and its codec over {look}", milliseconds[1:] or milliseconds, "ms", **where)
