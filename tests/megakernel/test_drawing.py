"""Drawing a code inside the kernel, in Triton's interpreter: the twin's numbers, and the frequencies they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU Triton compiles, and these tensors are the interpreter's", allow_module_level=True)

from megakernel import Decoder, DrawParams, sampling
from megakernel.frame import KernelDecoder, _draw_words
from megakernel.sampling import DrawTable
from tests.megakernel import stage_kernels as kernels
from tests.megakernel.kernel_ladder import packed
from tests.megakernel.random_decoder import EOS, SUPPRESS_FROM

CPU = torch.device("cpu")
ENDLESS = float("-inf")


def power_above(n: int) -> int:
    return max(1 << (n - 1).bit_length(), 4)


def random_rows(vocab: int, count: int, seed: int = 0) -> Tensor:
    """Logits ``[count, vocab]``: of any size, many equal, zeros of both signs, some that cannot be drawn."""
    generator = torch.Generator().manual_seed(seed)
    rows = 3 * torch.randn(count, vocab, generator=generator)
    rows[1::4] = rows[1::4].round()  # ties, and both zeros
    rows[2::4] *= 1e3
    rows[3::4] *= 1e-6
    hidden = torch.rand(count, vocab, generator=generator) < 0.2
    hidden[:, 0] = False
    return rows.masked_fill(hidden, ENDLESS)


@pytest.mark.parametrize("vocab", [1, 3, 8, 43])
def test_keep_top_k(vocab) -> None:
    rows = random_rows(vocab, 24)
    top_k = torch.tensor([1 + i * 5 % vocab for i in range(24)])
    out = torch.full_like(rows, float("nan"))
    kernels.run_keep_top_k[(24,)](rows, top_k.int(), out, vocab=vocab, count=power_above(vocab))
    expected = sampling.keep_top_k(rows, top_k[:, None], vocab)
    assert torch.equal(out, expected), f"rows {(out != expected).any(1).nonzero().flatten().tolist()}"


def test_keep_top_k_of_equal_logits_keeps_all_of_the_last_ones() -> None:
    row = torch.tensor([[1.0, -0.0, 0.0, 5.0, 1.0, ENDLESS, -2.0]])
    for top_k, kept in ((1, 1), (2, 3), (3, 3), (4, 5), (5, 5), (6, 6)):
        out = torch.empty_like(row)
        kernels.run_keep_top_k[(1,)](row, torch.tensor([top_k], dtype=torch.int32), out, vocab=7, count=8)
        assert out.isfinite().sum() == kept, f"top_k {top_k} keeps {out.tolist()}"


@pytest.mark.parametrize("vocab", [1, 3, 8, 43])
def test_keep_top_p(vocab) -> None:
    """As the definition says it, in float64; a sum as near to the border as float32 rounds may fall on either side."""
    rows = random_rows(vocab, 24, seed=1)
    cut = torch.linspace(0.01, 0.97, 24)
    out = torch.full_like(rows, float("nan"))
    kernels.run_keep_top_p[(24,)](rows, cut, out, vocab=vocab, count=power_above(vocab))
    for row, (logits, kept) in enumerate(zip(rows.double(), out, strict=True)):
        mass = (logits - logits.max()).exp()
        below = torch.stack([mass[logits <= logit].sum() for logit in logits]) / mass.sum()
        stays = (below > cut[row].double()) & logits.isfinite()
        clear = (below - cut[row].double()).abs() > 1e-6
        assert torch.equal(kept.isfinite()[clear], stays[clear]), f"row {row}, cut {cut[row]}"
        assert torch.equal(kept[kept.isfinite()], rows[row][kept.isfinite()]), f"row {row}: a logit changed"
    twin = sampling.keep_top_p(rows, 1 - cut.double()[:, None])
    assert (twin.isfinite() == out.isfinite()).float().mean() > 0.98


def test_uniform_is_the_twins_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 1 << 32, (4096,), generator=generator)
    words[:4] = torch.tensor([0, (1 << 32) - 1, 1 << 31, (1 << 31) - 1])
    out = torch.empty(4096)
    kernels.run_uniform[(1,)](torch.from_numpy(words.numpy().astype(np.uint32)), out, count=4096)
    assert torch.equal(out, sampling.uniform(words))
    assert out.min() > 0 and out.max() < 1


@pytest.mark.parametrize("seed", [0, 7, -1, 0x1234_5678_9ABC_DEF0, -(1 << 63)])
def test_gumbel_noise(seed) -> None:
    """The twin's but for the last bits of two logarithms, for many counters, each in its place."""
    for first_frame, group, count in ((0, 0, 64), (4000, 15, 4), (1 << 30, 1, 2048)):
        out = torch.empty(16, count)
        kernels.run_gumbel_noise[(1,)](torch.tensor([seed]), first_frame, group, out, frames=16, count=count)
        frames = torch.arange(first_frame, first_frame + 16)
        expected = sampling.gumbel_noise(torch.full((16,), seed), frames, torch.tensor([group]), count)[:, 0]
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)


def draw_all(logits: Tensor, params: DrawParams, seeds: Tensor, frame: int, group: int) -> tuple[Tensor, Tensor]:
    """One code for each row of ``logits`` by the kernel, and by the twin."""
    count, vocab = logits.shape
    table = DrawTable(count, vocab, CPU)
    for row in range(count):
        table.set(row, params)
    words = torch.tensor([_draw_words(table, row) for row in range(count)])
    codes = torch.full((count,), -1, dtype=torch.int64)
    frames, groups = (torch.full((count,), n, dtype=torch.int32) for n in (frame, group))
    options = {"vocab": vocab, "count": power_above(vocab)}
    kernels.run_draw[(count,)](logits, words, seeds, frames, groups, codes, **options)
    noise = sampling.gumbel_noise(seeds, frames.long(), torch.tensor([group]), vocab)[:, 0]
    lanes = list(range(count))
    return codes, table.take(lanes, torch.tensor(lanes)).sample(logits, noise)


@pytest.mark.parametrize("vocab", [3, 16, 43])
@pytest.mark.parametrize(
    "params",
    [
        DrawParams(),
        DrawParams(0.7, 3),
        DrawParams(1.3, 0, 0.6),
        DrawParams(0.9, 5, 0.8),
        DrawParams(2.0, 0),
        DrawParams(greedy=True),
        DrawParams(0.3, 2, 0.4, greedy=True),
    ],
    ids=str,
)
def test_draw_takes_the_twins_code(params, vocab) -> None:
    logits = random_rows(vocab, 12, seed=vocab)
    codes, expected = draw_all(logits, params, torch.arange(12) * 12345, frame=3, group=2)
    assert torch.equal(codes, expected), f"{codes.tolist()} instead of {expected.tolist()}"


def test_a_draw_from_no_numbers_stays_in_the_vocabulary() -> None:
    """Logits that are not numbers, of a checkpoint that is broken, must not point outside a table."""
    for value in (ENDLESS, float("nan")):
        codes, _ = draw_all(torch.full((4, 5), value), DrawParams(top_k=0), torch.arange(4), 0, 0)
        assert ((codes >= 0) & (codes < 5)).all(), f"{value}: {codes.tolist()}"


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.8, 5, 1.0), (1.5, 0, 0.7), (0.7, 6, 0.9)]
)
def test_frequencies_are_the_probabilities(temperature, top_k, top_p) -> None:
    """100 000 frames of the kernel's noise over logits that it keeps, against probabilities from the definitions."""
    vocab, frames = 8, 4096
    logits = torch.tensor([[2.0, 1.6, 1.1, 0.4, -0.3, -1.0, -1.5, 0.9]])
    kept = (logits / temperature).contiguous()
    if top_k:
        source, kept = kept, torch.empty_like(kept)
        kernels.run_keep_top_k[(1,)](source, torch.tensor([top_k], dtype=torch.int32), kept, vocab=vocab, count=vocab)
    if top_p < 1:
        source, kept = kept, torch.empty_like(kept)
        kernels.run_keep_top_p[(1,)](source, torch.tensor([1 - top_p]), kept, vocab=vocab, count=vocab)
    counts = torch.zeros(vocab)
    for first in range(0, 25 * frames, frames):
        noise = torch.empty(frames, vocab)
        kernels.run_gumbel_noise[(1,)](torch.tensor([77]), first, 4, noise, frames=frames, count=vocab)
        counts += torch.bincount((kept + noise).argmax(-1), minlength=vocab)
    probabilities = exact_probabilities(logits[0].tolist(), temperature, top_k, top_p)
    expected = torch.tensor(probabilities) * counts.sum()
    drawn = expected > 0
    assert counts[~drawn].sum() == 0, f"drawn {counts.tolist()}, expected {expected.tolist()}"
    statistic = ((counts - expected)[drawn].square() / expected[drawn]).sum().item()
    assert chi2.sf(statistic, int(drawn.sum()) - 1) > 1e-3, f"drawn {counts.tolist()}, expected {expected.tolist()}"


def exact_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Written from the definitions, with nothing of the twin's."""
    order = sorted(range(len(logits)), key=lambda code: -logits[code])[: top_k or len(logits)]
    weight = {code: math.exp(logits[code] / temperature) for code in order}
    total = sum(weight.values())
    while sum(w for code, w in weight.items() if code != order[-1]) / total >= top_p:  # the rest is enough
        del weight[order.pop()]
    return [weight.get(code, 0.0) / sum(weight.values()) for code in range(len(logits))]


def test_talker_logits() -> None:
    """Penalty for what was drawn, nothing reserved, no end before its time."""
    weights, lanes = packed("one width"), 4
    decoder, twin = KernelDecoder(weights, lanes, 8), Decoder(weights, lanes, 8)
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(lanes, 43, generator=generator)
    seen = torch.rand(lanes, 43, generator=generator) < 0.5
    frames = [0, 1, 2, 900]
    for one in (decoder, twin):
        for lane, penalty in enumerate((1.0, 1.3, 0.8, 5.0)):
            one.begin(lane, penalty=penalty)
        one.state.logits.copy_(logits)
        one.state.seen.copy_(seen)
        one.state.frame[:] = frames
    out = torch.full((lanes, 64), float("nan"))
    frame = torch.tensor(frames, dtype=torch.int32)
    kernels.run_talker_logits[(lanes,)](decoder.utterances, frame, out, S=decoder.shape)
    expected = twin.talker_logits(list(range(lanes)), torch.arange(lanes))
    torch.testing.assert_close(out[:, :43], expected, atol=0, rtol=1e-6)
    assert (out[:, 43:] == ENDLESS).all()
    assert (out[:, SUPPRESS_FROM:EOS] == ENDLESS).all() and out[:, :SUPPRESS_FROM].isfinite().all()
    assert out[:, EOS].isfinite().tolist() == [False, False, True, True]
