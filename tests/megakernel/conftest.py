"""Triton's interpreter without its idle work, for every test here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if find_spec("triton") is None:
        yield
        return
    from tests.megakernel.interpreted_grid import quick_interpreter

    with quick_interpreter():
        yield
