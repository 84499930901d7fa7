"""How a frame is dealt to the programs of one launch: every number that the kernel is compiled for.

A `DecoderSpec` says what is computed, a `Launch` with how many programs and in which way; `FrameShape` is both as
the kernel reads it. It is hashable and its text never changes, so that a compiled kernel is found again.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megakernel.spec import DecoderSpec, StackSpec

LANES = (1, 2, 4, 8, 16)
MAX_POSITIONS = 4096
BLOCK = 32  # the weights that share a scale in Q8_0
_SLICE = 64  # inputs of one warp's dot product, at most
_DOT_ROWS = 8  # rows that a tensor core takes at a time


@dataclass(frozen=True)
class Rows:
    """How the rows of one matrix are dealt: program *p* owns ``share`` rows from ``p * share`` on.

    It loads them ``tile`` rows at a time, a row in ``chunks`` chunks of ``chunk`` inputs, and for a dot product a chunk
    in ``slices`` slices of ``slice`` inputs, so that every warp sums another part of a row. The first ``early`` tiles
    are requested before the barrier.
    """

    count: int
    inputs: int
    share: int
    tile: int
    chunk: int
    slice: int
    early: int

    @property
    def tiles(self) -> int:
        return -(-self.share // self.tile)

    @property
    def chunks(self) -> int:
        return self.inputs // self.chunk

    @property
    def slices(self) -> int:
        return self.chunk // self.slice


@dataclass(frozen=True)
class Launch:
    """How one frame is run; nothing here changes what is computed, only the order of sums.

    ``programs`` must all be resident at once. ``dot`` multiplies with the tensor cores, without it rows are multiplied
    and summed, ``tile`` of them and ``chunk`` inputs at a time. Of the next stage's weights up to ``early`` bytes are
    requested before the
    barrier, with ``ahead`` those of the stage after it are asked to be brought into the L2. ``splits`` is the most
    parts that one lane's attention is cut into, each of them going over ``keys`` positions at a time.
    """

    programs: int
    warps: int = 8
    dot: bool = False
    tile: int = 32
    chunk: int = 512
    early: int = 3 << 15
    ahead: bool = False
    splits: int = 1
    keys: int = 32


@dataclass(frozen=True)
class StackShape(StackSpec):
    """A stack as the kernel is compiled for it."""

    positions: int  # of a lane's cache
    splits: int
    keys: int  # cache positions that attention takes at a time
    qkv: Rows
    o: Rows
    up: Rows
    down: Rows
    head: Rows

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def codes(self) -> int:
        """The vocabulary filled up to a power of two."""
        return max(_power_above(self.vocab), 4)


@dataclass(frozen=True)
class FrameShape:
    """What `megakernel.kernel` is compiled for."""

    talker: StackShape
    predictor: StackShape
    lanes: int
    groups: int
    eos: int
    suppress_from: int
    min_frames: int
    projects: bool
    quantized: bool
    narrow: bool  # what enters a matrix is bfloat16
    programs: int
    dot: bool
    ahead: bool

    def batch(self, positions: int) -> int:
        """How many columns are multiplied at a time when every lane has so many positions."""
        return min(self.lanes * positions, 16 if self.dot else 2)

    def batches(self, positions: int) -> int:
        return self.lanes * positions // self.batch(positions)


def shape_frame(spec: DecoderSpec, weight_format: str, lanes: int, positions: int, launch: Launch) -> FrameShape:
    """The shape of a kernel for ``lanes`` lanes of at most ``positions`` cache positions.

    Raises ``ValueError`` if the kernel does not exist for these sizes.
    """
    if lanes not in LANES:
        raise ValueError(f"the kernel runs {', '.join(map(str, LANES))} lanes, not {lanes}")
    if positions > MAX_POSITIONS:
        raise ValueError(f"a lane of the kernel has at most {MAX_POSITIONS} cache positions, not {positions}")
    if launch.dot and not suits_tensor_cores(spec, weight_format):
        launch = replace(launch, dot=False)
    deal = _Dealer(weight_format, launch)
    scored = spec.talker.vocab + (spec.predictor.hidden if spec.projects else 0)
    return FrameShape(
        talker=deal.stack(spec.talker, positions, launch.splits, launch.keys, scored),
        predictor=deal.stack(spec.predictor, spec.groups, 1, _power_above(spec.groups), spec.predictor.vocab),
        lanes=lanes,
        groups=spec.groups,
        eos=spec.eos,
        suppress_from=spec.suppress_from,
        min_frames=spec.min_frames,
        projects=spec.projects,
        quantized=weight_format == "q8_0",
        narrow=weight_format != "float32",
        programs=launch.programs,
        dot=launch.dot,
        ahead=launch.ahead,
    )


@dataclass(frozen=True)
class _Dealer:
    weight_format: str
    launch: Launch

    def stack(self, spec: StackSpec, positions: int, splits: int, keys: int, scored: int) -> StackShape:
        self._check(spec)
        qkv = self.rows(spec.qkv_width, spec.hidden)
        head = self.rows(scored, spec.hidden)
        head = replace(head, tile=qkv.tile, early=qkv.early)  # either may be requested as what follows a layer
        return StackShape(
            **asdict(spec),
            positions=positions,
            splits=splits,
            keys=keys,
            qkv=qkv,
            o=self.rows(spec.hidden, spec.q_width),
            up=self.rows(spec.ffn, spec.hidden, matrices=2),
            down=self.rows(spec.hidden, spec.ffn),
            head=head,
        )

    def rows(self, count: int, inputs: int, matrices: int = 1) -> Rows:
        share = -(-count // self.launch.programs)
        if self.launch.dot:
            share = -(-share // _DOT_ROWS) * _DOT_ROWS
        tile = min(_power_within(share) if self.launch.dot else _power_above(share), self.launch.tile)
        row = inputs * matrices * self._bytes()
        while tile > _DOT_ROWS and tile * row > self.launch.early > 0:
            tile //= 2  # so that at least one tile can be requested early
        early = min(self.launch.early // (tile * row), -(-share // tile))
        chunk = min(_power_within(inputs), self.launch.chunk)
        piece = BLOCK if self.weight_format == "q8_0" else min(chunk, _SLICE)
        return Rows(count, inputs, share, tile, chunk, piece, early)

    def _bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2, "q8_0": 1}[self.weight_format]

    def _check(self, spec: StackSpec) -> None:
        for name in ("head_dim", "group"):
            value = getattr(spec, name)
            if value != _power_within(value):
                raise ValueError(f"the kernel needs a power of two as {name}, got {value}")


def plan_launch(device: torch.device, lanes: int, weight_format: str) -> Launch:
    """The launch for ``lanes`` on ``device``: a program on every multiprocessor, or one in the interpreter."""
    if device.type != "cuda":
        return Launch(programs=1, warps=4, tile=1 << 16, chunk=1 << 10, early=1 << 40)
    properties = torch.cuda.get_device_properties(device)
    return launch_for(properties.multi_processor_count, lanes, weight_format)


def launch_for(multiprocessors: int, lanes: int, weight_format: str) -> Launch:
    """The launch for a GPU with so many multiprocessors."""
    splits = max(1, min(8, multiprocessors // (8 * lanes)))
    return Launch(programs=multiprocessors, dot=weight_format != "float32", splits=splits)


def variants(launch: Launch) -> list[Launch]:
    """The launches worth timing beside ``launch``."""
    changes: list[dict[str, Any]] = [
        {"warps": 16},
        {"warps": 4},
        {"early": 0},
        {"early": launch.early // 3},
        {"ahead": True},
        {"early": 0, "ahead": True},
        {"dot": not launch.dot},
        {"dot": not launch.dot, "ahead": True},
        {"tile": 8},
        {"tile": 16},
        {"splits": 1},
    ]
    return [replace(launch, **change) for change in changes]


def suits_tensor_cores(spec: DecoderSpec, weight_format: str) -> bool:
    """The tensor cores have no float32, and take 16 inputs at a time."""
    widths = [w for stack in (spec.talker, spec.predictor) for w in (stack.hidden, stack.ffn, stack.q_width)]
    return weight_format != "float32" and not any(width % 16 for width in widths)


def _power_above(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _power_below(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n else 0


def _power_within(n: int) -> int:
    """The largest power of two that divides ``n``."""
    return n & -n
