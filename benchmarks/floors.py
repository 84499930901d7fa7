"""The least work behind a step, from the shapes in the checkpoint, and the least time that it takes a machine.

Every weight is read at least once a step from memory, and multiplied once for every position that passes it. So are
the talker's keys and values, where a length is given. Norms and the arithmetic of attention are left out, so what comes
out is a lower bound: a floor, not an estimate. Where weights stay in a cache between steps, reading them may be faster
than this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from backend.checkpoint import Checkpoint
from backend.config import CodecConfig
from benchmarks.conditions import Machine
from benchmarks.report import Ceiling
from megakernel import DecoderSpec
from megakernel.linear import WEIGHT_FORMATS, matrix_bytes

MILLISECONDS = 1e3
Shape = tuple[int, ...]


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
    """The work of one model's steps with its decoder's weights in ``weight_format``; the codec's are float32.

    ``shapes`` are those of its tensors by name; ``codec`` is needed for the codec's steps alone.
    """

    def __init__(
        self, shapes: Mapping[str, Shape], spec: DecoderSpec, weight_format: str, codec: CodecConfig | None = None
    ) -> None:
        self.shapes, self.spec, self.format, self.codec_config = shapes, spec, weight_format, codec
        self.dtype = "float32" if weight_format == "float32" else "bfloat16"  # of what the weights are multiplied with

    @classmethod
    def of(cls, checkpoint: Checkpoint, weight_format: str) -> Floors:
        shapes = {name: entry.shape for name, entry in checkpoint.table.items()}
        return cls(shapes, checkpoint.config.spec, weight_format, checkpoint.config.codec)

    def parts(self, lanes: int = 1, length: int = 0) -> dict[str, Work]:
        """The parts of a frame of ``lanes`` utterances that read weights, and ``length`` cache positions of each."""
        steps = self.spec.groups - 1
        predictor = self._weights("predictor.layers.", "predictor.projection.", positions=lanes)
        return {
            "talker": self.talker(lanes) + self.cache(lanes * length),
            "predictor": predictor * steps,
            "heads": self._weights("talker.head", "predictor.heads.", positions=lanes),
        }

    def halves(self, lanes: int = 1, length: int = 0) -> dict[str, Work]:
        """A frame as talker step and predictor, each with its heads."""
        parts = self.parts(lanes, length)
        head = self._weights("talker.head", positions=lanes)
        predictor_heads = self._weights("predictor.heads.", positions=lanes)
        return {"talker": parts["talker"] + head, "predictor": parts["predictor"] + predictor_heads}

    def frame(self, lanes: int = 1, length: int = 0) -> Work:
        return sum(self.parts(lanes, length).values(), Work(dtype=self.dtype))

    def first_audio(self, positions: int, machine: Machine) -> Ceiling:
        """A prompt of ``positions``, a frame and its codec step, in milliseconds."""
        steps = [self.talker(positions), self.frame(), self.codec(frames=1)]
        seconds = sum(work.seconds(machine) for work in steps)
        return Ceiling(seconds * MILLISECONDS, f"floor, a prompt of {positions}, a frame, a codec step")

    def talker(self, positions: int) -> Work:
        """``positions`` at once through the talker's layers."""
        return self._weights("talker.layers.", positions=positions)

    def cache(self, positions: int) -> Work:
        """Reading the talker's keys and values of so many ``positions``."""
        numbers = 2 * self.spec.talker.layers * self.spec.talker.kv_width * positions
        return Work(numbers * WEIGHT_FORMATS[self.format].itemsize, dtype=self.dtype)

    def codec(self, frames: int, lanes: int = 1) -> Work:
        """The codec over the next ``frames`` of ``lanes``."""
        assert self.codec_config is not None, "a model without its codec has no codec steps"
        reads, operations = 0, 0
        for name, rate in codec_rates(self.codec_config, self._matrices("codec.")).items():
            elements = math.prod(self.shapes[name])
            reads += elements * WEIGHT_FORMATS["float32"].itemsize
            operations += 2 * elements * rate * frames * lanes
        return Work(reads, operations)

    def _weights(self, *prefixes: str, positions: int) -> Work:
        elements = sum(math.prod(self.shapes[name]) for name in self._matrices(*prefixes))
        return Work(matrix_bytes(elements, self.format), 2 * elements * positions, self.dtype)

    def _matrices(self, *prefixes: str) -> list[str]:
        """All weights under the prefixes but vectors: norms, scales and biases."""
        return [name for name, shape in self.shapes.items() if name.startswith(prefixes) and len(shape) > 1]


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
