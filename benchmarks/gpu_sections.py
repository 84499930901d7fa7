"""What is proved and measured on a GPU, a function a section; `benchmarks/gpu.py` says in which order and how long."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch

from backend import Synthesizer
from backend.checkpoint import Checkpoint
from backend.codec import Codec
from backend.make_checkpoint import Preset
from benchmarks import device as measured
from benchmarks.conditions import ROOT, gpu
from benchmarks.drawn import tensor_shapes
from benchmarks.floors import MILLISECONDS, Floors, Work
from benchmarks.gpu_engines import (
    KERNEL,
    TWIN,
    Case,
    Engine,
    draw_weights,
    kernel_decoder,
    why_no_kernel,
)
from benchmarks.gpu_run import Bench, SkippedError
from benchmarks.options import prompt_positions, quiet, setting, speech_request
from benchmarks.peer import SPEAKERS
from benchmarks.peers import Question, add_peer
from benchmarks.report import Ceiling, Report
from megakernel import Decoder, DecoderWeights
from megakernel.plan import Launch, plan_launch, variants

COMPILERS = 12  # processes that compile at a time, each with a model of its own on the device
SANITIZERS = ("memcheck", "racecheck")
LEAST_POSITIONS = 256  # of an utterance: its prompt, and then frames


@dataclass(frozen=True)
class Scale:
    """How much of everything: all of it on a GPU, a sample of it in a dry run."""

    preset: Preset = "0.6b"
    sizes: tuple[str, ...] = ("0.6b", "1.7b")
    formats: tuple[str, ...] = ("bfloat16", "q8_0")
    lanes: tuple[int, ...] = (1, 4, 16)
    positions: int = 1024
    prompt: int = 64
    warm_up: int = measured.WARM_UP
    frames: int = 200
    eager_frames: int = 20
    prompts: tuple[int, ...] = (16, 200)
    chunks: tuple[int, ...] = (1, 4, 8)
    repeats: int = 50
    listeners: tuple[int, ...] = (1, 16)
    utterances: int = 10
    peer_frames: int = 50
    peer_runs: int = 2
    buffer: int = measured.BUFFER_BYTES
    width: int = measured.PEAK_WIDTH


FULL = Scale()
DRY = Scale(
    preset="tiny",
    sizes=("small",),
    formats=("float32", "q8_0"),
    lanes=(2,),
    positions=32,
    prompt=3,
    warm_up=0,
    frames=1,
    eager_frames=1,
    prompts=(3,),
    chunks=(1, 2),
    repeats=2,
    listeners=(1, 2),
    utterances=1,
    peer_frames=3,
    peer_runs=1,
    buffer=1 << 22,
    width=64,
)


def scale(bench: Bench) -> Scale:
    return DRY if bench.dry else FULL


def conditions(bench: Bench) -> None:
    """The device, and its ceilings: what a copy moves, what a sum reads, what a matrix product computes."""
    device, much = bench.torch_device, scale(bench)
    machine = measured.measure_machine(device, much.buffer, much.width)
    print("\n".join(f"  {name}: {value}" for name, value in gpu(device).items()))
    where = {"device": str(device), "buffer_bytes": much.buffer, "width": much.width}
    with bench.report(machine) as result:
        for name, speeds in (("copy", measured.copy_speeds), ("read", measured.read_speeds)):
            result.add_many(f"{name} bandwidth", [s / 1e9 for s in speeds(device, much.buffer)], "GB/s", **where)
        for dtype in machine.peak:
            speeds = measured.matrix_speeds(device, dtype, much.width)
            result.add_many("matrix product", [s / 1e12 for s in speeds], "TFLOP/s", **where, dtype=dtype)
    bench.note("machine", asdict(machine))


def parity(bench: Bench) -> None:
    """The tests that need a GPU."""
    if bench.device != "cuda":
        raise SkippedError("its tests need a CUDA device")
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("pytest is not installed")
    # its own options, as the project's name plugins that need not be there
    options = ["-o", "addopts=--import-mode=importlib", "-m", "gpu", "-q", "-ra", "-p", "no:cacheprovider"]
    status = subprocess.run([sys.executable, "-m", "pytest", *options, "tests/gpu"], cwd=ROOT, check=False).returncode
    if status == 5:
        raise SkippedError("there are no tests for a GPU")
    if status:
        raise RuntimeError(f"parity failed: pytest ended with {status}")


def compile_kernels(bench: Bench) -> None:
    """Every kernel that the other sections launch, several at a time, into the compiler's cache."""
    require_kernel(bench)
    much = scale(bench)
    calls = [Compile(size, form, lanes) for size in much.sizes for form in much.formats for lanes in much.lanes]
    calls[0] = replace(calls[0], parts=True)
    compile_apart(bench, calls)


@dataclass(frozen=True)
class Compile:
    """A kernel to be compiled; with ``parts`` also its halves."""

    size: str
    weight_format: str
    lanes: int
    launch: Launch | None = None
    parts: bool = False

    def __call__(self) -> float:
        """Seconds for building a decoder and for its first frame."""
        begin = time.perf_counter()
        weights = draw_weights(self.size, self.weight_format, torch.device("cuda"))
        engine = Case(weights, self.lanes, FULL.prompt, FULL.positions).kernel(self.launch)
        engine.frame()
        for part in engine.parts.values() if self.parts else ():
            part()
        engine.finish()
        return time.perf_counter() - begin


def compile_apart(bench: Bench, calls: list[Compile]) -> None:
    """A call that fails is told; what it would have compiled is then met, and compiled, where it is used."""
    if bench.dry:
        raise SkippedError("an interpreter compiles nothing")
    failed = []
    with ProcessPoolExecutor(min(COMPILERS, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        for call, work in [(call, pool.submit(call)) for call in calls]:
            try:
                print(f"  {work.result():6.1f} s  {call}", flush=True)
            except Exception as error:  # noqa: BLE001  whatever the compiler or the device says
                failed.append(call)
                print(f"  {call}: {type(error).__name__}: {error}", flush=True)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(calls)} kernels could not be compiled and run")


def frames(bench: Bench) -> None:
    """A frame of every size, format and number of lanes: the kernel, the twin under a graph, the twin."""
    much = scale(bench)
    failed: list[str] = []
    with bench.report() as result:
        for size in much.sizes:
            for form in much.formats:
                weights = draw_weights(size, form, bench.torch_device)
                for lanes in much.lanes:
                    failed += add_frames(result, bench, weights, size, lanes)
                del weights
                release()
    if failed:
        raise RuntimeError("; ".join(failed))


def add_frames(result: Report, bench: Bench, weights: DecoderWeights, size: str, lanes: int) -> list[str]:
    """Every engine's figures, or what kept it from having any: those are returned."""
    failed = []
    much, device = scale(bench), bench.torch_device
    case = Case(weights, lanes, much.prompt, much.positions)
    makers: list[Callable[[], Engine]] = [] if why_no_kernel(device) else [case.kernel]
    makers += [case.graphed] if weights.format != "q8_0" else []
    makers += [case.twin] if lanes == min(much.lanes) else []
    for make in makers:
        try:
            add_frame(result, bench, make(), weights, size, lanes)
        except (RuntimeError, ValueError) as error:
            failed.append(f"{make.__name__}, {size}, {weights.format}, {lanes} lanes: {error}")
            print(f"  {failed[-1]}")
        result.write()
        release()
    return failed


def add_frame(result: Report, bench: Bench, engine: Engine, weights: DecoderWeights, size: str, lanes: int) -> None:
    """Between two events, frame after frame; and as long as somebody waits who needs each frame's codes."""
    much, device = scale(bench), bench.torch_device
    repeats = much.eager_frames if engine.name == TWIN else much.frames
    seconds = measured.spans(engine.frame, repeats, device, much.warm_up)
    waited = measured.waits(engine.frame, repeats, device, much.warm_up)
    engine.finish()
    where = frame_setting(bench, weights, size, engine.name, lanes)
    result.title(engine=engine.name, size=size, dtype=weights.format, lanes=lanes)
    add_time(result, "frame", seconds, floors(weights).frame(lanes, much.prompt), where)
    result.add_many("frame, waited for", [s * MILLISECONDS for s in waited], "ms", **where)


def add_time(result: Report, name: str, seconds: list[float], work: Work, where: dict[str, Any]) -> None:
    """Milliseconds beside their floor, and what share of the bandwidth the bytes behind them make of it."""
    where = {**where, "bytes": work.reads}
    figure = result.add_many(name, [s * MILLISECONDS for s in seconds], "ms", work.ceiling(result.machine), **where)
    assert figure.value, f"{name} took no time"
    share = work.reads / (figure.value / MILLISECONDS * result.machine.bandwidth)
    result.add(f"{name}, share of the bandwidth", share, "x", Ceiling(1.0, "the copy's bandwidth"), **where)


def frame_setting(bench: Bench, weights: DecoderWeights, size: str, engine: str, lanes: int) -> dict[str, Any]:
    return {
        "kind": "decoder",
        "size": size,
        "engine": engine,
        "device": bench.device,
        "dtype": weights.format,
        "weights": "random",
        "lanes": lanes,
        "prompt": scale(bench).prompt,
        "groups": weights.spec.groups,
    }


def floors(weights: DecoderWeights) -> Floors:
    return Floors(tensor_shapes(weights.spec), weights.spec, weights.format)


def parts(bench: Bench) -> None:
    """Talker step, predictor and prefill of the smallest size, and codec steps."""
    much = scale(bench)
    size, form = much.sizes[0], much.formats[0]
    weights = draw_weights(size, form, bench.torch_device)
    with bench.report() as result:
        add_parts(result, bench, weights, size)
        add_prefill(result, bench, weights, size)
        result.write()
        del weights
        release()
        add_codec(result, bench)


def add_parts(result: Report, bench: Bench, weights: DecoderWeights, size: str) -> None:
    much, device = scale(bench), bench.torch_device
    case = Case(weights, 1, much.prompt, much.positions)
    makers: list[Callable[[], Engine]] = [*([] if why_no_kernel(device) else [case.kernel]), case.graphed]
    work = floors(weights).halves(1, much.prompt)
    for make in makers:
        engine = make()
        engine.frame()  # tells the device of the lanes: without any, its parts have nothing to do
        result.title(engine=engine.name, size=size, dtype=weights.format, lanes=1)
        for part, run in engine.parts.items():
            where = frame_setting(bench, weights, size, engine.name, 1)
            add_time(result, part, measured.spans(run, much.frames, device, much.warm_up), work[part], where)
        engine.finish()


def add_prefill(result: Report, bench: Bench, weights: DecoderWeights, size: str) -> None:
    much, device = scale(bench), bench.torch_device
    make = Decoder if why_no_kernel(device) else kernel_decoder
    decoder = make(weights, 1, much.positions)
    for positions in much.prompts:
        rows = torch.randn(positions, weights.spec.talker.hidden, device=device)

        def prefill(rows: torch.Tensor = rows) -> None:
            decoder.begin(0)
            decoder.prefill(0, rows)

        where = frame_setting(bench, weights, size, decoder.name, 1) | {"prompt": positions}
        seconds = measured.spans(prefill, much.repeats, device)
        add_time(result, f"prefill of {positions}", seconds, floors(weights).talker(positions), where)


def add_codec(result: Report, bench: Bench) -> None:
    much, device = scale(bench), bench.torch_device
    checkpoint = Checkpoint(bench.checkpoint)
    config, work = checkpoint.config, Floors.of(checkpoint, "bfloat16")
    for lanes in much.lanes[:2]:
        codec, every = Codec(config.codec, checkpoint.read, lanes, device), list(range(lanes))
        for size in much.chunks:
            codes = torch.randint(config.spec.predictor.vocab, (lanes, size, config.codec.groups), device=device)
            seconds = measured.spans(lambda c=codec, x=codes, e=every: c.decode(x, e), much.repeats, device)
            where = {
                "kind": config.kind,
                "size": config.size,
                "engine": "codec",
                "device": bench.device,
                "dtype": "float32",
                "weights": "random",
                "lanes": lanes,
                "frames": size,
            }
            add_time(result, f"codec, chunk of {size}", seconds, work.codec(size, lanes), where)
        del codec
        release()


def first_audio(bench: Bench) -> None:
    """From the request to the first samples on the host, alone and with every lane taken."""
    quiet()
    much = scale(bench)
    dtype = "float32" if bench.dry else "bfloat16"
    with bench.report() as result:
        for listeners in much.listeners:
            with Synthesizer.from_pretrained(
                bench.checkpoint,
                device=bench.device,
                engine="twin" if bench.dry else "auto",  # an interpreted prompt and frame would take half a minute
                dtype=dtype,
                lanes=listeners,
                positions=max(much.positions, LEAST_POSITIONS),
            ) as synthesizer:
                seconds = hear_first(synthesizer, listeners, much.utterances, much.peer_frames)
                work = Floors.of(synthesizer.checkpoint, dtype)
                ceiling = work.first_audio(prompt_positions(synthesizer), result.machine)
                where = setting(synthesizer, lanes=listeners, frames=much.peer_frames, first_chunk="1")
                result.add_many("first audio", [s * MILLISECONDS for s in seconds], "ms", ceiling, **where)
            result.write()
            release()


def hear_first(synthesizer: Synthesizer, listeners: int, utterances: int, frames: int) -> list[float]:
    """Seconds to the first chunk of each utterance; each of the ``listeners`` asks again when it has heard all."""

    def listen(seed: int) -> float:
        begin = time.perf_counter()
        chunks = synthesizer.stream(speech_request(synthesizer, seed, frames))
        next(chunks)
        seconds = time.perf_counter() - begin
        for _ in chunks:
            pass
        return seconds

    with ThreadPoolExecutor(listeners) as pool:
        list(pool.map(listen, range(2 * listeners)))  # every size of step has then been met
        return list(pool.map(listen, range(utterances * listeners)))


def peers(bench: Bench) -> None:
    """Other implementations on the checkpoint of this run."""
    much = scale(bench)
    asked = Question.about(
        bench.checkpoint,
        device=bench.device,
        dtype="float32" if bench.dry else "bfloat16",
        frames=much.peer_frames,
        runs=much.peer_runs,
    )
    with bench.report() as result:
        answers = []
        for name in SPEAKERS:
            answers.append(add_peer(result, name, asked, limit=75))
            result.write()
    if all(answer.absent for answer in answers):
        raise SkippedError("no peer is here; benchmarks/peers.py says how to have them")


def launches(bench: Bench) -> None:
    """A frame under other ways of dealing it to programs, at the fewest and at the most lanes."""
    require_kernel(bench)
    much, device = scale(bench), bench.torch_device
    size, form = much.sizes[0], much.formats[0]
    weights = draw_weights(size, form, device)
    with bench.report() as result:
        for lanes in much.lanes[:1] if bench.dry else (much.lanes[0], much.lanes[-1]):
            plan = plan_launch(device, lanes, form)
            others = variants(plan)[:1] if bench.dry else variants(plan)
            if not bench.dry:
                compile_apart(bench, [Compile(size, form, lanes, launch) for launch in others])
            for launch in [plan, *others]:
                add_launch(result, bench, Case(weights, lanes, much.prompt, much.positions), size, launch)
                result.write()


def add_launch(result: Report, bench: Bench, case: Case, size: str, launch: Launch) -> None:
    much = scale(bench)
    where = frame_setting(bench, case.weights, size, KERNEL, case.lanes) | {"launch": asdict(launch)}
    try:
        engine = case.kernel(launch)
        seconds = measured.spans(engine.frame, much.frames, bench.torch_device, much.warm_up)
        engine.finish()
    except (RuntimeError, ValueError) as error:  # it asks for more than this device has
        print(f"  {launch}: {error}")
        return
    result.title(lanes=case.lanes, **asdict(launch))
    add_time(result, "frame of a launch", seconds, floors(case.weights).frame(case.lanes, much.prompt), where)


def sanitizer(bench: Bench) -> None:
    """A short run under the tools that look for wrong accesses and races."""
    require_kernel(bench)
    if bench.device != "cuda":
        raise SkippedError("it looks at programs of a CUDA device")
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise SkippedError("compute-sanitizer is not on the path")
    # every tensor an allocation of its own, or an access past its end meets the next one unseen
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    options = ["--error-exitcode", "9", "--report-api-errors", "no", "--target-processes", "application-only"]
    failed = []
    for name in SANITIZERS:
        call = [tool, "--tool", name, *options, sys.executable, "-m", "benchmarks.gpu_short"]
        print(f"  {name}", flush=True)
        if subprocess.run(call, cwd=ROOT, env=environment, check=False).returncode:
            failed.append(name)
    if failed:
        raise RuntimeError(f"{' and '.join(failed)} found something")


def require_kernel(bench: Bench) -> None:
    reason = why_no_kernel(bench.torch_device)
    if reason:
        raise SkippedError(reason)


def release() -> None:
    """Give back what the last decoder held: two of them at a time need not fit."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
