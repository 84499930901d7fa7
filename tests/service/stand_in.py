"""An engine that speaks only when a test says so: for what must not depend on how fast a real one is."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import numpy as np

from backend import SpeechRequest, Utterance
from backend.errors import RequestError
from backend.utterance import Chunk, TextFeed

FRAME = 1920


class HeardText:
    """Live text that is only written down."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ended = False

    def push(self, text: str) -> list[int]:
        if self.ended:
            raise RequestError("text was pushed after its end", "text")
        self.pieces.append(text)
        return []

    def end(self) -> list[int]:
        self.ended = True
        return []


class StandIn:
    """The engine's face over utterances that the test delivers to. ``opened`` gives them
    in order, ``freed`` those that were cancelled before their end."""

    sample_rate = 24_000
    kind = "custom_voice"
    noise = True
    lanes = 1

    def __init__(self) -> None:
        self.voices = ["ada", "bob"]
        self.languages = ["chinese", "english"]
        self.requests: list[SpeechRequest] = []
        self.leads: list[float | None] = []
        self.utterances: list[Utterance] = []
        self.opened: queue.Queue[Utterance] = queue.Queue()
        self.freed: queue.Queue[Utterance] = queue.Queue()
        self.texts: list[HeardText] = []
        self.closed = False
        self.fault: str | None = None
        self.on_open: Callable[[Utterance], None] = lambda utterance: None

    def open(self, request: SpeechRequest, lead: float | None = None) -> Utterance:
        if request.voice not in (None, *self.voices):
            raise RequestError(f"unknown voice {request.voice!r}; known: ada, bob", "voice")
        self.texts.append(HeardText())
        live: Any = self.texts[-1] if request.text is None else None
        utterance = Utterance(request.seed or 0, TextFeed([], live, room=4096), self._look)
        self.requests.append(request)
        self.leads.append(lead)
        self.utterances.append(utterance)
        self.on_open(utterance)
        self.opened.put(utterance)
        return utterance

    def _look(self) -> None:
        """Like the engine, ends what was cancelled; unlike it, in the thread that cancels."""
        for utterance in self.utterances:
            if utterance.cancelled and utterance.finish_reason is None:
                utterance.finish("cancelled")
                self.freed.put(utterance)

    def take(self) -> Utterance:
        """The next utterance that a client has opened."""
        return self.opened.get(timeout=10)

    def info(self) -> dict[str, Any]:
        return {
            "model": "stand-in",
            "kind": self.kind,
            "voice_is_noise": True,
            "voices": self.voices,
            "running": not self.closed,
            "healthy": self.fault is None,
            "fault": self.fault,
        }

    def close(self) -> None:
        self.closed = True


def chunk(frames: int = 1, value: float = 0.5) -> Chunk:
    """``frames`` frames of one level."""
    return Chunk(np.full(frames * FRAME, value, np.float32), np.zeros((frames, 16), np.int64))
