"""Where all programs of a launch meet: what was written before, by any of them, is read after, by all.

A sign-flip barrier: program 0 adds what makes the sum of all arrivals 2^31, so the top bit of the counter flips when
the last one arrives and the low bits are zero again. Nothing has to be reset, and it goes on from launch to launch.
One thread arrives with release and polls with acquire at the scope of the GPU, between two barriers of its
program. It does not wait for ever: after `PATIENCE` nanoseconds it sets the fault word to the number of its stage and
leaves, and whoever finds the fault word set leaves at once, so that the launch ends.

In the interpreter programs are Python calls; `hand_over` is what a test replaces to let several of them take turns.
"""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl

STAGES = ("draw", "project_qkv", "attend", "project_output", "feed_forward_up", "feed_forward_down", "score")
FAULT = 32  # where in `sync` the fault word is: 128 bytes on, in another line than the counter
SYNC_WORDS = 64
PATIENCE = 500_000_000

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_MEET = tl.constexpr(
    """{
    .reg .pred p;
    .reg .b32 r<4>;
    .reg .b64 t<3>;
    mov.u32 r0, %tid.x;
    setp.ne.u32 p, r0, 0;
    @p bra LEAVE;
    ld.relaxed.gpu.global.u32 r2, [$1 + FAULT];
    setp.ne.u32 p, r2, 0;
    @p bra LEAVE;
    atom.acq_rel.gpu.global.add.u32 r0, [$1], $2;
    mov.u64 t0, %globaltimer;
    add.u64 t0, t0, PATIENCE;
    POLL:
    ld.acquire.gpu.global.u32 r1, [$1];
    xor.b32 r1, r1, r0;
    setp.lt.s32 p, r1, 0;
    @p bra LEAVE;
    ld.relaxed.gpu.global.u32 r2, [$1 + FAULT];
    setp.ne.u32 p, r2, 0;
    @p bra LEAVE;
    mov.u64 t1, %globaltimer;
    setp.lt.u64 p, t1, t0;
    @p bra POLL;
    atom.relaxed.gpu.global.cas.b32 r3, [$1 + FAULT], 0, $3;
    LEAVE:
    mov.b32 $0, 0;
    }""".replace("PATIENCE", str(PATIENCE)).replace("FAULT", str(4 * FAULT))
)


def _alone() -> None:
    """A launch of one program in the interpreter has nobody to wait for."""


hand_over: Callable[[], None] = _alone


@triton.jit
def _meet_on_gpu(sync, stage: tl.constexpr, programs: tl.constexpr):
    rest: tl.constexpr = 2147483648 - (programs - 1) if programs > 1 else -2147483648  # so that all are 2^31
    arrival = tl.where(tl.program_id(0) == 0, rest, 1)
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        _MEET, "=r,l,r,r,~{memory}", [sync, arrival, stage], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()


@triton.jit
def _meet_in_turn(sync, stage: tl.constexpr, programs: tl.constexpr):
    hand_over()


# Wait until all ``programs`` are here: ``meet(sync, stage, programs)``, where ``stage`` is the number, from 1, of
# what they
# have just done. A function of Python's cannot be named where the compiler reads, hence two.
meet = _meet_in_turn if INTERPRETED.value else _meet_on_gpu


@triton.jit
def fresh():
    """Zero, and a new one each time as far as the compiler can tell.

    Offsets that begin with it are computed where they are used. Without it they are moved out of the loop over the
    layers, all of them, and there are more than registers to hold them.
    """
    zero = 0
    if not INTERPRETED:
        zero = tl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        zero = tl.multiple_of(zero, 1024)
    return zero


@triton.jit
def hold(x):
    """``x``, of 8, 16 or 32 bits, as something new to the compiler.

    What is done with the result is done here or later. Without it the compiler moves the first step of using a
    loaded tile, its way through shared memory, back to the load: before a barrier, where it would wait for the data.
    """
    if not INTERPRETED:
        if x.dtype.primitive_bitwidth == 8:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=4)
        elif x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x


@triton.jit
def bring_near(start, lines: tl.constexpr, most: tl.constexpr):
    """Ask for ``lines`` times 128 bytes from the pointer ``start`` to be brought into the L2, ``most`` at a time."""
    if not INTERPRETED:
        line = tl.arange(0, most)
        for first in tl.static_range(0, lines, most):
            address = (start.to(tl.int64) + (tl.minimum(first + line, lines - 1) * 128)).to(tl.int64)
            tl.inline_asm_elementwise(
                "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
                "=r,l",
                [address],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
