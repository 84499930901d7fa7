"""Sections of a run on a GPU: each in a process of its own with a time limit, so that one that fails or hangs costs
the others nothing. Knows nothing of what a section measures.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.conditions import RESULTS, ROOT, GpuConditions, Machine
from benchmarks.report import Report

QUESTION = "is the frame kernel right, does it hold out, and how fast is it beside the others on this GPU?"
PASSED, FAILED, OVERRAN, SKIPPED, UNREACHED = "passed", "failed", "overran", "skipped", "not reached"
SKIP_STATUS = 5  # the exit status of a section that cannot run here
LEAST_SECONDS = 3.0  # a section is not begun with less
CHECKPOINT_SECONDS = 120.0


class SkippedError(Exception):
    """The section cannot run here, and why."""


@dataclass(frozen=True)
class Bench:
    """What the sections share, as plain values: they travel to the section's process as JSON.

    ``work`` is a directory of this run; ``model`` the checkpoint in it or elsewhere; ``out`` where results go.
    """

    work: str
    model: str
    device: str = "cuda"
    dry: bool = False
    out: str | None = None
    commit: str | None = None

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def note(self, name: str, value: Any) -> None:
        """Leave ``value`` for the sections that follow."""
        (Path(self.work) / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")

    def noted(self, name: str) -> Any:
        """What was left; None if nothing was."""
        path = Path(self.work) / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def machine(self) -> Machine:
        """The ceilings that the section "conditions" measured."""
        noted = self.noted("machine")
        if noted is None:
            raise SkippedError("the device was not measured")
        return Machine(**noted)

    @property
    def checkpoint(self) -> Path:
        """The checkpoint's directory; waits for it, as it is made while the first sections run."""
        end = time.monotonic() + CHECKPOINT_SECONDS
        while not Path(self.model).is_dir():
            if time.monotonic() > end:
                raise SkippedError(f"no checkpoint appeared as {self.model}")
            time.sleep(0.2)
        return Path(self.model)

    @property
    def results(self) -> Path:
        """No figure stands beside those of record unless parity was green in the same run."""
        directory = Path(self.out) if self.out else ROOT / RESULTS
        return directory / ("gpu.jsonl" if self.noted("parity") == PASSED else "gpu.unproved.jsonl")

    def report(self, machine: Machine | None = None) -> Report:
        parity = self.noted("parity") or "not run"
        facts = {"parity": parity, **({"commit": self.commit} if self.commit else {})}
        conditions = GpuConditions(machine or self.machine, self.torch_device, **facts)
        return Report("gpu", QUESTION, self.results, self.dry, conditions)


@dataclass(frozen=True)
class Section:
    """A part of the run that takes at most ``limit`` seconds."""

    name: str
    limit: float
    run: Callable[[Bench], None]


@dataclass(frozen=True)
class Outcome:
    name: str
    state: str
    seconds: float
    why: str = ""

    @property
    def good(self) -> bool:
        return self.state in (PASSED, SKIPPED)

    def __str__(self) -> str:
        return f"{self.name:14} {self.state:12} {self.seconds:6.1f} s  {self.why}"


def run_all(bench: Bench, sections: Sequence[Section], budget: float) -> list[Outcome]:
    """The sections in order until ``budget`` seconds are over; a dry run runs them in this process."""
    end, outcomes = time.monotonic() + budget, []
    run_one = run_here if bench.dry else run_apart
    for section in sections:
        left = end - time.monotonic()
        print(f"\n== {section.name}, at most {min(section.limit, left):.0f} s", flush=True)
        if left < LEAST_SECONDS:
            outcome = Outcome(section.name, UNREACHED, 0.0, f"the budget of {budget:.0f} s was spent")
        else:
            outcome = run_one(bench, section, min(section.limit, left))
        bench.note(section.name, outcome.state)
        outcomes.append(outcome)
        print(outcome, flush=True)
    return outcomes


def run_here(bench: Bench, section: Section, limit: float) -> Outcome:
    """In this process, where nothing can be stopped: a longer time than ``limit`` is only told."""
    start = time.monotonic()
    try:
        section.run(bench)
        state, why = PASSED, ""
    except SkippedError as error:
        state, why = SKIPPED, str(error)
    except Exception as error:  # noqa: BLE001  the other sections still run
        traceback.print_exc()
        state, why = FAILED, f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    return Outcome(section.name, OVERRAN if state == PASSED and seconds > limit else state, seconds, why)


def run_apart(bench: Bench, section: Section, limit: float) -> Outcome:
    """In a process of its own, which is killed with all that it started when ``limit`` seconds are over."""
    start = time.monotonic()
    call = [sys.executable, "-m", "benchmarks.gpu", "--section", section.name, "--bench", json.dumps(asdict(bench))]
    with subprocess.Popen(call, cwd=ROOT, start_new_session=True) as process:
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return Outcome(section.name, OVERRAN, time.monotonic() - start, f"stopped after {limit:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and all of its children have ended
                os.killpg(process.pid, signal.SIGKILL)
    state = {0: PASSED, SKIP_STATUS: SKIPPED}.get(status, FAILED)
    why = bench.noted(f"{section.name}.why") or ("" if state == PASSED else f"exit status {status}")
    return Outcome(section.name, state, time.monotonic() - start, why)


def answer(bench: Bench, section: Section) -> int:
    """The section in the process that was started for it; returns the exit status."""
    outcome = run_here(bench, section, float("inf"))
    bench.note(f"{section.name}.why", outcome.why)
    return {PASSED: 0, SKIPPED: SKIP_STATUS}.get(outcome.state, 1)
