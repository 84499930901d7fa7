"""Turns `QWEN3_TTS_…` environment variables and command-line flags into one checked record.

Everything that the server may be told is a field here. It does not know how a model is loaded
or what a route does with a limit.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

MAX_REQUEST_BYTES = 128 * 1024  # of one HTTP body or one websocket message


class Settings(BaseSettings):
    """How the server runs.

    Seconds are wall-clock seconds, except ``lead_seconds``: seconds of audio that a client has not
    taken yet, after which its lane pauses. ``seed`` is used for requests that name none; without it
    each gets its own. A host other than loopback needs ``api_key``.
    """

    model_config = SettingsConfigDict(env_prefix="QWEN3_TTS_", extra="ignore", validate_default=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    model: str | None = None  # a directory or hub id; None: a small random checkpoint, made and cached
    revision: str | None = None
    offline: bool = False
    device: str = "cpu"
    engine: Literal["auto", "kernel", "twin"] = "auto"  # auto: the kernel where it can run
    dtype: Literal["float32", "bfloat16", "q8_0"] | None = None
    lanes: int = Field(default=4, ge=1)
    seed: int | None = Field(default=None, ge=0)
    lead_seconds: float = Field(default=10.0, gt=0)
    api_key: SecretStr | None = None
    allowed_origins: Annotated[list[str], NoDecode] = []  # of browser pages, beside the server's own
    max_input_chars: int = Field(default=4096, ge=1)
    max_request_bytes: int = Field(default=MAX_REQUEST_BYTES, ge=1024)
    max_contexts: int = Field(default=32, ge=1)  # open at once on one websocket
    send_timeout_seconds: float = Field(default=30.0, gt=0)  # a client that takes nothing for so long is dropped
    shutdown_seconds: int = Field(default=5, ge=0)  # that running responses get to finish after SIGTERM
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @model_validator(mode="before")
    @classmethod
    def _split_origins(cls, values: dict) -> dict:
        origins = values.get("allowed_origins")
        if isinstance(origins, str):
            values["allowed_origins"] = [part.strip() for part in origins.split(",") if part.strip()]
        return values

    @model_validator(mode="after")
    def _refuse_public_without_key(self) -> Self:
        if not is_loopback(self.host) and not self.key:
            raise ValueError(
                f"refusing to listen on {self.host} without a key: set QWEN3_TTS_API_KEY, or use --host 127.0.0.1"
            )
        return self

    @property
    def key(self) -> str | None:
        """The key that clients must present, or None where the server is open."""
        return (self.api_key.get_secret_value() or None) if self.api_key else None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
