"""One stage of the kernel at a time, on random activations: what it reads, how it is launched, what it should write.

Lanes that are idle hold NaN, and so does everything that a stage has to write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megakernel import reference as twin
from megakernel.frame import KernelDecoder
from megakernel.packed import Matrix
from megakernel.plan import plan_launch
from megakernel.q8 import dequantize
from tests.gpu.parity import DEVICE, DRY, WIDE, drawn
from tests.megakernel import stage_kernels as kernels
from tests.megakernel.kernel_ladder import dealt, relative

LAYER = 1  # of two, so that a stride that is wrong shows
POSITIONS = 19 if DRY else 300
NAN = float("nan")
# of one stage, ||kernel - float64|| / ||float64||
CLOSE = {"float32": 1e-5, "bfloat16": 1e-2, "q8_0": 1e-2}
SPEC = replace(WIDE, predictor=replace(WIDE.predictor, layers=2))  # in a dry run, too, the second layer


@dataclass(frozen=True)
class Case:
    """A way to run the stages of the talker or, with two new positions a lane, of the predictor's first step."""

    weight_format: str
    lanes: int
    dot: bool
    positions: int

    def __str__(self) -> str:
        stack = "predictor" if self.positions == 2 else "talker"
        return f"{self.weight_format}-{'dot' if self.dot else 'rows'}-{self.lanes}-{stack}"

    @property
    def active(self) -> list[int]:
        """All lanes but a few."""
        return [lane for lane in range(self.lanes) if lane not in (1, 6, 13)]


# as frames multiply in each format, and the other way; what takes the longest to compile first
WAYS = [("float32", False), ("q8_0", True), ("bfloat16", True)]
CASES = [Case(form, lanes, dot, 1) for lanes in (16, 4, 1) for form, dot in WAYS]
CASES += [Case("bfloat16", 4, False, 1), Case("q8_0", 1, False, 1)]
CASES += [Case("q8_0", 16, True, 2), Case("bfloat16", 16, True, 2), *(Case(form, 1, dot, 2) for form, dot in WAYS)]
DRY_CASES = [
    Case("float32", 4, False, 1),
    Case("bfloat16", 2, True, 1),
    Case("q8_0", 2, True, 2),
    Case("q8_0", 1, False, 2),
]


class Bench:
    """The memory of one case, and every stage on it; ``launch(kernel, grid)`` is how a kernel is called."""

    def __init__(
        self, case: Case, launch: Callable[[Any, tuple[int]], Callable[..., object]] = lambda k, grid: k[grid]
    ):
        self.case, self.launch = case, launch
        plan = dealt(3, splits=2, keys=4) if DRY else plan_launch(DEVICE, case.lanes, case.weight_format)
        self.plan = replace(plan, dot=case.dot)
        self.decoder = KernelDecoder(drawn(SPEC, case.weight_format), case.lanes, POSITIONS, self.plan)
        frame, packed = self.decoder.shape, self.decoder.packed
        self.predicts = case.positions == 2
        self.shape, self.w = (frame.predictor, packed.predictor) if self.predicts else (frame.talker, packed.talker)
        self.cache = self.decoder.caches[self.predicts]
        self.s, self.u, self.state = self.decoder.scratch, self.decoder.utterances, self.decoder.state
        self.generator = torch.Generator(DEVICE).manual_seed(9)
        self.active = torch.tensor(case.active, device=DEVICE)
        self.idle = sorted(set(range(case.lanes)) - set(case.active))
        last = self.shape.positions - case.positions
        lengths = torch.tensor([last, 0, 3, 8, 70, last // 2, 1, 2] * 2)[: case.lanes].clamp(max=last)
        self.start = lengths.to(DEVICE, torch.int32)  # cache positions before this step
        self.errors: dict[str, float] = {}

    # launching

    def run(self, stage: str) -> None:
        w, s, start = self.w, self.s, self.start
        mask = sum(1 << lane for lane in self.case.active)
        arguments: dict[str, tuple[Any, ...]] = {
            "project_qkv": (w, LAYER, s, mask),
            "attend": (w, LAYER, s, self.cache, start, mask),
            "project_output": (w, LAYER, s, start, mask),
            "feed_forward_up": (w, LAYER, s, mask),
            "feed_forward_down": (w, LAYER, s, mask),
            "score_talker": (self.decoder.packed, s, self.u, mask),
            "score_predictor": (self.decoder.packed, 2, s, self.u, mask),
        }
        shapes = {"S": self.decoder.shape, "POS": self.case.positions}
        if not stage.startswith("score"):
            shapes["T"] = self.shape
        kernel = getattr(kernels, f"run_{stage}")
        self.launch(kernel, (self.plan.programs,))(*arguments[stage], **shapes, num_warps=self.plan.warps)

    def run_all(self) -> None:
        for stage in ("project_qkv", "attend", "project_output", "feed_forward_up", "feed_forward_down"):
            self.run(stage)
        self.run("score_predictor" if self.predicts else "score_talker")

    # memory

    def _view(self, tensor: Tensor, *shape: int) -> Tensor:
        size = torch.Size((self.case.lanes, self.case.positions, *shape))
        return tensor.view(-1)[: size.numel()].view(size)

    def values(self, tensor: Tensor, *shape: int) -> Tensor:
        """The memory of ``tensor`` as ``[lanes, positions, ...]``: random where a lane is active."""
        view = self._view(tensor.fill_(NAN), *shape)
        values = torch.randn(view[self.active].shape, generator=self.generator, device=DEVICE)
        view[self.active] = values.to(view.dtype)
        return view

    def unwritten(self, tensor: Tensor, *shape: int) -> Tensor:
        return self._view(tensor.fill_(NAN), *shape)

    def parts(self) -> tuple[Tensor, Tensor]:
        """Attention ``[splits, lanes, positions, heads, head_dim]`` and each part's log sum, without the last."""
        shape, case = self.shape, self.case
        size = torch.Size((shape.splits, case.lanes, case.positions, shape.heads))
        attention = self.s.attention.fill_(NAN).view(-1)[: size.numel() * shape.head_dim]
        weight = self.s.weight.fill_(NAN).view(-1)[: size.numel()]
        return attention.view(*size, shape.head_dim), weight.view(size)

    def count(self, lane: int) -> int:
        """Into how many parts the attention of ``lane`` is cut."""
        end, shape = int(self.start[lane]) + self.case.positions, self.shape
        part = -(-end // shape.splits)
        return -(-end // (-(-part // shape.keys) * shape.keys))

    # what is right

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return twin.rms_norm(x.double(), weight.double(), self.shape.norm_eps)

    def attended(self, lane: int, qkv: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of one lane's ``qkv`` its new keys and values ``[kv_heads, positions, head_dim]``, and its attention.

        ``keys`` and ``values`` ``[kv_heads, start, head_dim]`` are what the cache held before.
        """
        shape, begin, end = self.shape, keys.shape[1], keys.shape[1] + self.case.positions
        heads = qkv.double().view(self.case.positions, -1, shape.head_dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cos, sin = (table[begin:end, None].double() for table in (self.cache.cos, self.cache.sin))
        q, k = (
            twin.rotate(self.norm(x, weight), cos, sin) for x, weight in zip((q, k), self.w.qk_norm[LAYER], strict=True)
        )
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        both = (torch.cat([old.double(), new], dim=1)[None] for old, new in ((keys, k), (values, v)))
        return k, v, twin.attend_causal(q[None], *both)[0]

    def check(self, mine: Tensor, right: Tensor, what: str) -> None:
        """Of ``mine`` ``[lanes, ...]`` the active lanes are ``right``, and the idle ones unwritten."""
        self.near(mine[self.active], right, what)
        assert mine[self.idle].isnan().all(), f"{what}: written for an idle lane"

    def near(self, mine: Tensor, right: Tensor, what: str) -> None:
        error = relative(mine, right)
        self.errors[what] = max(error, self.errors.get(what, 0.0))
        assert error < CLOSE[self.case.weight_format], f"{what}: {error:.1e} from float64's"


def exact(matrix: Matrix, index: int = LAYER) -> Tensor:
    """Matrix number ``index`` as it is multiplied, float64."""
    if matrix.rows.dtype == torch.int8:
        return dequantize(matrix.rows[index], matrix.scales[index]).double()
    return matrix.rows[index].double()
