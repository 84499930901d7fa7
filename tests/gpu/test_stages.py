"""Each stage of the kernel alone against the same stage in float64 on the same weights, at the true widths of 0.6B."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="the kernel is written in Triton")

from tests.gpu.parity import DRY
from tests.gpu.stage_bench import CASES, DRY_CASES, LAYER, NAN, Bench, exact
from tests.megakernel.kernel_ladder import bits

ALL = DRY_CASES if DRY else CASES
WORST: dict[str, float] = {}  # by stage and format, over all cases


@pytest.fixture(scope="module", autouse=True)
def tell(note) -> Iterator[None]:
    yield
    for what, error in WORST.items():
        note(f"{what}: {error:.1e} from float64's at most")


@pytest.fixture
def bench(case, built) -> Iterator[Bench]:
    built(case)
    bench = Bench(case)
    yield bench
    for what, error in bench.errors.items():
        name = f"{what}, {case.weight_format}"
        WORST[name] = max(error, WORST.get(name, 0.0))


def of_stack(positions: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in ALL if case.positions == positions], ids=str)


every = pytest.mark.parametrize("case", ALL, ids=str)


@every
def test_project_qkv(bench) -> None:
    x, qkv = bench.values(bench.s.x, bench.shape.hidden), bench.unwritten(bench.s.qkv, bench.shape.qkv_width)
    before = bits(x)
    bench.run("project_qkv")
    right = bench.norm(x[bench.active], bench.w.input_norm[LAYER]) @ exact(bench.w.qkv).T
    bench.check(qkv, right, "project_qkv")
    assert torch.equal(bits(x), before), "the residual stream changed"


@every
def test_attend(bench) -> None:
    """Caches are empty, full but for their last slots, or in between; beyond a length there is loud noise."""
    qkv = bench.values(bench.s.qkv, bench.shape.qkv_width)
    parts, weight = bench.parts()
    for tensor in (bench.cache.k, bench.cache.v):
        tensor.normal_(generator=bench.generator)
        for lane, length in enumerate(bench.start.tolist()):
            tensor[:, lane, :, length:] *= 1e4
    old_k, old_v = bench.cache.k.clone(), bench.cache.v.clone()
    bench.run("attend")
    for lane in bench.case.active:
        start, count = int(bench.start[lane]), bench.count(lane)
        new = slice(start, start + bench.case.positions)
        k, v, out = bench.attended(lane, qkv[lane], *(old[LAYER, lane, :, :start] for old in (old_k, old_v)))
        for tensor, old, right in ((bench.cache.k, old_k, k), (bench.cache.v, old_v, v)):
            bench.near(tensor[LAYER, lane, :, new], right, "attend: new slots")
            old[LAYER, lane, :, new] = tensor[LAYER, lane, :, new]
        mine = parts[:count, lane].double()
        if bench.shape.splits > 1:
            mine = (mine * weight[:count, lane].double().softmax(0)[..., None]).sum(0, keepdim=True)
        bench.near(mine[0].flatten(1), out, "attend")
        assert parts[count:, lane].isnan().all(), f"lane {lane}: a part that is not there was written"
    assert parts[:, bench.idle].isnan().all() and weight[:, bench.idle].isnan().all(), "written for an idle lane"
    assert torch.equal(bits(bench.cache.k), bits(old_k)), "another slot of the keys changed"
    assert torch.equal(bits(bench.cache.v), bits(old_v)), "another slot of the values changed"


@every
def test_project_output(bench) -> None:
    """Parts of the attention are put together by the logarithms of their shares; those that are not there hold NaN."""
    x = bench.values(bench.s.x, bench.shape.hidden)
    before, (parts, weight) = x.clone(), bench.parts()
    attention = []
    for lane in bench.case.active:
        count = bench.count(lane)
        parts[:count, lane] = parts[:count, lane].normal_(generator=bench.generator)
        weight[:count, lane] = 30 + 3 * weight[:count, lane].normal_(generator=bench.generator)
        share = weight[:count, lane].double().softmax(0)[..., None]
        attention.append((parts[:count, lane].double() * share).sum(0).flatten(1))
    bench.run("project_output")
    added = torch.stack(attention) @ exact(bench.w.o).T
    bench.check(x, before[bench.active].double() + added, "project_output")
    bench.check(x.double() - before.double(), added, "project_output: what is added")


@every
def test_feed_forward_up(bench) -> None:
    x, ffn = bench.values(bench.s.x, bench.shape.hidden), bench.unwritten(bench.s.ffn, bench.shape.ffn)
    bench.run("feed_forward_up")
    norm = bench.norm(x[bench.active], bench.w.post_norm[LAYER])
    gate, up = (norm @ exact(bench.w.gate_up).T).chunk(2, dim=-1)
    bench.check(ffn, F.silu(gate) * up, "feed_forward_up")


@every
def test_feed_forward_down(bench) -> None:
    x, ffn = bench.values(bench.s.x, bench.shape.hidden), bench.values(bench.s.ffn, bench.shape.ffn)
    before = x.clone()
    bench.run("feed_forward_down")
    added = ffn[bench.active].double() @ exact(bench.w.down).T
    bench.check(x, before[bench.active].double() + added, "feed_forward_down")
    bench.check(x.double() - before.double(), added, "feed_forward_down: what is added")


@of_stack(1)
def test_score_of_the_talker(bench) -> None:
    """The head's logits, and what the predictor begins with."""
    state, packed, vocab = bench.state, bench.decoder.packed, bench.shape.vocab
    x = bench.values(bench.s.x, bench.shape.hidden)
    for tensor in (state.logits, state.hidden, state.predictor_input):
        tensor.fill_(NAN)
    bench.run("score_talker")
    norm, head = bench.norm(x[bench.active, 0], bench.w.norm), exact(packed.head, 0)
    bench.check(state.hidden, norm, "score: the talker's hidden")
    bench.check(state.logits, norm @ head[:vocab].T, "score: the talker's logits")
    projected = norm @ head[vocab:].T + packed.head_bias.double() if bench.decoder.spec.projects else norm
    bench.check(state.predictor_input, projected, "score: the predictor's input")


@of_stack(2)
def test_score_of_the_predictor(bench) -> None:
    """The last of two positions, group 2 alone."""
    logits = bench.state.predictor_logits.fill_(NAN)
    x = bench.values(bench.s.x, bench.shape.hidden)
    bench.run("score_predictor")
    norm = bench.norm(x[bench.active, -1], bench.w.norm)
    bench.check(logits[:, 1], norm @ exact(bench.decoder.packed.predictor_heads, 1).T, "score: the predictor's logits")
    logits[:, 1] = NAN
    assert logits.isnan().all(), "logits of another group changed"
