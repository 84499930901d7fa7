"""The grid of programs that takes turns, which the tests of the kernel rely on: it shows what a GPU would do wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU Triton compiles, and these tensors are the interpreter's", allow_module_level=True)

import triton
from triton.runtime.errors import InterpreterError

from tests.megakernel import turn_kernels as kernels
from tests.megakernel.interpreted_grid import ORDERS, DisagreementError, checking_overflow, interpreted_grid

ROUNDS, PROGRAMS = 5, 4


@pytest.fixture(autouse=True)
def no_program_stays() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("program "):
            thread.join(10)
            assert not thread.is_alive(), f"{thread.name} is left over"


def ring(kernel: object, order: str) -> Tensor:
    values = torch.full((ROUNDS + 1, PROGRAMS), float("nan"))
    values[0] = torch.arange(1.0, PROGRAMS + 1)
    with interpreted_grid(order) as turns:
        kernel[(PROGRAMS,)](values, rounds=ROUNDS, programs=PROGRAMS)  # type: ignore[index]
    assert turns.barriers == (ROUNDS if kernel is kernels.run_in_ring else 0)
    return values[-1]


def expected() -> Tensor:
    values = torch.arange(1.0, PROGRAMS + 1)
    for _ in range(ROUNDS):
        values = values + values.roll(-1)
    return values


@pytest.mark.parametrize("order", ORDERS)
def test_programs_see_what_others_wrote_before_the_barrier(order) -> None:
    assert torch.equal(ring(kernels.run_in_ring, order), expected())


@pytest.mark.parametrize("order", ORDERS)
def test_without_a_barrier_they_do_not(order) -> None:
    assert not torch.equal(ring(kernels.run_in_ring_without_meeting, order), expected())


def test_a_program_that_ends_while_others_wait_is_found_out() -> None:
    with pytest.raises(DisagreementError, match=r"programs \[1\] of 4"), interpreted_grid():
        kernels.run_with_one_that_leaves[(PROGRAMS,)](torch.zeros(1), programs=PROGRAMS)


@pytest.mark.parametrize("order", ORDERS)
def test_a_program_that_fails_ends_the_launch(order) -> None:
    with pytest.raises((InterpreterError, ValueError)), interpreted_grid(order):
        kernels.run_with_one_that_fails[(PROGRAMS,)](torch.zeros(1), programs=PROGRAMS)
    test_programs_see_what_others_wrote_before_the_barrier(order)


def test_a_program_that_hangs_is_given_up() -> None:
    values = torch.zeros(1)
    with pytest.raises(TimeoutError, match="program 1"), interpreted_grid(timeout=0.5):
        kernels.run_with_one_that_hangs[(PROGRAMS,)](values, programs=PROGRAMS)
    values.fill_(1)  # so that it ends after all


def test_outside_of_it_a_program_has_nobody_to_meet() -> None:
    values = torch.zeros(2, 1)
    kernels.run_in_ring[(1,)](values, rounds=1, programs=1)
    assert values.tolist() == [[0.0], [0.0]]


@triton.jit
def square(value):
    n = triton.language.load(value)
    triton.language.store(value, n * n)


def test_overflow_is_checked_where_that_is_asked_for() -> None:
    square[(1,)](torch.tensor([1 << 20], dtype=torch.int32))
    with checking_overflow(), pytest.raises((InterpreterError, AssertionError), match="overflow"):
        square[(1,)](torch.tensor([1 << 20], dtype=torch.int32))
