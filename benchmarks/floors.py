"""The least work behind a step, from the shapes in the checkpoint, and the least time that it takes a machine.

Every weight is read at least once a step from memory, and multiplied once for every position that passes it.
Attention, caches and norms are left out, so what comes out is a lower bound: a floor, not an estimate. Where
weights stay in a cache between steps, reading them may be faster than this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from backend.checkpoint import Checkpoint
from backend.config import CodecConfig
from benchmarks.conditions import Machine
from benchmarks.report import Ceiling
from megakernel.linear import WEIGHT_FORMATS

MILLISECONDS = 1e3


@dataclass(frozen=True)
class Work:
    """``reads`` bytes, and ``operations`` (two a multiplication) in ``dtype``."""

    reads: int = 0
    operations: int = 0
    dtype: str = "float32"

    def __add__(self, other: Work) -> Work:
        return Work(self.reads + other.reads, self.operations + other.operations, self.dtype)

    def __mul__(self, times: int) -> Work:
        return Work(self.reads * times, self.operations * times, self.dtype)

    def seconds(self, machine: Machine) -> float:
        """The longer of reading and computing; narrow numbers may be computed with as wide ones."""
        peak = max(machine.peak[self.dtype], machine.peak["float32"])
        return max(self.reads / machine.bandwidth, self.operations / peak)

    def ceiling(self, machine: Machine) -> Ceiling:
        """In milliseconds."""
        reading = self.reads / machine.bandwidth
        what = f"reading {self.reads / 1e6:.4g} MB"
        if self.seconds(machine) > reading:
            what = f"computing {self.operations / 1e9:.3g} GFLOP"
        return Ceiling(self.seconds(machine) * MILLISECONDS, f"floor, {what}")


class Floors:
    """The work of one checkpoint's steps with weights in ``dtype``; the codec's are float32."""

    def __init__(self, checkpoint: Checkpoint, dtype: str) -> None:
        self.table, self.config, self.dtype = checkpoint.table, checkpoint.config, dtype

    def parts(self, lanes: int = 1) -> dict[str, Work]:
        """The parts of a frame of ``lanes`` utterances that read weights."""
        steps = self.config.spec.groups - 1
        predictor = self._weights("predictor.layers.", "predictor.projection.", positions=lanes)
        return {
            "talker": self.talker(lanes),
            "predictor": predictor * steps,
            "heads": self._weights("talker.head", "predictor.heads.", positions=lanes),
        }

    def frame(self, lanes: int = 1) -> Work:
        return sum(self.parts(lanes).values(), Work(dtype=self.dtype))

    def first_audio(self, positions: int, machine: Machine) -> Ceiling:
        """A prompt of ``positions``, a frame and its codec step, in milliseconds."""
        steps = [self.talker(positions), self.frame(), self.codec(frames=1)]
        seconds = sum(work.seconds(machine) for work in steps)
        return Ceiling(seconds * MILLISECONDS, f"floor, a prompt of {positions}, a frame, a codec step")

    def talker(self, positions: int) -> Work:
        """``positions`` at once through the talker's layers."""
        return self._weights("talker.layers.", positions=positions)

    def codec(self, frames: int, lanes: int = 1) -> Work:
        """The codec over the next ``frames`` of ``lanes``."""
        reads, operations = 0, 0
        for name, rate in codec_rates(self.config.codec, self._matrices("codec.")).items():
            elements = math.prod(self.table[name].shape)
            reads += elements * WEIGHT_FORMATS["float32"].itemsize
            operations += 2 * elements * rate * frames * lanes
        return Work(reads, operations)

    def _weights(self, *prefixes: str, positions: int) -> Work:
        elements = sum(math.prod(self.table[name].shape) for name in self._matrices(*prefixes))
        return Work(elements * WEIGHT_FORMATS[self.dtype].itemsize, 2 * elements * positions, self.dtype)

    def _matrices(self, *prefixes: str) -> list[str]:
        """All weights under the prefixes but vectors: norms, scales and biases."""
        return [name for name, entry in self.table.items() if name.startswith(prefixes) and len(entry.shape) > 1]


def codec_rates(codec: CodecConfig, names: list[str]) -> dict[str, int]:
    """The codec's weights by name, with how many times a frame each is multiplied.

    A transposed convolution multiplies its whole kernel at every input, a plain one at every output.
    """
    rates = {"codec.pre_conv.": 1, "codec.transformer.": 1}
    time = 1
    for i, ratio in enumerate(codec.upsampling_ratios):
        rates |= {f"codec.upsample.{i}.transposed.": time, f"codec.upsample.{i}.": time * ratio}
        time *= ratio
    rates["codec.conv_in."] = time
    for i, rate in enumerate(codec.upsample_rates):
        rates |= {f"codec.blocks.{i}.transposed.": time, f"codec.blocks.{i}.": time * rate}
        time *= rate
    rates["codec.conv_out."] = time
    found = {name: next((rate for start, rate in rates.items() if name.startswith(start)), 0) for name in names}
    return {name: rate for name, rate in found.items() if rate}
