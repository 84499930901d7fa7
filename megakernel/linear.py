"""Weight matrices as callables: ``[lanes, positions, in] -> [lanes, positions, out]``.

A lane's rows must come out bit for bit the same whether it runs alone or in company, because the
same seed has to give the same codes. Matrix libraries do not promise that: the order of a sum may
depend on how many rows a call has. Each class below says how it keeps the promise.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.q8 import BLOCK, BLOCK_BYTES, dequantize, quantize

# What enters and leaves a matrix of each format; so the dtype of embeddings and caches too.
WEIGHT_FORMATS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "q8_0": torch.bfloat16,
}

# Weights up to which four calls of a plain product cost no more than one of oneDNN's (measured: docs/notebook.md).
SMALL = 1 << 18
# Positions from which a bfloat16 matrix is worth widening (measured: docs/notebook.md).
WIDENED_POSITIONS = 8


def matrix_bytes(weights: int, weight_format: str) -> int:
    """The bytes of a matrix of so many ``weights``."""
    if weight_format == "q8_0":
        return weights // BLOCK * BLOCK_BYTES
    return weights * WEIGHT_FORMATS[weight_format].itemsize


class Linear(Protocol):
    """A weight matrix; ``dtype`` is what its input must have and its output has."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor: ...


class PackedLinear:
    """A large float32 matrix on a CPU, reordered once by oneDNN into its blocked layout.

    Two rows cost what one costs and run at the memory's speed. oneDNN sums every batch of two or
    more rows in one order and a single row in another, so a single row travels as two.
    """

    PACKED_FOR = 8  # rows that the blocked layout is chosen for; 1 would choose a matrix-vector layout

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype = weight.dtype
        self.out_features = weight.shape[0]
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.PACKED_FOR)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = rows.shape[0]
        padded = rows.expand(2, -1).contiguous() if count == 1 else rows
        y = torch.ops.mkldnn._linear_pointwise(padded, self.weight, self.bias, "none", [], "")
        return y[:count].view(*x.shape[:-1], self.out_features)


class LanewiseLinear:
    """A plain matrix applied to one lane at a time.

    In bfloat16 on a CPU without bfloat16 instructions a second row costs as much as the first, and a
    small matrix costs less than the call that would take all lanes together: there nothing is lost by
    taking the lanes one by one, and no lane can see another. In bfloat16 a matrix with fewer outputs than
    inputs is faster stored ``[out, in]``, any other stored ``[in, out]``; and the many positions of a prompt
    are multiplied in float32, which is faster although the matrix is widened first.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype, self.bias = weight.dtype, bias
        self.narrow = weight.device.type == "cpu" and weight.dtype != torch.float32
        self.by_output = self.narrow and weight.shape[0] < weight.shape[1]
        self.weight = weight.contiguous() if self.by_output else weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        multiply = self._narrow_lane if self.narrow else self._lane
        y = torch.stack([multiply(lane) for lane in x.unbind(0)]) if x.shape[0] > 1 else multiply(x[0]).unsqueeze(0)
        return y if self.bias is None else y + self.bias

    def _lane(self, lane: Tensor) -> Tensor:
        return torch.mm(lane, self.weight)

    def _narrow_lane(self, lane: Tensor) -> Tensor:
        positions = lane.shape[0]
        if positions >= WIDENED_POSITIONS:
            weight = self.weight.float()
            return (lane.float() @ (weight.t() if self.by_output else weight)).to(self.dtype)
        if not self.by_output:
            return torch.mm(lane, self.weight)
        rows = [torch.mv(self.weight, row) for row in lane.unbind(0)]
        return rows[0].unsqueeze(0) if positions == 1 else torch.stack(rows)


class WidenedLinear:
    """A Q8_0 matrix on a CPU as the float32 matrix of its values; bfloat16 goes in and comes out.

    Kept in 8 bits it would have to be widened at every call, which reads and writes more memory than the product.
    float32 holds its values exactly, and the lanes keep apart as that float32 matrix keeps them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.dtype = WEIGHT_FORMATS["q8_0"]
        values = dequantize(*quantize(weight))
        self.values = make_linear(values, None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        return self.values(x.float()).to(self.dtype)


class RowsLinear:
    """A matrix that stays as it is stored, ``rows`` ``[out, in]``, applied to one lane at a time.

    With ``scales`` ``[out, in // 32]`` the rows are Q8_0 numbers, widened to float32 at every call: that suits a
    prompt, whose many positions share it, and what is checked, not speed.
    """

    def __init__(self, rows: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> None:
        self.rows, self.scales = rows, scales
        self.dtype = rows.dtype if scales is None else WEIGHT_FORMATS["q8_0"]
        self.bias = None if bias is None else bias.to(rows.dtype if scales is None else torch.float32)

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.rows if self.scales is None else dequantize(self.rows, self.scales)
        lanes = [F.linear(lane, weight, self.bias) for lane in x.to(weight.dtype).unbind(0)]
        return torch.stack(lanes).to(self.dtype)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Choose the implementation for ``weight`` ``[out, in]`` by its device, format and size."""
    on_cpu = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    packed = on_cpu and weight.dtype == torch.float32 and weight.numel() > SMALL
    return PackedLinear(weight, bias) if packed else LanewiseLinear(weight, bias)
