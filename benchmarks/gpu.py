"""Is the frame kernel right, does it hold out, and how fast is it beside the others on this GPU?

Parity, soak and sanitizer, then figures of the kernel, of its twin eager and under a CUDA graph, and of other
implementations, all in one run. Every section has a time limit and a process of its own; what is worth most comes
first, and each writes its figures as soon as it has them. Without green parity they go to `gpu.unproved.jsonl`.

``--dry`` tries all of it on the CPU with a tiny model, the kernel in Triton's interpreter, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

BUDGET = 460.0  # seconds
ALWAYS = "conditions"  # every other section needs its ceilings


def main(arguments: list[str] | None = None) -> int:
    given = _options().parse_args(arguments)
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    from benchmarks.gpu_run import Bench, answer

    if given.section:
        bench = Bench(**json.loads(given.bench))
        return answer(bench, next(section for section in sections() if section.name == given.section))
    return _run(given)


def sections() -> list:
    """All sections in the order of their worth, with the most seconds that each may take."""
    from benchmarks import gpu_sections as g
    from benchmarks.gpu_run import Section
    from benchmarks.gpu_soak import soak

    return [
        Section(ALWAYS, 30, g.conditions),
        Section("parity", 170, g.parity),
        Section("compile", 120, g.compile_kernels),
        Section("frames", 100, g.frames),
        Section("peers", 150, g.peers),
        Section("soak", 90, soak),
        Section("parts", 50, g.parts),
        Section("first audio", 60, g.first_audio),
        Section("sanitizer", 60, g.sanitizer),
        Section("launches", 80, g.launches),
    ]


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", metavar="DIR", help="where the JSON lines go (benchmarks/results)")
    options.add_argument("--dry", action="store_true", help="a tiny model on the CPU; write nothing")
    options.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="of the whole run")
    options.add_argument("--only", nargs="+", metavar="NAME", help="these sections alone")
    options.add_argument("--model", metavar="DIR", help="a custom-voice checkpoint; without, one is made")
    options.add_argument("--commit", help="the commit that runs, where this directory is no checkout")
    options.add_argument("--section", help=argparse.SUPPRESS)
    options.add_argument("--bench", help=argparse.SUPPRESS)
    return options


def _run(given: argparse.Namespace) -> int:
    import torch

    from backend.make_checkpoint import make_checkpoint
    from benchmarks.gpu_run import Bench, run_all
    from benchmarks.gpu_sections import DRY, FULL

    chosen = _chosen(given.only)
    if not given.dry and not torch.cuda.is_available():
        print("there is no CUDA device; --dry runs on the CPU", file=sys.stderr)
        return 2
    preset = (DRY if given.dry else FULL).preset
    with (
        tempfile.TemporaryDirectory(prefix="gpu-bench-") as work,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as maker,
    ):
        model = given.model or str(Path(work) / preset)
        if not given.model:
            making = maker.submit(make_checkpoint, model, preset)  # meanwhile the first sections run
            making.add_done_callback(lambda made: made.exception() and print(f"no checkpoint: {made.exception()}"))
        device = "cpu" if given.dry else "cuda"
        bench = Bench(work, model, device, given.dry, given.out and str(Path(given.out).resolve()), given.commit)
        outcomes = run_all(bench, chosen, given.budget)
    print("\n" + "\n".join(map(str, outcomes)))
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _chosen(only: list[str] | None) -> list:
    every = sections()
    names = [section.name for section in every]
    unknown = set(only or []) - set(names)
    if unknown:
        raise SystemExit(f"no section {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return [section for section in every if not only or section.name in (*only, ALWAYS)]


if __name__ == "__main__":
    sys.exit(main())
