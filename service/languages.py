"""Turns a language code of a client (`en`, `zh-CN`) into the engine's name of it, and joins pieces of text.

A name that is not a known code passes as it is: the engine knows what its checkpoint speaks and
says so in its error.
"""

from __future__ import annotations

import unicodedata

LANGUAGE_NAMES = {
    "zh": "chinese",
    "en": "english",
    "de": "german",
    "es": "spanish",
    "fr": "french",
    "it": "italian",
    "ja": "japanese",
    "ko": "korean",
    "pt": "portuguese",
    "ru": "russian",
}


def language_name(code: str | None) -> str:
    """`en`, `en-US` and `English` all give `english`; nothing gives `auto`."""
    if not code:
        return "auto"
    plain = code.strip().lower()
    return LANGUAGE_NAMES.get(plain.replace("_", "-").split("-")[0], plain)


def joined(before: str, sentence: str) -> str:
    """``sentence`` as it continues ``before``: after a space, where the script puts one between sentences.

    Sentence aggregators strip the white space that stood between two sentences.
    """
    if not before or not sentence or before[-1].isspace() or sentence[0].isspace():
        return sentence
    return sentence if _is_unspaced(before[-1]) or _is_unspaced(sentence[0]) else " " + sentence


def _is_unspaced(character: str) -> bool:
    """Chinese and Japanese, whose characters are wide; Korean is wide too, but puts spaces."""
    if unicodedata.east_asian_width(character) not in "WF":
        return False
    return "HANGUL" not in unicodedata.name(character, "")
