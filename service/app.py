"""Makes the web app from its parts: an engine that already runs, settings, and one router a protocol.

Nothing happens on import. It does not know how the engine was loaded or which server runs the app.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from backend import Synthesizer
from service import cartesia, errors, health, openai_speech
from service.guard import Guard
from service.settings import Settings


def create_app(synthesizer: Synthesizer, settings: Settings, *, close_engine: bool = False) -> FastAPI:
    """The whole service over ``synthesizer``; with ``close_engine`` it is closed at shutdown."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.ready = True
        yield
        app.state.ready = False
        if close_engine:
            synthesizer.close()

    app = FastAPI(title="qwen3-tts", lifespan=lifespan)
    app.state.ready = False
    limit, origins = settings.max_request_bytes, settings.allowed_origins
    app.add_middleware(Guard, key=settings.key, allowed_origins=origins, max_bytes=limit)
    errors.install(app)
    app.include_router(health.router(synthesizer))
    app.include_router(openai_speech.router(synthesizer, settings))
    app.include_router(cartesia.router(synthesizer, settings))
    return app


def server_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """How uvicorn must run the app: its limits are part of the service's own."""
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level=settings.log_level,
        log_config=None,
        ws_max_size=settings.max_request_bytes,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )
