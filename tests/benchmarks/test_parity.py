"""The tests that need a GPU, as far as a CPU can try them: some of them dry, every time; all of them with `full`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernel is written in Triton")

from benchmarks.conditions import ROOT
from benchmarks.gpu_sections import FULL

FEW = "stages or graphs or precision or wide-float32-1 or (noise and not from_no) or (synthesizer and fault)"


def dry(*options: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *options, "tests/gpu"]
    environment = {**os.environ, "GPU_TESTS_DRY": "1", "TRITON_INTERPRET": "1"}
    return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_dry_run_of_some() -> None:
    done = dry("-k", FEW)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 35, done.stdout[-1000:]
    assert "seen on the way" in done.stdout and "cosine of hidden" in done.stdout


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_dry_run_of_all() -> None:
    done = dry()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    skipped = re.findall(r"SKIPPED \[\d+\] \S+: (.*)", done.stdout)
    assert set(skipped) == {"a CPU cannot stand in for the card"}


def test_without_a_gpu_all_are_skipped() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GPU_TESTS_DRY"}
    call = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "there is no CUDA GPU" in done.stdout, done.stdout[-3000:]
    assert "passed" not in done.stdout


def test_what_the_benchmarks_launch_is_compiled_once() -> None:
    code = "from tests.gpu.parity import FULL, ONE, POSITIONS; print(POSITIONS, ONE.lanes, FULL.lanes)"
    environment = {name: value for name, value in os.environ.items() if name != "GPU_TESTS_DRY"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(FULL.positions), str(min(FULL.lanes)), str(max(FULL.lanes))]
