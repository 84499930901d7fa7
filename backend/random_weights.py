"""Random weights that behave like trained ones in size: no layer's output vanishes, explodes or goes unused.

Turns a tensor's name here, its shape and a seed into its values, a block of rows at a time. Each tensor has
its own random stream, so a value depends on the seed and on its tensor alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

import torch

from backend.config import ModelConfig

Shape = tuple[int, ...]
Spread = Callable[[Shape], tuple[float, float]]  # Shape -> standard deviation and mean of its values.

BLOCK_VALUES = 1 << 22  # Values drawn at once: the largest tensor is never whole in memory.
DEAD_ENTRY = 3  # A codebook entry that training never used: its usage is 0.
EOS_SCALE = 0.9  # Below 1, or a small vocabulary ends most utterances within a second.


def random_values(config: ModelConfig, name: str, shape: Shape, seed: int) -> Iterator[torch.Tensor]:
    """The tensor's values as float32 blocks along its first axis, in order."""
    generator = torch.Generator().manual_seed(seed * 0x1_0000_0001 + zlib.crc32(name.encode()))
    std, mean = next(spread for pattern, spread in RULES if fnmatchcase(name, pattern))(shape)
    rows = max(1, BLOCK_VALUES // math.prod(shape[1:]))
    for start in range(0, shape[0], rows):
        block = torch.randn(min(rows, shape[0] - start), *shape[1:], generator=generator)
        yield _finished(config, name, start, block.mul_(std).add_(mean))


def _finished(config: ModelConfig, name: str, start: int, block: torch.Tensor) -> torch.Tensor:
    """The block that begins at row `start`, with what a normal distribution does not give."""
    if name.endswith("usage"):
        block.exp_()
        block[DEAD_ENTRY] = 0.0
    elif name.endswith((".sum", "embed_sum")):
        block[DEAD_ENTRY] *= 1e-5  # Divided by the least usage that counts, which is as small.
    elif name == "talker.head" and start <= config.spec.eos < start + len(block):
        block[config.spec.eos - start] *= EOS_SCALE
    elif name == "codec.conv_out.weight":
        block -= block.mean(dim=-1, keepdim=True)  # Lets no constant offset into the audio.
    return block


def _normal(std: float, mean: float = 0.0) -> Spread:
    return lambda shape: (std, mean)


def _kernel(gain: float = 1.0) -> Spread:
    """A linear or convolution weight `[out, in, ...]`: outputs as large as inputs, times `gain`."""
    return lambda shape: (gain / math.sqrt(math.prod(shape[1:])), 0.0)


def _transposed(overlap: int) -> Spread:
    """A transposed convolution `[in, out, taps]`; each output is met by `overlap` taps of every input."""
    return lambda shape: (1.0 / math.sqrt(shape[0] * overlap), 0.0)


# The first pattern that matches a name decides.
RULES: tuple[tuple[str, Spread], ...] = (
    # Codebooks are stored as sums and their usage (here its logarithm); the acoustic ones share one signal.
    ("*usage", _normal(0.9, mean=0.7)),
    ("codec.codebooks.0.sum", _normal(2.0)),
    ("codec.codebooks.*.sum", _normal(0.8)),
    ("*codebook.embed_sum", _normal(1.0)),
    ("*codebook.initialized", _normal(0.0, mean=1.0)),
    # The scales of the codec's residual branches; its periodic activations are stored as logarithms. At a higher
    # frequency a random network amplifies rounding so far that two exact decoders differ by more than 1e-5.
    ("codec*_scale*", _normal(0.1, mean=0.4)),
    ("codec.*.gamma", _normal(0.1, mean=0.4)),
    ("codec.*.alpha", _normal(0.3, mean=-0.7)),
    ("codec.*.beta", _normal(0.3)),
    ("*norm.bias", _normal(0.1)),
    ("*norm.weight", _normal(0.1, mean=1.0)),
    ("*norm", _normal(0.1, mean=1.0)),
    ("codec.conv_out.bias", _normal(0.002)),
    ("*.bias", _normal(0.05)),
    # Sixteen embeddings make a frame, one of them the talker's own; a text row of like size is added.
    ("text.embedding", _normal(1.0)),
    ("text.fc2.weight", _kernel(1.6)),
    ("talker.embedding", _normal(0.7)),
    ("predictor.embeddings.*", _normal(0.25)),
    ("talker.head", _kernel(1.5)),
    ("predictor.heads.*", _kernel(1.5)),
    # Residual branches, so that the sum over all layers stays a few times its input.
    ("*.o", _kernel(0.7)),
    ("*.down", _kernel(0.7)),
    ("codec.blocks.*.conv2.weight", _kernel(0.5)),
    ("codec.upsample.*.transposed.weight", _transposed(1)),
    ("codec.blocks.*.transposed.weight", _transposed(2)),
    ("codec.conv_out.weight", _kernel(0.04)),
    # Half of what enters a rectifier is lost; log-mel values are several units large.
    ("speaker_encoder.blocks.0.conv.weight", _kernel(0.2)),
    ("speaker_encoder.*.weight", _kernel(1.4)),
    ("*", _kernel()),
)
