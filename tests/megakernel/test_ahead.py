"""The kernel compiled for GPUs that are not here: it fits each, spills nothing to speak of and asks early for weights.

Compiling takes minutes and needs a Triton without its interpreter: processes of their own do it while the other tests
run (`tests.compiling`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.compiled import FEW, Case, complaints, every_case, table, write_table
from megakernel.ahead import TARGETS, Compiled

GOOD = Compiled(
    capability=90, programs=132, warps=8, registers=250, stack=0, spills=0, shared_bytes=32768,
    instructions=20000, wide_loads=300, requested=200, barriers=20,
)  # fmt: skip
# as often as `meet` is compiled: after the first draw; in the predictor's two stacks, each with a head and a draw; in
# the talker's stack
BARRIERS = 1 + 2 * (5 + 2) + 5


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_fits_its_target(compiled, case) -> None:
    assert complaints(case, compiled(case)) == []


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [case for case in every_case() if case not in FEW], ids=str)
def test_every_other_kernel_fits_its_target(compiled, case) -> None:
    assert complaints(case, compiled(case)) == []


@pytest.mark.timeout(900)
def test_weights_are_on_their_way_before_every_barrier_of_a_layer(compiled) -> None:
    found = compiled(FEW[0])
    assert found.barriers == BARRIERS
    assert found.requested >= 0.6 * found.wide_loads
    assert found.spills == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"registers": 257}, "257 registers"),
        ({"stack": 8}, "8 bytes of stack"),
        ({"shared_bytes": 228 << 10}, "shared memory"),
        ({"requested": 60}, "60 16-byte loads before barriers"),
    ],
)
def test_what_does_not_fit_is_complained_of(change, complaint) -> None:
    (found,) = complaints(FEW[0], replace(GOOD, **change))
    assert complaint in found


def test_a_few_values_may_wait_on_the_stack_of_a_kernel_for_many_lanes() -> None:
    many = Case("0.6b", "bfloat16", 16, 90)
    assert complaints(many, replace(GOOD, stack=128)) == []
    assert complaints(many, replace(GOOD, stack=136)) != []
    assert complaints(replace(many, size="1.7b"), replace(GOOD, stack=512)) == []


def test_small_shared_memory_is_a_limit_of_its_own() -> None:
    assert complaints(Case("0.6b", "bfloat16", 1, 120), replace(GOOD, shared_bytes=TARGETS[120].shared_bytes + 1)) != []


def test_every_case_is_in_the_matrix_once() -> None:
    cases = every_case()
    assert len(cases) == len(set(cases)) == 5 * 2 * 5 * 2
    assert set(FEW) < set(cases)


def test_the_table_goes_between_its_marks(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- compiled: begin -->\nold\n<!-- compiled: end -->\nafter\n", encoding="utf-8")
    write_table(page, table([(FEW[0], GOOD)]))
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 90 (H100) | 0.6b | bfloat16 | 1 | 132 × 256 | 250 | 0 |" in text
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match="marks"):
        write_table(page, "")
