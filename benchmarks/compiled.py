"""What does the frame kernel take of a GPU, target by target, as its compiler left it?

Compiles the kernel ahead of time for every target, size, weight format and number of lanes (a few without ``--all``),
which
needs no GPU, and writes registers, spills and shared memory into the table of docs/kernel.md. Compiled kernels stay
in Triton's cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from benchmarks.conditions import ROOT
from benchmarks.drawn import SPECS
from megakernel.ahead import REGISTER_FILE, TARGETS, Compiled, compile_ahead
from megakernel.plan import LANES

TABLE = "docs/kernel.md"
BEGIN, END = "<!-- compiled: begin -->\n", "<!-- compiled: end -->\n"
# Bytes of stack a thread, at most: none for one lane of the small model on Hopper and Blackwell. Many lanes hold more
# values over a layer than there are registers, and the large model has more tiles to sum.
STACK = {"0.6b": 128, "1.7b": 512}
# 16-byte loads right before the arrivals at the barriers, at least; it is less than half of this when the compiler has
# moved the tiles' way to the tensor cores in front of the barriers (docs/notebook.md)
REQUESTED = 100


@dataclass(frozen=True)
class Case:
    size: str
    weight_format: str
    lanes: int
    capability: int


FEW = [
    Case("0.6b", "bfloat16", 1, 90),
    Case("0.6b", "bfloat16", 16, 90),
    Case("0.6b", "q8_0", 1, 90),
    Case("0.6b", "bfloat16", 1, 120),
    Case("0.6b", "bfloat16", 16, 120),
]


def every_case() -> list[Case]:
    return [Case(*case) for case in product(("0.6b", "1.7b"), ("bfloat16", "q8_0"), LANES, TARGETS)]


def complaints(case: Case, compiled: Compiled) -> list[str]:
    """What is wrong with a compiled kernel; nothing if it fits its target."""
    target = TARGETS[case.capability]
    room = REGISTER_FILE // (32 * compiled.warps)
    spare = case.capability >= 90 and (case.lanes, case.size) == (1, "0.6b")
    allowed = 0 if spare else STACK[case.size]
    checks = {
        f"{compiled.registers} registers a thread of {room}": compiled.registers <= room,
        f"{compiled.stack} bytes of stack of {allowed}": compiled.stack <= allowed,
        f"{compiled.shared_bytes} bytes of shared memory of {target.shared_bytes}": compiled.shared_bytes
        <= target.shared_bytes,
        f"{compiled.requested} 16-byte loads before barriers of {REQUESTED}": compiled.requested >= REQUESTED,
    }
    return [complaint for complaint, fine in checks.items() if not fine]


def compile_cases(cases: list[Case], jobs: int) -> Iterator[tuple[Case, Compiled]]:
    """Compile in processes of their own, where Triton is imported without its interpreter."""
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            yield from zip(cases, pool.map(compile_case, cases), strict=True)
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def compile_case(case: Case) -> Compiled:
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what a launch does today, said aloud
    return compile_ahead(SPECS[case.size], case.weight_format, case.lanes, case.capability)


def table(results: list[tuple[Case, Compiled]]) -> str:
    """The results as a table in Markdown."""
    names = ["target", "size", "weights", "lanes", "programs × threads", "registers", "stack B", "spill instr."]
    names += ["shared KB", "instr.", "16-byte loads", "before a barrier"]
    lines = [names, ["---"] * 3 + ["---:"] * (len(names) - 3), *(_row(case, compiled) for case, compiled in results)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _row(case: Case, c: Compiled) -> list[str]:
    target = f"{case.capability} ({TARGETS[case.capability].example})"
    programs = f"{c.programs} × {c.warps * 32}"
    shared = f"{c.shared_bytes / 1024:.0f}"
    counts = [c.registers, c.stack, c.spills, shared, c.instructions, c.wide_loads, c.requested]
    return [str(cell) for cell in (target, case.size, case.weight_format, case.lanes, programs, *counts)]


def write_table(path: Path, text: str) -> None:
    """Replace what stands between the marks in ``path``. Raises ``ValueError`` if they are missing."""
    document = path.read_text(encoding="utf-8")
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} does not hold the marks {BEGIN.strip()} and {END.strip()}")
    path.write_text(before + begin + text + end + after, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--all", action="store_true", help="every case, not a few")
    options.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    options.add_argument("--write", action="store_true", help=f"write the table into {TABLE}")
    given = options.parse_args(arguments)
    cases = every_case() if given.all else FEW
    start = time.monotonic()
    bar = tqdm(compile_cases(cases, given.jobs), total=len(cases), desc="compiling", disable=not sys.stderr.isatty())
    results = list(bar)
    print(table(results), end="")
    print(f"{len(cases)} kernels in {time.monotonic() - start:.0f} s")
    wrong = [f"{case}: {complaint}" for case, compiled in results for complaint in complaints(case, compiled)]
    print("\n".join(wrong))
    if given.write:
        write_table(ROOT / TABLE, table(results))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
