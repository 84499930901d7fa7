"""The frame kernel and its twin side by side on the same weights: what the tests of the kernel climb."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megakernel import Decoder, DecoderSpec, DecoderWeights, DrawParams
from megakernel.frame import KernelDecoder
from megakernel.plan import Launch
from tests.megakernel.random_decoder import KERNEL_SPECS, Script, random_weights

POSITIONS = 16
GREEDY = DrawParams(greedy=True)
# of a frame's results, ||kernel - twin|| / ||twin||
CLOSE = {"float32": 3e-6, "bfloat16": 4e-2, "q8_0": 4e-2}


@cache
def packed(name: str, weight_format: str = "float32") -> DecoderWeights:
    return random_weights(KERNEL_SPECS[name], weight_format, "kernel")


def alone(**changes: Any) -> Launch:
    """A launch of one program, which holds any matrix at once."""
    return replace(Launch(programs=1, warps=4, tile=1 << 16, early=1 << 40), **changes)


def dealt(programs: int, **changes: Any) -> Launch:
    """A launch whose programs have several tiles of every matrix, of which some are requested early."""
    return replace(Launch(programs=programs, warps=4, tile=8, early=1 << 12), **changes)


def relative(mine: Tensor, theirs: Tensor) -> float:
    """``||mine - theirs|| / ||theirs||``; infinite for anything that is not finite."""
    error = ((mine.double() - theirs.double()).norm() / theirs.double().norm()).item()
    return error if error == error else float("inf")


def leaves(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for one in part:
            yield from leaves(one)


def poison(decoder: KernelDecoder) -> None:
    """NaN wherever a frame must write before it reads, loud noise in the caches beyond every lane's length."""
    scratch, state = decoder.scratch, decoder.state
    for tensor in (scratch.x, scratch.qkv, scratch.attention, scratch.weight, scratch.ffn, state.predictor_logits):
        tensor.fill_(float("nan"))
    noise = torch.Generator().manual_seed(5)
    for cache_, lengths in ((state.cache, state.length), (state.predictor_cache, [0] * state.lanes)):
        for tensor in (cache_.k, cache_.v):
            for lane, length in enumerate(lengths):
                rest = tensor[:, lane, :, length:]
                rest.copy_(1e4 * torch.randn(rest.shape, generator=noise))


def lane_memory(decoder: Decoder) -> dict[str, Tensor]:
    """Everything that a lane owns, lanes first."""
    state = decoder.state
    memory = {
        "keys": state.cache.k.transpose(0, 1),
        "values": state.cache.v.transpose(0, 1),
        "predictor keys": state.predictor_cache.k.transpose(0, 1),
        "predictor values": state.predictor_cache.v.transpose(0, 1),
        "hidden": state.hidden,
        "predictor input": state.predictor_input,
        "logits": state.logits,
        "predictor logits": state.predictor_logits,
        "seen": state.seen,
        "penalty": state.penalty,
        "length and frame": torch.tensor([state.length, state.frame]).T,
    }
    if isinstance(decoder, KernelDecoder):
        memory |= {"seed": decoder.utterances.seed, "draws": decoder.utterances.draws}
    return memory


def bits(tensor: Tensor) -> Tensor:
    """A copy as integers, so that NaN equals NaN."""
    tensor = tensor.clone().contiguous()
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point else tensor


def snapshot(decoder: Decoder, lanes: Iterable[int]) -> dict[str, Tensor]:
    return {name: bits(tensor[list(lanes)]) for name, tensor in lane_memory(decoder).items()}


def assert_same_bits(before: Mapping[str, Tensor], after: Mapping[str, Tensor], where: str) -> None:
    for name, expected in before.items():
        assert torch.equal(after[name], expected), f"{where}: {name} differs"


@dataclass
class Duet:
    """The kernel (``decoder``) and the twin on the same weights, through the same utterances."""

    name: str
    weight_format: str = "float32"
    lanes: int = 1
    launch: Launch = field(default_factory=alone)
    positions: int = POSITIONS

    def __post_init__(self) -> None:
        weights = packed(self.name, self.weight_format)
        self.spec = weights.spec
        self.decoder = KernelDecoder(weights, self.lanes, self.positions, self.launch)
        self.twin = Decoder(weights, self.lanes, self.positions)
        self.scripts: dict[int, Script] = {}

    def begin(self, lane: int, script: Script) -> None:
        self.scripts[lane] = script
        for decoder in (self.decoder, self.twin):
            decoder.begin(lane, script.seed, script.talker, script.predictor, script.penalty)
            decoder.prefill(lane, script.prompt)

    def text(self, lanes: list[int]) -> Tensor:
        frame = self.twin.state.frame
        return torch.stack([self.scripts[lane].text[frame[lane]] for lane in lanes])

    def step(self, lanes: list[int], forced: Tensor | None = None) -> Tensor:
        """One frame of both, poisoned before; everything that it leaves is compared. Returns the kernel's codes.

        What the twin draws is forced on a kernel of narrow weights, whose sums are rounded in another order.
        """
        text = self.text(lanes)
        expected = self.twin.step(lanes, text, forced)
        if self.weight_format != "float32":
            forced = expected
        idle = sorted(set(range(self.lanes)) - set(lanes))
        poison(self.decoder)
        before = snapshot(self.decoder, idle)
        codes = self.decoder.step(lanes, text, forced)
        where = f"frame {self.twin.state.frame[lanes[0]] - 1}"
        assert torch.equal(codes, expected), f"{where}: codes {codes.tolist()} instead of {expected.tolist()}"
        self.compare(lanes, where)
        assert_same_bits(before, snapshot(self.decoder, idle), f"{where}, idle lanes {idle}")
        return codes

    def compare(self, lanes: list[int], where: str) -> None:
        mine, theirs, limit = self.decoder.state, self.twin.state, CLOSE[self.weight_format]
        assert mine.length == theirs.length and mine.frame == theirs.frame, where
        assert torch.equal(mine.seen[lanes], theirs.seen[lanes]), f"{where}: seen"
        for lane in lanes:
            end = theirs.length[lane]
            for part, a, b in (
                ("predictor logits", mine.predictor_logits[lane], theirs.predictor_logits[lane]),
                ("keys", mine.cache.k[:, lane, :, :end], theirs.cache.k[:, lane, :, :end]),
                ("values", mine.cache.v[:, lane, :, :end], theirs.cache.v[:, lane, :, :end]),
                ("hidden", mine.hidden[lane], theirs.hidden[lane]),
                ("logits", mine.logits[lane], theirs.logits[lane]),
            ):
                error = relative(a, b)
                assert error <= limit, f"{where}, lane {lane}: {part} are {error:.1e} from the twin's"


def scripts(spec: DecoderSpec, count: int, frames: int = 4) -> list[Script]:
    """Utterances of different prompts, ways of drawing and penalties."""
    draws = [
        DrawParams(0.9, 10),
        DrawParams(1.2, 0, 0.8),
        GREEDY,
        DrawParams(0.7, 3, 0.9),
    ]
    return [
        Script(spec.talker.hidden, 100 + i, 1 + 3 * i % 5, frames, draws[i % 4], draws[(i + 1) % 4], 1.0 + i % 3 / 2)
        for i in range(count)
    ]
