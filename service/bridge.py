"""Turns an utterance of the engine's thread into an async iterator of chunks on the event loop.

The engine calls its listeners from its own thread; here each call becomes one wake-up of the loop.
Leaving the iterator, however that happens, cancels the utterance, so its lane is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend import Chunk, Utterance


async def chunks(utterance: Utterance) -> AsyncGenerator[Chunk, None]:
    """Chunks as they become ready, without ever blocking the loop.

    Close it (``contextlib.aclosing``) where the consumer may stop early. Raises what the utterance
    raises, ``EngineError`` if the engine failed.
    """
    wake = _Wake(asyncio.get_running_loop())
    utterance.add_listener(wake)
    try:
        while True:
            wake.event.clear()
            chunk = utterance.poll()
            if chunk is not None:
                yield chunk
            elif utterance.finished:
                return
            else:
                await wake.event.wait()
    finally:
        utterance.cancel()


class _Wake:
    """A listener: sets an event of the loop from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.event = asyncio.Event()
        self._loop = loop

    def __call__(self) -> None:
        # A closed loop raises and has nobody left to wake; the engine must not fail for it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.event.set)
