"""Whole frames in float32 against the twin: the same codes token for token, and what a frame leaves behind.

Before every frame scratch holds NaN and the caches loud noise beyond every length; idle lanes keep every bit (`Pair`).
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernel is written in Triton")

from benchmarks.gpu_engines import check
from megakernel import CacheFullError, DrawParams, KernelFaultError
from megakernel.barrier import STAGES
from tests.gpu.parity import DEVICE, DRY, KERNELS, ODD_FOUR, Pair, scripts
from tests.gpu.test_barrier import STAGE, break_down
from tests.megakernel.kernel_ladder import assert_same_bits, lane_memory, snapshot
from tests.megakernel.random_decoder import Script

FRAMES = 2 if DRY else 20
GREEDY = DrawParams(greedy=True)


def perform(pair: Pair, frames: int) -> None:
    lanes = list(range(pair.kernel.lanes))
    for lane, script in zip(lanes, scripts(pair.kernel, frames), strict=True):
        pair.begin(lane, script)
    codes = [pair.step(lanes) for _ in range(frames)]
    different = {tuple(frame.flatten().tolist()) for frame in codes}
    assert len(different) == frames, "the frames are alike and prove little"


@pytest.fixture
def pair(built) -> Pair:
    built(ODD_FOUR)
    return Pair(ODD_FOUR)


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.weight_format == "float32"], ids=str)
def test_codes_are_the_twins(kernel, built) -> None:
    """Greedy and drawn, with top-k, top-p and penalties, after prompts of several lengths."""
    built(kernel)
    perform(Pair(kernel), FRAMES)


def test_lanes_in_any_order_beside_idle_ones(pair) -> None:
    """Of the idle lanes one holds another utterance, and one holds none and NaN wherever it can."""
    for tensor in lane_memory(pair.decoder).values():
        if tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
    for lane, script in enumerate(scripts(ODD_FOUR, FRAMES)):
        if lane != 2:
            pair.begin(lane, script)
    for lanes in ([3, 0], [0], [1, 3])[:FRAMES]:
        pair.step(lanes)


def test_no_lane_at_all_changes_nothing(pair) -> None:
    pair.begin(0, scripts(ODD_FOUR, 1)[0])
    before = snapshot(pair.decoder, range(4))
    pair.decoder.warm_up()
    check(pair.decoder)
    assert_same_bits(before, snapshot(pair.decoder, range(4)), "warm-up")


def test_a_frame_ends_no_earlier_than_it_may_and_no_reserved_code_is_drawn(pair) -> None:
    """The end is by far the likeliest code, then reserved ones are."""
    spec = ODD_FOUR.spec
    pair.begin(1, replace(scripts(ODD_FOUR, 3)[1], talker=GREEDY, penalty=1.0))
    ended = []
    for _ in range(3):
        for decoder in (pair.decoder, pair.twin):
            decoder.state.logits[1, spec.suppress_from :] = 90.0
            decoder.state.logits[1, spec.eos] = 50.0
        ended.append(int(pair.step([1])[0, 0]) == spec.eos)
    assert ended == [False, False, True]


def test_forced_codes_are_taken_and_the_next_frame_is_drawn_again(pair) -> None:
    for lane, script in enumerate(scripts(ODD_FOUR, 2)[:2]):
        pair.begin(lane, script)
    forced = torch.tensor([[40, 28, 0, 1, 2], [0, 0, 28, 27, 26]], device=DEVICE)
    codes = pair.step([0, 1], forced)
    assert torch.equal(codes, forced)
    pair.step([0, 1])
    assert torch.equal(codes, forced), "codes of a frame changed with the next"


def test_the_last_slot_of_a_cache_is_used_and_one_more_is_refused(pair) -> None:
    hidden, most = ODD_FOUR.spec.talker.hidden, ODD_FOUR.positions
    pair.begin(0, Script(hidden, 1, most - 2, frames=3))
    pair.begin(1, Script(hidden, 2, 1, frames=3))
    for _ in range(2):
        pair.step([0, 1])
    assert pair.decoder.state.length[:2] == [most, 3]
    before = snapshot(pair.decoder, range(4))
    with pytest.raises(CacheFullError, match="lane 0"):
        pair.decoder.step([1, 0], pair.text([1, 0]))
    assert_same_bits(before, snapshot(pair.decoder, range(4)), "a refused frame")


def test_after_a_fault_frames_end_at_once_and_after_a_rebuild_they_are_right(pair) -> None:
    perform(pair, 1)
    break_down(pair.decoder)
    begin = time.perf_counter()
    pair.decoder.step([0, 1], torch.zeros(2, ODD_FOUR.spec.talker.hidden, device=DEVICE))
    assert pair.decoder.fault is not None and pair.decoder.fault.tolist() == [STAGE]
    assert DRY or time.perf_counter() - begin < 2
    with pytest.raises(KernelFaultError, match=STAGES[STAGE - 1]):
        check(pair.decoder)
    for decoder in (pair.decoder, pair.twin):
        decoder.rebuild()
    perform(pair, 1 if DRY else FRAMES)
