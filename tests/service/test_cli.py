"""The command: what it writes, what it says when something is wrong, closed pipes, live input."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import wave
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backend import Sampling, SpeechRequest, Synthesizer
from service import engine as engine_module
from service.cli import app
from service.engine import noise_checkpoint
from service.pcm import wav_header
from tests.service.engine_fixtures import spoken

ROOT = Path(__file__).parent.parent.parent
TEXT = "Good morning, how are you?"
FOREVER = "1500"  # frames: two minutes, which no test waits for
SAY = ["--seed", "3", "--max-frames", "12"]

runner = CliRunner()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the tests' own."""
    home = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


def request(engine: Synthesizer, **fields) -> SpeechRequest:
    given = {"voice": engine.voices[0], "seed": 3, "sampling": Sampling(max_frames=12), **fields}
    return SpeechRequest(TEXT, **given)


def start(*arguments: str, **streams) -> subprocess.Popen[bytes]:
    """The command as a process of its own."""
    command = [sys.executable, "-c", "from service.cli import main; main()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, **streams)


def samples_of(path: Path) -> bytes:
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
        return file.readframes(file.getnframes())


def test_say_writes_a_wav_file(engine: Synthesizer, tiny: Path, tmp_path: Path):
    out = tmp_path / "out.wav"
    done = runner.invoke(app, ["say", TEXT, "-o", str(out), "--model", str(tiny), "--language", "en", *SAY])
    assert done.exit_code == 0, done.output
    assert samples_of(out) == spoken(engine, request(engine, language="english"))
    assert "first audio" in done.stderr and "RTF" in done.stderr and "seed 3" in done.stderr
    assert "limit of frames" in done.stderr


def test_say_reads_standard_input(engine: Synthesizer, tiny: Path, tmp_path: Path):
    out = tmp_path / "out.pcm"
    done = runner.invoke(app, ["say", "-o", str(out), "--model", str(tiny), *SAY], input=f"{TEXT}\n")
    assert done.exit_code == 0, done.output
    assert out.read_bytes() == spoken(engine, request(engine))


def test_live_input_sounds_like_the_whole(engine: Synthesizer, tiny: Path, tmp_path: Path):
    out = tmp_path / "out.pcm"
    done = runner.invoke(app, ["say", "--live", "-o", str(out), "--model", str(tiny), *SAY], input=f"{TEXT}\n")
    assert done.exit_code == 0, done.output
    assert out.read_bytes() == spoken(engine, request(engine, text_mode="streamed"))


def test_flags_reach_the_engine(engine: Synthesizer, tiny: Path, tmp_path: Path):
    out = tmp_path / "out.pcm"
    flags = [
        "--voice",
        engine.voices[1],
        "--text-mode",
        "streamed",
        "--top-k",
        "5",
        "--predictor-top-p",
        "0.8",
    ]
    done = runner.invoke(app, ["say", TEXT, "-o", str(out), "--model", str(tiny), *SAY, *flags])
    sampling = Sampling(max_frames=12, top_k=5, predictor_top_p=0.8)
    wanted = request(engine, voice=engine.voices[1], text_mode="streamed", sampling=sampling)
    assert done.exit_code == 0 and out.read_bytes() == spoken(engine, wanted), done.output


def test_stdout_is_streamed_while_text_is_missing(engine: Synthesizer, tiny: Path):
    """The first samples are read before the last words are written."""
    say = ["say", "--live", "-o", "-", "--model", str(tiny), *SAY]
    with start(*say, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin and running.stdout
        running.stdin.write(b"Good morning, how")
        running.stdin.flush()
        first = running.stdout.read(44 + 3840)
        running.stdin.write(b" are you?\n")
        running.stdin.close()
        received = first + running.stdout.read()
    assert running.returncode == 0
    assert received == wav_header() + spoken(engine, request(engine, text_mode="streamed"))


@pytest.mark.parametrize("form", ["wav", "pcm"])
def test_a_closed_pipe_ends_it_cleanly(tiny: Path, form: str):
    say = ["say", TEXT, "-o", "-", "--format", form, "--model", str(tiny), "--max-frames", FOREVER]
    with start(*say, stdout=subprocess.PIPE) as running:
        assert running.stdout and running.stderr
        assert running.stdout.read(2000)
        running.stdout.close()
        errors = running.stderr.read().decode()
    assert running.returncode == 0 and "Traceback" not in errors and "Broken" not in errors, errors


def test_what_a_closed_pipe_leaves_in_the_buffer_is_no_error():
    """A short write stays in Python's buffer, which is flushed once more at exit."""
    script = (
        "import sys; from service.cli import _one_line_errors\n"
        "with _one_line_errors(): sys.stdin.read(); sys.stdout.buffer.write(b'x'); sys.stdout.buffer.flush()"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=buffered,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdin and running.stdout and running.stderr
        running.stdout.close()
        running.stdin.close()
        assert running.stderr.read() == b""
    assert running.returncode == 0


def test_interrupt_ends_it_with_one_line(tiny: Path):
    with start(
        "say", TEXT, "-o", "-", "--model", str(tiny), "--max-frames", FOREVER, stdout=subprocess.PIPE
    ) as running:
        assert running.stdout and running.stderr
        assert running.stdout.read(2000)
        running.send_signal(signal.SIGINT)
        running.stdout.read()
        errors = running.stderr.read().decode().strip().splitlines()
    assert running.returncode == 130 and errors[-1] == "qwen3-tts: interrupted", errors
    assert not any("Traceback" in line for line in errors)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["say", TEXT, "--voice", "nobody"], 2, "nobody"),
        (["say", TEXT, "--language", "klingon"], 2, "english"),
        (["say", " "], 2, "text"),
        (["say", "x" * 5000], 2, "4096"),
        (["say", "a\x07b"], 2, "U+0007"),
        (["say", TEXT, "--temperature", "-1"], 2, "temperature"),
        (["say", TEXT, "--text-mode", "backwards"], 2, "whole"),
        (["say", TEXT, "--format", "mp3"], 2, "wav"),
        (["say", TEXT, "--dtype", "int4"], 2, "bfloat16"),
        (["say", TEXT, "--engine", "fast"], 2, "engine"),
        (["say", TEXT, "--engine", "kernel"], 2, "cannot run here"),
        (["serve", "--engine", "fast"], 2, "'auto', 'kernel' or 'twin'"),
        (["say", TEXT, "--live"], 2, "TEXT"),
        (["say", TEXT, "-o", "/nowhere/at/all.wav", "--max-frames", "1"], 1, "/nowhere"),
        (["say", TEXT, "--model", "/nowhere/at/all"], 1, "/nowhere"),
        (["info", "--model", "/nowhere/at/all"], 1, "/nowhere"),
        (["serve", "--host", "0.0.0.0"], 2, "QWEN3_TTS_API_KEY"),
        (["serve", "--port", "99999"], 2, "port"),
        (["make-checkpoint", "/tmp"], 2, "/tmp"),
        (["make-checkpoint", "x", "--preset", "9b"], 2, "0.6b"),
        (["make-checkpoint", "x", "--kind", "other"], 2, "voice_design"),
    ],
)
@pytest.mark.usefixtures("no_interpreter")
def test_errors_are_one_line(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, word: str
):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "say" and "--model" not in arguments:
        arguments = [*arguments, "--model", str(tiny)]
    done = runner.invoke(app, arguments)
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("this checkpoint is random")]
    assert done.exit_code == code, done.output
    assert len(lines) == 1 and lines[0].startswith("qwen3-tts: ") and word in lines[0], done.output


def test_an_instruction_for_a_model_that_takes_none_is_refused(deaf: Path):
    done = runner.invoke(app, ["say", TEXT, "--instruction", "softly", "--model", str(deaf), "-o", os.devnull])
    assert done.exit_code == 2 and "takes no instruction" in done.stderr, done.output


def test_input_that_is_no_text_is_refused(tiny: Path):
    for flags in ([], ["--live"]):
        done = runner.invoke(app, ["say", *flags, "--model", str(tiny), "-o", os.devnull], input=b"\xff\xfe")
        assert "UTF-8" in done.stderr and done.exit_code == 2, done.output


@pytest.mark.parametrize("nothing", ["", " \n"])
def test_live_input_without_text_is_an_error(tiny: Path, nothing: str):
    done = runner.invoke(app, ["say", "--live", "--model", str(tiny), "-o", os.devnull], input=nothing)
    assert done.exit_code == 2 and "no text" in done.stderr, done.output


@pytest.mark.usefixtures("no_interpreter")
def test_info_is_a_table_or_json(engine: Synthesizer, tiny: Path):
    done = runner.invoke(app, ["info", "--model", str(tiny), "--json"])
    facts = json.loads(done.stdout)
    assert facts["voices"] == engine.voices and facts["voice_is_noise"] is True
    assert set(facts) == set(engine.info()) and (facts["engine"], facts["healthy"]) == ("twin", True)
    assert json.loads(runner.invoke(app, ["info", "--model", str(tiny), "--json", "--engine", "twin"]).stdout) == facts
    assert runner.invoke(app, ["info", "--model", str(tiny), "--engine", "kernel"]).exit_code == 2
    table = runner.invoke(app, ["info", "--model", str(tiny)]).stdout
    assert all(voice in table for voice in engine.voices)


def test_make_checkpoint_makes_one(tmp_path: Path):
    out = tmp_path / "made"
    done = runner.invoke(app, ["make-checkpoint", str(out), "--kind", "base", "--seed", "4"])
    assert done.exit_code == 0 and (out / "model.safetensors").exists(), done.output
    assert "noise" in done.stderr


def test_without_a_model_a_noise_checkpoint_is_made_once(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    out = tmp_path / "out.wav"
    done = runner.invoke(app, ["say", TEXT, "-o", str(out), *SAY])
    assert done.exit_code == 0 and "NOISE" in caplog.text and samples_of(out), done.output
    [made] = (cache / "qwen3-tts").iterdir()
    before = made.stat().st_mtime_ns
    assert noise_checkpoint() == made and made.stat().st_mtime_ns == before


def test_a_lost_race_for_the_noise_checkpoint_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    maker = engine_module.importlib.import_module("backend.make_checkpoint")

    def lose(out: Path, **_: object) -> None:
        out.mkdir(parents=True)
        raise FileExistsError(out)

    monkeypatch.setattr(maker, "make_checkpoint", lose)
    assert noise_checkpoint().exists()


def test_importing_the_command_is_light():
    script = "import sys, service.cli; assert not {'torch', 'fastapi', 'uvicorn', 'backend'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_wav_on_stdout_is_what_a_player_reads(tiny: Path):
    done = runner.invoke(app, ["say", TEXT, "-o", "-", "--model", str(tiny), *SAY])
    with wave.open(io.BytesIO(done.stdout_bytes)) as file:
        assert file.getframerate() == 24_000
    assert len(done.stdout_bytes) == 44 + 12 * 3840
