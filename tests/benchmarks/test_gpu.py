"""The run on a GPU, as far as a CPU can try it: all of it dry, its schedule, and the arithmetic of its figures."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from backend.checkpoint import Checkpoint, tensor_table
from backend.codec import Codec
from backend.config import ModelConfig
from benchmarks import conditions, device, gpu, gpu_sections, gpu_soak
from benchmarks.conditions import ROOT, GpuConditions, Machine
from benchmarks.drawn import SPECS, DrawnWeights, tensor_shapes
from benchmarks.floors import Floors
from benchmarks.gpu_engines import Engine, draw_weights
from benchmarks.gpu_run import FAILED, OVERRAN, PASSED, SKIPPED, UNREACHED, Bench, Section, SkippedError, run_all
from benchmarks.gpu_run import run_apart as run_apart_
from benchmarks.gpu_sections import DRY, FULL, scale
from benchmarks.gpu_soak import Company, Watchdog
from megakernel import Decoder, KernelFaultError, pack_decoder
from tests.released import codec_config, model_config, write_configs

CPU = torch.device("cpu")
MACHINE = Machine(bandwidth=2e9, peak={"float32": 1e9, "bfloat16": 0.5e9})


@pytest.fixture
def bench(tmp_path: Path, tiny) -> Bench:
    (tmp_path / "work").mkdir()
    return Bench(str(tmp_path / "work"), str(tiny("custom_voice")), "cpu", dry=True, out=str(tmp_path / "results"))


@pytest.mark.timeout(300)  # all that the run has, and the kernel in an interpreter
def test_a_dry_run_tries_every_section_and_writes_nothing(tmp_path: Path, tiny) -> None:
    model, out = str(tiny("custom_voice")), tmp_path / "results"
    call = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--model", model, "--out", str(out)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # other libraries leave things there
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = done.stdout.splitlines()[-len(gpu.sections()) :]
    names = [section.name for section in gpu.sections()]
    states = {name: line.removeprefix(name).split()[0] for name, line in zip(names, table, strict=True)}
    assert states == dict.fromkeys(names, PASSED) | dict.fromkeys(["parity", "compile", "sanitizer"], SKIPPED)
    for engine in ("kernel", "graphed twin", "twin"):
        assert f"engine {engine}, size small" in done.stdout, f"{engine} was not timed"
    assert not out.exists() and list(tmp_path.glob("gpu-bench-*")) == [], "something was left behind"


@pytest.mark.timeout(300)
def test_what_a_sanitizer_watches_runs() -> None:
    call = [sys.executable, "-m", "benchmarks.gpu_short", "--device", "cpu", "--formats", "float32"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("float32: [["), done.stderr[-3000:]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "--dry" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no section nonsense"):
        gpu.main(["--only", "nonsense"])


def test_only_some_sections_and_always_the_conditions() -> None:
    assert [section.name for section in gpu._chosen(["soak"])] == ["conditions", "soak"]
    assert [section.name for section in gpu._chosen(None)][:2] == ["conditions", "parity"]


# The schedule.


def fail(bench: Bench) -> None:
    raise RuntimeError("broken")


def skip(bench: Bench) -> None:
    raise SkippedError("not here")


def test_a_section_that_fails_stops_no_other(bench, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []
    sections = [
        Section("one", 10, fail),
        Section("two", 10, lambda bench: ran.append("two")),
        Section("three", 10, skip),
        Section("four", -1, lambda bench: None),
    ]
    outcomes = run_all(bench, sections, 100)
    assert [outcome.state for outcome in outcomes] == [FAILED, PASSED, SKIPPED, OVERRAN]
    assert [outcome.good for outcome in outcomes] == [False, True, True, False]
    assert ran == ["two"] and "broken" in outcomes[0].why and outcomes[2].why == "not here"
    assert bench.noted("one") == FAILED and bench.noted("two") == PASSED and bench.noted("five") is None
    capsys.readouterr()


def test_what_the_budget_does_not_reach_is_told(bench) -> None:
    (outcome,) = run_all(bench, [Section("late", 10, fail)], 1)
    assert outcome.state == UNREACHED and not outcome.good


def test_a_section_runs_in_a_process_of_its_own(bench) -> None:
    done = run_apart_(bench, Section("conditions", 100, fail), 100)  # it is found by its name there
    assert done.state == PASSED, done
    assert bench.machine.bandwidth > 1e8 and set(bench.machine.peak) == {"float32", "bfloat16"}
    skipped = run_apart_(bench, Section("parity", 100, fail), 100)
    assert (skipped.state, skipped.why) == (SKIPPED, "its tests need a CUDA device")
    failed = run_apart_(bench, Section("no such section", 100, fail), 100)
    assert (failed.state, failed.why) == (FAILED, "exit status 1")
    assert run_apart_(bench, Section("conditions", 0.1, fail), 0.1).state == OVERRAN


def test_a_section_that_overruns_is_ended(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*arguments, **named):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    begin = time.monotonic()
    assert run_apart_(bench, Section("conditions", 0.2, fail), 0.2).state == OVERRAN
    assert started[0].poll() is not None and time.monotonic() - begin < 10


@pytest.mark.parametrize("state", [None, PASSED, FAILED, SKIPPED])
def test_figures_are_of_record_only_beside_green_parity(bench, state) -> None:
    bench.note("machine", asdict(MACHINE))
    if state:
        bench.note("parity", state)
    proved = Path(bench.out) / "gpu.jsonl"
    assert (bench.results == proved) == (state == PASSED)
    assert bench.report()._given.record()["parity"] == (state or "not run")  # type: ignore[union-attr]


def test_figures_are_written_as_they_come_and_once(bench, tmp_path: Path) -> None:
    bench = Bench(bench.work, bench.model, "cpu", out=bench.out, commit="abc")
    bench.note("machine", asdict(MACHINE))
    with contextlib.suppress(RuntimeError), bench.report() as result:
        result.add("one", 1.0, "ms")
        result.write()
        result.add("two", 2.0, "ms")
        result.write()
        result.add("three", 3.0, "ms")
        raise RuntimeError
    lines = [json.loads(line) for line in bench.results.read_text().splitlines()]
    assert [line["figure"] for line in lines] == ["one", "two"]
    record = lines[0]["conditions"]
    assert record["commit"] == "abc" and record["bandwidth"] == 2e9 and record["torch"] == torch.__version__


def test_sections_wait_for_the_checkpoint(bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Bench(bench.work, str(tmp_path / "late"), "cpu", dry=True)
    threading.Timer(0.3, (tmp_path / "late").mkdir).start()
    assert late.checkpoint == tmp_path / "late"
    monkeypatch.setattr("benchmarks.gpu_run.CHECKPOINT_SECONDS", 0.1)
    with pytest.raises(SkippedError, match="never"):
        _ = Bench(bench.work, str(tmp_path / "never"), "cpu").checkpoint


def test_the_scale_of_a_dry_run(bench) -> None:
    assert scale(bench) is DRY and scale(Bench("", "")) is FULL
    assert max(FULL.prompts) <= FULL.positions and FULL.prompt + 2 * (FULL.frames + FULL.warm_up) <= FULL.positions


# Times, speeds and conditions.


def test_warm_up_is_not_counted() -> None:
    calls: list[int] = []
    for measure in (device.spans, device.waits):
        assert len(measure(lambda: calls.append(1), 5, CPU, warm_up=3)) == 5
    assert len(calls) == 16


def test_a_copy_counts_what_it_reads_and_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "spans", lambda work, repeats, device: [work() is None or 0.5] * repeats)
    assert set(device.copy_speeds(CPU, 1 << 20)) == {2 * (1 << 20) / 0.5}
    assert set(device.read_speeds(CPU, 1 << 20)) == {(1 << 20) / 0.5}
    assert set(device.matrix_speeds(CPU, "float32", 8)) == {2 * 8**3 / 0.5}


def test_the_state_of_a_gpu_is_asked_for_and_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\necho "$@" > "$0.asked"\necho "580.1, 345, 1980, 3201, 3201, 700.00, 31, 0"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = conditions.gpu_state("GPU-1")
    assert found["driver"] == 580.1 and found["sm_clock_limit_mhz"] == 1980 and found["utilization_percent"] == 0
    asked = (tmp_path / "nvidia-smi.asked").read_text().split()
    assert [word.partition("=")[0] for word in asked] == ["--query-gpu", "--format", "--id"]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert conditions.gpu_state("GPU-1") == {}
    assert conditions.gpu(CPU) == {} and "gpu" not in GpuConditions(MACHINE, CPU).record()


# The engines.


@dataclass
class Recorded:
    """Engines that note what is called, in place of those of `Case`."""

    calls: list[str]

    def __call__(self, weights, lanes: int, prompt: int, positions: int) -> Recorded:
        return self

    def kernel(self) -> Engine:
        return self.engine("kernel")

    def graphed(self) -> Engine:
        return self.engine("graphed twin")

    def twin(self) -> Engine:
        raise ValueError("broken")

    def engine(self, name: str) -> Engine:
        def call(what: str) -> torch.Tensor:
            self.calls.append(f"{name}: {what}")
            return torch.zeros(1)

        parts = {part: partial(call, part) for part in ("talker", "predictor")}
        return Engine(name, partial(call, "frame"), parts, lambda: self.calls.append(f"{name}: finish"))


@pytest.fixture
def recorded(bench, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    bench.note("machine", asdict(MACHINE))
    made = Recorded([])
    monkeypatch.setattr(gpu_sections, "Case", made)
    monkeypatch.setattr(gpu_sections, "why_no_kernel", lambda device: None)
    return made


def test_parts_are_timed_after_a_frame_and_then_checked(bench, recorded) -> None:
    weights = draw_weights("small", "float32", CPU)
    with bench.report() as result:
        gpu_sections.add_parts(result, bench, weights, "small")
    for name in ("kernel", "graphed twin"):
        mine = [call.removeprefix(f"{name}: ") for call in recorded.calls if call.startswith(name)]
        assert mine == ["frame", "talker", "predictor", "finish"]
    shares = [figure for figure in result.figures if figure.name == "talker, share of the bandwidth"]
    times = [figure for figure in result.figures if figure.name == "talker"]
    for share, taken in zip(shares, times, strict=True):
        assert share.value and taken.value
        assert share.value == pytest.approx(share.setting["bytes"] / 2e9 / (taken.value / 1e3))


def test_an_engine_that_breaks_is_told_and_costs_no_other_its_figures(bench, recorded) -> None:
    weights = draw_weights("small", "float32", CPU)
    with bench.report() as result:
        failed = gpu_sections.add_frames(result, bench, weights, "small", lanes=min(DRY.lanes))
    assert failed == ["twin, small, float32, 2 lanes: broken"]
    assert [f.setting["engine"] for f in result.figures if f.name == "frame"] == ["kernel", "graphed twin"]


# The weights and what they weigh.


@pytest.mark.parametrize(("size", "name"), [("0b6", "0.6b"), ("1b7", "1.7b")])
def test_drawn_weights_have_the_released_shapes(tmp_path: Path, size: str, name: str) -> None:
    write_configs(tmp_path, model_config(size), codec_config())
    config = ModelConfig.read(tmp_path)
    assert SPECS[name] == config.spec
    table = tensor_table(config)
    expected = {name: table[name].shape for name in table if name.startswith(("talker.", "predictor."))}
    assert tensor_shapes(SPECS[name]) == expected


def test_drawn_weights_are_the_same_at_every_call_and_sized_as_a_checkpoints() -> None:
    spec = SPECS["small"]
    read, again = (DrawnWeights(spec, CPU, torch.float32) for _ in range(2))
    assert torch.equal(read("talker.layers.0.q"), again("talker.layers.0.q"))
    assert not torch.equal(read("talker.layers.0.gate"), read("talker.layers.0.up"))
    assert read("talker.layers.0.gate").std().item() == pytest.approx(spec.talker.hidden**-0.5, rel=0.1)
    assert read("talker.norm").mean().item() == pytest.approx(1, abs=0.1)
    pack_decoder(read, spec, "q8_0", layout="kernel")


def test_floors_of_other_formats_lengths_and_halves() -> None:
    spec = SPECS["0.6b"]
    wide, narrow = (Floors(tensor_shapes(spec), spec, form) for form in ("bfloat16", "q8_0"))
    assert narrow.frame().reads / wide.frame().reads == pytest.approx(34 / 64)
    per_position = 28 * 2 * 8 * 128 * 2  # layers, keys and values, heads, head_dim, bytes
    for floors in (wide, narrow):
        assert floors.frame(4, 100).reads - floors.frame(4).reads == 4 * 100 * per_position
    halves = wide.halves(2, 50)
    assert halves["talker"] + halves["predictor"] == wide.frame(2, 50)
    assert halves["predictor"].reads > halves["talker"].reads


# The soak.


def test_the_watchdog_barks_at_silence_and_at_nothing_else() -> None:
    barked = threading.Event()
    with Watchdog(0.3, barked.set) as watchdog:
        for _ in range(5):
            watchdog.beat()
            assert not barked.wait(0.1)
    assert not barked.is_set() and not watchdog.thread.is_alive()
    with Watchdog(0.05, barked.set):
        assert barked.wait(5)


@pytest.fixture
def company(tiny) -> Company:
    checkpoint = Checkpoint(tiny("custom_voice"))
    weights = pack_decoder(checkpoint.read, checkpoint.config.spec, "float32", layout="kernel")
    positions = gpu_soak.PROMPT + 4
    return Company(Decoder(weights, 3, positions), Codec(checkpoint.config.codec, checkpoint.read, 3), positions)


def test_company_changes_while_it_is_looked_at(company) -> None:
    beats: list[int] = []
    seconds = gpu_soak.run(company, frames=12, look=4, beat=lambda: beats.append(1))
    assert len(seconds) == len(beats) == 3 and min(seconds) > 0
    assert company.begun > 2 * len(company.lanes), "no lane was given away"
    assert company.samples.shape[0] == 3


def test_a_look_finds_faults_codes_and_samples_that_cannot_be(company, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [company.step() for _ in range(4)][-1]
    company.look(codes)
    with pytest.raises(RuntimeError, match="out of range"):
        company.look(codes.index_fill(1, torch.tensor([3]), company.decoder.spec.predictor.vocab))
    company.samples = company.samples * float("nan")
    with pytest.raises(RuntimeError, match="not finite"):
        company.look(codes)

    def raise_fault(fault: int) -> None:
        raise KernelFaultError(f"stage {fault}")

    monkeypatch.setattr(company.decoder, "fault", torch.tensor([7], dtype=torch.int32))
    monkeypatch.setattr(company.decoder, "check", raise_fault)
    with pytest.raises(KernelFaultError, match="stage 7"):
        company.look(codes)
