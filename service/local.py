"""Speaks through an engine in this process, with the same few calls as `service/remote.py`.

It does not know who listens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from backend import Synthesizer, Utterance
from service.bridge import chunks
from service.pcm import Encoder
from service.speech_fields import SpeechFields


class LocalEngine:
    """A running engine, which stays the caller's."""

    def __init__(self, synthesizer: Synthesizer) -> None:
        self._synthesizer = synthesizer

    async def open(self, fields: dict[str, Any], sample_rate: int) -> LocalUtterance:
        """An utterance that waits for text; ``fields`` are those of ``SpeechFields``, and ``voice``."""
        return LocalUtterance(self._synthesizer, fields, sample_rate)


class LocalUtterance:
    """One utterance: text in by ``push`` and ``end``, audio out by iterating ``audio()`` once there is text.

    ``push`` and ``end`` raise ``RequestError`` for what cannot be spoken, ``audio`` ``EngineError``.
    """

    def __init__(self, synthesizer: Synthesizer, fields: dict[str, Any], sample_rate: int) -> None:
        self._synthesizer = synthesizer
        self._fields = fields
        self._encoder = Encoder("pcm_s16le", sample_rate)
        self._utterance: Utterance | None = None

    async def push(self, text: str) -> None:
        if self._utterance is None:
            self._utterance = self._open(None)
        self._utterance.push_text(text)

    async def end(self, text: str = "") -> None:
        """Ends the text, after ``text``: alone, that is a whole request."""
        if self._utterance is None:
            self._utterance = self._open(text)
        else:
            if text:
                self._utterance.push_text(text)
            self._utterance.end_text()

    async def audio(self) -> AsyncGenerator[bytes, None]:
        assert self._utterance is not None, "audio() before any text"
        async with aclosing(chunks(self._utterance)) as ready:
            async for chunk in ready:
                if data := self._encoder.encode(chunk.samples):
                    yield data
        if tail := self._encoder.finish():
            yield tail

    async def cancel(self) -> None:
        if self._utterance is not None:
            self._utterance.cancel()

    def _open(self, text: str | None) -> Utterance:
        voice = self._fields.get("voice")
        if voice is None and self._synthesizer.voices:
            voice = self._synthesizer.voices[0]
        return self._synthesizer.open(SpeechFields.model_validate(self._fields).request(text, voice))
