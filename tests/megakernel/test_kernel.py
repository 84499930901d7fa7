"""Whole frames of the kernel, in Triton's interpreter, against the twin: the same codes from the same weights.

Scratch holds NaN and the caches loud noise before every frame, and idle lanes keep every bit (`Duet.step`).
"""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU Triton compiles, and these tensors are the interpreter's", allow_module_level=True)

from benchmarks.drawn import SPECS as RELEASED
from benchmarks.drawn import DrawnWeights
from megakernel import CacheFullError, Decoder, DrawParams, KernelFaultError, pack_decoder
from megakernel.barrier import FAULT, STAGES
from megakernel.frame import KernelDecoder
from megakernel.plan import Launch
from tests.megakernel.interpreted_grid import ORDERS, checking_overflow, interpreted_grid
from tests.megakernel.kernel_ladder import (
    GREEDY,
    POSITIONS,
    Duet,
    alone,
    assert_same_bits,
    dealt,
    lane_memory,
    packed,
    poison,
    relative,
    scripts,
    snapshot,
)
from tests.megakernel.random_decoder import EOS, SUPPRESS_FROM, Script

NAMES = ["one width", "projected"]


def perform(duet: Duet, frames: int) -> list[Tensor]:
    """All lanes from the beginning, step by step."""
    lanes = list(range(duet.lanes))
    for lane, script in zip(lanes, scripts(duet.spec, duet.lanes, frames), strict=True):
        duet.begin(lane, script)
    return [duet.step(lanes) for _ in range(frames)]


# Values.


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_twins(name, lanes) -> None:
    """Greedy and drawn, with top-k, top-p and penalties, after prompts of several lengths."""
    frames = perform(Duet(name, lanes=lanes, launch=alone(splits=lanes, keys=4)), frames=3)
    assert len({tuple(codes.flatten().tolist()) for codes in frames}) == 3, "the frames are alike and prove little"


@pytest.mark.full
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("weight_format", "dot"), [("float32", False), ("bfloat16", True), ("q8_0", True)])
def test_codes_of_many_lanes_are_the_twins(name, lanes, weight_format, dot) -> None:
    with interpreted_grid("shuffled"):
        perform(Duet(name, weight_format, lanes, dealt(3, dot=dot, splits=2, keys=4)), frames=4)


WAYS = [
    ("one width", "bfloat16", 1, alone()),
    ("projected", "bfloat16", 1, alone(dot=True)),
    ("one width", "bfloat16", 2, alone(dot=True, splits=2, keys=4)),
    ("projected", "bfloat16", 4, alone(dot=True, early=0)),
    ("one width", "q8_0", 1, alone(dot=True)),
    ("projected", "q8_0", 1, alone()),
    ("one width", "q8_0", 2, alone(splits=2, keys=8)),
    ("projected", "q8_0", 4, alone(dot=True)),
]


@pytest.mark.parametrize(("name", "weight_format", "lanes", "launch"), WAYS)
def test_narrow_weights_stay_near_the_twin(name, weight_format, lanes, launch) -> None:
    """Teacher-forced: the twin's codes are put into the kernel's frames."""
    perform(Duet(name, weight_format, lanes, launch), frames=2)


def test_a_frame_ends_no_earlier_than_it_may_and_no_reserved_code_is_drawn() -> None:
    """The end is by far the likeliest code, then reserved ones are."""
    duet = Duet("one width")
    for params, penalty in ((GREEDY, 1.0), (DrawParams(1.0, 2), 2.0)):
        duet.begin(0, replace(scripts(duet.spec, 1)[0], talker=params, predictor=params, penalty=penalty))
        ended = []
        for _ in range(4):
            for decoder in (duet.decoder, duet.twin):
                decoder.state.logits[0, EOS] = 50.0
                decoder.state.logits[0, SUPPRESS_FROM:EOS] = 90.0
                decoder.state.logits[0, EOS + 1 :] = 90.0
            ended.append(int(duet.step([0])[0, 0]) == EOS)
        assert ended == [False, False, True, True]


def test_forced_codes_are_taken_and_the_next_frame_is_drawn_again() -> None:
    duet = Duet("projected", lanes=2)
    for lane, script in enumerate(scripts(duet.spec, 2)):
        duet.begin(lane, script)
    forced = torch.tensor([[40, 28, 0], [0, 0, 28]])
    assert torch.equal(duet.step([0, 1], forced), forced)
    assert duet.decoder.state.seen[0, 40] and duet.decoder.state.seen[1, 0]
    assert (duet.decoder.utterances.forced == -1).all()
    duet.step([0, 1])


def test_codes_of_a_frame_outlive_the_next() -> None:
    duet = Duet("one width")
    duet.begin(0, scripts(duet.spec, 1)[0])
    first = duet.step([0])
    kept = first.clone()
    duet.step([0])
    assert torch.equal(first, kept)


def test_a_frame_repeats_itself_bit_for_bit() -> None:
    first, second = (Duet("projected", lanes=2, launch=alone(splits=3, keys=4)) for _ in range(2))
    for codes in zip(perform(first, 2), perform(second, 2), strict=True):
        assert torch.equal(*codes)
    assert_same_bits(snapshot(first.decoder, [0, 1]), snapshot(second.decoder, [0, 1]), "second run")


def test_the_halves_of_a_frame_one_after_the_other_are_a_frame() -> None:
    whole, halves = Duet("projected", lanes=2), Duet("projected", lanes=2)
    for duet in (whole, halves):
        for lane, script in enumerate(scripts(duet.spec, 2)):
            duet.begin(lane, script)
        poison(duet.decoder)
    text, decoder = whole.text([0, 1]), halves.decoder
    codes = whole.decoder.step([0, 1], text)
    decoder.controls.send(decoder._control_words([0, 1]), decoder.utterances.control)
    decoder.utterances.text[:2] = text
    before = snapshot(decoder, [0, 1])
    decoder.run(talker=False)
    assert torch.equal(decoder.utterances.codes, codes), "the predictor's half"
    after = snapshot(decoder, [0, 1])
    for name in ("keys", "values", "hidden", "logits", "predictor input"):
        assert torch.equal(before[name], after[name]), f"{name} changed without the talker"
    decoder.run(predictor=False)
    decoder.state.length[:], decoder.state.frame[:] = whole.decoder.state.length, whole.decoder.state.frame
    assert_same_bits(snapshot(whole.decoder, [0, 1]), snapshot(decoder, [0, 1]), "both halves")
    kept = decoder.state.predictor_logits.clone()
    decoder.run(predictor=False)
    assert torch.equal(decoder.state.predictor_logits, kept) and torch.equal(decoder.utterances.codes, codes)


# Programs.


@pytest.mark.parametrize(("name", "programs"), [("one width", 3), ("projected", 5)])
def test_programs_in_any_order_make_the_same_bits(name, programs) -> None:
    """And the codes of one program, which are the twin's."""
    lanes, expected = [0, 1], None
    for order in ORDERS:
        duet = Duet(name, lanes=2, launch=alone(programs=programs, splits=2, keys=4))
        with interpreted_grid(order) as turns:
            perform(duet, frames=1)
        stacks = duet.spec.talker.layers + (duet.spec.groups - 1) * duet.spec.predictor.layers
        assert turns.barriers == 5 * stacks + 2 * (duet.spec.groups - 1) + 1, "a barrier is not what it was"
        bits = snapshot(duet.decoder, lanes)
        assert_same_bits(expected or bits, bits, f"{programs} programs, {order}")
        expected = bits


@pytest.mark.parametrize(("weight_format", "dot"), [("bfloat16", False), ("q8_0", True)])
def test_programs_share_narrow_weights(weight_format, dot) -> None:
    with interpreted_grid("shuffled"):
        perform(Duet("projected", weight_format, 2, dealt(3, dot=dot)), frames=1)


def test_programs_without_rows() -> None:
    """Some of them own nothing of some matrices."""
    with interpreted_grid("reverse"):
        perform(Duet("one width", launch=alone(programs=13)), frames=1)


# Lanes.


@pytest.mark.parametrize("lanes", [[1], [3, 0]])
def test_idle_lanes_keep_every_bit(lanes) -> None:
    """Lanes in any order, beside lanes that hold another utterance and lanes that hold none."""
    duet = Duet("projected", lanes=4, launch=alone(splits=2, keys=4))
    for tensor in lane_memory(duet.decoder).values():
        if tensor.dtype.is_floating_point:
            tensor.fill_(float("nan"))
    for lane, script in enumerate(scripts(duet.spec, 4)[:4]):
        if lane != 2:
            duet.begin(lane, script)
    for _ in range(2):
        duet.step(lanes)


def test_lanes_that_join_and_leave_do_not_touch_the_others() -> None:
    """Lane 2's bits are those of the same utterance alone in the same decoder."""
    duet = Duet("projected", lanes=4, launch=alone(splits=2, keys=4))
    spec, company = duet.spec, scripts(duet.spec, 4, frames=8)
    script = Script(spec.talker.hidden, 55, 5, 8, DrawParams(1.1, 8, 0.9), DrawParams(0.9, 0), 1.4)

    def perform_in(plan: list[list[int]]) -> list[dict[str, Tensor]]:
        duet.begin(2, script)
        takes, begun = [], {2}
        for lanes in plan:
            for lane in set(lanes) - begun:
                duet.begin(lane, company[lane])
            begun = {2, *lanes}  # who left begins afresh
            duet.step(lanes)
            takes.append(snapshot(duet.decoder, [2]))
        return takes

    alone_, accompanied = perform_in([[2]] * 4), perform_in([[2, 0], [3, 2, 1, 0], [2, 3], [0, 2]])
    for frame, (expected, take) in enumerate(zip(alone_, accompanied, strict=True)):
        assert_same_bits({n: b for n, b in expected.items() if n not in CACHES}, take, f"frame {frame}")
    end = duet.decoder.state.length[2]
    for name in CACHES[:2]:  # beyond the length lies noise
        expected, take = (t[-1][name].view(torch.float32)[..., :end, :] for t in (alone_, accompanied))
        assert torch.equal(expected, take), name


CACHES = ("keys", "values", "predictor keys", "predictor values")


def test_no_lane_at_all_changes_nothing() -> None:
    duet = Duet("one width", lanes=2)
    duet.begin(0, scripts(duet.spec, 1)[0])
    poison(duet.decoder)
    before = snapshot(duet.decoder, [0, 1])
    duet.decoder.warm_up()
    assert_same_bits(before, snapshot(duet.decoder, [0, 1]), "warm-up")


# The cache.


@pytest.mark.parametrize("splits", [1, 4])
def test_the_last_slot_of_a_cache_is_used_and_one_more_is_refused(splits) -> None:
    duet = Duet("one width", lanes=2, launch=alone(splits=splits, keys=4))
    hidden = duet.spec.talker.hidden
    duet.begin(0, Script(hidden, 1, POSITIONS - 2, frames=3))
    duet.begin(1, Script(hidden, 2, 1, frames=3))
    for _ in range(2):
        duet.step([0, 1])
    assert duet.decoder.state.length == [POSITIONS, 3]
    before = {name: tensor.clone() for name, tensor in snapshot(duet.decoder, [0, 1]).items()}
    with pytest.raises(CacheFullError, match="lane 0"):
        duet.decoder.step([1, 0], duet.text([1, 0]))
    assert_same_bits(before, snapshot(duet.decoder, [0, 1]), "a refused frame")


# Faults and refusals.


def test_a_fault_is_named_by_its_stage_and_gone_after_a_rebuild() -> None:
    duet = Duet("one width", lanes=2)
    duet.begin(0, scripts(duet.spec, 1)[0])
    decoder = duet.decoder
    assert decoder.fault is not None and decoder.fault.shape == (1,) and decoder.fault.dtype == torch.int32
    decoder.check(int(decoder.fault))
    for number, stage in enumerate(STAGES, start=1):
        with pytest.raises(KernelFaultError, match=stage) as caught:
            decoder.check(number)
        assert caught.value.stage == stage
    decoder.scratch.sync[0] = 77
    decoder.scratch.sync[FAULT] = 3
    assert decoder.fault.tolist() == [3]
    decoder.rebuild()
    assert not decoder.scratch.sync.any() and decoder.state.length == [0, 0]
    duet.twin.rebuild()
    perform(duet, frames=1)


def test_weights_of_the_twin_are_refused() -> None:
    with pytest.raises(ValueError, match='layout="kernel"'):
        KernelDecoder(replace(packed("one width"), packed=None))


def test_a_decoder_plans_for_itself() -> None:
    decoder = KernelDecoder(packed("one width"), 2, 8)
    assert decoder.name == "kernel" and decoder.launch.programs == 1 and decoder.shape.lanes == 2


# The released size.


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("programs", [1, 3])
def test_a_frame_of_the_released_size(programs) -> None:
    """0.6B in bfloat16, with every sum and product of integers checked for overflow; less than 12 GB of memory."""
    spec = RELEASED["0.6b"]
    weights = pack_decoder(DrawnWeights(spec, torch.device("cpu")), spec, "bfloat16", layout="kernel")
    launch = Launch(programs=programs, warps=4, tile=1 << 9, chunk=1 << 10, early=0, splits=8)
    decoder, twin = KernelDecoder(weights, 1, 4096, launch), Decoder(weights, 1, 4096)
    script = Script(spec.talker.hidden, 1, 9, 1)
    for one in (decoder, twin):
        one.begin(0, 1)
        one.prefill(0, script.prompt)
    poison(decoder)
    expected = twin.step([0], script.text)
    with interpreted_grid("reverse", timeout=600), checking_overflow():
        codes = decoder.step([0], script.text, expected)
    assert torch.equal(codes, expected)
    for name in ("hidden", "logits", "predictor_logits"):
        error = relative(getattr(decoder.state, name), getattr(twin.state, name))
        assert error < 0.05, f"{name}: {error:.1e}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 12 << 20  # KB
