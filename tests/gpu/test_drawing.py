"""Drawing a code on the card: the twin's noise, its codes, and the frequencies that its probabilities promise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")

from megakernel import DrawParams, sampling
from megakernel.frame import _draw_words
from megakernel.sampling import DrawTable
from tests.gpu.card_kernels import run_noise
from tests.gpu.parity import DEVICE, DRY, ODD_FOUR
from tests.megakernel import stage_kernels as kernels

ENDLESS = float("-inf")
VOCAB, COUNT = (43, 64) if DRY else (3072, 4096)
ROWS = 12 if DRY else 512
FRAMES = 4 if DRY else 256
# (seed, frame, group, code) of words whose upper 23 bits are all ones, and all zeros: the ends of the distribution
TAILS = {16.6355324: (124, 133, 3, 33), -2.8115408: (7, 210, 3, 10)}


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def noise(seed: int, first_frame: int, group: int, frames: int, count: int) -> Tensor:
    out = torch.full((frames, count), float("nan"), device=DEVICE)
    run_noise[(frames,)](numbers(seed), first_frame, group, out, count=count)
    return out


def twin_noise(seed: int, first_frame: int, group: int, frames: int, count: int) -> Tensor:
    frame = torch.arange(first_frame, first_frame + frames, device=DEVICE)
    return sampling.gumbel_noise(numbers(seed).expand(frames), frame, numbers(group), count)[:, 0]


@pytest.mark.parametrize("seed", [0, 7, -1, 0x1234_5678_9ABC_DEF0, -(1 << 63)])
def test_noise_is_the_twins(seed, note) -> None:
    for first_frame, group in ((3, 2), (4001, 15), ((1 << 30) + 5, 9)):
        mine = noise(seed, first_frame, group, FRAMES, COUNT)
        theirs = twin_noise(seed, first_frame, group, FRAMES, COUNT)
        assert mine.isfinite().all()
        worst = (mine - theirs).abs().max().item()
        assert worst < 1e-5, f"{worst:.1e} from the twin's"
    note(f"noise of seed {seed:#x}: at most {worst:.1e} from the twin's")


@pytest.mark.parametrize("end", TAILS)
def test_noise_of_the_least_and_the_most_likely_number(end) -> None:
    seed, frame, group, code = TAILS[end]
    theirs = twin_noise(seed, frame, group, 1, COUNT)[0, code].item()
    assert theirs == pytest.approx(end, abs=1e-6), "the word is not the one that it was chosen for"
    assert noise(seed, frame, group, 1, COUNT)[0, code].item() == pytest.approx(end, abs=1e-5)


def rows(count: int, vocab: int) -> Tensor:
    """Logits of any size, many equal, zeros of both signs, some that cannot be drawn."""
    generator = torch.Generator(DEVICE).manual_seed(vocab)
    logits = 3 * torch.randn(count, vocab, generator=generator, device=DEVICE)
    logits[1::4] = logits[1::4].round()
    logits[2::4] *= 1e3
    logits[3::4] *= 1e-3
    hidden = torch.rand(count, vocab, generator=generator, device=DEVICE) < 0.2
    hidden[:, 0] = False
    return logits.masked_fill(hidden, ENDLESS)


def test_the_largest_are_kept_as_the_twin_keeps_them() -> None:
    logits = rows(ROWS, VOCAB)
    top_k = 1 + torch.arange(ROWS, device=DEVICE) * 5 % VOCAB
    out = torch.full_like(logits, float("nan"))
    kernels.run_keep_top_k[(ROWS,)](logits, top_k.int(), out, vocab=VOCAB, count=COUNT)
    assert torch.equal(out, sampling.keep_top_k(logits, top_k[:, None], int(top_k.max())))


def table(count: int, vocab: int, params: DrawParams) -> tuple[sampling.Draw, Tensor]:
    """The parameters of ``count`` rows as the twin and as the kernel takes them."""
    drawn = DrawTable(1, vocab, DEVICE)
    drawn.set(0, params)
    words = torch.tensor([_draw_words(drawn, 0)], device=DEVICE).repeat(count, 1)
    return drawn.take([0], torch.zeros(count, dtype=torch.int64, device=DEVICE)), words


def draw(logits: Tensor, params: DrawParams, seeds: Tensor, frames: Tensor, group: int, count: int) -> Tensor:
    _, words = table(len(logits), logits.shape[1], params)
    codes = torch.full((len(logits),), -1, dtype=torch.int64, device=DEVICE)
    groups = torch.full_like(frames, group)
    options = {"vocab": logits.shape[1], "count": count}
    kernels.run_draw[(len(logits),)](logits, words, seeds, frames, groups, codes, **options)
    return codes


WAYS = [
    DrawParams(),
    DrawParams(0.7, 3),
    DrawParams(1.3, 0, 0.6),
    DrawParams(0.9, 40, 0.8),
    DrawParams(2.0, 0),
    DrawParams(greedy=True),
]


@pytest.mark.parametrize("params", WAYS[::2] if DRY else WAYS, ids=str)
def test_a_drawn_code_is_the_twins(params) -> None:
    logits = rows(ROWS, VOCAB)
    seeds = torch.arange(ROWS, device=DEVICE) * 12345
    frames = torch.full((ROWS,), 3, dtype=torch.int32, device=DEVICE)
    codes = draw(logits, params, seeds, frames, group=2, count=COUNT)
    drawn, _ = table(ROWS, VOCAB, params)
    noise = sampling.gumbel_noise(seeds, frames.long(), numbers(2), VOCAB)[:, 0]
    expected = drawn.sample(logits, noise)
    wrong = (codes != expected).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong}: {codes[wrong].tolist()} instead of {expected[wrong].tolist()}"


@pytest.mark.parametrize("value", [ENDLESS, float("nan")])
def test_a_draw_from_no_numbers_stays_in_the_vocabulary(value) -> None:
    logits = torch.full((4, 43), value, device=DEVICE)
    frames = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    for params in (DrawParams(top_k=0), DrawParams(top_k=3, top_p=0.5), DrawParams(greedy=True)):
        codes = draw(logits, params, torch.arange(4, device=DEVICE), frames, 0, count=64)
        assert ((codes >= 0) & (codes < 43)).all(), f"{value}, {params}: {codes.tolist()}"


@pytest.mark.parametrize("params", [DrawParams(1.0, 0), DrawParams(0.8, 20, 0.9)], ids=str)
def test_frequencies_are_the_twins_probabilities(params, note) -> None:
    """One utterance of 100 000 frames (fewer in a dry run): the chi-square statistic of its codes."""
    draws, vocab = 100 if DRY else 100_000, 64
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    frames = torch.arange(draws, dtype=torch.int32, device=DEVICE)
    seeds = torch.full((draws,), 77, device=DEVICE)
    codes = draw(logits.expand(draws, -1).contiguous(), params, seeds, frames, group=4, count=vocab)
    drawn, _ = table(1, vocab, params)
    probabilities = drawn.filter(logits)[0].double().softmax(0).cpu()
    counts, expected = torch.bincount(codes.cpu(), minlength=vocab).double(), probabilities * draws
    assert counts[expected == 0].sum() == 0, "a code that cannot be drawn was"
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    there = expected > 0
    statistic = ((counts - expected)[there].square() / expected[there]).sum()
    freedom = int(there.sum()) - 1
    chance = torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2).item()
    note(f"{draws} draws, {params}: chi-square {statistic:.1f} of {freedom} degrees of freedom, p = {chance:.3f}")
    assert chance > 1e-4, f"drawn {counts.tolist()}, expected {expected.tolist()}"


def test_penalty_reserved_codes_and_an_end_before_its_time() -> None:
    decoder, twin, lanes = ODD_FOUR.decoder(), ODD_FOUR.twin(), ODD_FOUR.lanes
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(decoder.state.logits.shape, generator=generator)
    seen = torch.rand(logits.shape, generator=generator) < 0.5
    frames = [0, 1, 2, 900]
    for one in (decoder, twin):
        for lane, penalty in enumerate((1.0, 1.3, 0.8, 5.0)):
            one.begin(lane, penalty=penalty)
        one.state.logits.copy_(logits)
        one.state.seen.copy_(seen)
        one.state.frame[:] = frames
    out = torch.full((lanes, decoder.shape.talker.codes), float("nan"), device=DEVICE)
    frame = torch.tensor(frames, dtype=torch.int32, device=DEVICE)
    kernels.run_talker_logits[(lanes,)](decoder.utterances, frame, out, S=decoder.shape)
    expected = twin.talker_logits(list(range(lanes)), torch.arange(lanes, device=DEVICE))
    torch.testing.assert_close(out[:, : logits.shape[1]], expected, atol=0, rtol=1e-6)
