"""The benchmarks on a tiny model: the schema of their lines, figures that can be true, and the arithmetic by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from backend import Synthesizer
from backend.checkpoint import Checkpoint, tensor_table
from backend.config import ModelConfig
from benchmarks import conditions, frame, memory, options, reference, stream
from benchmarks.conditions import Conditions, Machine
from benchmarks.floors import Floors, Work
from benchmarks.frame import PartClock, time_frames
from benchmarks.reference import Marks, ramp_sizes
from benchmarks.report import Ceiling, Report, Spread
from benchmarks.stream import Arrival, audible_first_audio, longest_gap, playback, underrun
from tests.released import codec_config, model_config, write_configs

RATE = 1000  # samples a second of the timelines below
MACHINE = Machine(bandwidth=2e9, peak={"float32": 1e9, "bfloat16": 0.5e9})
Line = dict[str, Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is measured in no time; nothing is proved here about its speed."""
    monkeypatch.setattr(conditions, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(conditions, "BUFFER_BYTES", 1 << 24)


@pytest.fixture
def lines(tiny, tmp_path: Path) -> Callable[..., list[Line]]:
    """Run a benchmark on the tiny model and read what it wrote."""

    def run(main: Callable[[list[str]], None], *arguments: str) -> list[Line]:
        out = tmp_path / "results" / "lines.jsonl"
        main(["--model", str(tiny("custom_voice")), "--out", str(out), *arguments])
        written = [json.loads(line) for line in out.read_text().splitlines()]
        for line in written:
            check_schema(line)
        return written

    return run


def find(found: list[Line], figure: str, **setting: Any) -> Line:
    """The one line of that figure and setting."""
    (line,) = [line for line in found if line["figure"] == figure and setting.items() <= line["setting"].items()]
    return line


def value(found: list[Line], figure: str, **setting: Any) -> float:
    return find(found, figure, **setting)["value"]


def check_schema(line: Line) -> None:
    assert list(line) == [
        *("benchmark", "question", "figure", "value", "unit", "spread", "ceiling", "setting", "conditions")
    ]
    assert line["question"].endswith("?") and line["unit"] in {"ms", "1/s", "s/s", "MB", "x"}
    assert math.isfinite(line["value"])
    if line["spread"] is not None:
        spread = line["spread"]
        assert spread["least"] <= spread["p5"] <= line["value"] <= spread["p95"] <= spread["most"]
        assert spread["count"] >= 1
    if line["ceiling"] is not None:
        assert set(line["ceiling"]) == {"value", "basis"} and line["ceiling"]["basis"]
        if line["ceiling"]["basis"].startswith("floor"):
            assert 0 < line["ceiling"]["value"] <= line["value"], line["figure"]
        if line["ceiling"]["basis"].startswith("bound"):
            assert line["value"] <= line["ceiling"]["value"], line["figure"]
    assert {"kind", "size", "dtype", "weights", "lanes"} <= set(line["setting"])
    check_conditions(line["conditions"])


def check_conditions(record: Line) -> None:
    named = {"date", "commit", "dirty", "cpu", "cores", "threads", "torch", "python", "others_before", "others_during"}
    assert named <= set(record)
    assert record["torch"] == torch.__version__ and record["threads"] == torch.get_num_threads()
    assert record["bandwidth"] > 1e8 and min(record["peak"].values()) > 1e8


def test_frame(lines) -> None:
    found = lines(frame.main, "--dtype", "float32", "--lanes", "1,2", "--frames", "5", "--sizes", "1,3")
    for lanes in (1, 2):
        parts = [value(found, part, lanes=lanes) for part in ("talker", "predictor", "heads", "sampling", "rest")]
        whole = value(found, "frame", lanes=lanes)
        assert 0 < min(parts) <= max(parts) <= whole  # they add up in each frame, not in their medians
        frames = value(found, "frames a second", lanes=lanes)
        assert frames == pytest.approx(lanes * 1000 / whole)
        assert value(found, "codes a second", lanes=lanes) == pytest.approx(16 * frames)
        assert value(found, "codec, chunk of 3", lanes=lanes, frames=3) > 0
    assert find(found, "frame", lanes=2)["spread"]["count"] == 5


def test_stream(lines) -> None:
    found = lines(stream.main, "--utterances", "2", "--frames", "8", "--lanes", "1,2")
    for lanes in (1, 2):
        assert value(found, "audible first audio", lanes=lanes) >= value(found, "first audio", lanes=lanes)
        assert value(found, "underrun", lanes=lanes) >= 0 and value(found, "RTF", lanes=lanes) > 0
        assert value(found, "resident memory, largest", lanes=lanes) > 50
        assert find(found, "RTF", lanes=lanes)["spread"]["count"] == 2 * lanes


def test_memory(lines, monkeypatch: pytest.MonkeyPatch, tiny) -> None:
    monkeypatch.setattr(memory, "made_checkpoint", lambda preset: tiny("custom_voice"))
    found = lines(memory.main, "--utterances", "6", "--frames", "3")
    weights = Checkpoint(tiny("custom_voice")).stored_bytes("talker.", "predictor.", "text.", "codec.")
    assert find(found, "peak")["ceiling"]["value"] == pytest.approx((1.3 * weights + 0.5e9) / 1e6)
    assert value(found, "peak") >= value(found, "peak while loading") > weights / 1e6
    assert find(found, "growth after 3 utterances")["setting"]["utterances"] == 6


def test_reference(lines, capfd: pytest.CaptureFixture[str]) -> None:
    found = lines(reference.main, "--frames", "4", "--runs", "1", "--chunks", "1", "--dtype", "float32")
    chunks = [f"codec, chunks of {size}, a frame" for size in (1, 2, 4, 8)]
    for name in ["frame", "first audio", *chunks, "codec, an utterance, a frame"]:
        ratio = value(found, f"{name}, qwen-tts") / value(found, f"{name}, ours")
        assert value(found, f"{name}, ratio") == pytest.approx(ratio)
        assert find(found, f"{name}, ratio")["ceiling"]["value"] >= ratio
    assert {find(found, f"frame, {side}")["spread"]["count"] for side in ("ours", "qwen-tts")} == {4}
    assert value(found, "first audio, qwen-tts") > 4 * value(found, "frame, qwen-tts")
    assert "flash-attn" not in capfd.readouterr().out


def test_the_better_dtype_of_each_is_compared(lines) -> None:
    dtypes = ("bfloat16", "float32")
    found = lines(reference.main, "--frames", "3", "--runs", "1", "--chunks", "1", "--dtype", ",".join(dtypes))
    mine, reference_ = (min(value(found, f"frame, {side}", dtype=d) for d in dtypes) for side in ("ours", "qwen-tts"))
    assert value(found, "frame, better dtype of each, ratio") == pytest.approx(reference_ / mine)


def test_dry_writes_nothing_and_an_error_neither(tmp_path: Path) -> None:
    for dry, error in ((True, None), (False, RuntimeError)):
        out = tmp_path / "out.jsonl"
        try:
            with Report("stream", "?", out, dry) as result:
                result.add("figure", 1.0, "ms")
                if error:
                    raise error
        except RuntimeError:
            pass
        assert not out.exists()


def test_lines_are_appended(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    for number in (1.0, None):
        with Report("stream", "?", out) as result:
            result.add("figure", number, "ms", Ceiling(0.5, "floor"), lanes=1)
            result.add_many("several", [], "ms")
    figures = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["value"] for line in figures] == [1.0, None, None, None]


def test_spread() -> None:
    assert Spread.of([float(n) for n in range(101)]) == Spread(5.0, 95.0, 0.0, 100.0, 101)


def test_a_busy_machine_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(conditions.Busy, "share", lambda self: 0.4)
    record = Conditions(said.append).record()
    assert record["others_before"] == record["others_during"] == 0.4
    assert [("40%" in line, line.split(" the run")[0].split()[-1]) for line in said] == [
        (True, "before"),
        (True, "during"),
    ]


def test_own_work_is_not_others_work() -> None:
    busy = conditions.Busy()
    times = iter([(10.0, 100.0, 7.0), (14.0, 103.0, 9.0)])  # seconds: clock, all processes, this one
    busy._now = lambda: next(times)  # type: ignore[method-assign]
    busy.start = busy._now()
    assert busy.share() == pytest.approx((3.0 - 2.0) / (4.0 * (conditions.os.cpu_count() or 1)))


def arrivals(*chunks: tuple[float, int], level: float = 0.5) -> list[Arrival]:
    """Chunks as (seconds, samples) of a constant level."""
    return [Arrival(seconds, np.full(samples, level, dtype=np.float32)) for seconds, samples in chunks]


@pytest.mark.parametrize(
    ("chunks", "stood_still", "gap"),
    [
        (((0.3, 100),), 0.0, 0.0),
        (((0.3, 100), (0.35, 200), (0.5, 100)), 0.0, 0.15),  # each there before the one before it is over
        (((0.3, 100), (0.5, 200)), 0.1, 0.2),  # over at 0.4, the next 0.1 s late
        (((0.3, 100), (0.5, 200), (0.65, 100), (1.0, 100)), 0.1 + 0.2, 0.35),  # 0.8 is over at 0.8: 0.2 s late
        (((0.1, 1000), (1.0, 100), (1.4, 100)), 0.2, 0.9),  # a long gap that nobody hears, a short one that all do
    ],
)
def test_underrun_and_longest_gap(chunks, stood_still: float, gap: float) -> None:
    timeline = arrivals(*chunks)
    assert underrun(timeline, RATE) == pytest.approx(stood_still, abs=1e-9)
    assert longest_gap(timeline) == pytest.approx(gap)


def test_playback_waits_for_chunks_and_for_the_one_before() -> None:
    assert playback(arrivals((0.3, 100), (0.35, 200), (0.9, 100)), RATE) == pytest.approx([0.3, 0.4, 0.9])


def test_audible_first_audio_is_when_the_first_loud_window_sounds() -> None:
    quiet, loud = np.full(10, 0.003, np.float32), np.full(10, 0.0033, np.float32)  # -50.5 and -49.6 dBFS
    chunks = [
        Arrival(0.3, np.concatenate([quiet, quiet])),
        Arrival(0.31, np.concatenate([quiet, loud, loud])),  # sounds from 0.32, when the first is over
    ]
    assert audible_first_audio(chunks, RATE) == pytest.approx(0.33)
    assert audible_first_audio(chunks[:1], RATE) is None
    assert audible_first_audio([Arrival(0.2, loud)], RATE) == pytest.approx(0.2)
    assert audible_first_audio(arrivals((0.2, 100), level=-0.5), RATE) == pytest.approx(0.2)


def test_frames_are_timed_without_the_codec() -> None:
    marks = Marks(steps=[1.0, 1.5, 2.5, 2.75], codec=[(1.6, 1.9), (2.0, 2.1), (2.8, 3.0)])
    assert marks.frame_seconds() == pytest.approx([0.5, 0.6, 0.25])


def test_ramp_sizes() -> None:
    assert ramp_sizes((1, 2, 4, 8), 24) == [1, 2, 4, 8, 8, 8]
    assert ramp_sizes((1, 2, 4, 8), 15) == [1, 2, 4, 8]


def test_parts_add_up_to_the_frame(tiny) -> None:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=2) as synthesizer:
        for parts in time_frames(synthesizer, [0, 1], frames=3):
            whole = parts.pop("frame")
            assert set(parts) == {"talker", "predictor", "heads", "sampling", "rest"}
            assert sum(parts.values()) == pytest.approx(whole) and parts["rest"] > 0
        assert synthesizer.decoder.talk.__name__ == "talk", "the clock was left in the decoder"


def test_the_clock_starts_anew_with_every_frame() -> None:
    clock = PartClock()
    assert clock.wrap("part", lambda x, y: x + y)(1, y=2) == 3
    assert set(clock.take()) == {"part"} and clock.take() == {}


def test_work_takes_as_long_as_its_slower_half() -> None:
    assert Work(reads=2_000, operations=10).seconds(MACHINE) == pytest.approx(1e-6)
    assert Work(reads=2_000, operations=5_000).seconds(MACHINE) == pytest.approx(5e-6)
    assert Work(operations=5_000, dtype="bfloat16").seconds(MACHINE) == pytest.approx(5e-6)
    assert (Work(1, 2) + Work(3, 4) * 2) == Work(7, 10)


@pytest.mark.parametrize(("size", "talker", "whole"), [("0b6", 0.88, 3.31), ("1b7", 2.82, 5.32)])
def test_bytes_of_a_frame_of_the_released_shapes(tmp_path: Path, size: str, talker: float, whole: float) -> None:
    """GB in bfloat16, worked out by hand from the released shapes: 28 layers, then 15 passes over 5.

    On 1.7B each of those passes starts with the projection to the predictor's width.
    """
    write_configs(tmp_path, model_config(size), codec_config())
    config = ModelConfig.read(tmp_path)
    shapes = {name: entry.shape for name, entry in tensor_table(config).items()}
    floors = Floors(shapes, config.spec, "bfloat16")
    assert floors.parts()["talker"].reads / 1e9 == pytest.approx(talker, abs=0.01)
    assert floors.frame().reads / 1e9 == pytest.approx(whole, abs=0.01)
    assert floors.frame(4).reads == floors.frame().reads
    assert floors.frame(4).operations == 4 * floors.frame().operations


def test_operations_of_the_codec_are_those_that_qwen_tts_makes(tiny) -> None:
    from tests.reference import qwen_tts

    directory, frames = tiny("custom_voice"), 5
    decoder = qwen_tts.Qwen3TTSTokenizer.from_pretrained(str(directory / "speech_tokenizer")).model.decoder
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        decoder(torch.zeros(1, 16, frames, dtype=torch.int64))
    counted = counter.get_total_flops()
    ours = Floors.of(Checkpoint(directory), "float32").codec(frames).operations
    assert 0.9 * counted < ours <= counted, "attention and the codebooks' projections are all that may be missing"


def test_options_refuse_what_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--dtype", "int3"], ["--preset", "huge"], ["--lanes", "0"]):
        with pytest.raises(SystemExit):
            frame.main(arguments)
    assert "int3" in capsys.readouterr().err


def test_a_preset_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = options.made_checkpoint("tiny")
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert options.made_checkpoint("tiny") == made and tmp_path in made.parents
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_checkpoint_without_voices_is_refused(tiny) -> None:
    with (
        Synthesizer.from_pretrained(tiny("voice_design"), lanes=1) as synthesizer,
        pytest.raises(SystemExit, match="no named voice"),
    ):
        options.speech_request(synthesizer, seed=0, frames=1)
