"""Decoders of chosen shapes on the device, each beside its twin on the same weights.

In a dry run (``GPU_TESTS_DRY=1``) the device is the CPU, kernels run in Triton's interpreter and every shape is small.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from benchmarks.drawn import SPECS as RELEASED
from benchmarks.drawn import DrawnWeights
from benchmarks.gpu_engines import check
from megakernel import Decoder, DecoderSpec, DecoderWeights, DrawParams, StackSpec, pack_decoder
from megakernel.frame import KernelDecoder
from tests.megakernel.kernel_ladder import assert_same_bits, poison, relative, snapshot
from tests.megakernel.random_decoder import KERNEL_SPECS, Script

DRY = os.environ.get("GPU_TESTS_DRY") == "1"
DEVICE = torch.device("cpu" if DRY else "cuda")
# of a frame in float32, ||kernel - twin|| / ||twin||: sums of the same numbers in another order
CLOSE = 1e-5

# of odd widths, as far as heads of a power of two allow, and the predictor's inputs are projected
ODD = DecoderSpec(
    StackSpec(2, 24, 40, 4, 2, 8, 43, norm_eps=1e-6, rope_base=1e4),
    StackSpec(1, 12, 20, 4, 1, 4, 29, norm_eps=1e-6, rope_base=1e4),
    groups=5,
    eos=41,
    suppress_from=37,
)
TRUE = KERNEL_SPECS["one width"] if DRY else RELEASED["0.6b"]
WIDE = (
    TRUE if DRY else replace(TRUE, talker=replace(TRUE.talker, layers=2), predictor=replace(TRUE.predictor, layers=2))
)
POSITIONS = 32 if DRY else 1024  # of a released size: what the benchmarks launch too, so that it is compiled once


@dataclass(frozen=True)
class Kernel:
    """A frame kernel that tests launch, and what it is compiled for."""

    name: str
    spec: DecoderSpec
    weight_format: str
    lanes: int
    positions: int

    def __str__(self) -> str:
        return f"{self.name}-{self.weight_format}-{self.lanes}"

    @property
    def weights(self) -> DecoderWeights:
        return drawn(self.spec, self.weight_format)

    def decoder(self) -> KernelDecoder:
        return KernelDecoder(self.weights, self.lanes, self.positions)

    def twin(self) -> Decoder:
        return Decoder(self.weights, self.lanes, self.positions)


ODD_FOUR = Kernel("odd", ODD, "float32", 4, 48)
WIDE_ONE = Kernel("wide", WIDE, "float32", 1, 64)  # of more lanes in float32 one is minutes in the compiler
MANY = 4 if DRY else 16
ONE, FOUR, FULL = (Kernel("0.6b", TRUE, "bfloat16", lanes, POSITIONS) for lanes in (1, 2 if DRY else 4, MANY))
ONE_Q8, FULL_Q8 = (Kernel("0.6b", TRUE, "q8_0", lanes, POSITIONS) for lanes in (1, MANY))
KERNELS = (FULL_Q8, FULL, FOUR, ONE_Q8, ONE, WIDE_ONE, ODD_FOUR)  # what takes the longest to compile first


@cache
def drawn(spec: DecoderSpec, weight_format: str) -> DecoderWeights:
    """Random weights that fill all bits of float32, so that one that was rounded on the way shows."""
    return pack_decoder(DrawnWeights(spec, DEVICE, torch.float32), spec, weight_format, DEVICE, layout="kernel")


DRAWS = (DrawParams(), DrawParams(1.2, 0, 0.8), DrawParams(greedy=True), DrawParams(0.7, 3, 0.9))


def scripts(kernel: Kernel, frames: int) -> list[Script]:
    """An utterance for every lane: another prompt, another way of drawing, another penalty."""
    return [
        Script(
            kernel.spec.talker.hidden,
            seed=100 + lane,
            positions=1 + 5 * lane % 13,
            frames=frames,
            talker=DRAWS[lane % 4],
            predictor=DRAWS[(lane + lane // 4 + 1) % 4],
            penalty=1.0 + lane % 3 / 2,
        )
        for lane in range(kernel.lanes)
    ]


def begin(decoder: Decoder, lane: int, script: Script) -> None:
    decoder.begin(lane, script.seed, script.talker, script.predictor, script.penalty)
    decoder.prefill(lane, script.prompt.to(DEVICE))


class Pair:
    """A kernel's decoder and its twin, through the same utterances in float32."""

    def __init__(self, kernel: Kernel) -> None:
        assert kernel.weight_format == "float32", "elsewhere the order of a sum may change a code"
        self.kernel, self.decoder, self.twin = kernel, kernel.decoder(), kernel.twin()
        self.scripts: dict[int, Script] = {}

    def begin(self, lane: int, script: Script) -> None:
        self.scripts[lane] = script
        for decoder in (self.decoder, self.twin):
            begin(decoder, lane, script)

    def text(self, lanes: list[int]) -> Tensor:
        frame = self.twin.state.frame
        return torch.stack([self.scripts[lane].text[frame[lane]] for lane in lanes]).to(DEVICE)

    def step(self, lanes: list[int], forced: Tensor | None = None) -> Tensor:
        """One frame of both after the kernel's memory was poisoned; codes and all that is left must be the same."""
        text = self.text(lanes)
        where = f"{self.kernel}, frame {self.twin.state.frame[lanes[0]]}"
        expected = self.twin.step(lanes, text, forced)
        idle = sorted(set(range(self.kernel.lanes)) - set(lanes))
        poison(self.decoder)
        before = snapshot(self.decoder, idle)
        codes = self.decoder.step(lanes, text, forced)
        check(self.decoder)
        assert_same_codes(codes, expected, where)
        for part, error in self.errors(lanes).items():
            assert error < CLOSE, f"{where}: {part} is {error:.1e} from the twin's"
        assert_same_bits(before, snapshot(self.decoder, idle), f"{where}, idle lanes {idle}")
        return codes

    def errors(self, lanes: list[int]) -> dict[str, float]:
        mine, theirs = self.decoder.state, self.twin.state
        assert mine.length == theirs.length and mine.frame == theirs.frame
        assert torch.equal(mine.seen[lanes], theirs.seen[lanes])
        errors = {}
        for lane in lanes:
            end = theirs.length[lane]
            for name in ("hidden", "logits", "predictor_logits"):
                errors[f"{name} of lane {lane}"] = relative(getattr(mine, name)[lane], getattr(theirs, name)[lane])
            for name in ("k", "v"):
                a, b = (getattr(state.cache, name)[:, lane, :, :end] for state in (mine, theirs))
                errors[f"cache.{name} of lane {lane}"] = relative(a, b)
        return errors


def assert_same_codes(mine: Tensor, theirs: Tensor, where: str) -> None:
    """Both ``[lanes, groups]``."""
    wrong = (mine != theirs).nonzero().tolist()
    if wrong:
        row, group = wrong[0]
        first = f"{int(mine[row, group])} instead of {int(theirs[row, group])}"
        raise AssertionError(f"{where}: {len(wrong)} codes differ, first row {row}, group {group}: {first}")
