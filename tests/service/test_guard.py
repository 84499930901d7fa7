"""Who gets in: keys in every place that clients put them, and origins of websockets."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.service.serving import ThreadServer, serving
from tests.service.stand_in import StandIn

KEY = "k3y-ü"


@pytest.fixture(scope="module")
def locked() -> Iterator[ThreadServer]:
    with serving(StandIn(), api_key=KEY, allowed_origins="https://page.example") as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/models", "/v1/audio/voices", "/docs", "/nowhere"])
def test_every_other_path_needs_the_key(locked: ThreadServer, path: str):
    reply = httpx.get(locked.url + path)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"


def test_health_needs_none(locked: ThreadServer):
    assert httpx.get(locked.url + "/health").status_code == 200
    assert httpx.get(locked.url + "/ready").json() == {"ready": True}


@pytest.mark.parametrize("offer", ["", "Bearer", "Bearer wrong", f"Basic {KEY}"])
def test_a_wrong_key_is_refused(locked: ThreadServer, offer: str):
    reply = httpx.get(locked.url + "/v1/models", headers={"Authorization": offer.encode()})
    assert reply.status_code == 401


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key"])
def test_the_key_opens(locked: ThreadServer, name: str):
    value = f"Bearer {KEY}" if name == "Authorization" else KEY
    reply = httpx.get(locked.url + "/v1/models", headers={name: value.encode()})
    assert reply.status_code == 200


def test_websocket_takes_the_key_in_the_query(locked: ThreadServer):
    with connect(f"{locked.websocket_url}?access_token=k3y-%C3%BC", compression=None):
        pass
    for query in ("", "?api_key=wrong"):
        with pytest.raises(InvalidStatus) as refused:
            connect(locked.websocket_url + query)
        assert refused.value.response.status_code == 401


def test_query_keys_are_for_websockets_only(locked: ThreadServer):
    assert httpx.get(f"{locked.url}/v1/models?api_key=k3y-%C3%BC").status_code == 401


def test_foreign_origins_are_refused(locked: ThreadServer):
    for origin in (locked.url, "https://page.example"):
        with connect(f"{locked.websocket_url}?api_key=k3y-%C3%BC", origin=origin):  # type: ignore[arg-type]
            pass
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
        with pytest.raises(InvalidStatus) as refused:
            connect(f"{locked.websocket_url}?api_key=k3y-%C3%BC", origin=origin)  # type: ignore[arg-type]
        assert refused.value.response.status_code == 403
