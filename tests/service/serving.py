"""Runs the real server in a thread, on a port of its own, and takes it down again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from service.app import create_app, server_config
from service.settings import Settings


class ThreadServer(uvicorn.Server):
    """A server that says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = threading.Event()

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @property
    def address(self) -> str:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def websocket_url(self) -> str:
        return f"ws://{self.address}/tts/websocket"


@contextmanager
def serving(engine: Any, **settings: Any) -> Iterator[ThreadServer]:
    """The app over ``engine``, listening; on leaving it must be down within ten seconds."""
    chosen = Settings(**{"port": 0, "shutdown_seconds": 1, "log_level": "warning", **settings})
    server = ThreadServer(server_config(create_app(engine, chosen), chosen))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert server.listening.wait(10), "the server does not start"
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server does not stop"
