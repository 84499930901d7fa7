"""Settings: from the environment, loopback by default, nothing public without a key."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from service.settings import Settings


def test_defaults_are_private():
    settings = Settings()
    assert settings.host == "127.0.0.1" and settings.key is None and settings.max_request_bytes == 131_072


def test_environment_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QWEN3_TTS_LANES", "9")
    monkeypatch.setenv("QWEN3_TTS_ALLOWED_ORIGINS", "https://a.example, https://b.example")
    settings = Settings()
    assert settings.lanes == 9
    assert settings.allowed_origins == ["https://a.example", "https://b.example"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_public_needs_a_key(host: str):
    for key in (None, ""):
        with pytest.raises(ValidationError, match="QWEN3_TTS_API_KEY"):
            Settings(host=host, api_key=key)
    assert Settings(host=host, api_key="secret").key == "secret"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str):
    assert Settings(host=host).key is None


def test_the_key_is_not_shown():
    assert "secret" not in repr(Settings(api_key="secret"))


def test_the_engine_is_one_of_three(monkeypatch: pytest.MonkeyPatch):
    assert Settings().engine == "auto"
    monkeypatch.setenv("QWEN3_TTS_ENGINE", "twin")
    assert Settings().engine == "twin"
    with pytest.raises(ValidationError, match="'auto', 'kernel' or 'twin'"):
        Settings(engine="fast")  # type: ignore[arg-type]
