"""The kernel broken on purpose, one line at a time: the ladder must notice every time, or it proves little.

A mutation is a line of the source and what stands there instead. The line must be there exactly once, so that no change
of the kernel disarms a mutation without a word.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton", reason="the kernel is written in Triton")
if torch.cuda.is_available():
    pytest.skip("with a GPU Triton compiles, and these tensors are the interpreter's", allow_module_level=True)

from triton.runtime.errors import InterpreterError

import megakernel
from megakernel import DrawParams
from megakernel.barrier import STAGES
from tests.megakernel.interpreted_grid import interpreted_grid
from tests.megakernel.kernel_ladder import GREEDY, Duet, alone
from tests.megakernel.random_decoder import EOS, Script

# mutated kernels go on with what is no number
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

HERE = Path(megakernel.__file__).parent
MODULES = ("drawing", "stages", "kernel")  # in the order in which they import one another
SOURCES = {name: (HERE / f"{name}.py").read_text() for name in MODULES}
_number = itertools.count()


@pytest.fixture
def use(tmp_path, monkeypatch) -> Callable[..., None]:
    """`use(module, old, new)`: the decoder runs a copy of the kernel in which ``old`` of ``module`` is ``new``."""

    def load(name: str, source: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    def use_copy(changed: str = "kernel", old: str = "", new: str = "") -> None:
        number = next(_number)
        module = None
        for name in MODULES:
            source = SOURCES[name]
            if name == changed and old:
                assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {name}.py"
                source = source.replace(old, new)
            for other in MODULES:
                source = source.replace(f"from megakernel.{other} import", f"from mutated_{other}_{number} import")
            module = load(f"mutated_{name}_{number}", source)
        monkeypatch.setattr("megakernel.frame.frame_kernel", module.frame_kernel)

    return use_copy


def climb(order: str, frames: int = 2, **launch: int) -> None:
    """Two of four lanes, of which one may end at once; half of all codes were drawn before."""
    duet = Duet("projected", lanes=4, launch=alone(splits=2, keys=4, **launch))
    hidden, lanes = duet.spec.talker.hidden, [2, 0]
    duet.begin(0, Script(hidden, 4, 6, 4, DrawParams(5.0, 2), DrawParams(3.0, 0, 0.5), penalty=4.0))
    duet.begin(2, Script(hidden, 2, 3, 4, DrawParams(3.0, 0), DrawParams(4.0, 2), penalty=4.0))
    duet.begin(3, Script(hidden, 3, 2, 4, GREEDY, GREEDY))
    for state in (duet.decoder.state, duet.twin.state):
        state.seen[:, ::2] = True
        state.logits[2, EOS] = 200.0
        state.frame[2] = duet.spec.min_frames
    with interpreted_grid(order, timeout=30):
        for _ in range(frames):
            duet.step(lanes)


def climb_alone() -> None:
    climb("forward")


def climb_together() -> None:
    climb("forward", programs=3, early=0, frames=1)


def climb_all() -> None:
    climb_alone()
    climb_together()


def assert_caught(ladder: Callable[[], None]) -> None:
    """By a comparison: a kernel that is no program at all would prove nothing about the ladder."""
    with pytest.raises((AssertionError, InterpreterError)) as caught:
        ladder()
    if isinstance(caught.value, InterpreterError):
        assert "All-NaN" in str(caught.value), "the mutation does not run"  # a draw from what was never written


@pytest.mark.parametrize("ladder", [climb_alone, climb_together])
def test_a_true_copy_passes(use, ladder) -> None:
    use()
    ladder()


# (stage, place in the source)
MEETINGS = [(match[1], match.start()) for match in re.finditer(r"meet\(s\.sync, (\w+), P\)", SOURCES["kernel"])]


def test_every_kind_of_barrier_is_dropped_below() -> None:
    kinds = {re.fullmatch(r"[A-Z]+", stage)[0] for stage, _ in MEETINGS}  # type: ignore[index]
    assert len(kinds) == len(STAGES), f"{sorted(kinds)} are not {STAGES}"


@pytest.mark.parametrize("meeting", range(len(MEETINGS)), ids=lambda n: f"{MEETINGS[n][0]}-{n}")
def test_a_dropped_barrier_is_caught(use, monkeypatch, meeting) -> None:
    place = MEETINGS[meeting][1]
    source = SOURCES["kernel"]
    monkeypatch.setitem(SOURCES, "kernel", source[:place] + re.sub(r"meet\(.*?\)", "pass", source[place:], count=1))
    use()
    assert_caught(climb_together)


MUTATIONS = {
    # matrices
    "rows of another stride": ("stages", "qkv + column * T.qkv_width + row", "qkv + column * T.q_width + row"),
    "rows one further on": ("stages", "(first + row)[:, None]", "(first + tl.maximum(row - 1, 0))[:, None]"),
    "the first layer's weights": ("stages", "w.input_norm + layer * T.hidden", "w.input_norm + 0 * T.hidden"),
    "no residual": ("stages", "before + finish(sums[t], S)", "finish(sums[t], S)"),
    "no silu": ("stages", "gate * tl.sigmoid(gate) * finish", "gate * finish"),
    "gate and up are one": ("stages", "w.gate_up, first + R.count, c, h", "w.gate_up, first, c, h"),
    "no root of the mean square": ("stages", "/ R.inputs + eps)", "+ eps)"),
    # attention
    "no norm of queries and keys": ("stages", "a = a * scale * tl.load(weight + d)", "a = a * tl.load(weight + d)"),
    "keys normed as queries": ("stages", "(layer * 2 + 1) * T.head_dim", "layer * 2 * T.head_dim"),
    "rotated the other way": ("stages", "a * c - b * s, b * c + a * s", "a * c + b * s, b * c - a * s"),
    "a stale slot": ("stages", "own = (past + p) * T.head_dim", "own = tl.maximum(past + p - 1, 0) * T.head_dim"),
    "nothing stored": ("stages", "if high == end:", "if high == end + 1:"),
    "values where keys belong": ("stages", "tl.store(values + own + full", "tl.store(keys + own + full"),
    "another lane's cache": ("stages", "* S.lanes + lane) * T.kv_heads", "* S.lanes + lane // 2) * T.kv_heads"),
    "another head's cache": ("stages", "* T.kv_heads + head) * T.positions", "* T.kv_heads) * T.positions"),
    "a slot beyond the length": ("stages", "there & (n[:, None] <= at[None, :])", "n[:, None] <= at[None, :] + 1"),
    "a look ahead": ("stages", "seen = there & (n[:, None] <= at[None, :])", "seen = there"),
    "a query at another place": ("stages", "at = past + q // T.group", "at = past + q * 0"),
    "no scale": ("stages", "score * T.scale", "score"),
    "parts of equal weight": ("stages", "share = tl.exp(one - top)", "share = tl.exp(0 * (one - top))"),
    "the parts of one lane": ("stages", "mask=s < parts, other=0.0", "mask=s < 1, other=0.0"),
    # from a stack to the next
    "the first position scored": ("stages", "row = lane * POS + POS - 1", "row = lane * POS"),
    "no bias of the projection": ("stages", "y += tl.load(bias + row - T.vocab", "0 * tl.load(bias + row - T.vocab"),
    "another group's head": ("kernel", "row = wide(group - 1) * T.vocab", "row = wide(0) * T.vocab"),
    "another group's input": ("kernel", "w.later_inputs + ((group - 1)", "w.later_inputs + ((group)"),
    "a predictor that starts late": ("kernel", "s.position + group * S.lanes", "s.position + (group - 1) * S.lanes"),
    "a group not embedded": ("kernel", "range(1, S.groups):\n        code", "range(2, S.groups):\n        code"),
    "another lane's text": ("kernel", "u.text + row * width", "u.text"),
    "another lane's column": ("kernel", "s.x + lane * 2 * width", "s.x + (2 - lane) * 2 * width"),
    "an idle lane drawn": ("kernel", "!= 0:\n                draw_talker", "!= 9:\n                draw_talker"),
    # drawing
    "another lane's seed": ("kernel", "2 * WORDS, tl.load(u.seed + lane)", "2 * WORDS, tl.load(u.seed)"),
    "noise of another group": ("drawing", "+ gumbel_noise(seed, frame, group", "+ gumbel_noise(seed, frame, 0"),
    "noise of another frame": ("drawing", "+ gumbel_noise(seed, frame, group", "+ gumbel_noise(seed, 0, group"),
    "noise of another order": ("drawing", "(a, c), tl.interleave(b, d)", "(a, b), tl.interleave(c, d)"),
    "one code more in the top": ("drawing", "keep_top_k(logits, top_k)\n ", "keep_top_k(logits, top_k + 1)\n "),
    "a larger nucleus": ("drawing", "keep_top_p(logits, cut)\n ", "keep_top_p(logits, cut / 4)\n "),
    "no temperature": ("drawing", "logits / tl.load(params + TEMPERATURE)", "logits / 1.0"),
    "no penalty": ("drawing", "tl.where(x < 0, x * penalty, x / penalty)", "x"),
    "a penalty that rewards": ("drawing", "x < 0, x * penalty, x / penalty", "x < 0, x / penalty, x * penalty"),
    "an end too late": ("drawing", "frame >= S.min_frames", "frame > S.min_frames"),
    "what was drawn not kept": ("kernel", "tl.store(u.seen + lane * S.talker.vocab + code, 1)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_caught(use, name) -> None:
    use(*MUTATIONS[name])
    assert_caught(climb_all)
