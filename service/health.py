"""Answers whether the server is alive (`/health`, and what runs), and whether it takes work (`/ready`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from backend import Synthesizer
from service.errors import AsciiJSONResponse


def router(synthesizer: Synthesizer) -> APIRouter:
    """Both routes; they need no key."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, Any]:
        facts = synthesizer.info()
        return {"status": "ok" if facts["healthy"] else "broken", **facts}

    @routes.get("/ready")
    async def ready(request: Request) -> Response:
        facts = synthesizer.info()
        is_ready = bool(request.app.state.ready) and facts["running"] and facts["healthy"]
        return AsciiJSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)

    return routes
