"""The weights as the frame kernel takes them: of each kind of matrix one tensor that holds all layers.

Every tensor is allocated once at its full size and written from one source tensor at a time, so that no second
copy of the model ever exists. Rows are row-major and what one stage reads is one block of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megakernel.linear import WEIGHT_FORMATS, RowsLinear
from megakernel.q8 import BLOCK, quantize_into
from megakernel.spec import DecoderSpec, StackSpec

_PROJECTED_ROWS = 4096  # of an embedding at a time


class Matrix(NamedTuple):
    """``count`` weight matrices of one shape.

    ``rows`` ``[count, out, in]`` is float32, bfloat16, or int8 for Q8_0; ``scales`` is ``[count, out, in // 32]``
    float16 for Q8_0, and otherwise ``rows`` again, never read.
    """

    rows: Tensor
    scales: Tensor


class PackedStack(NamedTuple):
    """A stack of layers; norms are float32."""

    input_norm: Tensor  # [layers, hidden]
    qkv: Matrix  # [layers, qkv_width, hidden]: rows of q, of k, of v
    qk_norm: Tensor  # [layers, 2, head_dim]: q's, k's
    o: Matrix  # [layers, hidden, q_width]
    post_norm: Tensor  # [layers, hidden]
    gate_up: Matrix  # [layers, 2 * ffn, hidden]: rows of gate, then of up
    down: Matrix  # [layers, hidden, ffn]
    norm: Tensor  # [hidden]


class PackedDecoder(NamedTuple):
    """Everything that a frame reads; embeddings are never quantised.

    Where talker and predictor differ in width the head's matrix ends with the projection's rows, and
    ``first_input`` and ``later_inputs`` are the embeddings after the projection, rounded as it rounds. Where they
    do not, these are the embeddings themselves and ``head_bias`` is one zero.
    """

    talker: PackedStack
    predictor: PackedStack
    head: Matrix  # [1, talker.vocab (+ predictor.hidden), talker.hidden]
    head_bias: Tensor  # [predictor.hidden] float32: the projection's
    predictor_heads: Matrix  # [groups - 1, predictor.vocab, predictor.hidden]
    embedding: Tensor  # [talker.vocab, talker.hidden]
    predictor_embedding: Tensor  # [groups - 1, predictor.vocab, talker.hidden]
    first_input: Tensor  # [talker.vocab, predictor.hidden]
    later_inputs: Tensor  # [groups - 1, predictor.vocab, predictor.hidden]


def pack_for_kernel(
    read: Callable[[str], Tensor], spec: DecoderSpec, weight_format: str, device: torch.device
) -> PackedDecoder:
    """Read every decoder tensor once, by the names of `pack_decoder`.

    Raises ``ValueError`` for a tensor of another shape, and for one that Q8_0 cannot hold.
    """
    pack = _Packer(read, weight_format, device)
    talker, predictor, later = spec.talker, spec.predictor, range(spec.groups - 1)
    embedding = pack.table(["talker.embedding"], talker.vocab, talker.hidden)[0]
    tables = pack.table([f"predictor.embeddings.{g}" for g in later], predictor.vocab, talker.hidden)
    head_names, head_rows, bias = ["talker.head"], talker.vocab, torch.zeros(1, device=device)
    if spec.projects:
        head_names, head_rows = ["talker.head", "predictor.projection.weight"], talker.vocab + predictor.hidden
        bias = pack.bias("predictor.projection.bias")
    head = pack.matrix([head_names], head_rows, talker.hidden)
    projection = projection_of(head, bias, spec)
    return PackedDecoder(
        talker=pack.stack("talker", talker),
        predictor=pack.stack("predictor", predictor),
        head=head,
        head_bias=bias,
        predictor_heads=pack.matrix([[f"predictor.heads.{g}"] for g in later], predictor.vocab, predictor.hidden),
        embedding=embedding,
        predictor_embedding=tables,
        first_input=embedding if projection is None else _project(embedding, projection),
        later_inputs=tables if projection is None else _project(tables, projection),
    )


def linear_of(matrix: Matrix, index: int, rows: slice = slice(None), bias: Tensor | None = None) -> RowsLinear:
    """Matrix number ``index``, or some of its rows, as a callable on the same memory."""
    scales = matrix.scales[index, rows] if matrix.rows.dtype == torch.int8 else None
    return RowsLinear(matrix.rows[index, rows], bias, scales)


def projection_of(head: Matrix, bias: Tensor, spec: DecoderSpec) -> RowsLinear | None:
    return linear_of(head, 0, slice(spec.talker.vocab, None), bias) if spec.projects else None


def _project(table: Tensor, projection: RowsLinear) -> Tensor:
    """``[..., vocab, talker.hidden]`` to ``[..., vocab, predictor.hidden]``."""
    projected = table.new_empty(*table.shape[:-1], projection.rows.shape[0])
    pieces = (t.flatten(0, -2).split(_PROJECTED_ROWS) for t in (table, projected))
    for source, target in zip(*pieces, strict=True):
        target.copy_(projection(source[None])[0])
    return projected


class _Packer:
    def __init__(self, read: Callable[[str], Tensor], weight_format: str, device: torch.device) -> None:
        self.read, self.device = read, device
        self.dtype, self.quantized = WEIGHT_FORMATS[weight_format], weight_format == "q8_0"

    def stack(self, prefix: str, spec: StackSpec) -> PackedStack:
        def each(*names: str) -> list[list[str]]:
            return [[f"{prefix}.layers.{layer}.{name}" for name in names] for layer in range(spec.layers)]

        return PackedStack(
            input_norm=self.norms(each("input_norm"), spec.hidden)[:, 0],
            qkv=self.matrix(each("q", "k", "v"), spec.qkv_width, spec.hidden),
            qk_norm=self.norms(each("q_norm", "k_norm"), spec.head_dim),
            o=self.matrix(each("o"), spec.hidden, spec.q_width),
            post_norm=self.norms(each("post_norm"), spec.hidden)[:, 0],
            gate_up=self.matrix(each("gate", "up"), 2 * spec.ffn, spec.hidden),
            down=self.matrix(each("down"), spec.hidden, spec.ffn),
            norm=self.norms([[f"{prefix}.norm"]], spec.hidden)[0, 0],
        )

    def matrix(self, names: Sequence[Sequence[str]], out: int, width: int) -> Matrix:
        """One matrix ``[out, width]`` for each element of ``names``, of the tensors of these names stacked."""
        if not self.quantized:
            rows = torch.empty(len(names), out, width, dtype=self.dtype, device=self.device)
            self._fill(names, rows, lambda source, index, part: rows[index, part].copy_(source))
            return Matrix(rows, rows)
        rows = torch.empty(len(names), out, width, dtype=torch.int8, device=self.device)
        scales = torch.empty(len(names), out, width // BLOCK, dtype=torch.float16, device=self.device)

        def put(source: Tensor, index: int, part: slice) -> None:
            quantize_into(source.to(self.device), rows[index, part], scales[index, part])

        self._fill(names, rows, put)
        return Matrix(rows, scales)

    def table(self, names: Sequence[str], vocab: int, width: int) -> Tensor:
        """``[len(names), vocab, width]``, never quantised."""
        rows = torch.empty(len(names), vocab, width, dtype=self.dtype, device=self.device)
        self._fill([[name] for name in names], rows, lambda source, index, part: rows[index, part].copy_(source))
        return rows

    def norms(self, names: Sequence[Sequence[str]], width: int) -> Tensor:
        """``[len(names), norms of each, width]`` float32."""
        rows = torch.empty(len(names), len(names[0]), width, device=self.device)
        self._fill(names, rows, lambda source, index, part: rows[index, part].copy_(source), vectors=True)
        return rows

    def bias(self, name: str) -> Tensor:
        """Rounded as the twin's, held in float32."""
        return self.read(name).to(self.device, self.dtype).float()

    def _fill(
        self,
        names: Sequence[Sequence[str]],
        target: Tensor,
        put: Callable[[Tensor, int, slice], object],
        vectors: bool = False,
    ) -> None:
        """``put`` the tensors of ``names[index]`` one below the other, so that they fill ``target[index]`` exactly."""
        for index, parts in enumerate(names):
            start = 0
            for name in parts:
                source = self.read(name)
                source = source[None] if vectors else source
                end = start + len(source)
                if source.shape[1:] != target.shape[2:] or end > target.shape[1]:
                    raise ValueError(f"{name} of shape {list(source.shape)} does not fit into {list(target.shape[1:])}")
                put(source, index, slice(start, end))
                start = end
                del source  # before the next is read
            if start != target.shape[1]:
                raise ValueError(f"{', '.join(parts)} have {start} rows of {target.shape[1]}")
