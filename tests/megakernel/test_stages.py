"""Each stage of the kernel alone, in Triton's interpreter, against the same stage in float64 on the same weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU Triton compiles, and these tensors are the interpreter's", allow_module_level=True)

from megakernel import DecoderSpec, DecoderWeights, StackSpec
from megakernel import reference as twin
from megakernel.frame import KernelDecoder
from megakernel.packed import Matrix, PackedStack
from megakernel.plan import Launch, StackShape
from megakernel.q8 import dequantize
from tests.megakernel import stage_kernels as kernels
from tests.megakernel.kernel_ladder import alone, bits, dealt, relative
from tests.megakernel.random_decoder import paired_stack, random_weights

POSITIONS = 19
LAYER = 1  # of two, so that a stride that is wrong shows
# of one stage, ||kernel - float64|| / ||float64||: what enters a matrix is rounded to 8 bits of mantissa, or is not
CLOSE = {"float32": 1e-6, "bfloat16": 8e-3, "q8_0": 8e-3}

SPECS = {
    # every matrix has an odd width, heads have one query each
    "odd": DecoderSpec(
        StackSpec(2, 13, 7, 3, 3, 2, 11, norm_eps=1e-6, rope_base=1e4),
        StackSpec(2, 9, 5, 4, 1, 4, 3, norm_eps=1e-5, rope_base=1e4),
        groups=3,
        eos=9,
        suppress_from=7,
    ),
    "blocks": DecoderSpec(paired_stack(96, 160, 43, 2, 16), paired_stack(64, 32, 29, 2, 8), 3, 41, 37),
    "one width": DecoderSpec(paired_stack(64, 32, 43, 1, 16), paired_stack(64, 96, 29, 4, 4), 4, 41, 37),
}


@dataclass(frozen=True)
class Case:
    """A way to run a stage."""

    name: str
    weight_format: str
    lanes: int
    active: tuple[int, ...]
    launch: Launch

    @property
    def mask(self) -> int:
        return sum(1 << lane for lane in self.active)


CASES = [
    Case("odd", "float32", 1, (0,), alone()),
    Case("odd", "float32", 4, (1, 2), dealt(3, splits=3, keys=2)),
    Case("odd", "bfloat16", 2, (0, 1), dealt(5, tile=2, early=0, splits=2, keys=4)),
    Case("blocks", "float32", 16, (0, 3, 4, 9, 14, 15), alone(splits=4, keys=4)),
    Case("blocks", "bfloat16", 1, (0,), dealt(4)),
    Case("blocks", "bfloat16", 4, (0, 3), dealt(3, dot=True, splits=2, keys=8)),
    Case("blocks", "bfloat16", 16, (0, 1, 7, 8, 15), alone(dot=True, early=0)),
    Case("blocks", "q8_0", 2, (1,), alone(splits=8, keys=1)),
    Case("blocks", "q8_0", 8, (0, 2, 3, 7), dealt(2, dot=True)),
    Case("one width", "float32", 2, (0, 1), dealt(7, splits=2, keys=16)),
    Case("one width", "q8_0", 1, (0,), dealt(2, dot=True, early=1 << 20)),
]
STAGES = [(case, positions) for case in CASES for positions in (1, 2)]


def case_id(value: object) -> str | None:
    if not isinstance(value, Case):
        return None
    launch = value.launch
    way = "dot" if launch.dot else "rows"
    return f"{value.name}-{value.weight_format}-{len(value.active)}of{value.lanes}-{launch.programs}p-{way}"


class Bench:
    """A stack with ``positions`` new positions a lane: two are the predictor's first step, one is everything else."""

    def __init__(self, case: Case, positions: int) -> None:
        self.case, self.positions = case, positions
        weights: DecoderWeights = random_weights(SPECS[case.name], case.weight_format, "kernel")
        self.decoder = KernelDecoder(weights, case.lanes, POSITIONS, case.launch)
        frame = self.decoder.shape
        self.predicts = positions == 2
        self.shape: StackShape = frame.predictor if self.predicts else frame.talker
        self.w: PackedStack = self.decoder.packed.predictor if self.predicts else self.decoder.packed.talker
        self.spec = weights.spec.predictor if self.predicts else weights.spec.talker
        self.cache = self.decoder.caches[1 if self.predicts else 0]
        self.s, self.u = self.decoder.scratch, self.decoder.utterances
        self.generator = torch.Generator().manual_seed(9)
        self.active = torch.tensor(case.active)

    @property
    def options(self) -> dict[str, object]:
        return {"S": self.decoder.shape, "T": self.shape, "POS": self.positions}

    @property
    def grid(self) -> tuple[int]:
        return (self.case.launch.programs,)

    def values(self, tensor: Tensor, *shape: int) -> Tensor:
        """The memory of ``tensor`` as ``[lanes, positions, ...]``, random for active lanes and NaN for idle ones."""
        view = tensor.view(-1)[: torch.Size((self.case.lanes, self.positions, *shape)).numel()]
        view = view.view(self.case.lanes, self.positions, *shape).fill_(float("nan"))
        active = torch.randn(len(self.active), self.positions, *shape, generator=self.generator)
        view[self.active] = active.to(view.dtype)
        return view

    def unwritten(self, tensor: Tensor, *shape: int) -> Tensor:
        """The memory of ``tensor`` likewise, for a result; all else that it holds must be left alone."""
        tensor.fill_(float("nan"))
        return tensor.view(-1)[: torch.Size((self.case.lanes, self.positions, *shape)).numel()].view(
            self.case.lanes, self.positions, *shape
        )

    def assert_close(self, mine: Tensor, exact: Tensor, what: str = "result") -> None:
        """Of ``mine`` ``[lanes, ...]`` the active lanes are ``exact``, and the idle ones still NaN."""
        error = relative(mine[self.active], exact)
        assert error <= CLOSE[self.case.weight_format], f"{what}: {error:.1e}"
        idle = sorted(set(range(self.case.lanes)) - set(self.case.active))
        assert mine[idle].isnan().all(), f"{what}: written for an idle lane"

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return twin.rms_norm(x.double(), weight.double(), self.spec.norm_eps)

    @cached_property
    def start(self) -> Tensor:
        """Cache positions before this step, of every lane: none, some, and all but those of the last step."""
        last = self.shape.positions - self.positions
        return torch.tensor([0, last, 3, 8] * 4, dtype=torch.int32)[: self.case.lanes].clamp(max=last)


def parts_of(end: int, shape: StackShape) -> int:
    """Into how many parts attention over ``end`` positions is cut, each a multiple of ``keys``."""
    return math.ceil(end / (math.ceil(end / shape.splits / shape.keys) * shape.keys))


def exact(matrix: Matrix, index: int = LAYER) -> Tensor:
    """Matrix number ``index`` as it is multiplied, float64."""
    if matrix.rows.dtype == torch.int8:
        return dequantize(matrix.rows[index], matrix.scales[index]).double()
    return matrix.rows[index].double()


def exact_attention(bench: Bench, qkv: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one lane's ``qkv`` ``[positions, qkv_width]`` its new keys and values, and attention over the cache before.

    ``keys`` and ``values`` ``[kv_heads, start, head_dim]``; float64 throughout.
    """
    spec, start = bench.spec, keys.shape[1]
    heads = qkv.double().view(bench.positions, -1, spec.head_dim)
    q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    cos, sin = (table[start : start + bench.positions, None].double() for table in (bench.cache.cos, bench.cache.sin))
    q_norm, k_norm = bench.w.qk_norm[LAYER].double()
    q = twin.rotate(twin.rms_norm(q, q_norm, spec.norm_eps), cos, sin)
    k = twin.rotate(twin.rms_norm(k, k_norm, spec.norm_eps), cos, sin)
    all_k, all_v = (torch.cat([old.double(), new.transpose(0, 1)], dim=1) for old, new in ((keys, k), (values, v)))
    return k.transpose(0, 1), v.transpose(0, 1), twin.attend_causal(q[None], all_k[None], all_v[None])[0]


@pytest.mark.parametrize(("case", "positions"), STAGES, ids=case_id)
def test_project_qkv(case, positions) -> None:
    bench = Bench(case, positions)
    x, qkv = bench.values(bench.s.x, bench.shape.hidden), bench.unwritten(bench.s.qkv, bench.shape.qkv_width)
    before = bits(x)
    kernels.run_project_qkv[bench.grid](bench.w, LAYER, bench.s, case.mask, **bench.options)
    bench.assert_close(qkv, bench.norm(x[bench.active], bench.w.input_norm[LAYER]) @ exact(bench.w.qkv).T)
    assert torch.equal(bits(x), before), "the residual stream changed"


@pytest.mark.parametrize(("case", "positions"), STAGES, ids=case_id)
def test_attend(case, positions) -> None:
    """Lanes begin with an empty cache, with all but its last slots filled, and in between."""
    bench = Bench(case, positions)
    shape, start = bench.shape, bench.start
    qkv = bench.values(bench.s.qkv, shape.qkv_width)
    splits = shape.splits
    parts = bench.s.attention.view(-1).fill_(float("nan"))[: splits * case.lanes * positions * shape.q_width]
    parts = parts.view(splits, case.lanes, positions, shape.heads, shape.head_dim)
    weight = bench.s.weight.view(-1).fill_(float("nan"))[: splits * case.lanes * positions * shape.heads]
    weight = weight.view(splits, case.lanes, positions, shape.heads)
    for tensor in (bench.cache.k, bench.cache.v):
        tensor.copy_(torch.randn(tensor.shape, generator=bench.generator))
        for lane in range(case.lanes):
            tensor[:, lane, :, start[lane] :] *= 1e4  # loud noise beyond the length
    old_k, old_v = bench.cache.k.clone(), bench.cache.v.clone()
    kernels.run_attend[bench.grid](bench.w, LAYER, bench.s, bench.cache, start, case.mask, **bench.options)
    limit = CLOSE[case.weight_format]
    for lane in case.active:
        begin = int(start[lane])
        new = slice(begin, begin + positions)
        k, v, out = exact_attention(bench, qkv[lane], old_k[LAYER, lane, :, :begin], old_v[LAYER, lane, :, :begin])
        for tensor, old, expected in ((bench.cache.k, old_k, k), (bench.cache.v, old_v, v)):
            assert relative(tensor[LAYER, lane, :, new], expected) <= limit, f"lane {lane}: cache slots {new}"
            old[LAYER, lane, :, new] = tensor[LAYER, lane, :, new]
        count = parts_of(begin + positions, shape)
        mine = parts[:count, lane].double()
        if splits > 1:
            mine = (mine * weight[:count, lane].double().softmax(0)[..., None]).sum(0, keepdim=True)
        assert relative(mine[0].flatten(1), out) <= limit, f"lane {lane}: {count} parts"
        assert parts[count:, lane].isnan().all(), f"lane {lane}: a part that is not there was written"
    idle = sorted(set(range(case.lanes)) - set(case.active))
    assert parts[:, idle].isnan().all() and weight[:, idle].isnan().all(), "written for an idle lane"
    assert torch.equal(bench.cache.k, old_k) and torch.equal(bench.cache.v, old_v), "another slot of a cache changed"


@pytest.mark.parametrize(("case", "positions"), STAGES, ids=case_id)
def test_project_output(case, positions) -> None:
    """Parts of the attention are put together by the logarithms of their shares; those that are not there hold NaN."""
    bench = Bench(case, positions)
    shape, lanes = bench.shape, case.lanes
    x, splits = bench.values(bench.s.x, shape.hidden), shape.splits
    before = x.clone()
    bench.s.attention.fill_(float("nan"))
    bench.s.weight.fill_(float("nan"))
    parts = bench.s.attention.view(-1)[: splits * lanes * positions * shape.q_width]
    parts = parts.view(splits, lanes, positions, shape.heads, shape.head_dim)
    weight = bench.s.weight.view(-1)[: splits * lanes * positions * shape.heads].view(
        splits, lanes, positions, shape.heads
    )
    attention = torch.empty(lanes, positions, shape.q_width, dtype=torch.float64)
    for lane in case.active:
        count = parts_of(int(bench.start[lane]) + positions, shape)
        parts[:count, lane] = torch.randn(parts[:count, lane].shape, generator=bench.generator)
        weight[:count, lane] = 30 + 3 * torch.randn(weight[:count, lane].shape, generator=bench.generator)
        share = weight[:count, lane].double().softmax(0)[..., None]
        attention[lane] = (parts[:count, lane].double() * share).sum(0).flatten(1)
    kernels.run_project_output[bench.grid](bench.w, LAYER, bench.s, bench.start, case.mask, **bench.options)
    added = attention[bench.active] @ exact(bench.w.o).T
    bench.assert_close(x, before[bench.active].double() + added)
    bench.assert_close(x - before, added, "what is added")


@pytest.mark.parametrize(("case", "positions"), STAGES, ids=case_id)
def test_feed_forward_up(case, positions) -> None:
    bench = Bench(case, positions)
    x, ffn = bench.values(bench.s.x, bench.shape.hidden), bench.unwritten(bench.s.ffn, bench.shape.ffn)
    kernels.run_feed_forward_up[bench.grid](bench.w, LAYER, bench.s, case.mask, **bench.options)
    gate, up = (bench.norm(x[bench.active], bench.w.post_norm[LAYER]) @ exact(bench.w.gate_up).T).chunk(2, dim=-1)
    bench.assert_close(ffn, F.silu(gate) * up)


@pytest.mark.parametrize(("case", "positions"), STAGES, ids=case_id)
def test_feed_forward_down(case, positions) -> None:
    bench = Bench(case, positions)
    x, ffn = bench.values(bench.s.x, bench.shape.hidden), bench.values(bench.s.ffn, bench.shape.ffn)
    before = x.clone()
    kernels.run_feed_forward_down[bench.grid](bench.w, LAYER, bench.s, case.mask, **bench.options)
    bench.assert_close(x, before[bench.active].double() + ffn[bench.active].double() @ exact(bench.w.down).T)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_score_of_the_talker(case) -> None:
    """The head's logits, and what the predictor begins with: the norm itself or its projection."""
    bench = Bench(case, 1)
    decoder, state = bench.decoder, bench.decoder.state
    x, vocab = bench.values(bench.s.x, bench.shape.hidden), bench.shape.vocab
    for tensor in (state.logits, state.hidden, state.predictor_input):
        tensor.fill_(float("nan"))
    options = {"S": decoder.shape, "POS": 1}
    kernels.run_score_talker[bench.grid](decoder.packed, bench.s, bench.u, case.mask, **options)
    norm, head = bench.norm(x[bench.active, 0], bench.w.norm), exact(decoder.packed.head, 0)
    bench.assert_close(state.hidden, norm, "hidden")
    bench.assert_close(state.logits, norm @ head[:vocab].T, "logits")
    projected = norm @ head[vocab:].T + decoder.packed.head_bias.double() if decoder.spec.projects else norm
    bench.assert_close(state.predictor_input, projected, "predictor input")


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("case", "positions"), STAGES, ids=case_id)
def test_score_of_the_predictor(case, positions, group) -> None:
    """Of two positions the last is scored; logits of other groups are left alone."""
    bench = Bench(case, 2)
    bench.positions = positions
    decoder, logits = bench.decoder, bench.decoder.state.predictor_logits.fill_(float("nan"))
    x = bench.values(bench.s.x, bench.shape.hidden)
    options = {"S": decoder.shape, "POS": positions}
    kernels.run_score_predictor[bench.grid](decoder.packed, group, bench.s, bench.u, case.mask, **options)
    norm = bench.norm(x[bench.active, -1], bench.w.norm)
    bench.assert_close(logits[:, group - 1], norm @ exact(decoder.packed.predictor_heads, group - 1).T)
    logits[:, group - 1] = float("nan")
    assert logits.isnan().all(), "logits of another group changed"
