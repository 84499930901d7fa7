"""Other implementations: each in its own process with its own packages, and a reason where there is none."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peer, peers
from benchmarks.conditions import Machine
from benchmarks.peer import Answer, Call, Run
from benchmarks.peers import Question
from benchmarks.report import Report

FAKE = """
import time

class Graph:
    def run(self, x):
        time.sleep(0.001)

class FasterQwen3TTS:
    def __init__(self):
        self.predictor_graph, self.calls = Graph(), 0

    @classmethod
    def from_pretrained(cls, directory, device, dtype):
        print("something nobody asked for")
        return cls()

    def generate_custom_voice(self, text, speaker, language, max_new_tokens):
        self.calls += 1
        for _ in range(max_new_tokens if self.calls % 2 else 2):  # every other one ends early
            self.predictor_graph.run(None)
        return ["samples"], 24000

    def generate_custom_voice_streaming(self, text, speaker, language, max_new_tokens, chunk_size):
        for _ in range(0, max_new_tokens, chunk_size):
            time.sleep(0.001 * chunk_size)
            yield "samples", 24000, {}
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PEERS_PATH with a faster-qwen3-tts that makes no speech."""
    directory = tmp_path / "faster-qwen3-tts"
    directory.mkdir()
    (directory / "faster_qwen3_tts.py").write_text(FAKE)
    information = directory / "faster_qwen3_tts-9.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: faster-qwen3-tts\nVersion: 9.9\n")
    monkeypatch.setenv(peers.PATH_VARIABLE, str(tmp_path))
    return tmp_path


def call(directory: Path, **more) -> Call:
    return Call(str(directory), "Good morning.", "ryan", "cpu", "float32", **{"frames": 4, "runs": 2, **more})


def test_a_peer_is_asked_with_its_own_packages(packages, tiny) -> None:
    answer = peers.ask_apart("faster-qwen3-tts", call(tiny("custom_voice")), limit=100)
    assert answer.absent is None and answer.versions["faster-qwen3-tts"] == "9.9"
    assert len(answer.frame_seconds) >= 2 * 4 and min(answer.frame_seconds) >= 0.001
    assert set(answer.first_audio) == {"1", "12"}
    assert [len(seconds) for seconds in answer.first_audio.values()] == [2, 2]
    assert min(answer.first_audio["12"]) >= 0.012


def test_an_absent_peer_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny, capsys) -> None:
    monkeypatch.setenv(peers.PATH_VARIABLE, str(tmp_path))
    asked = Question.about(tiny("custom_voice"), device="cpu", dtype="float32", frames=3, runs=1)
    result = Report("peers", "?", dry=True)
    answer = peers.add_peer(result, "faster-qwen3-tts", asked, limit=100)
    assert answer.absent is not None and "faster_qwen3_tts" in answer.absent and result.figures == []
    assert "--install faster-qwen3-tts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (subprocess.TimeoutExpired("x", 7), "more than 7 s"),
        (subprocess.CalledProcessError(1, "x", stderr="Traceback\nKeyError: 'bad'\n"), "KeyError: 'bad'"),
        (subprocess.CalledProcessError(-9, "x", stderr=""), "exit status -9"),
    ],
)
def test_a_peer_that_breaks_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error, why) -> None:
    def run(*_, **__):
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert why in (peers.ask_apart("qwen-tts", call(tmp_path), limit=7).absent or "")


def test_figures_of_a_peer(monkeypatch: pytest.MonkeyPatch, tiny) -> None:
    answer = Answer([0.002, 0.004, 0.003], {"1": [0.01], "12": [0.05]}, {"torch": "2"})
    monkeypatch.setattr(peers, "ask_apart", lambda name, call, limit: answer)
    asked = Question.about(tiny("custom_voice"), device="cpu", dtype="float32", frames=3)
    machine = Machine(2e9, {"float32": 1e12, "bfloat16": 1e12})
    result = Report("peers", "?", dry=True)
    result.conditions = type("Given", (), {"machine": machine, "record": dict})()
    peers.add_peer(result, "qwen-tts", asked, limit=1)
    frame, share, *first = result.figures
    assert frame.value == pytest.approx(3.0) and frame.setting["engine"] == "qwen-tts"
    assert share.value == pytest.approx(asked.floor.reads / 2e9 / 0.003)
    assert {figure.setting["first_chunk"]: figure.value for figure in first} == pytest.approx({"1": 10.0, "12": 50.0})


def test_an_utterance_that_ends_early_is_spoken_again() -> None:
    class Speaker:
        name = "one that ends early"

        def speak(self, seed: int, frames: int) -> Run:
            return Run([0.1] * (frames if seed == 43 else 1), 0.2)

    assert len(peer.whole_run(Speaker(), 5, 40).frame_seconds) == 5
    with pytest.raises(SystemExit, match="none of 40 seeds"):
        peer.whole_run(Speaker(), 5, 44)


def test_what_is_not_used_may_be_absent_but_not_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "UNUSED", ("no_such_package.part.deeper", "json"))
    before = set(sys.modules)
    try:
        peer.stand_in_for_unused()
        stood = importlib.import_module("no_such_package.part.deeper")
        assert importlib.import_module("no_such_package").part.deeper is stood
        assert importlib.util.find_spec("no_such_package") is not None
        with pytest.raises(ImportError, match=r"deeper\.mel is needed after all"):
            stood.mel(1)
        assert importlib.import_module("json").dumps(1) == "1"
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]


def test_packages_are_installed_alone_and_in_their_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda call, check: calls.append(call))
    monkeypatch.setenv(peers.PATH_VARIABLE, str(tmp_path))
    peers.main(["--install", "--wheels", "wheels"])
    assert len(calls) == len(peers.INSTALL) == 2
    for name, made in zip(peers.INSTALL, calls, strict=True):
        assert made[made.index("--target") + 1] == str(tmp_path / name) and "--no-deps" in made
        assert made[-len(peers.INSTALL[name]) :] == list(peers.INSTALL[name])
        assert made[made.index("--find-links") + 1] == "wheels" and "--no-index" in made
    peers.main(["--install", "qwen-tts"])
    assert "--no-index" not in calls[-1] and "qwen-tts==0.1.1" in calls[-1] and len(calls) == 3
    assert set(peers.INSTALL) == set(peer.SPEAKERS)
