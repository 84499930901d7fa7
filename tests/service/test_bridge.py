"""An utterance as an async iterator: order, waiting, errors, and cancellation by leaving."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing

import pytest

from backend import SpeechRequest
from backend.errors import EngineError
from service.bridge import chunks
from tests.service.stand_in import StandIn, chunk


def test_chunks_come_in_order_from_another_thread(stand_in: StandIn):
    utterance = stand_in.open(SpeechRequest("x"))

    def deliver() -> None:
        for frames in (1, 2, 4):
            utterance.deliver(chunk(frames))
        utterance.finish("stop")

    async def collect() -> list[int]:
        threading.Thread(target=deliver).start()
        return [len(part.codes) async for part in chunks(utterance)]

    assert asyncio.run(collect()) == [1, 2, 4]
    assert utterance.finish_reason == "stop"


def test_leaving_cancels(stand_in: StandIn):
    utterance = stand_in.open(SpeechRequest("x"))
    utterance.deliver(chunk())

    async def leave() -> None:
        async with aclosing(chunks(utterance)) as ready:
            await anext(ready)
            assert not utterance.cancelled

    asyncio.run(leave())
    assert utterance.cancelled


def test_cancelling_the_task_cancels(stand_in: StandIn):
    utterance = stand_in.open(SpeechRequest("x"))

    async def wait_in_vain() -> None:
        task = asyncio.create_task(anext(chunks(utterance)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(wait_in_vain())
    assert utterance.cancelled


def test_the_engines_error_arrives(stand_in: StandIn):
    utterance = stand_in.open(SpeechRequest("x"))
    utterance.deliver(chunk())
    utterance.fail(EngineError("out of memory"))

    async def collect() -> None:
        ready = chunks(utterance)
        await anext(ready)
        with pytest.raises(EngineError, match="out of memory"):
            await anext(ready)

    asyncio.run(collect())


def test_an_engine_outlives_the_loop(stand_in: StandIn):
    """A listener whose loop is closed must not break the engine's thread."""
    utterance = stand_in.open(SpeechRequest("x"))

    async def begin() -> None:
        ready = chunks(utterance)
        task = asyncio.create_task(anext(ready))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(begin())
    utterance.deliver(chunk())
    utterance.finish("cancelled")
