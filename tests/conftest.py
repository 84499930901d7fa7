"""Fixtures that many tests share: random checkpoints of the tiny preset, made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from backend.make_checkpoint import Kind, make_checkpoint

if TYPE_CHECKING:
    from tests.compiling import Compiling

if os.environ.get("OMP_NUM_THREADS") == "1":
    torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which nothing above does


COMPILING = pytest.StashKey["Compiling"]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Kernels that some test asks for begin to be compiled now, and those tests come last."""
    waiting = [item for item in items if "compiled" in getattr(item, "fixturenames", ())]
    if not waiting or config.option.collectonly:
        return
    from tests.compiling import Compiling

    items[:] = [item for item in items if item not in waiting] + waiting
    callspecs = [item.callspec for item in waiting if hasattr(item, "callspec")]
    config.stash[COMPILING] = Compiling(spec.params["case"] for spec in callspecs)


def pytest_unconfigure(config: pytest.Config) -> None:
    if COMPILING in config.stash:
        config.stash[COMPILING].close()


@pytest.fixture(scope="session")
def compiled(pytestconfig: pytest.Config) -> Compiling:
    """`compiled(case)` is what the frame kernel of that case takes of its GPU."""
    return pytestconfig.stash[COMPILING]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    """`tiny(kind)` is the directory of a tiny checkpoint of that kind; tests must not write to it."""
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda kind: make_checkpoint(root / kind, "tiny", kind))


@pytest.fixture
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in production: without a GPU there is no kernel."""
    if find_spec("triton") is not None:
        import triton.language as tl

        monkeypatch.setattr("megakernel.barrier.INTERPRETED", tl.constexpr(False))


@pytest.fixture(scope="session")
def recording() -> np.ndarray:
    """2.4 seconds of a made-up voice at 16 kHz, ``[n]`` float32."""
    time = np.arange(int(2.4 * 16000)) / 16000
    noise = np.random.default_rng(5).standard_normal(len(time))
    wave = 0.3 * np.sin(2 * np.pi * 180 * time * (1 + 0.1 * np.sin(3 * time))) + 0.02 * noise
    return wave.astype(np.float32)
