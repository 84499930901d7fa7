"""Kernels compiled by many processes into the compiler's cache, while tests that need none of them run.

A kernel of a whole frame takes one core up to a minute, and a test that launches it waits for no other.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import TimeoutError, get_context
from typing import Any
from unittest.mock import patch

import megakernel.frame
from tests.gpu.parity import Kernel
from tests.gpu.stage_bench import Bench, Case

BUDGET = 150.0  # seconds in which everything must be compiled, of the 170 that parity may take


class Only:
    """In the place of a Triton kernel: a launch compiles it, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
        return partial(self.kernel.warmup, grid=grid)


@contextmanager
def only_compiling() -> Iterator[None]:
    """Inside it frames are compiled and not run."""
    with patch.object(megakernel.frame, "frame_kernel", Only(megakernel.frame.frame_kernel)):
        yield


@dataclass(frozen=True)
class Job:
    """What is compiled together: a frame, or all stages of a case."""

    what: Kernel | Case

    def __call__(self) -> float:
        """The seconds that it took."""
        begin = time.perf_counter()
        try:
            if isinstance(self.what, Case):
                Bench(self.what, lambda kernel, grid: Only(kernel)[grid]).run_all()
            else:
                with only_compiling():
                    self.what.decoder().run()
        except Exception as error:  # those of the compiler cannot be sent from a process to another
            raise RuntimeError(f"{self.what} could not be compiled:\n{traceback.format_exc()}") from error
        return time.perf_counter() - begin


class Builder:
    """Compiles ``kernels`` in their order, as many at a time as there are other cores."""

    def __init__(self, kernels: Iterable[Kernel | Case]) -> None:
        kernels, self.end = list(kernels), time.monotonic() + BUDGET
        self.pool = get_context("spawn").Pool(min(len(kernels), max(1, (os.cpu_count() or 1) - 1)))
        self.seconds = {kernel: self.pool.apply_async(Job(kernel)) for kernel in kernels}

    def wait(self, kernel: Kernel | Case) -> float:
        """The seconds that ``kernel`` took to compile. Raises what the compiler raised, and if time is up."""
        try:
            return self.seconds[kernel].get(max(0.0, self.end - time.monotonic()))
        except TimeoutError as error:
            raise TimeoutError(f"{kernel} was not compiled {BUDGET:.0f} s after the tests began") from error

    def close(self) -> None:
        self.pool.terminate()
        self.pool.join()
