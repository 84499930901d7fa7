"""Turns what went wrong into OpenAI's error shape: `{"error": {"message", "type", "param", "code"}}`.

The message is for the caller; what only we may know goes to the log. It does not know the routes.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from backend.errors import EngineError, RequestError

logger = logging.getLogger("qwen3_tts")

ENGINE_FAILED = "the engine failed; the server's log says why"


class AsciiJSONResponse(JSONResponse):
    """JSON that escapes what is not ASCII: a message may quote text that UTF-8 cannot carry."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode("ascii")


def openai_error(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> AsciiJSONResponse:
    """An error reply; its type follows from the status."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    return AsciiJSONResponse(body, status_code=status, headers=headers)


def engine_failure(error: Exception) -> AsciiJSONResponse:
    """503, and the reason in the log."""
    logger.error("the engine failed: %s", error)
    return openai_error(503, ENGINE_FAILED, code="engine_failed")


def complaint(problem: dict[str, Any]) -> tuple[str, str | None]:
    """One of pydantic's problems as a sentence and the name of the field."""
    names = [str(part) for part in problem["loc"] if part != "body"]
    param = ".".join(names) or None
    text = str(problem["msg"]).removeprefix("Value error, ")
    return (f"{param}: {text}" if param else text), param


def install(app: FastAPI) -> None:
    """Makes every error of the app's HTTP routes one of OpenAI's shape."""
    app.add_exception_handler(RequestError, _on_request_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(EngineError, _on_engine_error)


async def _on_request_error(_: Request, error: Exception) -> AsciiJSONResponse:
    return openai_error(400, str(error), param=getattr(error, "param", None))


async def _on_invalid_body(_: Request, error: Exception) -> AsciiJSONResponse:
    assert isinstance(error, RequestValidationError)
    message, param = complaint(error.errors()[0])
    if error.errors()[0]["type"] == "json_invalid":
        message, param = "the body is not valid JSON", None
    return openai_error(400, message, param=param)


async def _on_http_error(_: Request, error: Exception) -> AsciiJSONResponse:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    return openai_error(error.status_code, str(error.detail), headers=headers)


async def _on_engine_error(_: Request, error: Exception) -> AsciiJSONResponse:
    return engine_failure(error)
