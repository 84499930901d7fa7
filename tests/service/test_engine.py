"""How a running engine comes out of settings: which one it is, what the log says, where compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backend import RequestError, Synthesizer
from service import engine as engine_module
from service.engine import load
from service.settings import Settings


def test_the_log_says_which_engine_makes_the_frames(tiny: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="qwen3_tts"), load(Settings(model=str(tiny), lanes=1)) as engine:
        assert engine.info()["engine"] == "twin"
    assert "frames are made by the twin, on cpu in" in caplog.text


@pytest.mark.usefixtures("no_interpreter")
def test_the_engine_of_the_settings_is_asked_for(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RequestError, match="cannot run here"):
        load(Settings(model=str(tiny), engine="kernel"))
    asked: list[str] = []

    def spy(*_args, engine: str, **_options):
        asked.append(engine)
        raise KeyboardInterrupt

    monkeypatch.setattr(Synthesizer, "from_pretrained", spy)
    for name in ("auto", "twin", "kernel"):
        with pytest.raises(KeyboardInterrupt):
            load(Settings(model=str(tiny), engine=name))  # type: ignore[arg-type]
    assert asked == ["auto", "twin", "kernel"]


@pytest.mark.parametrize("chosen", [None, "/somewhere/else"])
def test_compiled_kernels_are_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if chosen is None:
        monkeypatch.delenv("TRITON_CACHE_DIR")
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", chosen)
    engine_module._keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == (chosen or str(tmp_path / "qwen3-tts" / "triton"))
