"""Speaks over the websocket of a running server: text pieces go out, the bytes of the audio come in.

One connection carries many utterances, each a context of `/tts/websocket`. Loads neither torch nor
the engine. It does not know who listens.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

OPEN_SECONDS = 5.0
CLOSE_SECONDS = 2.0
PATH = "/tts/websocket"


class RemoteError(RuntimeError):
    """The server refused or failed; ``status`` is its HTTP-like code, None where it was not reached."""

    def __init__(self, message: str, status: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class RemoteEngine:
    """A server by its URL (`http://…`, `ws://…`, with or without a path). Connects on first use, and again.

    Belongs to one event loop.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = websocket_url(url)
        self._headers = {"X-API-Key": api_key} if api_key else {}
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._utterances: dict[str, RemoteUtterance] = {}

    async def connect(self) -> None:
        """Raises ``RemoteError`` where the server cannot be reached or refuses the key."""
        async with self._connecting:
            if self._reader is not None and not self._reader.done():
                return
            try:
                self._socket = await connect(
                    self.url,
                    additional_headers=self._headers,
                    open_timeout=OPEN_SECONDS,
                    close_timeout=CLOSE_SECONDS,
                    compression=None,
                    max_size=None,
                )
            except InvalidStatus as error:
                status = error.response.status_code
                raise RemoteError(f"{self.url} refused the connection with {status}", status) from error
            except (OSError, TimeoutError, WebSocketException) as error:
                raise RemoteError(f"{self.url} cannot be reached: {error}") from error
            self._reader = asyncio.create_task(self._read(self._socket))

    async def open(self, fields: dict[str, Any], sample_rate: int) -> RemoteUtterance:
        """An utterance that waits for text; ``fields`` are those of ``SpeechFields``, and ``voice``."""
        await self.connect()
        voice = {"mode": "id", "id": fields.get("voice")}
        form = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": sample_rate}
        message = {**fields, "voice": voice, "output_format": form}
        utterance = RemoteUtterance(self, uuid.uuid4().hex, message)
        self._utterances[utterance.id] = utterance
        return utterance

    async def close(self) -> None:
        """Closes the connection; may be called again, and so may ``connect``."""
        socket, reader = self._socket, self._reader
        self._socket = self._reader = None
        if socket is not None:
            await socket.close()
        if reader is not None:
            await asyncio.gather(reader, return_exceptions=True)

    async def send(self, message: dict[str, Any]) -> None:
        try:
            if self._socket is None:
                raise RemoteError("the connection is closed")
            await self._socket.send(json.dumps(message))
        except ConnectionClosed as error:
            raise RemoteError(f"{self.url} closed the connection") from error

    def forget(self, utterance: RemoteUtterance) -> None:
        self._utterances.pop(utterance.id, None)

    async def _read(self, socket: ClientConnection) -> None:
        """Hands messages to their utterances; the end of the connection is the end of them all."""
        try:
            async for text in socket:
                message = json.loads(text)
                utterance = self._utterances.get(message.get("context_id") or "")
                if utterance is not None:
                    utterance.events.put_nowait(message)
        except ConnectionClosed:
            pass
        finally:
            lost = {"type": "error", "message": f"{self.url} closed the connection"}
            for utterance in list(self._utterances.values()):
                utterance.events.put_nowait(lost)


class RemoteUtterance:
    """One context: text in by ``push`` and ``end``, audio out by iterating ``audio()``."""

    def __init__(self, engine: RemoteEngine, context_id: str, fields: dict[str, Any]) -> None:
        self.id = context_id
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._engine = engine
        self._fields = fields
        self._is_over = False  # the server has said its last word

    async def push(self, text: str) -> None:
        await self._say(text, continues=True)

    async def end(self, text: str = "") -> None:
        """Ends the text, after ``text``: alone, that is a whole request."""
        await self._say(text, continues=False)

    async def audio(self) -> AsyncGenerator[bytes, None]:
        """The audio as it comes. Raises ``RemoteError`` where the server reports an error or goes away."""
        try:
            while (message := await self.events.get())["type"] != "done":
                if message["type"] == "chunk":
                    yield base64.b64decode(message["data"])
                elif message["type"] == "error":
                    self._is_over = True
                    raise RemoteError(message["message"], message.get("status_code"), message.get("param"))
            self._is_over = True
        finally:
            self._engine.forget(self)

    async def cancel(self) -> None:
        """Ends the audio and frees the server's lane; a connection that is gone has freed it already."""
        if self._is_over:
            return
        self._engine.forget(self)
        self.events.put_nowait({"type": "done"})
        with suppress(RemoteError):
            await self._engine.send({"context_id": self.id, "cancel": True})

    async def _say(self, text: str, continues: bool) -> None:
        message = {"context_id": self.id, "transcript": text, "continue": continues}
        await self._engine.send({**self._fields, **message})


def websocket_url(url: str) -> str:
    """`http://host:8000` and `ws://host:8000/tts/websocket` both give the latter."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("http", "https", "ws", "wss"):
        raise ValueError(f"{url!r} is no server URL; it looks like http://127.0.0.1:8000")
    host, _, path = rest.partition("/")
    return (
        f"{scheme.replace('http', 'ws')}://{host}/{path}" if path else f"{scheme.replace('http', 'ws')}://{host}{PATH}"
    )
