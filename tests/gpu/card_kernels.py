"""Kernels that only tests on a GPU launch: programs that meet, programs that cannot, and noise as a frame draws it."""

import triton
import triton.language as tl

from megakernel.barrier import meet
from megakernel.drawing import gumbel_noise


@triton.jit
def run_in_ring(values, sync, rounds, programs: tl.constexpr):
    """Every round each program adds what its neighbour had before: ``values`` ``[rounds + 1, programs]`` int32."""
    mine = tl.program_id(0)
    neighbour = (mine + 1) % programs
    for r in range(rounds):
        row = values + r * programs
        total = tl.load(row + mine, cache_modifier=".cg") + tl.load(row + neighbour, cache_modifier=".cg")
        tl.store(row + programs + mine, total)
        meet(sync, 1, programs)


@triton.jit
def run_short_handed(sync, stage: tl.constexpr, programs: tl.constexpr):
    """All ``programs`` wait for one more, which does not exist."""
    meet(sync, stage, programs + 1)


@triton.jit
def run_noise(seed, first_frame, group, out, count: tl.constexpr):
    """The noise of one frame a program, ``[programs, count]``."""
    row = tl.program_id(0)
    noise = gumbel_noise(tl.load(seed), first_frame + row, group, count)
    tl.store(out + row * count + tl.arange(0, count), noise)
