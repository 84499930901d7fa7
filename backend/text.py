"""Text into token ids: the byte-level BPE of a Qwen2 tokenizer directory, for whole or growing texts.

Every character of a text is data: a special token's name inside it is spelt out, never obeyed. The special
ids themselves come from the checkpoint's configuration. Knows nothing of prompts, codes or weights.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from backend.errors import CheckpointError, RequestError

# The pre-tokens of Qwen2 (`Qwen2Converter` of transformers). `LiveText` rests on this expression: no match
# depends on more than the one character that follows it, except within a run of whitespace. From a local
# directory, and only there, qwen-tts 0.1.1 has transformers put Mistral's expression in its place
# (`fix_mistral_regex`), by which some words with inner capitals get ids that the model was not trained on.
PRE_TOKENS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# C0 and C1 controls without tab and line ends, and lone surrogates: no tokenizer can say them.
_UNSPEAKABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


def check_text(text: str, param: str = "text") -> None:
    """Raise ``RequestError`` naming the first control character or lone surrogate and its position."""
    found = _UNSPEAKABLE.search(text)
    if found is None:
        return
    code = ord(found.group())
    what = "a lone surrogate" if code >= 0xD800 else "a control character"
    raise RequestError(f"{param} holds {what}, U+{code:04X}, at position {found.start()}", param)


class TextTokenizer:
    """The text tokenizer of a checkpoint directory, without its special tokens.

    Reads ``vocab.json`` and ``merges.txt``, or ``tokenizer.json`` where those are missing. Raises
    ``CheckpointError`` if the files are absent, damaged or not of Qwen2's kind.
    """

    def __init__(self, directory: str | Path) -> None:
        self._model = _read_model(Path(directory))
        self._normalizer = NFC()
        byte_level = ByteLevel(add_prefix_space=False, use_regex=False)
        self._pre_tokenizer = Sequence([Split(Regex(PRE_TOKENS), behavior="isolated"), byte_level])
        self._whole = Tokenizer(self._model)
        self._whole.normalizer = self._normalizer
        self._whole.pre_tokenizer = self._pre_tokenizer
        self.size = self._whole.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of ``text`` as it stands: those of ``Qwen2TokenizerFast``, had it no special tokens."""
        return self._whole.encode(text, add_special_tokens=False).ids

    def normalize(self, text: str) -> str:
        """``text`` composed to NFC, the form in which it is cut and encoded."""
        return self._normalizer.normalize_str(text)

    def split(self, text: str) -> list[tuple[str, int]]:
        """The pre-tokens of normalized ``text``: its bytes as symbols, and where its characters end."""
        return [(symbols, end) for symbols, (_, end) in self._pre_tokenizer.pre_tokenize_str(text)]

    def encode_pre_token(self, symbols: str) -> list[int]:
        """The ids of one pre-token of ``split``; no merge crosses from one pre-token into the next."""
        return [token.id for token in self._model.tokenize(symbols)]


class LiveText:
    """Text that arrives in pieces, turned into ids as soon as no later piece can change them.

    However the text is cut up, the ids of all ``push`` calls and of ``end``, in order, are
    ``tokenizer.encode(text.strip())`` of the whole. Only the open tail is kept and looked at again.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tail = ""  # normalized; starts at a pre-token's start
        self._begun = self._ended = False

    def push(self, text: str) -> list[int]:
        """Add ``text``; returns the ids that are final now.

        Raises ``RequestError`` for characters that cannot be spoken (nothing of ``text`` is taken then), and
        after ``end``.
        """
        if self._ended:
            raise RequestError("text was pushed after its end", "text")
        check_text(text)
        self._tail += text if self._begun else text.lstrip()
        if not self._tail:
            return []
        self._begun = True
        return self._take_final()

    def end(self) -> list[int]:
        """The ids still held back; whitespace at the end of the text has none."""
        tail, self._tail, self._ended = self._tail.rstrip(), "", True
        return self._tokenizer.encode(tail)

    def _take_final(self) -> list[int]:
        self._tail = text = self._tokenizer.normalize(self._tail)
        # A pre-token is settled by the character after it; whitespace at the end may yet grow, or be dropped.
        settled = min(_stable_length(text), len(text.rstrip()))
        ids: list[int] = []
        cut = 0
        for symbols, end in self._tokenizer.split(text):
            if end > settled:
                break
            ids += self._tokenizer.encode_pre_token(symbols)
            cut = end
        self._tail = text[cut:]
        return ids


def _stable_length(text: str) -> int:
    """How many first characters of NFC ``text`` no continuation can recompose: all before the last inert one.

    A combining mark or a Hangul jamo that comes later composes with what stands before it. ASCII, digits,
    punctuation, symbols and spaces never compose backwards, so text before one of them is settled.
    """
    for position in range(len(text) - 1, -1, -1):
        character = text[position]
        if character.isascii() or unicodedata.category(character)[0] in "NPSZ":
            return position
    return 0


def _read_model(directory: Path) -> BPE:
    vocab, merges, single = (directory / name for name in ("vocab.json", "merges.txt", "tokenizer.json"))
    if vocab.is_file() and merges.is_file():
        return _read_pair(vocab, merges)
    if single.is_file():
        return _read_single(single)
    raise CheckpointError(f"{directory} holds neither vocab.json with merges.txt nor tokenizer.json")


def _read_pair(vocab_file: Path, merges_file: Path) -> BPE:
    try:
        vocab, merges = BPE.read_file(str(vocab_file), str(merges_file))
        model = BPE(vocab, merges)
    except Exception as error:  # the library raises bare `Exception`
        raise CheckpointError(f"{vocab_file} and {merges_file} are not a BPE tokenizer: {error}") from error
    _check_vocabulary(vocab, merges, merges_file)
    return model


def _read_single(path: Path) -> BPE:
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
        model = Tokenizer.from_file(str(path)).model
    except Exception as error:  # the library raises bare `Exception`
        raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
    steps = description.get("pre_tokenizer") or {}
    patterns = [step.get("pattern", {}).get("Regex") for step in steps.get("pretokenizers", [steps])]
    normalizer = (description.get("normalizer") or {}).get("type")
    if not isinstance(model, BPE) or PRE_TOKENS not in patterns or normalizer != "NFC":
        raise CheckpointError(f"{path} is not of Qwen2's kind: BPE of NFC text within Qwen2's pre-tokens")
    pairs = description["model"]["merges"]  # ["a", "b"], or "a b" in older files
    merges = (pair.split(" ") if isinstance(pair, str) else pair for pair in pairs)
    _check_vocabulary(description["model"]["vocab"], merges, path)
    return model


def _check_vocabulary(vocab: dict[str, int], merges: Iterable[Iterable[str]], source: Path) -> None:
    """Refuse a byte without a token, or a token that no merge makes: a damaged file misreads silently."""
    missing = [symbol for symbol in ByteLevel.alphabet() if symbol not in vocab]
    if missing:
        raise CheckpointError(f"the vocabulary beside {source} lacks {len(missing)} of the 256 bytes")
    made = {"".join(pair) for pair in merges}.union(ByteLevel.alphabet())
    unmade = [token for token in vocab if token not in made and not re.fullmatch(r"<.*>", token)]
    if unmade:
        raise CheckpointError(f"{source} is cut short: no merge makes {len(unmade)} tokens, as {unmade[0]!r}")
