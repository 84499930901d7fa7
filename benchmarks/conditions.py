"""What a figure was measured on: machine, software, commit, who else was busy, and what the machine can do.

The ceilings are measured in the same run as the figures: bytes read a second from memory, and multiplications
and additions a second in a matrix product. Knows nothing of the model.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks") / "results"
BUFFER_BYTES = 1 << 30  # several times a large last-level cache
WATCH_SECONDS = 1.0
BUSY = 0.1  # share of the machine from which others' work spoils a figure


@dataclass(frozen=True)
class Machine:
    """What the hardware can do: ``bandwidth`` in bytes read a second, ``peak`` in operations a second by dtype."""

    bandwidth: float
    peak: dict[str, float]

    @classmethod
    def measure(cls, buffer_bytes: int) -> Machine:
        return cls(read_bandwidth(buffer_bytes), {name: matrix_peak(name) for name in ("float32", "bfloat16")})

    @classmethod
    def measure_apart(cls) -> Machine:
        """In a process of its own: a second set of OpenMP threads in this one would slow what is measured next."""
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as apart:
            return apart.submit(cls.measure, BUFFER_BYTES).result()


def read_bandwidth(buffer_bytes: int, repeats: int = 6) -> float:
    """Bytes a second at which all threads read ``buffer_bytes`` once: the best of several tries and two ways."""
    rows = torch.ones(buffer_bytes // 4096, 1024)
    vector = torch.ones(1024)
    ways: tuple[Callable[[], Any], ...] = (rows.sum, lambda: torch.mv(rows, vector))
    return rows.nbytes / min(_seconds(way) for _ in range(repeats) for way in ways)


def matrix_peak(dtype: str, width: int = 1024, repeats: int = 4) -> float:
    """Operations a second of a square matrix product, two for each multiplication: the best of several tries."""
    square = torch.ones(width, width, dtype=getattr(torch, dtype))
    return 2 * width**3 / min(_seconds(lambda: square @ square) for _ in range(repeats))


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Busy:
    """The share of the machine that other processes took since this object was made."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float:
        wall, busy, own = (now - then for now, then in zip(self._now(), self.start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float]:
        """Seconds: of the clock, of all processes (and of other guests of the host), of this one and its children."""
        system, own = psutil.cpu_times(), os.times()
        idle = system.idle + getattr(system, "iowait", 0.0)
        guests = getattr(system, "guest", 0.0) + getattr(system, "guest_nice", 0.0)  # counted in user and nice too
        return time.perf_counter(), sum(system) - idle - guests, sum(own[:4])


class Conditions:
    """Made before a run, asked for a record after it; both times others' work is warned of through ``warn``."""

    def __init__(self, warn: Callable[[str], None] = print) -> None:
        self.warn = warn
        self.before = self._watch()
        self.machine = Machine.measure_apart()
        self.during = Busy()

    def record(self) -> dict[str, Any]:
        """Plain values; ``others_before`` and ``others_during`` are shares of the machine."""
        during = self.during.share()
        self._warn_if_busy(during, "during")
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **commit(),
            **software(),
            **hardware(),
            "others_before": round(self.before, 3),
            "others_during": round(during, 3),
            **asdict(self.machine),
        }

    def _watch(self) -> float:
        watch = Busy()
        time.sleep(WATCH_SECONDS)
        share = watch.share()
        self._warn_if_busy(share, "before")
        return share

    def _warn_if_busy(self, share: float, when: str) -> None:
        if share > BUSY:
            self.warn(f"WARNING: other processes took {share:.0%} of the machine {when} the run: not for the record")


def hardware() -> dict[str, Any]:
    return {
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "last_level_cache": last_level_cache(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def software() -> dict[str, Any]:
    return {
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def cpu_model() -> str:
    """The processor's name where the system tells it, else its architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def last_level_cache() -> str | None:
    """Its size as the system writes it, such as ``32768K``."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return sizes[-1].read_text(encoding="ascii").strip() if sizes else None


def commit() -> dict[str, Any]:
    """The commit and whether the tree differs from it; results that a run has just written do not count."""
    head = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", f":!{RESULTS.as_posix()}")
    return {"commit": head, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None  # not a checkout, or no git
    return done.stdout.strip()
