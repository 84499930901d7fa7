"""Times of work on a device, and the speeds of that device's memory and matrix products.

On a GPU the times are between two events on the stream, so they hold what the device did and what it waited for; on a
CPU they are the clock's. Knows nothing of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.conditions import Machine

WARM_UP = 3
BUFFER_BYTES = 4 << 30  # many times the largest L2
PEAK_WIDTH = 8192


def spans(work: Callable[[], Any], repeats: int, device: torch.device, warm_up: int = WARM_UP) -> list[float]:
    """Seconds of each of ``repeats`` calls, after ``warm_up`` that do not count.

    On a GPU the calls follow each other without waiting, as frames do in an utterance.
    """
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        return [_clocked(work) for _ in range(repeats)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * repeats)]
    for start, end in zip(events[::2], events[1::2], strict=True):
        start.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in zip(events[::2], events[1::2], strict=True)]


def waits(work: Callable[[], Any], repeats: int, device: torch.device, warm_up: int = WARM_UP) -> list[float]:
    """Seconds of the clock until each call's work is done, as a caller that needs the result waits."""

    def awaited() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(warm_up):
        awaited()
    return [_clocked(awaited) for _ in range(repeats)]


def _clocked(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def copy_speeds(device: torch.device, size: int, repeats: int = 20) -> list[float]:
    """Bytes a second of copies of ``size`` bytes within the device's memory, bytes read and bytes written together."""
    source, target = (_random(size, device) for _ in range(2))
    return [2 * size / seconds for seconds in spans(lambda: target.copy_(source), repeats, device)]


def read_speeds(device: torch.device, size: int, repeats: int = 20) -> list[float]:
    """Bytes a second of sums over ``size`` bytes: they are read, and next to nothing is written."""
    rows = _random(size, device).view(torch.float32).view(-1, 1024)
    return [size / seconds for seconds in spans(rows.sum, repeats, device)]


def matrix_speeds(device: torch.device, dtype: str, width: int, repeats: int = 10) -> list[float]:
    """Operations a second of products of two random ``width`` x ``width`` matrices, two for each multiplication."""
    a, b = (torch.randn(width, width, device=device).to(getattr(torch, dtype)) for _ in range(2))
    return [2 * width**3 / seconds for seconds in spans(lambda: a @ b, repeats, device)]


def measure_machine(device: torch.device, size: int = BUFFER_BYTES, width: int = PEAK_WIDTH) -> Machine:
    """The ceilings of a device: its ``bandwidth`` is that of a copy."""
    peaks = {dtype: float(np.median(matrix_speeds(device, dtype, width))) for dtype in ("float32", "bfloat16")}
    return Machine(float(np.median(copy_speeds(device, size))), peaks)


def _random(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that no compression of the memory can shorten."""
    return torch.rand(size // 4, device=device).view(torch.uint8)
