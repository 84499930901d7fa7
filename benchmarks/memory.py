"""How much memory does the process take at most, and does it grow with the utterances?

Each answer comes from a fresh process that loads the checkpoint and speaks; nothing else has run in it. The bound
on the peak is 1.3 times the bytes of the weights as stored plus 0.5 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.conditions import ROOT
from benchmarks.options import checkpoint_directory, made_checkpoint, parser, quiet, report, setting, speech_request
from benchmarks.report import Ceiling, Report

QUESTION = "how much memory does the process take at most, and does it grow with the utterances?"
TIMES_WEIGHTS, BESIDE_BYTES = 1.3, 0.5e9
SETTLED = 20  # utterances after which the allocator has what it needs
PAGES_BYTES = 1e6  # what an allocator may still move between two readings


def status_bytes(field: str) -> int:
    """``VmHWM`` (peak) or ``VmRSS`` of this process; without /proc, the peak that the system keeps."""
    path = Path("/proc/self/status")
    if path.is_file():
        lines = path.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def speak(directory: Path, dtype: str | None, utterances: int, frames: int) -> dict[str, Any]:
    """Load and speak in this process: its peak, the resident bytes after each utterance, the weights as stored."""
    from backend import Synthesizer

    quiet()
    resident = []
    with Synthesizer.from_pretrained(directory, dtype=dtype) as synthesizer:
        loaded = status_bytes("VmHWM")
        for seed in range(utterances):
            for _ in synthesizer.stream(speech_request(synthesizer, seed, frames)):
                pass
            resident.append(status_bytes("VmRSS"))
        return {
            "peak": status_bytes("VmHWM"),
            "loaded": loaded,
            "resident": resident,
            "weights": synthesizer.info()["weight_bytes"],
            "setting": setting(synthesizer, lanes=synthesizer.lanes, utterances=utterances, frames=frames),
        }


def in_fresh_process(directory: Path, dtype: str | None, utterances: int, frames: int) -> dict[str, Any]:
    """`speak` in a process of its own."""
    call = json.dumps([str(directory.resolve()), dtype, utterances, frames])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--speak", call],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def add_peak(result: Report, found: dict[str, Any]) -> None:
    where, weights = found["setting"], found["weights"]
    bound = Ceiling((TIMES_WEIGHTS * weights + BESIDE_BYTES) / 1e6, f"bound, 1.3 x {weights / 1e6:.0f} MB + 500 MB")
    result.title(**where)
    result.add("peak", found["peak"] / 1e6, "MB", bound, **where)
    result.add("peak while loading", found["loaded"] / 1e6, "MB", bound, **where)


def add_growth(result: Report, found: dict[str, Any]) -> None:
    """Resident bytes after the last utterance less those after the first ones."""
    where, resident = found["setting"], found["resident"]
    result.title(**where)
    settled = min(SETTLED, len(resident) // 2)
    growth = (resident[-1] - resident[settled]) / 1e6
    bound = Ceiling(PAGES_BYTES / 1e6, "bound, what an allocator may move")
    result.add(f"growth after {settled} utterances", growth, "MB", bound, **where)


def main(arguments: list[str] | None = None) -> None:
    options = parser(QUESTION)
    options.add_argument("--frames", type=int, default=10, help="the longest that an utterance may be")
    options.add_argument("--utterances", type=int, default=200, help="how many are spoken in a row, by the tiny preset")
    options.add_argument("--speak", type=json.loads, help=argparse.SUPPRESS)
    given = options.parse_args(arguments)
    if given.speak:
        directory, *rest = given.speak
        print(json.dumps(speak(Path(directory), *rest)))
        return
    directory = checkpoint_directory(given)
    with report("memory", QUESTION, given) as result:
        for dtype in given.dtype or [None]:  # None: as it is stored
            add_peak(result, in_fresh_process(directory, dtype, 1, given.frames))
        add_growth(result, in_fresh_process(made_checkpoint("tiny"), None, given.utterances, given.frames))


if __name__ == "__main__":
    main()
