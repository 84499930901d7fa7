"""The server's end: SIGTERM and Ctrl-C with clients in every phase, in seconds and without a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import inference_server
from backend import EngineError, SpeechRequest, Synthesizer
from service import engine as engine_module
from tests.service.serving import serving
from tests.service.stand_in import StandIn, chunk

ROOT = Path(__file__).parent.parent.parent
FOREVER = 1500


def test_going_down_ends_everything(stand_in: StandIn):
    """One response in the middle, one websocket waiting for text, one waiting for audio."""
    stand_in.on_open = lambda utterance: utterance.deliver(chunk())
    with serving(stand_in, shutdown_seconds=0) as running, connect(running.websocket_url) as socket:
        socket.send(json.dumps({"context_id": "a", "transcript": "One", "continue": True}))
        socket.send(json.dumps({"context_id": "b", "transcript": "Two."}))
        for _ in range(2):
            socket.recv(timeout=10)
        stream = httpx.stream("POST", f"{running.url}/v1/audio/speech", json={"input": "Three."})
        with stream as reply:
            running.should_exit = True
            with pytest.raises(httpx.RemoteProtocolError):
                reply.read()
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=10)
    assert len(stand_in.utterances) == 3 and all(u.cancelled for u in stand_in.utterances)


def test_ready_only_while_it_runs_and_a_given_engine_is_left_open(stand_in: StandIn):
    with serving(stand_in) as running:
        assert httpx.get(f"{running.url}/ready").status_code == 200
        stand_in.closed = True
        assert httpx.get(f"{running.url}/ready").json() == {"ready": False}
        stand_in.closed = False
    app = running.config.app
    assert app.state.ready is False and not stand_in.closed  # type: ignore[union-attr]


def test_the_factory_loads_first_and_closes_last(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QWEN3_TTS_MODEL", str(tiny))
    loaded: list[Synthesizer] = []
    load = engine_module.load
    monkeypatch.setattr(engine_module, "load", lambda settings: loaded.append(load(settings)) or loaded[0])
    app = inference_server.app()
    with TestClient(app) as client:
        assert loaded and client.get("/ready").status_code == 200
    with pytest.raises(EngineError):
        loaded[0].open(SpeechRequest("Too late.", loaded[0].voices[0]))


@contextmanager
def process(tiny: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`inference_server.py` on a free port, and its URL, once it listens."""
    command = [sys.executable, "inference_server.py", "--model", str(tiny), "--port", "0", *flags]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment())
    try:
        assert running.stderr is not None
        log = []
        while "Uvicorn running on" not in (line := running.stderr.readline()):
            assert line, f"the server ended: {log}"
            log.append(line)
        assert any("loading" in entry for entry in log) and any("NOISE" in entry for entry in log)
        yield running, line.split("running on ")[1].split()[0]
    finally:
        running.kill()
        running.communicate()


def environment() -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("QWEN3_TTS_")}
    return {**mine, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_cleanly(tiny: Path, signum: signal.Signals):
    with process(tiny) as (running, url):
        address = url.replace("http", "ws") + "/tts/websocket"
        with connect(address) as socket:
            message = {"context_id": "a", "transcript": "For ever.", "max_new_tokens": FOREVER}
            socket.send(json.dumps(message))
            assert json.loads(socket.recv(timeout=20))["type"] == "chunk"
            running.send_signal(signum)
            _, log = running.communicate(timeout=15)
    assert running.returncode == 0, log
    assert "Traceback" not in log and "Application shutdown complete" in log
