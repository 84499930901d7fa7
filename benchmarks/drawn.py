"""Random decoder weights of a given shape, drawn on the device that needs them: no file, no checkpoint.

The shapes are those of the released models; how large the numbers are is `backend/random_weights.py`'s.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from backend.random_weights import EOS_SCALE, RULES
from megakernel import DecoderSpec, StackSpec

Shape = tuple[int, ...]

_STACK = {"norm_eps": 1e-6, "rope_base": 1e6}
_TALKER = StackSpec(28, 1024, 3072, 16, 8, 128, vocab=3072, **_STACK)
_PREDICTOR = StackSpec(5, 1024, 3072, 16, 8, 128, vocab=2048, **_STACK)
_SMALL = replace(_TALKER, layers=1, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=1088)
_RELEASED = DecoderSpec(_TALKER, _PREDICTOR, groups=16, eos=2150, suppress_from=2048)

SPECS = {
    "0.6b": _RELEASED,
    "1.7b": replace(_RELEASED, talker=replace(_TALKER, hidden=2048, ffn=6144)),
    # for dry runs: whole blocks of Q8_0, and two widths, so that the predictor's inputs are projected
    "small": DecoderSpec(_SMALL, replace(_SMALL, hidden=32, vocab=64), groups=4, eos=166, suppress_from=64),
}


class DrawnWeights:
    """Reads as a checkpoint does: ``weights(name)`` is that tensor, the same at every call."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.spec, self.device, self.dtype, self.shapes = spec, device, dtype, tensor_shapes(spec)

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        std, mean = next(spread for pattern, spread in RULES if fnmatchcase(name, pattern))(shape)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator, device=self.device).mul_(std).add_(mean)
        if name == "talker.head":
            values[self.spec.eos] *= EOS_SCALE
        return values.to(self.dtype)


def tensor_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Every tensor that `megakernel.pack_decoder` asks for."""
    talker, predictor = spec.talker, spec.predictor
    shapes: dict[str, Shape] = {}
    for name, stack in (("talker", talker), ("predictor", predictor)):
        shapes |= {f"{name}.{tensor}": shape for tensor, shape in _stack_shapes(stack).items()}
    shapes["talker.head"] = shapes["talker.embedding"] = (talker.vocab, talker.hidden)
    for group in range(spec.groups - 1):
        shapes[f"predictor.heads.{group}"] = (predictor.vocab, predictor.hidden)
        shapes[f"predictor.embeddings.{group}"] = (predictor.vocab, talker.hidden)
    if spec.projects:
        shapes["predictor.projection.weight"] = (predictor.hidden, talker.hidden)
        shapes["predictor.projection.bias"] = (predictor.hidden,)
    return shapes


def _stack_shapes(spec: StackSpec) -> dict[str, Shape]:
    layer: dict[str, Shape] = {
        **dict.fromkeys(("input_norm", "post_norm"), (spec.hidden,)),
        **dict.fromkeys(("q_norm", "k_norm"), (spec.head_dim,)),
        "q": (spec.q_width, spec.hidden),
        **dict.fromkeys(("k", "v"), (spec.kv_width, spec.hidden)),
        "o": (spec.hidden, spec.q_width),
        **dict.fromkeys(("gate", "up"), (spec.ffn, spec.hidden)),
        "down": (spec.hidden, spec.ffn),
    }
    layers = {f"layers.{i}.{name}": shape for i in range(spec.layers) for name, shape in layer.items()}
    return {**layers, "norm": (spec.hidden,)}
