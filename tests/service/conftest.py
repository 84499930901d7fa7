"""The fixtures of the service's tests."""

from pathlib import Path

import pytest

from tests.service.engine_fixtures import deaf, engine, server, stand_in, still_server, tiny

__all__ = ["deaf", "engine", "server", "stand_in", "still_server", "tiny"]


@pytest.fixture(autouse=True)
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading an engine names a cache for the whole process: here only until the test's end."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(Path(tmp_path_factory.getbasetemp()) / "kernels"))
