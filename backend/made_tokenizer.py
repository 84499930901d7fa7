"""The tokenizer files of a made checkpoint: a small byte-level BPE in Qwen2's format.

Learns it from a fixed text and turns two numbers (the id of the first special token, the id of "assistant")
into `vocab.json`, `merges.txt` and `tokenizer_config.json`. Any text can be spelt with it, in more tokens
than with the released one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

# The released names, in the order of their ids.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>",
    "</tool_response>", "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>",
    "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip

# Prompts count on these being one token each.
WHOLE_WORDS = ("assistant", "user")

MERGES = 240
CORPUS = """
the quick brown fox jumps over the lazy dog and then it goes home to sleep in the sun while the others wait
for their dinner. this is a small voice that speaks with no words of its own, but there are many things
which it could say if you would only give it time. hello world, how are you today? i am well, thank you very
much. please tell me what the weather will be like tomorrow morning, and whether we should take the train or
the bus to the station. she said that he had been there before, when they were young; they used to walk
along the river every evening. one two three four five six seven eight nine ten, first second third, more
than all other numbers have ever been.
"""


def tokenizer_files(first_special: int | None = None, assistant: int | None = None) -> dict[str, str]:
    """File name -> content. Ids are packed without gaps where no place is asked for."""
    vocab, merges = _vocabulary(first_special, assistant)
    return {
        "vocab.json": json.dumps(vocab, ensure_ascii=False),
        "merges.txt": "\n".join(["#version: 0.2", *(" ".join(pair) for pair in merges)]) + "\n",
        "tokenizer_config.json": json.dumps(_tokenizer_config(vocab), indent=2),
    }


def write_tokenizer(directory: Path, **places: int | None) -> dict[str, int]:
    """Write the files of `tokenizer_files` and return the vocabulary, special tokens included."""
    files = tokenizer_files(**places)
    for name, content in files.items():
        (directory / name).write_text(content, encoding="utf-8")
    return json.loads(files["vocab.json"])


def _vocabulary(first_special: int | None, assistant: int | None) -> tuple[dict[str, int], list[tuple[str, str]]]:
    symbols, merges = _byte_symbols(), _learn_merges()
    tokens = [*symbols, *("".join(pair) for pair in merges)]
    vocab = {token: position for position, token in enumerate(dict.fromkeys(tokens))}
    if assistant is not None:
        vocab["assistant"] = assistant
    first = max(vocab.values()) + 1 if first_special is None else first_special
    # Listed in the vocabulary too: a fast tokenizer gives added tokens the next free ids otherwise.
    vocab |= {token: first + offset for offset, token in enumerate(SPECIAL_TOKENS)}
    return vocab, merges


def _byte_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes, in the order of their ids (GPT-2's byte-level alphabet)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(byte) for byte in printable] + [chr(0x100 + place) for place in range(256 - len(printable))]


def _learn_merges() -> list[tuple[str, str]]:
    """Whole words first, so that no later merge can break them up; then the commonest pairs of the corpus."""
    merges: list[tuple[str, str]] = []
    for word in WHOLE_WORDS:
        merges += [(word[:end], word[end]) for end in range(1, len(word))]
    words = Counter(tuple("Ġ" + word) for word in re.findall("[a-z]+", CORPUS))
    for pair in merges:
        words = _merged(words, pair)
    while len(merges) < MERGES:
        pairs = _pair_counts(words)
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = _merged(words, best)
    return merges


def _pair_counts(words: Counter[tuple[str, ...]]) -> Counter[tuple[str, str]]:
    pairs = Counter[tuple[str, str]]()
    for word, count in words.items():
        for pair in pairwise(word):
            pairs[pair] += count
    return pairs


def _merged(words: Counter[tuple[str, ...]], pair: tuple[str, str]) -> Counter[tuple[str, ...]]:
    merged = Counter[tuple[str, ...]]()
    for word, count in words.items():
        symbols: list[str] = []
        for symbol in word:
            if symbols and (symbols[-1], symbol) == pair:
                symbols[-1] += symbol
            else:
                symbols.append(symbol)
        merged[tuple(symbols)] += count
    return merged


def _tokenizer_config(vocab: dict[str, int]) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(vocab[token]): {"content": token, **plain, "special": token.startswith("<|") or "tts" in token}
        for token in SPECIAL_TOKENS
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
