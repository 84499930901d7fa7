"""Turns OpenAI's speech requests into streamed audio, and lists models and voices as its clients ask.

The audio leaves chunk by chunk while the engine is still speaking. A client that goes away, in any
phase, cancels its utterance. It does not know how speech is made.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from backend import Synthesizer, Utterance
from backend.errors import EngineError, RequestError
from service.bridge import chunks
from service.errors import engine_failure
from service.pcm import ENGINE_RATE, Encoder, wav_header
from service.settings import Settings
from service.speech_fields import SpeechFields, check_length

logger = logging.getLogger("qwen3_tts")

FORMATS = {"wav": "audio/wav", "pcm": f"audio/pcm;rate={ENGINE_RATE};channels=1"}
OPENAI_VOICES = (
    *("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable"),
    *("marin", "nova", "onyx", "sage", "shimmer", "verse"),
)


class VoiceId(BaseModel):
    id: str


class SpeechBody(SpeechFields):
    """The body of `POST /v1/audio/speech`. The format defaults to wav, as mp3 is not made here."""

    model: str | None = None
    input: str
    voice: str | VoiceId | None = None
    response_format: str = "wav"
    stream_format: str = "audio"
    speed: float = Field(default=1.0, ge=0.25, le=4.0, strict=False)

    def check(self) -> None:
        """Raises ``RequestError`` for what OpenAI takes and this server does not."""
        if self.response_format not in FORMATS:
            known = ", ".join(FORMATS)
            message = f"response_format {self.response_format!r} is not supported; supported are: {known}"
            raise RequestError(message, "response_format")
        if self.stream_format != "audio":
            raise RequestError("stream_format must be 'audio', the only one supported", "stream_format")
        if self.speed != 1.0:
            raise RequestError("speed must be 1.0, the only one supported", "speed")

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


def router(synthesizer: Synthesizer, settings: Settings) -> APIRouter:
    """The routes under `/v1`."""
    routes = APIRouter(prefix="/v1")
    model = synthesizer.info()["model"]

    @routes.post("/audio/speech")
    async def speech(body: SpeechBody) -> Response:
        body.check()
        voice = own_voice(body.voice_name, synthesizer.voices)
        check_length(body.input, settings.max_input_chars)
        request = body.request(body.input, voice, settings.seed)
        utterance = synthesizer.open(request, lead=settings.lead_seconds)
        return AudioStream(utterance, body.response_format, settings.send_timeout_seconds)

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "qwen3-tts"}
        return {"object": "list", "data": [entry]}

    @routes.get("/audio/models")
    async def audio_models() -> dict[str, Any]:
        return {"models": [{"id": model}]}

    @routes.get("/audio/voices")
    async def voices() -> dict[str, Any]:
        return {"voices": [{"id": name, "name": name} for name in synthesizer.voices]}

    return routes


def own_voice(asked: str | None, voices: list[str]) -> str | None:
    """The checkpoint's voice for a name: its own names first, OpenAI's 13 spread over them, else as asked."""
    if asked is None:
        return voices[0] if voices else None
    if asked in voices or asked not in OPENAI_VOICES:
        return asked
    return sorted(voices)[OPENAI_VOICES.index(asked) % len(voices)] if voices else None


class AudioStream(Response):
    """An utterance as a response: status and headers leave with the first chunk.

    So an engine that fails before it gives 503, and later breaks the connection off, which no client
    takes for a finished file. ``send_timeout`` is the seconds that a client may let a send wait.
    """

    def __init__(self, utterance: Utterance, form: str, send_timeout: float) -> None:
        super().__init__(media_type=FORMATS[form], headers={"X-Seed": str(utterance.seed)})
        del self.headers["content-length"]
        self._utterance = utterance
        self._head = wav_header() if form == "wav" else b""
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        speaking = asyncio.create_task(self._speak(scope, receive, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((speaking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if speaking.done():
                speaking.result()
        except TimeoutError:
            logger.info("a client took nothing for %.0f s and is dropped", self._send_timeout)
        finally:
            # A task that is cancelled before its first step never enters its own cleanup.
            self._utterance.cancel()
            speaking.cancel()
            leaving.cancel()
            await asyncio.gather(speaking, leaving, return_exceptions=True)

    async def _speak(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoder = Encoder()
        started = False
        try:
            async with aclosing(chunks(self._utterance)) as ready:
                async for chunk in ready:
                    body = encoder.encode(chunk.samples)
                    if not started:
                        started, body = True, self._head + body
                        await self._start(send)
                    await self._put(send, body)
        except EngineError as error:
            if started:
                raise
            await engine_failure(error)(scope, receive, send)
            return
        if not started:
            await self._start(send)
        await self._put(send, b"" if started else self._head, more=False)

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _put(self, send: Send, body: bytes, more: bool = True) -> None:
        async with asyncio.timeout(self._send_timeout):
            await send({"type": "http.response.body", "body": body, "more_body": more})


async def _left(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
