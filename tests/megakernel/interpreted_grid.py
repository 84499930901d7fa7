"""Launches of several programs under Triton's interpreter, which by itself runs one program after another to its end.

Each program gets a thread, and one thread runs at a time: at a barrier it hands the baton back, and no program is
resumed before every one has arrived. Between two barriers each runs without a break, in an order that the test
chooses, so that what a missing barrier should have protected is seen half done, as a real machine may see it.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from megakernel import barrier

ORDERS = ("forward", "reverse", "shuffled")


class DisagreementError(AssertionError):
    """Some programs ended while others waited at a barrier: on a GPU these would wait for ever."""


class _AbandonedError(BaseException):
    """Ends a program whose launch has failed; not an ``Exception``, which the interpreter would wrap."""


class _Program(threading.Thread):
    def __init__(self, number: int, function: Callable[[], object], done: threading.Semaphore) -> None:
        super().__init__(name=f"program {number}", daemon=True)
        self.number, self.function, self.done = number, function, done
        self.baton = threading.Semaphore(0)
        self.abandoned = self.ended = False
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.take_baton()
            self.function()
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001  # the launch raises it where the test can see it
            self.error = error
        self.ended = True
        self.done.release()

    def take_baton(self) -> None:
        self.baton.acquire()
        if self.abandoned:
            raise _AbandonedError

    def hand_over(self) -> None:
        self.done.release()
        self.take_baton()


class Turns:
    """Programs of a launch, resumed round by round in ``order``; ``barriers`` counts the rounds that ended in one."""

    def __init__(self, order: str, timeout: float) -> None:
        assert order in ORDERS
        self.order, self.timeout = order, timeout
        self.chance = random.Random(0)
        self.barriers = 0

    def run(self, programs: int, function: Callable[[], object]) -> None:
        done = threading.Semaphore(0)
        threads = [_Program(number, function, done) for number in range(programs)]
        for thread in threads:
            thread.start()
        try:
            while not all(thread.ended for thread in threads):
                for thread in self._in_order(threads):
                    self._resume(thread, done)
                self._compare(threads)
        finally:
            for thread in threads:
                thread.abandoned = True
                thread.baton.release()

    def _in_order(self, threads: list[_Program]) -> list[_Program]:
        if self.order == "reverse":
            return threads[::-1]
        return self.chance.sample(threads, len(threads)) if self.order == "shuffled" else threads

    def _resume(self, thread: _Program, done: threading.Semaphore) -> None:
        interpreter.interpreter_builder.set_grid_idx(thread.number, 0, 0)
        thread.baton.release()
        if not done.acquire(timeout=self.timeout):
            raise TimeoutError(f"{thread.name} neither met the others nor ended within {self.timeout} s")
        if thread.error is not None:
            raise thread.error

    def _compare(self, threads: list[_Program]) -> None:
        ended = [thread.number for thread in threads if thread.ended]
        if ended and len(ended) < len(threads):
            raise DisagreementError(f"programs {ended} of {len(threads)} ended and the others wait for them")
        self.barriers += not ended


def _hand_over() -> None:
    program = threading.current_thread()
    if isinstance(program, _Program):
        program.hand_over()


@contextmanager
def interpreted_grid(order: str = "forward", timeout: float = 60.0) -> Iterator[Turns]:
    """Inside it the programs of every launch take turns; a turn that takes longer than ``timeout`` seconds fails."""
    turns = Turns(order, timeout)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        taken = set(inspect.signature(executor.fn).parameters)
        scope = interpreter._patch_lang(executor.fn)
        try:
            arguments = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in kwargs.items() if k in taken})
            for name in set(arguments) - set(executor.constexprs):
                arguments[name] = interpreter._implicit_cvt(arguments[name])
            interpreter.interpreter_builder.set_grid_dim(*executor.grid, 1, 1)
            turns.run(executor.grid[0], lambda: executor.fn(**arguments))
        finally:
            scope.restore()

    with patch.object(interpreter.GridExecutor, "__call__", launch), patch.object(barrier, "hand_over", _hand_over):
        yield turns


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """The interpreter at four times its speed, rounding to bfloat16 as hardware does.

    It swaps the functions of Triton's language at every call of a function; here once a launch and module. It repeats
    all arithmetic of integers in 64 bits and looks at it only if asked to (`checking_overflow`). And it cuts the last
    bits of float32 off where every GPU rounds to the nearest bfloat16.
    """
    swap = interpreter._patch_lang
    swapped: dict[int, dict[str, object]] = {}

    def swap_once(function: Any) -> Any:
        names = function.__globals__
        if id(names) in swapped:
            return None  # only what a launch begins with is ever restored
        swapped[id(names)] = names
        scope = swap(function)
        # the one of Triton 3.6 asks numpy in a way that newer ones refuse
        scope.set_attr(tl.tensor, "__index__", lambda number: int(number.handle.data.item()))
        restore = scope.restore

        def restore_all() -> None:
            swapped.clear()
            restore()

        scope.restore = restore_all
        return scope

    rounding = patch.object(interpreter, "_convert_float", _convert(interpreter._convert_float))
    with patch.object(interpreter, "_patch_lang", swap_once), checking_overflow(False), rounding:
        yield


def _convert(convert: Callable[..., Any]) -> Callable[..., Any]:
    def nearest(values: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return values.astype(np.uint32) << np.uint32(16)
        return convert(values, source, target, mode)

    return nearest


@contextmanager
def checking_overflow(check: bool = True) -> Iterator[None]:
    """Whether every sum and product of integers must fit its type; by itself the interpreter looks and says nothing."""
    builder = interpreter.interpreter_builder
    with patch.object(builder, "options", replace(builder.options, sanitize_overflow=check, debug=check)):
        yield
