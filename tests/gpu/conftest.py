"""Everything in this directory is marked ``gpu``, and skipped where there is no CUDA GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before the markers are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA GPU"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
