"""Programs that meet on the card, and a launch that cannot meet: it ends, is told by its stage, and is got over."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")

from megakernel.barrier import FAULT, PATIENCE, SYNC_WORDS
from megakernel.frame import KernelDecoder
from tests.gpu.card_kernels import run_in_ring, run_short_handed
from tests.gpu.parity import DEVICE, DRY, ODD_FOUR

OPTIONS = {} if DRY else {"launch_cooperative_grid": True}
STAGE = 3


def programs() -> int:
    return 3 if DRY else torch.cuda.get_device_properties(DEVICE).multi_processor_count


def new_sync() -> Tensor:
    return torch.zeros(SYNC_WORDS, dtype=torch.int32, device=DEVICE)


def interpreted() -> contextlib.AbstractContextManager[object]:
    if not DRY:
        return contextlib.nullcontext()
    from tests.megakernel.interpreted_grid import interpreted_grid

    return interpreted_grid("shuffled")


def ring(first: Tensor, rounds: int) -> Tensor:
    row = first.clone()
    for _ in range(rounds):
        row = row + row.roll(-1)
    return row


@pytest.mark.parametrize("warps", [4, 8, 16])
def test_programs_read_what_the_others_wrote_before_they_met(warps) -> None:
    """Launch after launch with nothing reset, from the barrier as the last one left it."""
    count, sync = programs(), new_sync()
    for rounds in (3, 4, 5) if DRY else (2001, 2003, 1999):
        values = torch.zeros(rounds + 1, count, dtype=torch.int32, device=DEVICE)
        values[0] = torch.arange(count) * 7919 + 1
        with interpreted():
            run_in_ring[(count,)](values, sync, rounds, programs=count, num_warps=warps, **OPTIONS)
        assert torch.equal(values[-1], ring(values[0], rounds)), f"after {rounds} rounds"
        assert sync[FAULT] == 0
    assert DRY or sync[0] & 0x7FFFFFFF == 0, "arrivals are left over"


def test_more_programs_than_fit_at_once_are_refused_before_they_start(card) -> None:
    sync, count = new_sync(), 64 * programs()
    values = torch.zeros(2, count, dtype=torch.int32, device=DEVICE)
    with pytest.raises(RuntimeError, match="cooperative"):
        run_in_ring[(count,)](values, sync, 1, programs=count, num_warps=4, **OPTIONS)
    torch.cuda.synchronize()
    assert not sync.any()


def break_down(decoder: KernelDecoder) -> None:
    """Have a launch wait for a program that does not exist; where nobody waits, leave what it would leave."""
    sync, count = decoder.scratch.sync, decoder.launch.programs
    if DRY:
        sync[FAULT] = STAGE
    else:
        run_short_handed[(count,)](sync, stage=STAGE, programs=count, num_warps=decoder.launch.warps, **OPTIONS)


def test_a_launch_that_cannot_meet_ends_and_says_where(card) -> None:
    decoder = ODD_FOUR.decoder()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    break_down(decoder)
    assert decoder.fault.tolist() == [STAGE]
    seconds = time.perf_counter() - begin
    assert PATIENCE / 1e9 < seconds < 10, f"{seconds:.2f} s"  # the first launch compiles
    decoder.rebuild()
    begin = time.perf_counter()
    break_down(decoder)
    assert decoder.fault.tolist() == [STAGE]
    assert (seconds := time.perf_counter() - begin) < 2, f"{seconds:.2f} s"
