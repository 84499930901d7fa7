"""Small decoders of random weights and utterances for them: odd sizes, grouped heads, any of the two widths."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megakernel import DecoderSpec, DecoderWeights, DrawParams, StackSpec, pack_decoder

GROUPS = 5
EOS = 41
SUPPRESS_FROM = 37


def stack_spec(hidden: int, ffn: int, vocab: int, heads: int = 8, head_dim: int = 6, layers: int = 2) -> StackSpec:
    """Four query heads to a key/value head."""
    return StackSpec(layers, hidden, ffn, heads, heads // 4, head_dim, vocab, norm_eps=1e-6, rope_base=1e4)


def decoder_spec(talker: StackSpec, predictor: StackSpec) -> DecoderSpec:
    return DecoderSpec(talker, predictor, groups=GROUPS, eos=EOS, suppress_from=SUPPRESS_FROM)


SPECS = {
    "one width": decoder_spec(stack_spec(26, 45, 43), stack_spec(26, 31, 29, heads=4)),
    "projected": decoder_spec(stack_spec(26, 45, 43), stack_spec(18, 31, 29, heads=4, head_dim=10)),
    # gate and up, their way back and the heads are large enough for packed weights
    "wide": decoder_spec(stack_spec(264, 1030, 1033, head_dim=20), stack_spec(264, 1030, 1001, heads=4, layers=1)),
}
# whose rows are whole blocks of 32, so that they can be quantised
BLOCK_SPECS = {
    "one width of blocks": decoder_spec(
        stack_spec(64, 96, 43, head_dim=12), stack_spec(64, 32, 29, heads=4, head_dim=8)
    ),
    "projected blocks": decoder_spec(stack_spec(96, 160, 43, head_dim=4), stack_spec(32, 96, 29, heads=4, head_dim=24)),
}
ALL_SPECS = SPECS | BLOCK_SPECS


def paired_stack(hidden: int, ffn: int, vocab: int, kv_heads: int, head_dim: int, layers: int = 2) -> StackSpec:
    """Two query heads to a key/value head."""
    return StackSpec(layers, hidden, ffn, 2 * kv_heads, kv_heads, head_dim, vocab, norm_eps=1e-6, rope_base=1e4)


# what the frame kernel takes: heads of a power of two; in whole blocks, and short, for it is interpreted
KERNEL_SPECS = {
    "one width": DecoderSpec(paired_stack(96, 64, 43, 2, 8), paired_stack(96, 32, 29, 1, 16, 1), 3, EOS, SUPPRESS_FROM),
    "projected": DecoderSpec(paired_stack(64, 96, 43, 2, 8, 1), paired_stack(32, 64, 29, 2, 8), 3, EOS, SUPPRESS_FROM),
}
# Of a decoder its name in `ALL_SPECS`, the format of its weights and their layout.
KINDS = [(name, weight_format, "twin") for name in SPECS for weight_format in ("float32", "bfloat16")]
KINDS += [(name, weight_format, "kernel") for name in SPECS for weight_format in ("float32", "bfloat16")]
KINDS += [(name, "q8_0", layout) for name in BLOCK_SPECS for layout in ("twin", "kernel")]


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that `pack_decoder` may ask for."""
    talker, predictor = spec.talker, spec.predictor
    shapes: dict[str, tuple[int, ...]] = {}
    for name, stack in (("talker", talker), ("predictor", predictor)):
        shapes |= {f"{name}.{tensor}": shape for tensor, shape in stack_shapes(stack).items()}
    shapes["talker.head"] = shapes["talker.embedding"] = (talker.vocab, talker.hidden)
    for group in range(spec.groups - 1):
        shapes[f"predictor.heads.{group}"] = (predictor.vocab, predictor.hidden)
        shapes[f"predictor.embeddings.{group}"] = (predictor.vocab, talker.hidden)
    if spec.projects:
        shapes["predictor.projection.weight"] = (predictor.hidden, talker.hidden)
        shapes["predictor.projection.bias"] = (predictor.hidden,)
    return shapes


def stack_shapes(spec: StackSpec) -> dict[str, tuple[int, ...]]:
    layer = {
        "input_norm": (spec.hidden,),
        "q": (spec.q_width, spec.hidden),
        "k": (spec.kv_width, spec.hidden),
        "v": (spec.kv_width, spec.hidden),
        "q_norm": (spec.head_dim,),
        "k_norm": (spec.head_dim,),
        "o": (spec.hidden, spec.q_width),
        "post_norm": (spec.hidden,),
        "gate": (spec.ffn, spec.hidden),
        "up": (spec.ffn, spec.hidden),
        "down": (spec.hidden, spec.ffn),
    }
    layers = {f"layers.{i}.{name}": shape for i in range(spec.layers) for name, shape in layer.items()}
    return {**layers, "norm": (spec.hidden,)}


def random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Depends on name and shape alone; activations keep their size, logits are a few units large."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(f"{name} {shape}".encode())))
    if name.endswith("norm"):
        return 1 + 0.2 * values
    if len(shape) == 1:
        return 0.1 * values
    if "embedding" in name:
        return 0.5 * values
    return values * (2.0 if "head" in name else 1.0) / shape[1] ** 0.5


def random_tensors(spec: DecoderSpec) -> dict[str, Tensor]:
    return {name: random_tensor(name, shape) for name, shape in tensor_shapes(spec).items()}


def random_weights(spec: DecoderSpec, weight_format: str = "float32", layout: str = "twin") -> DecoderWeights:
    return pack_decoder(random_tensors(spec).__getitem__, spec, weight_format, layout=layout)


DRAWS = [
    DrawParams(),
    DrawParams(temperature=1.2, top_k=0, top_p=0.8),
    DrawParams(greedy=True),
    DrawParams(temperature=0.7, top_k=3),
]


@dataclass
class Script:
    """One utterance: what goes into a lane, from its prompt to its last frame."""

    hidden: int
    seed: int
    positions: int = 4
    frames: int = 6
    talker: DrawParams = field(default_factory=DrawParams)
    predictor: DrawParams = field(default_factory=DrawParams)
    penalty: float = 1.3

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.prompt = torch.randn(self.positions, self.hidden, generator=generator)
        self.text = torch.randn(self.frames, self.hidden, generator=generator)


def scripts(spec: DecoderSpec, count: int) -> list[Script]:
    """Utterances of different lengths and ways of drawing."""
    hidden = spec.talker.hidden
    return [
        Script(hidden, 100 + i, 1 + i % 4, 3 + i % 5, DRAWS[i % 4], DRAWS[(i + i // 4) % 4], 1.0 + i % 3 / 4)
        for i in range(count)
    ]
