"""One utterance between the thread that asks for it and the thread that speaks it.

Text goes in on one side, whole or in pieces; chunks come out on the other, taken by blocking
iteration, by polling, or by polling when a listener is called. Knows nothing of tensors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from backend.errors import RequestError
from backend.text import LiveText

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, eq=False)
class Chunk:
    """``samples`` ``[frames * samples_per_frame]`` float32 within ±1, and their ``codes`` ``[frames, groups]``."""

    samples: np.ndarray
    codes: np.ndarray


class TextFeed:
    """The text ids of an utterance as they become known; ``closed`` when no more will come.

    ``room`` is how many characters a live text may still have.
    """

    def __init__(self, ids: list[int], live: LiveText | None = None, room: int = 0) -> None:
        self.ids, self.live, self.room, self.closed = ids, live, room, live is None

    def push(self, text: str) -> None:
        if self.live is None:
            raise ValueError("this utterance was opened with its whole text; open it with text=None to push")
        if len(text) > self.room:
            raise RequestError(f"the text has become {len(text) - self.room} characters too long: end it here", "text")
        self.ids += self.live.push(text)
        self.room -= len(text)

    def end(self) -> None:
        if self.live is not None and not self.closed:
            self.ids += self.live.end()
            self.closed = True


class Utterance:
    """A request that is being spoken. Every method may be called from any thread.

    ``seed`` is the seed in use. ``finish_reason`` is None until the speech has ended: ``"stop"`` by the model
    itself, ``"length"`` at its bound, ``"cancelled"`` by the caller.
    """

    def __init__(self, seed: int, feed: TextFeed, wake: Callable[[], None]) -> None:
        self.seed = seed
        self.finish_reason: FinishReason | None = None
        self._feed, self._wake = feed, wake
        self._chunks: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._error: BaseException | None = None
        self._ended = self._cancelled = False
        self._waiting_frames = 0

    def push_text(self, text: str) -> None:
        """Add text to a live utterance.

        Raises `RequestError`, taking nothing, for characters that cannot be spoken, past the length that a text
        may have, and after `end_text`;
        ``ValueError`` if the utterance was opened with its text.
        """
        with self._changed:
            self._feed.push(text)
        self._wake()

    def end_text(self) -> None:
        """Say that no more text will come. Calling it again does nothing."""
        with self._changed:
            self._feed.end()
        self._wake()

    def cancel(self) -> None:
        """Stop speaking and drop what was not taken; the lane is free within a frame."""
        with self._changed:
            self._cancelled = True
            self._chunks.clear()
            self._waiting_frames = 0
        self._wake()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def finished(self) -> bool:
        """Whether everything was taken and nothing more will come."""
        with self._changed:
            return self._ended and not self._chunks and self._error is None

    def poll(self) -> Chunk | None:
        """The next chunk if there is one. Raises the error that ended the utterance, if one did."""
        with self._changed:
            chunk = self._take()
        if chunk is not None:
            self._wake()
        return chunk

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._chunks or self._ended)
                chunk = self._take()
            if chunk is None:
                return
            self._wake()
            yield chunk

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called, from the engine's thread, whenever `poll` or `finished` may have changed."""
        with self._changed:
            self._listeners.append(listener)
        listener()

    # what follows is the engine's side

    @property
    def waiting_frames(self) -> int:
        """Frames that nobody has taken yet."""
        return self._waiting_frames

    def text_ids(self, start: int = 0) -> tuple[list[int], bool]:
        """The text ids known so far, from number ``start``, and whether no more will come."""
        with self._changed:
            return self._feed.ids[start:], self._feed.closed

    def deliver(self, chunk: Chunk) -> None:
        with self._changed:
            if self._cancelled:
                return
            self._chunks.append(chunk)
            self._waiting_frames += len(chunk.codes)
        self._announce()

    def finish(self, reason: FinishReason) -> None:
        with self._changed:
            self.finish_reason = reason
            self._ended = True
        self._announce()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._ended = True
        self._announce()

    def _take(self) -> Chunk | None:
        if self._chunks:
            chunk = self._chunks.popleft()
            self._waiting_frames -= len(chunk.codes)
            return chunk
        if self._error is not None:
            raise self._error
        return None

    def _announce(self) -> None:
        with self._changed:
            self._changed.notify_all()
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
