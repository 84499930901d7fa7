"""The picture of frame times: of every bar the newest figure, of one device, beside its floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot

KERNEL = {"engine": "kernel", "size": "0.6b", "dtype": "bfloat16", "lanes": 1}


def line(value: float | None, date: str = "2026-01-01", gpu: str | None = "GPU one", **changed: Any) -> dict[str, Any]:
    setting = {name: changed.get(name, default) for name, default in KERNEL.items()}
    return {
        "figure": changed.get("figure", "frame"),
        "value": value,
        "spread": value and {"p5": value * 0.9, "p95": value * 1.2},
        "ceiling": changed.get("ceiling", {"value": 0.99, "basis": "floor"}),
        "setting": setting,
        "conditions": {"date": date, "cpu": "CPU one", **({"gpu": gpu} if gpu else {})},
    }


def test_bars_are_the_newest_of_one_device() -> None:
    lines = [
        line(9.0, "2026-01-03"),
        line(5.0, "2026-01-02"),
        line(2.0, "2026-01-02", lanes=16),
        line(30.0, engine="qwen-tts", size="0b6"),
        line(7.0, "2026-01-02", gpu="GPU two"),
        line(200.0, "2026-01-02", gpu=None, engine="twin"),
        line(None, "2026-01-04"),
        line(1.0, "2026-01-04", figure="codec, chunk of 1"),
    ]
    found = {(bar.engine, bar.group.replace("\n", " ")): bar for bar in plot.bars(lines)}
    assert {key: bar.value for key, bar in found.items()} == {
        ("kernel", "0.6b bfloat16 1 lane"): 9.0,
        ("kernel", "0.6b bfloat16 16 lanes"): 2.0,
        ("qwen-tts", "0.6b bfloat16 1 lane"): 30.0,
    }
    bar = found["kernel", "0.6b bfloat16 1 lane"]
    assert (bar.least, bar.most, bar.floor) == pytest.approx((8.1, 10.8, 0.99))
    assert [bar.value for bar in plot.bars(lines, "GPU two")] == [7.0]
    assert [bar.value for bar in plot.bars(lines, "CPU one")] == [200.0]
    assert plot.bars([]) == []


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    results, out = tmp_path / "gpu.jsonl", tmp_path / "made" / f"frame.{suffix}"
    lines = [line(1.5), line(6.0, engine="graphed twin"), line(90.0, engine="another", ceiling=None)]
    results.write_text("".join(json.dumps(one) + "\n" for one in lines))
    plot.main(["--results", str(results), "--out", str(out)])
    assert "3 bars of GPU one" in capsys.readouterr().out
    if suffix == "svg":
        text = out.read_text()
        for label in ("kernel", "graphed twin", "another", "floor", "GPU one", "0.6b", "1 lane"):
            assert f"<!-- {label} -->" in text, label
    else:
        assert out.read_bytes().startswith(b"\x89PNG")


def test_figures_without_parity_are_drawn_only_if_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "ROOT", tmp_path)
    monkeypatch.setattr(plot, "RESULTS", Path("results"))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "gpu.unproved.jsonl").write_text(json.dumps(line(1.0)) + "\n")
    with pytest.raises(SystemExit, match="no frame was measured"):
        plot.main(["--out", str(tmp_path / "frame.svg")])
    plot.main(["--results", str(tmp_path / "results" / "gpu.unproved.jsonl"), "--out", str(tmp_path / "frame.svg")])
    assert (tmp_path / "frame.svg").is_file()
