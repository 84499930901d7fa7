"""Q8_0: bit for bit what GGUF's own quantiser makes, whatever the block; and the errors where it cannot be."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor

from megakernel import q8
from megakernel.q8 import BLOCK, BLOCK_BYTES, check_width, dequantize, quantize

LARGEST = 65504.0  # of float16


def published(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, scales and values of the ``gguf`` package."""
    raw = quants.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    blocks = raw.reshape(-1, BLOCK_BYTES)
    scales = blocks[:, :2].copy().view(np.float16).reshape(*weight.shape[:-1], -1)
    numbers = blocks[:, 2:].copy().view(np.int8).reshape(weight.shape)
    values = quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0).reshape(weight.shape)
    return torch.from_numpy(numbers), torch.from_numpy(scales), torch.from_numpy(values)


def assert_as_published(weight: Tensor) -> None:
    numbers, scales = quantize(weight)
    expected = published(weight)
    for name, mine, theirs in zip(
        ("numbers", "scales", "values"), (numbers, scales, dequantize(numbers, scales)), expected, strict=True
    ):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, name
        differing = (mine != theirs).nonzero()
        assert not len(differing), f"{name}: {len(differing)} differ, the first at {differing[0].tolist()}"


def halves() -> Tensor:
    """A block whose scale is exactly 1 and whose weights lie half-way between numbers, of both signs."""
    block = torch.arange(BLOCK) - 15.5
    block[0] = 127.0
    return block


BLOCKS = {
    "zeros": torch.zeros(BLOCK),
    "negative zeros": torch.full((BLOCK,), -0.0),
    "one weight": torch.zeros(BLOCK).index_fill(0, torch.tensor([7]), 0.3),
    "one negative weight": torch.zeros(BLOCK).index_fill(0, torch.tensor([31]), -0.3),
    "halves": halves(),
    "negative extreme": -halves(),
    "as large as float16": torch.linspace(-LARGEST, LARGEST, BLOCK),
    "the largest scale": torch.linspace(-127 * LARGEST, 127 * LARGEST, BLOCK),
    "a scale below the normal ones": torch.linspace(-1e-4, 2e-4, BLOCK),
    "a scale of zero": torch.linspace(-1e-7, 1e-7, BLOCK),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_odd_blocks_are_those_of_gguf(name) -> None:
    assert_as_published(BLOCKS[name][None])


def test_halves_round_away_from_zero() -> None:
    numbers, scales = quantize(halves())
    assert scales.tolist() == [1.0]
    assert numbers[1:].tolist() == [round(x + 0.5 if x > 0 else x - 0.5) for x in halves()[1:].tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(32,), (1, 32), (37, 64), (3, 5, 96), (256, 1024)], ids=str)
def test_matrices_are_those_of_gguf(shape, dtype) -> None:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    weight = torch.randn(shape, generator=generator) * torch.rand((*shape[:-1], 1), generator=generator)
    assert_as_published(weight.to(dtype))


def test_a_matrix_in_pieces_is_that_matrix(monkeypatch) -> None:
    weight = torch.randn(37, 96, generator=torch.Generator().manual_seed(1))
    whole = quantize(weight)
    monkeypatch.setattr(q8, "_AT_A_TIME", 5 * BLOCK)
    for piece, expected in zip(quantize(weight), whole, strict=True):
        assert torch.equal(piece, expected)


def test_a_transposed_matrix_is_quantised_by_its_values() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(quantize(weight.t()), quantize(weight.t().contiguous()), strict=True):
        assert torch.equal(mine, theirs)


def test_no_value_is_further_off_than_half_a_number() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    numbers, scales = quantize(weight)
    error = (dequantize(numbers, scales) - weight).abs().unflatten(-1, (-1, BLOCK))
    bound = weight.unflatten(-1, (-1, BLOCK)).abs().amax(-1) / 127 * 0.5 + 127 * 2.0**-11 * scales.float()
    assert (error <= bound[..., None]).all()


def test_every_value_is_exact_in_float32() -> None:
    numbers = torch.arange(-127, 1).repeat(4).to(torch.int8)
    scales = torch.tensor([6.1e-5, 0.1, 1 / 3, LARGEST, 5.96e-8, 1.9995] * 3)[: len(numbers) // BLOCK].half()
    expected = numbers.double() * scales.double().repeat_interleave(BLOCK)
    assert torch.equal(dequantize(numbers, scales).double(), expected)


@pytest.mark.parametrize("width", [1, 31, 33, 48])
def test_a_row_that_is_not_whole_blocks_is_refused_by_name(width) -> None:
    with pytest.raises(ValueError, match=f"^in is {width}: q8_0 needs a multiple of 32"):
        quantize(torch.ones(64, width))
    with pytest.raises(ValueError, match=f"^talker.ffn is {width}"):
        check_width(width, "talker.ffn")


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan"), 1e9, -1e9])
def test_weights_without_a_scale_are_refused(wrong) -> None:
    weight = torch.ones(3, 64)
    weight[1, 40] = wrong
    with pytest.raises(ValueError, match="q8_0 cannot hold weights that are not finite or beyond"):
        quantize(weight)
