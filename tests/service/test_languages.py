"""Codes to names, and where a space goes between two sentences."""

from __future__ import annotations

import pytest

from service.languages import joined, language_name


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("en", "english"),
        ("en-US", "english"),
        ("zh_CN", "chinese"),
        ("English", "english"),
        (None, "auto"),
        ("", "auto"),
        ("auto", "auto"),
        ("nl", "nl"),
        ("klingon", "klingon"),
    ],
)
def test_language_name(code: str | None, name: str):
    assert language_name(code) == name


@pytest.mark.parametrize(
    ("before", "sentence", "as_joined"),
    [
        ("", "One.", "One."),
        ("One.", "Two.", " Two."),
        ("One. ", "Two.", "Two."),
        ("One.", " Two.", " Two."),
        ("One.", "", ""),
        ("你好。", "再见。", "再见。"),
        ("안녕", "세상", " 세상"),
    ],
)
def test_joined(before: str, sentence: str, as_joined: str):
    assert joined(before, sentence) == as_joined
