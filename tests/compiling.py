"""Kernels compiled in the background of a test session, in processes of their own and at low priority."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.compiled import Case, compile_case
from megakernel.ahead import Compiled


def _yield_to_the_tests() -> None:
    os.nice(10)


class Compiling:
    """Starts compiling ``cases`` at once; calling it waits for one of them."""

    def __init__(self, cases: Iterable[Case]) -> None:
        interpreted = os.environ.pop("TRITON_INTERPRET", None)  # the processes inherit what is set when they start
        jobs = max(1, (os.cpu_count() or 2) // 2)
        self.pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_yield_to_the_tests)
        self.results: dict[Case, Future[Compiled]] = {case: self.pool.submit(compile_case, case) for case in cases}
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted

    def __call__(self, case: Case) -> Compiled:
        return self.results[case].result()

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
