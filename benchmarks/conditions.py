"""What a figure was measured on: machine, software, commit, who else was busy, and what the machine can do.

The ceilings are measured in the same run as the figures: bytes read a second from memory, and multiplications
and additions a second in a matrix product. Knows nothing of the model. Settings of a GPU are read, never set.
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
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path("benchmarks") / "results"
BUFFER_BYTES = 1 << 30  # several times a large last-level cache
WATCH_SECONDS = 1.0
BUSY = 0.1  # share of the machine from which others' work spoils a figure

# What nvidia-smi is asked for, and the name of the answer in a record.
GPU_STATE = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "sm_clock_limit_mhz",
    "clocks.mem": "memory_clock_mhz",
    "clocks.max.mem": "memory_clock_limit_mhz",
    "power.limit": "power_limit_watts",
    "temperature.gpu": "celsius",
    "utilization.gpu": "utilization_percent",
}


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
        import psutil  # a run on a GPU does without it

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


class GpuConditions:
    """The conditions of a run on a GPU: ``machine`` is what that can do, measured before; ``parity`` and other
    ``facts`` about the run are recorded beside them. On a CPU, for dry runs, what concerns the GPU is left out.
    """

    def __init__(self, machine: Machine, device: torch.device, **facts: Any) -> None:
        self.machine, self.device, self.facts = machine, device, facts

    def record(self) -> dict[str, Any]:
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **commit(),
            **software(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            **gpu(self.device),
            **asdict(self.machine),
            **{name: value for name, value in self.facts.items() if value is not None},
        }


def gpu(device: torch.device) -> dict[str, Any]:
    """The device, its driver and the state of its clocks now."""
    if device.type != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        **gpu_state(f"GPU-{properties.uuid}"),
    }


def gpu_state(which: str) -> dict[str, Any]:
    """What nvidia-smi tells of the device of that identifier; nothing where it cannot be asked."""
    query = [f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader,nounits", f"--id={which}"]
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return {}
    answers = [answer.strip() for answer in done.stdout.strip().split(",")]
    return dict(zip(GPU_STATE.values(), map(_number, answers), strict=False))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # a version, or a state that this device does not have


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def hardware() -> dict[str, Any]:
    import psutil

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
