"""The arithmetic of the sign-flip barrier, which only a GPU runs: nobody leaves early, and nothing has to be reset."""

from __future__ import annotations

import ast
import inspect
import random
import re

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernel is written in Triton")

from megakernel import barrier

TOP = np.uint32(1 << 31)
GRIDS = [1, 2, 3, 108, 132, 170, 1 << 14]


def arrivals(programs: int) -> np.ndarray:
    """What each program adds, as the barrier's own source says it."""
    source = inspect.getsource(barrier._meet_on_gpu.fn)
    rest = re.search(r"rest: tl\.constexpr = (.*?)  #", source)
    first = re.search(r"arrival = tl\.where\(tl\.program_id\(0\) == 0, rest, (\d+)\)", source)
    assert rest and first
    rest_of = eval(compile(ast.parse(rest[1], mode="eval"), "rest", "eval"), {"programs": programs})
    assert -(1 << 31) <= rest_of < 1 << 31, "the arrival is an int32"
    values = np.full(programs, int(first[1]), dtype=np.int64)
    values[0] = rest_of
    return values.astype(np.int32).view(np.uint32)


@pytest.mark.parametrize("programs", GRIDS)
def test_all_arrivals_flip_the_top_bit_and_leave_the_others(programs) -> None:
    counter, chance = np.zeros((), np.uint32), random.Random(programs)
    for round_ in range(5):
        before = counter.copy()
        for arrival in chance.sample(arrivals(programs).tolist(), programs):
            assert (counter ^ before) & TOP == 0, f"round {round_}: the bit flipped before all were there"
            counter += np.uint32(arrival)
        assert counter == before ^ TOP, f"round {round_}"


class Program:
    """Arrives, polls until the top bit is not what it was when it arrived, goes on."""

    def __init__(self, arrival: int) -> None:
        self.arrival, self.round, self.seen = np.uint32(arrival), 0, None

    def step(self, counter: np.ndarray) -> None:
        if self.seen is None:
            self.seen = counter.copy()
            counter += self.arrival
        elif (counter ^ self.seen) & TOP:
            self.round, self.seen = self.round + 1, None


@pytest.mark.parametrize("programs", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_no_program_is_a_round_ahead_of_one_that_has_not_arrived(programs, seed) -> None:
    """Steps come in any order, and a fast program may arrive again before a slow one has looked."""
    chance, counter, rounds = random.Random(seed), np.zeros((), np.uint32), 40
    grid = [Program(arrival) for arrival in arrivals(programs)]
    speed = [chance.choice([1, 10, 100]) for _ in grid]
    for _ in range(1_000_000):
        if all(program.round >= rounds for program in grid):
            break
        program = chance.choices(grid, speed)[0]
        program.step(counter)
        arrived = min(other.round + (other.seen is not None) for other in grid)
        assert program.round <= arrived, "a program went on before all had arrived"
    else:
        pytest.fail(f"stuck at {[program.round for program in grid]}")


def test_the_fault_word_is_in_a_line_of_its_own_and_every_stage_has_a_name() -> None:
    assert 4 * barrier.FAULT >= 128 and barrier.FAULT < barrier.SYNC_WORDS
    kernel = pytest.importorskip("megakernel.kernel")
    numbers = [value.value for value in (kernel.DRAW, kernel.QKV, kernel.ATTEND, kernel.OUTPUT)]
    numbers += [value.value for value in (kernel.UP, kernel.DOWN, kernel.SCORE)]
    assert [barrier.STAGES[number - 1] for number in numbers] == list(barrier.STAGES)
    assert f"[$1 + {4 * barrier.FAULT}]" in barrier._MEET.value and str(barrier.PATIENCE) in barrier._MEET.value
