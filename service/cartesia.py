"""Turns Cartesia's websocket messages into utterances and their chunks into messages back.

A *context* is one turn of a speaker: its text comes in pieces (`continue: true`) and is spoken while
it comes. A socket carries several contexts at once; each has a task that sends its chunks, beside the
one that receives. An error ends its context, never the socket. It does not know how speech is made.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
import uuid
from collections.abc import MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backend import Synthesizer, Utterance
from backend.errors import EngineError, RequestError
from service.bridge import chunks
from service.errors import ENGINE_FAILED, complaint
from service.languages import joined
from service.pcm import ENCODINGS, ENGINE_RATE, MAX_RATE, MIN_RATE, Encoder
from service.settings import Settings
from service.speech_fields import SpeechFields, check_length

logger = logging.getLogger("qwen3_tts")

TITLES = {400: "Bad request", 429: "Too many contexts", 503: "Engine failed"}


class VoiceChoice(BaseModel):
    model_config = ConfigDict(strict=True)
    mode: str = "id"
    id: str | None = None


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True)
    container: str = "raw"
    encoding: str = "pcm_s16le"
    sample_rate: int = Field(default=ENGINE_RATE, ge=MIN_RATE, le=MAX_RATE)


class Message(SpeechFields):
    """One message of a client. Voice, language and format count in a context's first message only."""

    context_id: str | None = Field(default=None, max_length=256)
    transcript: str = ""
    continues: bool = Field(False, alias="continue")
    cancel: bool = False
    flush: bool = False
    voice: VoiceChoice | None = None
    output_format: OutputFormat = OutputFormat()
    max_buffer_delay_ms: int | None = None

    def check(self) -> None:
        """Raises ``RequestError`` for what Cartesia takes and this server does not."""
        if self.output_format.container != "raw":
            raise RequestError("output_format.container must be 'raw'", "output_format.container")
        if self.output_format.encoding not in ENCODINGS:
            known = ", ".join(ENCODINGS)
            raise RequestError(f"output_format.encoding must be one of: {known}", "output_format.encoding")
        if self.voice and self.voice.mode != "id":
            raise RequestError("voice.mode must be 'id'", "voice.mode")

    @property
    def is_whole_sentence(self) -> bool:
        """A client that turns the server's buffering off sends sentences, stripped, and not tokens."""
        return self.max_buffer_delay_ms == 0


def router(synthesizer: Synthesizer, settings: Settings) -> APIRouter:
    """The route `/tts/websocket`."""
    routes = APIRouter()

    @routes.websocket("/tts/websocket")
    async def speak(websocket: WebSocket) -> None:
        await websocket.accept()
        await Connection(websocket, synthesizer, settings).run()

    return routes


class Connection:
    """One socket and its contexts, until the client leaves."""

    def __init__(self, websocket: WebSocket, synthesizer: Synthesizer, settings: Settings) -> None:
        self.synthesizer = synthesizer
        self.settings = settings
        self._websocket = websocket
        self._contexts: dict[str, Context] = {}
        self._tasks = asyncio.TaskGroup()
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Receives until the client leaves; then, or when a send fails, all contexts are cancelled."""
        try:
            async with self._tasks:
                try:
                    await self._receive()
                finally:
                    self._cancel_all()
        except* (WebSocketDisconnect, TimeoutError) as gone:
            logger.debug("websocket client left: %s", gone.exceptions[0])

    async def send(self, message: dict[str, Any]) -> None:
        """Raises ``TimeoutError`` where the client takes nothing for longer than the settings allow."""
        async with asyncio.timeout(self.settings.send_timeout_seconds), self._sending:
            try:
                await self._websocket.send_text(json.dumps(message))
            except RuntimeError as error:
                # Starlette's word for a socket that it has already seen closed.
                raise WebSocketDisconnect(1006) from error

    async def send_error(self, context_id: str | None, status: int, text: str, param: str | None = None) -> None:
        title = TITLES[status]
        code = title.lower().replace(" ", "_")
        error = {"status_code": status, "error_code": code, "title": title, "message": text, "error": text}
        await self.send({"type": "error", "context_id": context_id, "done": True, "param": param, **error})

    async def _receive(self) -> None:
        while True:
            event = await self._websocket.receive()
            if event["type"] == "websocket.disconnect":
                return
            await self._take(event)

    async def _take(self, event: MutableMapping[str, Any]) -> None:
        context_id = None
        try:
            content = _parse(event)
            context_id = _readable_id(content)
            message = Message.model_validate(content)
            self._obey(message, message.context_id or uuid.uuid4().hex)
        except ValidationError as error:
            text, param = complaint(dict(error.errors()[0]))
            await self._refuse(context_id, 400, text, param)
        except RequestError as error:
            await self._refuse(context_id, 400, str(error), error.param)
        except EngineError as error:
            logger.error("the engine failed: %s", error)
            await self._refuse(context_id, 503, ENGINE_FAILED)
        except _TooMany as error:
            await self._refuse(context_id, 429, str(error))

    async def _refuse(self, context_id: str | None, status: int, text: str, param: str | None = None) -> None:
        """Sends the error; a context that it names is over."""
        context = self._contexts.get(context_id or "")
        if context is not None:
            context.fail(status, text, param)
        else:
            await self.send_error(context_id, status, text, param)

    def _obey(self, message: Message, context_id: str) -> None:
        context = self._contexts.get(context_id)
        if message.cancel:
            if context is not None:
                context.cancel()
            return
        if context is None or context.is_over:
            context = self._begin(message, context_id, after=context)
        context.take(message)

    def _begin(self, message: Message, context_id: str, after: Context | None) -> Context:
        message.check()
        if len(self._contexts) >= self.settings.max_contexts:
            raise _TooMany(f"{self.settings.max_contexts} contexts are open on this socket, which is the limit")
        context = Context(self, context_id, message)
        self._contexts[context_id] = context
        context.task = self._tasks.create_task(self._carry(context, after.task if after else None))
        return context

    async def _carry(self, context: Context, before: asyncio.Task[None] | None) -> None:
        """Runs a context to its end, after an earlier one of the same name has said its last word."""
        try:
            if before is not None:
                await asyncio.wait((before,))
            await context.run()
        finally:
            context.cancel()
            if self._contexts.get(context.id) is context:
                del self._contexts[context.id]

    def _cancel_all(self) -> None:
        for context in list(self._contexts.values()):
            context.cancel()
            if context.task is not None:
                context.task.cancel()


class _TooMany(Exception):
    pass


@dataclass
class Part:
    """What a context speaks without a break: up to a flush, or to its end."""

    utterance: Utterance
    flush_id: int | None = None


class Context:
    """One context: parts that are spoken in turn, each an utterance that may still be getting text."""

    def __init__(self, connection: Connection, context_id: str, first: Message) -> None:
        self.id = context_id
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._first = first
        self._parts: asyncio.Queue[Part | None] = asyncio.Queue()
        self._open: Part | None = None  # the part that still gets text
        self._begun: list[Part] = []
        self._text = ""
        self._flushes = 0
        self._is_ended = False
        self._is_cancelled = False
        self._failure: tuple[int, str, str | None] | None = None

    @property
    def is_over(self) -> bool:
        """Cancelled or failed: the next message of this name begins another context."""
        return self._is_cancelled

    def take(self, message: Message) -> None:
        """Adds a message's text. Raises ``RequestError`` where it cannot be spoken."""
        text = joined(self._text, message.transcript) if message.is_whole_sentence else message.transcript
        if self._is_ended and text.strip():
            raise RequestError("this context has been ended by continue: false", "transcript")
        check_length(self._text + text, self._connection.settings.max_input_chars)
        self._text += text
        if message.flush:
            self._push(text)
            self._flush()
        elif message.continues:
            self._push(text)
        if not message.continues:
            self._end("" if message.flush else text)

    def cancel(self) -> None:
        """Stops speaking at once; what is still under way is not sent."""
        self._is_cancelled = True
        for part in self._begun:
            part.utterance.cancel()
        self._parts.put_nowait(None)

    def fail(self, status: int, text: str, param: str | None) -> None:
        self._failure = self._failure or (status, text, param)
        self.cancel()

    async def run(self) -> None:
        """Sends the parts' chunks and, last, `done` or the error."""
        while (part := await self._parts.get()) is not None and not self._is_cancelled:
            await self._speak(part)
        if self._failure is not None:
            await self._connection.send_error(self.id, *self._failure)
        else:
            await self._connection.send({"type": "done", "context_id": self.id, "done": True, "status_code": 200})

    def _push(self, text: str) -> None:
        """Live text. A part begins with its first word, so that no lane waits for white space."""
        if self._open is not None:
            if text:
                self._open.utterance.push_text(text)
        elif text.strip():
            self._open = self._speak_later(None)
            self._open.utterance.push_text(text.lstrip())

    def _end(self, text: str) -> None:
        if self._is_ended:
            return
        if self._open is None and text.strip():
            self._speak_later(text.lstrip())
        elif self._open is not None:
            self._push(text)
            self._open.utterance.end_text()
        self._is_ended = True
        self._open = None
        self._parts.put_nowait(None)

    def _flush(self) -> None:
        """Ends the part: all text so far is spoken, then `flush_done` is sent, then what comes after."""
        self._flushes += 1
        if self._open is not None:
            self._open.flush_id = self._flushes
            self._open.utterance.end_text()
            self._open = None

    def _speak_later(self, text: str | None) -> Part:
        first, settings = self._first, self._connection.settings
        synthesizer = self._connection.synthesizer
        voice = first.voice.id if first.voice else None
        if voice is None and synthesizer.voices:
            voice = synthesizer.voices[0]
        request = first.request(text, voice, settings.seed)
        part = Part(synthesizer.open(request, lead=settings.lead_seconds))
        self._begun.append(part)
        self._parts.put_nowait(part)
        return part

    async def _speak(self, part: Part) -> None:
        form = self._first.output_format
        encoder = Encoder(form.encoding, form.sample_rate)
        begun = time.monotonic()
        try:
            async with aclosing(chunks(part.utterance)) as ready:
                async for chunk in ready:
                    if self._is_cancelled:
                        return
                    begun = await self._send_audio(encoder.encode(chunk.samples), begun)
        except EngineError as error:
            logger.error("the engine failed: %s", error)
            self.fail(503, ENGINE_FAILED, None)
        if not self._is_cancelled:
            await self._send_audio(encoder.finish(), begun)
            await self._send_flush_done(part)

    async def _send_audio(self, audio: bytes, begun: float) -> float:
        """Sends one chunk; ``step_time`` is the milliseconds since the one before."""
        now = time.monotonic()
        if audio:
            data = base64.b64encode(audio).decode("ascii")
            message = {
                "type": "chunk",
                "context_id": self.id,
                "data": data,
                "done": False,
                "status_code": 206,
            }
            await self._connection.send({**message, "step_time": round((now - begun) * 1000, 3)})
        return now

    async def _send_flush_done(self, part: Part) -> None:
        if part.flush_id is not None:
            message = {"type": "flush_done", "context_id": self.id, "done": False, "status_code": 206}
            await self._connection.send({**message, "flush_done": True, "flush_id": part.flush_id})


def _parse(event: MutableMapping[str, Any]) -> dict[str, Any]:
    try:
        content = json.loads(event.get("text") or "")
    except (ValueError, RecursionError):
        raise RequestError("the message is not valid JSON text") from None
    if not isinstance(content, dict):
        raise RequestError("the message must be a JSON object")
    return content


def _readable_id(content: dict[str, Any]) -> str | None:
    """The context that an error is about, even where the rest of the message is wrong."""
    context_id = content.get("context_id")
    return context_id if isinstance(context_id, str) and len(context_id) <= 256 else None
