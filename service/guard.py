"""Lets a request in, or not: the key, the size of its body, and the origin of a browser's websocket.

An ASGI layer around the app, so that no route can forget it. It does not know the routes but for
the two that a load balancer asks without a key.
"""

from __future__ import annotations

import hmac
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import AsciiJSONResponse, openai_error

OPEN_PATHS = frozenset({"/health", "/ready"})


class Guard:
    """Answers 401 to a wrong or missing ``key`` (None: no key is asked), 403 to a foreign origin, and
    413 to a body over ``max_bytes``, as soon as that is known."""

    def __init__(self, app: ASGIApp, key: str | None, allowed_origins: list[str], max_bytes: int) -> None:
        self._app = app
        self._key = key
        self._max_bytes = max_bytes
        self._allowed_origins = {origin.rstrip("/").lower() for origin in allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            if scope["type"] == "websocket" and not self._is_welcome(headers):
                await openai_error(403, "this origin may not connect")(scope, receive, send)
                return
            if self._key is not None and not self._knows_key(scope, headers):
                await _unauthorized()(scope, receive, send)
                return
        await self._app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Receive) -> Receive:
        """``receive`` that raises inside the app, where errors become replies, once a body is too long."""
        total = 0

        async def bounded() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_bytes:
                raise HTTPException(413, f"the body is over {self._max_bytes} bytes")
            return message

        return bounded

    def _is_welcome(self, headers: Headers) -> bool:
        """Whether the websocket comes from no browser, from our own pages or from a listed origin."""
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed_origins:
            return True
        own = urlsplit(origin).netloc.lower() == headers.get("host", "").lower() != ""
        return own or origin.rstrip("/").lower() in self._allowed_origins

    def _knows_key(self, scope: Scope, headers: Headers) -> bool:
        assert self._key is not None
        expected = self._key.encode()
        # Every offer is compared, and each in constant time.
        matches = [hmac.compare_digest(offer, expected) for offer in _offered_keys(scope, headers)]
        return any(matches)


def _offered_keys(scope: Scope, headers: Headers) -> list[bytes]:
    """As OpenAI's and Cartesia's clients send it; in the query only where headers cannot be set."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    offers = [token.strip()] if scheme.lower() == "bearer" else []
    raw = [offer.encode("latin-1") for offer in offers + headers.getlist("x-api-key")]
    if scope["type"] == "websocket":
        query = parse_qs(scope["query_string"].decode("latin-1"))
        raw += [offer.encode() for offer in query.get("api_key", []) + query.get("access_token", [])]
    return raw


def _unauthorized() -> AsciiJSONResponse:
    message = "a key is needed: send it as 'Authorization: Bearer …' or 'X-API-Key: …'"
    return openai_error(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
