"""Weights in 8 bits: GGUF's Q8_0, blocks of 32 consecutive inputs of a row under one float16 scale.

A block's scale is ``absmax / 127`` and its numbers ``round(weight / scale)``, half away from zero; the
value of a number is ``number * scale``, which float32 holds exactly. Source: ``quantize_row_q8_0_ref`` of ggml.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
BLOCK_BYTES = BLOCK + 2  # the numbers and their scale
_LARGEST = 127
_AT_A_TIME = 1 << 21  # weights, so that what is needed beside the result stays a few tens of megabytes


def check_width(width: int, name: str = "in") -> None:
    """Raises ``ValueError`` unless rows of ``width`` inputs are whole blocks."""
    if width % BLOCK:
        raise ValueError(f"{name} is {width}: q8_0 needs a multiple of {BLOCK}")


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``weight`` ``[..., in]`` of any float dtype to numbers ``[..., in]`` int8 and scales ``[..., in // 32]`` float16.

    Raises ``ValueError`` if ``in`` is no multiple of 32 or a scale would be no finite number.
    """
    check_width(weight.shape[-1])
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = weight.new_empty((*weight.shape[:-1], weight.shape[-1] // BLOCK), dtype=torch.float16)
    quantize_into(weight, numbers, scales)
    return numbers, scales


def quantize_into(weight: Tensor, numbers: Tensor, scales: Tensor) -> None:
    """As `quantize`, into contiguous tensors that are there already."""
    check_width(weight.shape[-1])
    sources = weight.reshape(-1, BLOCK).split(_AT_A_TIME // BLOCK)
    targets = numbers.view(-1, BLOCK).split(_AT_A_TIME // BLOCK), scales.view(-1).split(_AT_A_TIME // BLOCK)
    for source, number, scale in zip(sources, *targets, strict=True):
        blocks = source.float()
        step = blocks.abs().amax(-1) / _LARGEST
        inverse = torch.where(step == 0, 0.0, step.reciprocal())
        number.copy_(_round(blocks * inverse[:, None]))
        scale.copy_(step)
    if not scales.isfinite().all():
        raise ValueError(f"q8_0 cannot hold weights that are not finite or beyond {65504 * _LARGEST:g}")


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    """The values, float32, of numbers ``[..., in]`` and scales ``[..., in // 32]``."""
    blocks = numbers.unflatten(-1, (-1, BLOCK))
    return torch.mul(blocks, scales.float()[..., None]).flatten(-2)


def _round(x: Tensor) -> Tensor:
    """Half away from zero, as C's ``roundf``; ``torch.round`` rounds half to even."""
    whole = x.trunc()
    return whole + ((x - whole) * 2).trunc()
