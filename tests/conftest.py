"""Fixtures that many tests share: random checkpoints of the tiny preset, made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.make_checkpoint import Kind, make_checkpoint

if os.environ.get("OMP_NUM_THREADS") == "1":
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    """`tiny(kind)` is the directory of a tiny checkpoint of that kind; tests must not write to it."""
    root = tmp_path_factory.mktemp("checkpoints")
    return cache(lambda kind: make_checkpoint(root / kind, "tiny", kind))


@pytest.fixture(scope="session")
def recording() -> np.ndarray:
    """2.4 seconds of a made-up voice at 16 kHz, ``[n]`` float32."""
    time = np.arange(int(2.4 * 16000)) / 16000
    noise = np.random.default_rng(5).standard_normal(len(time))
    wave = 0.3 * np.sin(2 * np.pi * 180 * time * (1 + 0.1 * np.sin(3 * time))) + 0.02 * noise
    return wave.astype(np.float32)
