"""Small kernels whose programs meet, for the tests of the grid of programs that takes turns."""

import triton
import triton.language as tl

from megakernel.barrier import meet


@triton.jit
def run_in_ring(values, rounds: tl.constexpr, programs: tl.constexpr):
    """Every round each program adds what its neighbour had before: ``values`` ``[rounds + 1, programs]``."""
    mine = tl.program_id(0)
    neighbour = (mine + 1) % programs
    for r in range(rounds):
        row = values + r * programs
        tl.store(row + programs + mine, tl.load(row + mine) + tl.load(row + neighbour))
        meet(values, 1, programs)


@triton.jit
def run_in_ring_without_meeting(values, rounds: tl.constexpr, programs: tl.constexpr):
    mine = tl.program_id(0)
    neighbour = (mine + 1) % programs
    for r in range(rounds):
        row = values + r * programs
        tl.store(row + programs + mine, tl.load(row + mine) + tl.load(row + neighbour))


@triton.jit
def run_with_one_that_leaves(values, programs: tl.constexpr):
    meet(values, 1, programs)
    if tl.program_id(0) != 1:
        meet(values, 1, programs)


@triton.jit
def run_with_one_that_fails(values, programs: tl.constexpr):
    meet(values, 1, programs)
    if tl.program_id(0) == 1:
        tl.load(values + tl.arange(0, 2) + tl.arange(0, 4))  # shapes that do not go together
    meet(values, 1, programs)


@triton.jit
def run_with_one_that_hangs(values, programs: tl.constexpr):
    if tl.program_id(0) == 1:
        while tl.load(values) == 0:  # for what nobody stores
            pass
    meet(values, 1, programs)
