"""A decoder's weights, packed once at load from tensors that are read one at a time.

``pack_decoder`` asks its reader for each tensor by name, converts it to the weight format, stacks
what one stage reads together and lets the original go before it asks for the next, so that no
second copy of the model ever exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel.linear import WEIGHT_FORMATS, Linear, make_linear
from megakernel.spec import DecoderSpec, StackSpec

Read = Callable[[str], Tensor]


@dataclass
class LayerWeights:
    """One transformer layer; norms in float32, ``qk_norm`` ``[heads + kv_heads, head_dim]``."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor
    o: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass
class StackWeights:
    spec: StackSpec
    layers: list[LayerWeights]
    norm: Tensor


@dataclass
class DecoderWeights:
    """Everything that a frame reads.

    ``embedding`` is ``[talker.vocab, talker.hidden]``, ``predictor_embedding``
    ``[groups - 1, predictor.vocab, talker.hidden]``, both in the weight format.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    device: torch.device
    talker: StackWeights
    head: Linear
    embedding: Tensor
    predictor: StackWeights
    predictor_heads: list[Linear]
    predictor_embedding: Tensor
    projection: Linear | None


def pack_decoder(
    read: Read, spec: DecoderSpec, weight_format: str = "float32", device: str | torch.device = "cpu"
) -> DecoderWeights:
    """Read and pack every decoder tensor.

    ``read(name)`` returns the tensor of that name (``talker.layers.0.q`` and so on) in any float
    dtype. Raises ``ValueError`` for an unknown ``weight_format``.
    """
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight format {weight_format!r} is not one of {', '.join(WEIGHT_FORMATS)}")
    dtype = WEIGHT_FORMATS[weight_format]
    pack = _Packer(read, dtype, torch.device(device))
    later = range(spec.groups - 1)
    return DecoderWeights(
        spec=spec,
        dtype=dtype,
        device=pack.device,
        talker=pack.stack("talker", spec.talker),
        head=pack.linear("talker.head"),
        embedding=pack.tensor("talker.embedding"),
        predictor=pack.stack("predictor", spec.predictor),
        predictor_heads=[pack.linear(f"predictor.heads.{g}") for g in later],
        predictor_embedding=pack.table([f"predictor.embeddings.{g}" for g in later]),
        projection=pack.linear("predictor.projection.weight", "predictor.projection.bias") if spec.projects else None,
    )


class _Packer:
    def __init__(self, read: Read, dtype: torch.dtype, device: torch.device) -> None:
        self.read, self.dtype, self.device = read, dtype, device

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.read(name).to(device=self.device, dtype=dtype or self.dtype)

    def norm(self, *names: str) -> Tensor:
        return torch.stack([self.tensor(name, torch.float32) for name in names])

    def linear(self, weight: str, bias: str | None = None) -> Linear:
        return make_linear(self.tensor(weight), None if bias is None else self.tensor(bias))

    def stacked(self, *names: str) -> Linear:
        return make_linear(torch.cat([self.tensor(name) for name in names]))

    def table(self, names: list[str]) -> Tensor:
        first = self.tensor(names[0])
        table = first.new_empty(len(names), *first.shape)
        table[0] = first
        for row, name in enumerate(names[1:], start=1):
            table[row] = self.tensor(name)
        return table

    def stack(self, prefix: str, spec: StackSpec) -> StackWeights:
        layers = [self.layer(f"{prefix}.layers.{i}", spec) for i in range(spec.layers)]
        return StackWeights(spec, layers, self.norm(f"{prefix}.norm")[0])

    def layer(self, prefix: str, spec: StackSpec) -> LayerWeights:
        q_norm, k_norm = self.norm(f"{prefix}.q_norm", f"{prefix}.k_norm")
        return LayerWeights(
            input_norm=self.norm(f"{prefix}.input_norm")[0],
            qkv=self.stacked(f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"),
            qk_norm=torch.cat([q_norm.expand(spec.heads, -1), k_norm.expand(spec.kv_heads, -1)]),
            o=self.linear(f"{prefix}.o"),
            post_norm=self.norm(f"{prefix}.post_norm")[0],
            gate_up=self.stacked(f"{prefix}.gate", f"{prefix}.up"),
            down=self.linear(f"{prefix}.down"),
        )
