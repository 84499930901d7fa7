"""What the engine is and how it does, as `/health` and `/ready` tell it; and that a broken one takes no request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from backend import Synthesizer
from megakernel import KernelFaultError
from tests.service.serving import ThreadServer, serving
from tests.service.stand_in import StandIn


def health(server: ThreadServer) -> dict[str, Any]:
    return httpx.get(f"{server.url}/health").json()


def ready(server: ThreadServer) -> tuple[int, dict[str, Any]]:
    reply = httpx.get(f"{server.url}/ready")
    return reply.status_code, reply.json()


def test_health_names_the_engine(engine: Synthesizer, server: ThreadServer):
    told = health(server)
    assert (told["status"], told["engine"], told["healthy"], told["fault"]) == ("ok", "twin", True, None)
    assert set(told) == {"status", *engine.info()}
    assert ready(server) == (200, {"ready": True})


def test_a_broken_engine_is_alive_and_not_ready(still_server: ThreadServer, stand_in: StandIn):
    stand_in.fault = "the decoder failed in stage talk"
    told = health(still_server)
    assert (told["status"], told["healthy"], told["fault"]) == ("broken", False, stand_in.fault)
    assert ready(still_server) == (503, {"ready": False})
    stand_in.fault = None
    assert health(still_server)["status"] == "ok"
    assert ready(still_server) == (200, {"ready": True})


def test_a_fault_is_503_for_who_speaks_and_who_comes_later_until_the_engine_is_rebuilt(
    tiny, monkeypatch: pytest.MonkeyPatch
):
    body = {"input": "Hello.", "seed": 1, "max_new_tokens": 4}

    def broken(*_args):
        raise KernelFaultError("talk")

    with Synthesizer.from_pretrained(tiny, lanes=1) as engine, serving(engine) as server:
        url = f"{server.url}/v1/audio/speech"
        with monkeypatch.context() as patch:
            patch.setattr(engine.decoder, "step", broken)
            assert httpx.post(url, json=body).status_code == 503
        assert "stage talk" in health(server)["fault"]
        reply = httpx.post(url, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_failed")
        with connect(server.websocket_url) as socket:
            socket.send(json.dumps({"context_id": "a", "transcript": "Hello."}))
            assert json.loads(socket.recv(timeout=10))["status_code"] == 503
        assert ready(server)[0] == 503
        engine.rebuild()
        assert ready(server)[0] == 200
        assert httpx.post(url, json=body).status_code == 200
