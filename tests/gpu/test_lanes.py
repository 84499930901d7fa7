"""The same seed gives the same codes, and the same logits bit for bit: in any company, and again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")

from benchmarks.gpu_engines import check
from megakernel import Decoder, DrawParams
from tests.gpu.parity import DEVICE, DRY, FOUR, FULL, FULL_Q8, ODD_FOUR, ONE, begin, scripts
from tests.megakernel.random_decoder import Script

FRAMES = 2 if DRY else 16
MINE = 2  # the lane that is watched
KERNELS = [FULL_Q8] if DRY else [ODD_FOUR, FULL, FULL_Q8]


def utterance(hidden: int) -> Script:
    return Script(hidden, 55, 7, FRAMES, DrawParams(1.1, 40, 0.9), DrawParams(0.9, 0), 1.4)


def perform(decoder: Decoder, plan: list[list[int]], company: list[Script]) -> list[dict[str, Tensor]]:
    """What each frame of ``plan``, the lanes in their order, leaves of lane `MINE`."""
    script, state = utterance(decoder.spec.talker.hidden), decoder.state
    begin(decoder, MINE, script)
    takes, speaking = [], {MINE}
    for frame, lanes in enumerate(plan):
        for lane in set(lanes) - speaking:
            begin(decoder, lane, company[lane])
        speaking = {MINE, *lanes}  # who left begins afresh
        texts = [script.text[frame] if lane == MINE else company[lane].text[frame] for lane in lanes]
        codes = decoder.step(lanes, torch.stack(texts).to(DEVICE))
        take = {name: getattr(state, name)[MINE].clone() for name in ("hidden", "logits", "predictor_logits")}
        takes.append(take | {"codes": codes[lanes.index(MINE)]})
    check(decoder)
    end = state.length[MINE]
    takes[-1] |= {"keys": state.cache.k[:, MINE, :, :end].clone(), "values": state.cache.v[:, MINE, :, :end].clone()}
    return takes


def companies(lanes: int) -> list[list[int]]:
    """Lane `MINE` among others that come and go, in any order; at the end all of them."""
    chance = random.Random(lanes)
    others = [lane for lane in range(lanes) if lane != MINE]
    plan = [[MINE, *chance.sample(others, chance.randrange(1, lanes))] for _ in range(FRAMES - 1)]
    return [chance.sample(frame, len(frame)) for frame in [*plan, list(range(lanes))]]


def assert_same(first: list[dict[str, Tensor]], second: list[dict[str, Tensor]], what: str) -> None:
    for frame, (expected, take) in enumerate(zip(first, second, strict=True)):
        for name in expected:
            assert torch.equal(expected[name], take[name]), f"{what}, frame {frame}: other {name}"


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_lane_does_not_notice_its_company(kernel, built) -> None:
    built(kernel)
    decoder, company = kernel.decoder(), scripts(kernel, FRAMES)
    plan = companies(kernel.lanes)
    accompanied = perform(decoder, plan, company)
    assert_same(accompanied, perform(decoder, plan, company), "again")
    assert_same(accompanied, perform(decoder, [[MINE]] * FRAMES, company), "alone")


def test_codes_of_decoders_for_other_numbers_of_lanes(built, note) -> None:
    """Told, not required: sums may be made in another order there."""
    frames = 1 if DRY else FRAMES
    script, taken = utterance(ONE.spec.talker.hidden), []
    for kernel in (ONE, FOUR, FULL):
        built(kernel)
        decoder = kernel.decoder()
        begin(decoder, 0, script)
        codes = [decoder.step([0], script.text[frame][None].to(DEVICE)) for frame in range(frames)]
        check(decoder)
        taken.append(torch.cat(codes))
    for kernel, codes in zip((FOUR, FULL), taken[1:], strict=True):
        same = (codes == taken[0]).all(1).tolist()
        first = same.index(False) if False in same else frames
        note(f"{kernel}: the first {first} of {frames} frames have the codes of {ONE}")
