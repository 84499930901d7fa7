"""Logits to codes: the random numbers, the filters against those of transformers, the draw by its statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megakernel.sampling import (
    Draw,
    DrawParams,
    DrawTable,
    gumbel_noise,
    keep_top_k,
    keep_top_p,
    penalize,
    philox,
    uniform,
)

CPU = torch.device("cpu")
WORD = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
# Counter, key and result. Source: kat_vectors of Random123, the lines of philox4x32 with 10 rounds.
KNOWN_ANSWERS = {
    "zeros": ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((WORD,) * 4, (WORD,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "digits of pi": (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
}


def philox_by_integers(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 on unbounded integers, round by round as the paper's figure draws it."""
    left, right = list(counter[0::2]), list(counter[1::2])
    for round_ in range(10):
        keys = [(key[i] + round_ * step) % 2**32 for i, step in enumerate((0x9E3779B9, 0xBB67AE85))]
        high_low = [divmod(m * word, 2**32) for m, word in zip((0xD2511F53, 0xCD9E8D57), left, strict=True)]
        (high0, low0), (high1, low1) = high_low
        left, right = [high1 ^ right[0] ^ keys[0], high0 ^ right[1] ^ keys[1]], [low1, low0]
    return left[0], right[0], left[1], right[1]


def philox_of(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    words = philox(
        (torch.tensor(counter[0]), torch.tensor(counter[1]), torch.tensor(counter[2]), torch.tensor(counter[3])),
        (torch.tensor(key[0]), torch.tensor(key[1])),
    )
    return tuple(int(word) for word in words)


words32 = st.integers(0, WORD)


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(name) -> None:
    counter, key, answer = KNOWN_ANSWERS[name]
    assert philox_of(counter, key) == answer
    assert philox_by_integers(counter, key) == answer, "the second opinion is itself wrong"


@settings(max_examples=100, deadline=None)
@given(st.tuples(words32, words32, words32, words32), st.tuples(words32, words32))
def test_philox_equals_the_same_on_unbounded_integers(counter, key) -> None:
    assert philox_of(counter, key) == philox_by_integers(counter, key)


def test_uniform_numbers_are_exact_and_never_0_or_1() -> None:
    words = torch.tensor([0, 1, 511, 512, 1 << 31, WORD - 512, WORD - 511, WORD])
    u = uniform(words)
    expected = [((int(word) >> 9) + 0.5) / 2**23 for word in words]
    assert u.dtype == torch.float32
    assert u.tolist() == expected, "a value was rounded"
    assert u.min() == 2.0**-24 and u.max() == 1 - 2.0**-24


def test_uniform_numbers_are_spread_evenly() -> None:
    blocks = torch.arange(25_000)
    zero = torch.zeros_like(blocks)
    u = uniform(torch.stack(philox((blocks, zero, zero, zero), (zero + 5, zero))))
    counts = torch.histc(u.flatten(), bins=100, min=0, max=1).double()
    assert chi2.sf(((counts - 1000) ** 2 / 1000).sum().item(), 99) > 1e-3


@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 95, 3072])
def test_noise_of_a_code_is_counted_by_block_group_and_frame_and_keyed_by_seed(vocab) -> None:
    seeds, frames, groups = [0x1234_5678_9ABC_DEF0, -1, 7], [0, 3, 4000], [0, 1, 15]
    noise = gumbel_noise(torch.tensor(seeds), torch.tensor(frames), torch.tensor(groups), vocab)
    assert noise.shape == (3, 3, vocab) and noise.dtype == torch.float32
    for lane, (seed, frame) in enumerate(zip(seeds, frames, strict=True)):
        for place, group in enumerate(groups):
            for code in {0, vocab // 2, vocab - 1}:
                key = (seed & WORD, seed >> 32 & WORD)
                word = philox_by_integers((code // 4, group, frame, 0), key)[code % 4]
                expected = -math.log(-math.log(((word >> 9) + 0.5) / 2**23))
                got = noise[lane, place, code].item()
                assert got == pytest.approx(expected, rel=1e-5, abs=1e-5), (seed, frame, group, code)


def test_noise_of_a_code_does_not_depend_on_the_vocabulary() -> None:
    seed, frame, group = torch.tensor([9]), torch.tensor([2]), torch.arange(16)
    wide, narrow = (gumbel_noise(seed, frame, group, vocab) for vocab in (3072, 2046))
    assert torch.equal(wide[..., :2046], narrow)


@pytest.mark.parametrize("threads", [1, 2])
def test_noise_of_a_lane_is_the_same_bits_in_any_company(threads) -> None:
    seed, frame, group = torch.arange(16) * 77_777_777_777, torch.arange(16), torch.arange(16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for vocab in (3072, 2048, 93):
            alone = [gumbel_noise(seed[i : i + 1], frame[i : i + 1], group, vocab)[0] for i in range(16)]
            for size in (2, 3, 5, 16):
                together = gumbel_noise(seed[-size:], frame[-size:], group, vocab)
                for place in range(size):
                    lane = 16 - size + place
                    assert torch.equal(together[place], alone[lane]), f"lane {lane} of {size}, vocabulary {vocab}"
    finally:
        torch.set_num_threads(before)


def test_noise_is_finite_at_the_ends_of_the_uniform_numbers() -> None:
    ends = uniform(torch.tensor([0, WORD]))
    assert torch.isfinite(-(-ends.log()).log()).all()


# The filters. Values on a coarse grid have many ties, and equal probabilities at the border of the nucleus.

grid = st.integers(-24, 24).map(lambda n: n / 8)
anything = st.floats(-30, 30, width=32)
logit_rows = st.one_of(st.lists(grid, min_size=2, max_size=40), st.lists(anything, min_size=2, max_size=40))
top_ps = st.one_of(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.999]), st.floats(0.01, 0.999))
NO_CODES = torch.zeros(1, 1, dtype=torch.int64)


def apply(processor: Any, logits: Tensor, codes: Tensor = NO_CODES) -> Tensor:
    """A logits processor of transformers, whose own types want particular tensors."""
    return processor(codes, logits.clone())


def with_ties(kept: Tensor, logits: Tensor) -> Tensor:
    """``kept`` and all ``logits`` equal to its smallest: transformers leaves it to its sort which of them stay."""
    return logits.masked_fill(logits < kept[kept.isfinite()].min(), float("-inf"))


def assert_same_filter(mine: Tensor, theirs: Tensor) -> None:
    assert torch.equal(mine, theirs), f"kept {mine.tolist()}, expected {theirs.tolist()}"


@settings(max_examples=150, deadline=None)
@given(logit_rows, st.integers(1, 50))
def test_top_k_keeps_what_transformers_keeps(row, top_k) -> None:
    logits = torch.tensor([row])
    kept = min(top_k, len(row))
    assert_same_filter(keep_top_k(logits, torch.tensor([[kept]]), kept), apply(TopKLogitsWarper(top_k), logits))


@settings(max_examples=300, deadline=None)
@given(logit_rows, top_ps)
def test_top_p_keeps_what_transformers_keeps_and_ties_with_it(row, top_p) -> None:
    logits = torch.tensor([row])
    table = DrawTable(1, len(row), CPU)
    table.set(0, DrawParams(top_p=top_p))
    mine = keep_top_p(logits, table.take([0], torch.tensor([0])).top_p)
    assert_same_filter(mine, with_ties(apply(TopPLogitsWarper(top_p), logits), logits))


def test_of_equal_logits_at_the_border_top_p_and_top_k_keep_all() -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 3.0, 0.0, 3.0] * 4])
    largest = logits.masked_fill(logits < 3, float("-inf"))
    assert torch.equal(keep_top_p(logits, torch.tensor([[0.5]], dtype=torch.float64)), largest)
    assert torch.equal(keep_top_k(logits, torch.tensor([[2]]), 2), largest)


def test_codes_that_sum_to_exactly_1_minus_top_p_go() -> None:
    """``1 - top_p`` is rounded once, from double precision."""
    logits = torch.tensor([[0.0, 0.7, 1.9, 2.3]])
    sums = logits.softmax(-1).cumsum(-1)
    for dropped in (1, 2, 3):
        border = sums[0, dropped - 1]
        table = DrawTable(1, 4, CPU)
        for share, kept in ((border, 4 - dropped), (border.nextafter(torch.tensor(0.0)), 5 - dropped)):
            table.set(0, DrawParams(top_p=1 - share.double().item()))
            mine = keep_top_p(logits, table.take([0], torch.tensor([0])).top_p)
            assert mine.isfinite().sum() == kept, f"{dropped} codes sum to {border}, 1 - top_p is {share}"


@settings(max_examples=200, deadline=None)
@given(logit_rows, top_ps)
def test_a_code_stays_if_all_codes_at_most_as_likely_sum_to_more(row, top_p) -> None:
    """In float64, code by code; sums as near to the border as float32 rounds may fall on either side."""
    probabilities = [math.exp(logit - max(row)) for logit in row]
    kept = keep_top_p(torch.tensor([row]), torch.tensor([[top_p]], dtype=torch.float64))[0].isfinite()
    for code, logit in enumerate(row):
        below = math.fsum(p for p, other in zip(probabilities, row, strict=True) if other <= logit)
        share = below / math.fsum(probabilities)
        if abs(share - (1 - top_p)) > 1e-5:
            assert kept[code].item() == (share > 1 - top_p), f"code {code}: {share} against {1 - top_p}"


@settings(max_examples=100, deadline=None)
@given(logit_rows, st.lists(st.integers(0, 1000), max_size=20), st.floats(0.2, 5))
def test_repetition_penalty_equals_that_of_transformers(row, history, penalty) -> None:
    logits = torch.tensor([row])
    codes = torch.tensor([[code % len(row) for code in history]], dtype=torch.int64)
    seen = torch.zeros(1, len(row), dtype=torch.bool)
    seen[0, codes[0]] = True
    mine = penalize(logits, seen, torch.tensor([[penalty]]))
    assert torch.equal(mine, apply(RepetitionPenaltyLogitsProcessor(penalty), logits, codes))


def take(params: list[DrawParams], vocab: int, lanes: list[int] | None = None) -> Draw:
    """The draw of ``lanes`` of a table that holds ``params``."""
    table = DrawTable(len(params), vocab, CPU)
    for lane, one in enumerate(params):
        table.set(lane, one)
    lanes = list(range(len(params))) if lanes is None else lanes
    return table.take(lanes, torch.tensor(lanes))


@settings(max_examples=150, deadline=None)
@given(logit_rows, st.floats(0.05, 3), st.integers(0, 50), st.one_of(st.just(1.0), top_ps))
def test_all_filters_in_a_row_equal_those_of_transformers(row, temperature, top_k, top_p) -> None:
    logits = torch.tensor([row])
    mine = take([DrawParams(temperature, top_k, top_p)], len(row)).filter(logits)
    theirs = apply(TemperatureLogitsWarper(temperature), logits)
    if top_k:
        theirs = apply(TopKLogitsWarper(top_k), theirs)
    if top_p < 1:
        theirs = with_ties(apply(TopPLogitsWarper(top_p), theirs), theirs)
    assert_same_filter(mine, theirs)


def test_suppressed_codes_stay_suppressed_and_something_is_always_kept() -> None:
    logits = torch.full((1, 8), float("-inf"))
    logits[0, 3] = -100.0
    for params in (DrawParams(top_k=5, top_p=0.5), DrawParams(top_k=0), DrawParams(top_p=1e-12)):
        draw = take([params], 8)
        assert draw.filter(logits).isfinite().nonzero().tolist() == [[0, 3]], params
        assert draw.sample(logits, torch.full((1, 8), 10.0)).tolist() == [3], params


# The draw.


def draws(logits: Tensor, params: DrawParams, count: int, seed: int) -> Tensor:
    """``count`` codes drawn from the one row ``logits``, as the frames of one utterance."""
    vocab = len(logits)
    frames = torch.arange(count)
    noise = gumbel_noise(torch.full((count,), seed), frames, torch.tensor([0]), vocab)[:, 0]
    return take([params] * count, vocab).sample(logits.expand(count, -1), noise)


@pytest.mark.parametrize(
    "params",
    [
        DrawParams(temperature=0.9, top_k=50),
        DrawParams(temperature=0.3, top_k=0),
        DrawParams(temperature=1.7, top_k=7),
        DrawParams(temperature=1.0, top_k=0, top_p=0.8),
        DrawParams(temperature=1.2, top_k=12, top_p=0.6),
    ],
    ids=str,
)
def test_draws_follow_the_filtered_probabilities(params) -> None:
    count, vocab = 100_000, 61
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    expected = take([params], vocab).filter(logits[None])[0].double().softmax(-1) * count
    observed = torch.zeros(vocab, dtype=torch.float64)
    for part in range(5):
        codes = draws(logits, params, count // 5, seed=1000 + part)
        observed += torch.bincount(codes, minlength=vocab)
    dropped = expected == 0
    assert observed[dropped].sum() == 0, (
        f"drew {(observed * dropped).nonzero().flatten().tolist()}, which no filter kept"
    )
    rare = (expected < 10) & ~dropped
    pooled_observed = torch.cat([observed[expected >= 10], observed[rare].sum()[None]])
    pooled_expected = torch.cat([expected[expected >= 10], expected[rare].sum()[None].clamp(min=1e-9)])
    statistic = ((pooled_observed - pooled_expected) ** 2 / pooled_expected).sum().item()
    assert chi2.sf(statistic, len(pooled_expected) - 1) > 1e-3, (
        f"chi-square {statistic} of {len(pooled_expected)} cells"
    )


def test_draws_of_neighbouring_frames_groups_and_seeds_are_independent() -> None:
    """Of two codes as likely as each other, pairs of draws are all four as likely."""
    noise = gumbel_noise(torch.arange(40), torch.arange(40) // 2, torch.arange(16), 2)  # [seeds, groups, 2]
    frames = gumbel_noise(torch.full((1000,), 5), torch.arange(1000), torch.tensor([0]), 2)[:, 0]
    first = (frames[:, 0] > frames[:, 1]).long()
    groups = (noise[..., 0] > noise[..., 1]).long()
    for name, pairs in (
        ("frames", 2 * first[:-1] + first[1:]),
        ("groups", (2 * groups[:, :-1] + groups[:, 1:]).flatten()),
        ("seeds", (2 * groups[:-1] + groups[1:]).flatten()),
    ):
        counts = torch.bincount(pairs, minlength=4).double()
        expected = len(pairs) / 4
        assert chi2.sf(((counts - expected) ** 2 / expected).sum().item(), 3) > 1e-3, f"{name}: {counts.tolist()}"


def test_the_same_seed_draws_the_same_and_another_seed_another() -> None:
    logits = torch.zeros(64)
    params = DrawParams(top_k=0)
    first = draws(logits, params, 50, seed=4)
    assert torch.equal(first, draws(logits, params, 50, seed=4))
    for seed in (5, 4 + (1 << 32), -4):
        assert not torch.equal(first, draws(logits, params, 50, seed=seed)), f"seed {seed} draws as seed 4"


MIXED = [
    DrawParams(temperature=0.9, top_k=50),
    DrawParams(temperature=1.4, top_k=3, top_p=0.9),
    DrawParams(temperature=0.7, greedy=True),
    DrawParams(temperature=1.1, top_k=0, top_p=0.4),
    DrawParams(temperature=0.9, top_k=0, top_p=0.3, greedy=True),
    DrawParams(temperature=2.0, top_k=1),
    DrawParams(temperature=1.0, top_k=0),
]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_lanes_of_different_parameters_draw_as_each_alone(data) -> None:
    order = data.draw(st.permutations(range(len(MIXED))))
    lanes = order[: data.draw(st.integers(1, len(MIXED)))]
    vocab = data.draw(st.integers(1, 40))
    values = data.draw(st.sampled_from([grid, anything]))
    logits = torch.tensor([data.draw(st.lists(values, min_size=vocab, max_size=vocab)) for _ in lanes])
    noise = gumbel_noise(torch.tensor(lanes), torch.tensor(lanes), torch.tensor([0]), vocab)[:, 0]
    together = take(MIXED, vocab, lanes).sample(logits, noise)
    for row, lane in enumerate(lanes):
        alone = take(MIXED, vocab, [lane])
        expected = alone.sample(logits[row : row + 1], None if alone.greedy else noise[row : row + 1])
        assert together[row] == expected[0], f"lane {lane} ({MIXED[lane]}) in the company of {lanes}"


@pytest.mark.parametrize("top_p", [1.0, 0.3])
@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.3])
def test_greedy_beside_a_lane_that_draws_takes_the_first_of_the_largest_logits(temperature, top_p) -> None:
    """Temperature rounds no two of the logits to one, and no filter cuts off a tie."""
    lane = DrawParams(temperature, top_p=top_p, greedy=True)
    tied = torch.tensor([0.0, 1.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0])
    assert take([lane, DrawParams()], 8).sample(tied.expand(2, -1), torch.zeros(2, 8))[0] == 2
    lower = torch.linspace(1.1, 1.9, 500)
    rows = torch.stack([lower, torch.nextafter(lower, 2 * lower)], dim=1)  # each beside the next larger number
    drawn = take([lane] * 499 + [DrawParams()], 2).sample(rows, torch.zeros(500, 2))[:499]
    wrong = (drawn != 1).nonzero().flatten()
    assert not len(wrong), f"rounded to one: {rows[wrong[0]].tolist()}"


def test_greedy_ignores_the_noise() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    greedy = DrawParams(greedy=True)
    noise = torch.randn(3, 50, generator=torch.Generator().manual_seed(2)) * 100
    best = logits.argmax(-1)
    assert torch.equal(take([greedy] * 3, 50).sample(logits, None), best)
    mixed = take([greedy, DrawParams(), greedy], 50).sample(logits, noise)
    assert mixed[[0, 2]].tolist() == best[[0, 2]].tolist()
    assert mixed[1] != best[1], "the lane that draws ignored the noise too"


def test_top_k_1_is_the_best_code_whatever_the_noise() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(4, 50, generator=torch.Generator().manual_seed(2)) * 100
    assert torch.equal(take([DrawParams(top_k=1)] * 4, 50).sample(logits, noise), logits.argmax(-1))


def test_a_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(1))
    assert torch.equal(take([DrawParams(top_k=1000)], 9).filter(logits), take([DrawParams(top_k=0)], 9).filter(logits))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": -0.5},
        {"top_p": float("nan")},
    ],
    ids=str,
)
def test_draw_parameters_out_of_range_are_refused_by_name(wrong) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DrawParams(**wrong)
