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

from megakernel.linear import WEIGHT_FORMATS, Linear, WidenedLinear, make_linear
from megakernel.packed import PackedDecoder, PackedStack, linear_of, pack_for_kernel, projection_of
from megakernel.q8 import check_width
from megakernel.spec import DecoderSpec, StackSpec

Read = Callable[[str], Tensor]
LAYOUTS = ("twin", "kernel")


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
    ``[groups - 1, predictor.vocab, talker.hidden]``; they, and what enters and leaves a matrix, are of ``dtype``.
    With ``packed``, the kernel's layout, every other tensor lies in the memory of that one.
    """

    spec: DecoderSpec
    format: str
    dtype: torch.dtype
    device: torch.device
    talker: StackWeights
    head: Linear
    embedding: Tensor
    predictor: StackWeights
    predictor_heads: list[Linear]
    predictor_embedding: Tensor
    projection: Linear | None
    packed: PackedDecoder | None = None


def pack_decoder(
    read: Read,
    spec: DecoderSpec,
    weight_format: str = "float32",
    device: str | torch.device = "cpu",
    layout: str = "twin",
) -> DecoderWeights:
    """Read and pack every decoder tensor, for the twin alone or as the frame kernel takes it.

    ``read(name)`` returns the tensor of that name (``talker.layers.0.q`` and so on) in any float
    dtype. Raises ``ValueError`` as `check_format`, for an unknown ``layout``, and for a matrix that the format
    cannot hold.
    """
    check_format(weight_format, spec)
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    if layout == "kernel":
        return _view(pack_for_kernel(read, spec, weight_format, torch.device(device)), spec, weight_format)
    pack = _Packer(read, weight_format, torch.device(device))
    later = range(spec.groups - 1)
    return DecoderWeights(
        spec=spec,
        format=weight_format,
        dtype=pack.dtype,
        device=pack.device,
        talker=pack.stack("talker", spec.talker),
        head=pack.linear("talker.head"),
        embedding=pack.tensor("talker.embedding"),
        predictor=pack.stack("predictor", spec.predictor),
        predictor_heads=[pack.linear(f"predictor.heads.{g}") for g in later],
        predictor_embedding=pack.table([f"predictor.embeddings.{g}" for g in later]),
        projection=pack.linear("predictor.projection.weight", "predictor.projection.bias") if spec.projects else None,
    )


def check_format(weight_format: str, spec: DecoderSpec) -> None:
    """Raises ``ValueError`` if ``weight_format`` is unknown or a decoder of this shape cannot be held in it."""
    if weight_format not in WEIGHT_FORMATS:
        raise ValueError(f"weight format {weight_format!r} is not one of {', '.join(WEIGHT_FORMATS)}")
    if weight_format == "q8_0":
        for name, stack in (("talker", spec.talker), ("predictor", spec.predictor)):
            for width in ("hidden", "q_width", "ffn"):
                check_width(getattr(stack, width), f"{name}.{width}")


def _view(packed: PackedDecoder, spec: DecoderSpec, weight_format: str) -> DecoderWeights:
    """The weights as the twin takes them, in the memory of ``packed``."""
    return DecoderWeights(
        spec=spec,
        format=weight_format,
        dtype=packed.embedding.dtype,
        device=packed.embedding.device,
        talker=_view_stack(packed.talker, spec.talker),
        head=linear_of(packed.head, 0, slice(spec.talker.vocab)),
        embedding=packed.embedding,
        predictor=_view_stack(packed.predictor, spec.predictor),
        predictor_heads=[linear_of(packed.predictor_heads, g) for g in range(spec.groups - 1)],
        predictor_embedding=packed.predictor_embedding,
        projection=projection_of(packed.head, packed.head_bias, spec),
        packed=packed,
    )


def _view_stack(stack: PackedStack, spec: StackSpec) -> StackWeights:
    layers = [
        LayerWeights(
            input_norm=stack.input_norm[layer],
            qkv=linear_of(stack.qkv, layer),
            qk_norm=_spread(stack.qk_norm[layer], spec),
            o=linear_of(stack.o, layer),
            post_norm=stack.post_norm[layer],
            gate_up=linear_of(stack.gate_up, layer),
            down=linear_of(stack.down, layer),
        )
        for layer in range(spec.layers)
    ]
    return StackWeights(spec, layers, stack.norm)


def _spread(qk_norm: Tensor, spec: StackSpec) -> Tensor:
    """The norms of q and k ``[2, head_dim]``, one row a head."""
    return qk_norm.repeat_interleave(torch.tensor([spec.heads, spec.kv_heads], device=qk_norm.device), dim=0)


class _Packer:
    def __init__(self, read: Read, weight_format: str, device: torch.device) -> None:
        self.read, self.dtype, self.device = read, WEIGHT_FORMATS[weight_format], device
        self.quantized = weight_format == "q8_0"

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.read(name).to(device=self.device, dtype=dtype or self.dtype)

    def norm(self, *names: str) -> Tensor:
        return torch.stack([self.tensor(name, torch.float32) for name in names])

    def linear(self, weight: str, bias: str | None = None) -> Linear:
        return self.make(self.matrix(weight), None if bias is None else self.tensor(bias))

    def stacked(self, *names: str) -> Linear:
        return self.make(torch.cat([self.matrix(name) for name in names]))

    def matrix(self, name: str) -> Tensor:
        """In the weight format, or as stored if it is still to be quantised."""
        return self.read(name).to(self.device) if self.quantized else self.tensor(name)

    def make(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return (WidenedLinear if self.quantized else make_linear)(weight, bias)

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
        return LayerWeights(
            input_norm=self.norm(f"{prefix}.input_norm")[0],
            qkv=self.stacked(f"{prefix}.q", f"{prefix}.k", f"{prefix}.v"),
            qk_norm=_spread(self.norm(f"{prefix}.q_norm", f"{prefix}.k_norm"), spec),
            o=self.linear(f"{prefix}.o"),
            post_norm=self.norm(f"{prefix}.post_norm")[0],
            gate_up=self.stacked(f"{prefix}.gate", f"{prefix}.up"),
            down=self.linear(f"{prefix}.down"),
        )
