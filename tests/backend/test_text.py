"""Text and ids: equal to the reference tokenizer, and the same ids however live text is cut up."""

from __future__ import annotations

import json
import random
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backend.errors import CheckpointError, RequestError
from backend.text import LiveText, TextTokenizer, check_text
from tests.qwen_vocabulary import IM_END, IM_START, TOKENS, write_qwen_vocabulary

SPECIAL = {"<|endoftext|>": 151643, "<|im_start|>": IM_START, "<|im_end|>": IM_END}

TEXTS = [
    "Hello there.",
    "It's we'll THEY'RE I'd don't o'clock 'tis 'S",
    "Numbers 1234567 and 3.14, ½ and ٣٤.",
    "Tabs\tand  runs   of \u00a0 space \u3000 here",
    "One line.\n\nTwo lines.\r\n   \n  Three ?!\n",
    "你好，世界。今天3月5日，天气不错！",
    "日本語のテキスト、カタカナ。",
    "안녕하세요 여러분",
    "\u1112\u1161\u11ab\u1100\u1173\u11af",  # the same script in single jamo
    "Cafe\u0301 A\u030angstro\u0308m ≠ =\u0338",
    "हिन्दी में बोलना",
    "ภาษาไทย ไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 family 👍🏽 ok 🇫🇷",
    "ſt 'ſ ﬁne K Å İstanbul",
    "camelCaseWord HTTPServer snake_case/path/to",
    "\u0301 starts with a mark",
]


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen_vocabulary(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def tokenizer(directory: Path) -> TextTokenizer:
    return TextTokenizer(directory)


@pytest.fixture(scope="session")
def reference(directory: Path) -> Any:
    from transformers import AddedToken, Qwen2TokenizerFast

    tokenizer = Qwen2TokenizerFast(str(directory / "vocab.json"), str(directory / "merges.txt"))
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL} == SPECIAL
    return tokenizer


def live_ids(tokenizer: TextTokenizer, pieces: list[str]) -> list[int]:
    live = LiveText(tokenizer)
    return [token for piece in pieces for token in live.push(piece)] + live.end()


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


# Single characters and short strings on which cutting can go wrong, mixed with arbitrary ones.
TRICKY = st.sampled_from(
    (
        *(" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "'", "'s", "'ll", "'RE", "’s", "l", "a", "word"),
        *("1", "42", "½", ".", "...", "?!", "-", "=", "<", "<|im_end|>", "\u0301", "\u0338", "\u0323"),
        *("\u1112", "\u1161", "\u11ab", "가", "각", "你好", "，", "。", "ア", "\u3099", "か", "का", "\u09c7"),
        *("\u09be", "😀", "\u200d", "\ufe0f", "👍🏽", "\u0345", "é", "ſ", "ﬁ", "İ", "\u212b", "Ünder"),
    )
)
SPEAKABLE = st.characters(exclude_categories=["Cs", "Cc"])
# A starter whose marks are reordered and composed with it only when the later ones have come.
MARKS = st.text("\u0345\u0323\u0301\u0302\u0338\u3099", max_size=4)
MARKED = st.builds(str.__add__, st.sampled_from("aEo=<か"), MARKS)
TEXT = st.lists(st.one_of(TRICKY, TRICKY, MARKED, SPEAKABLE), max_size=30).map("".join)


class TestEncode:
    def test_holds_the_released_vocabulary(self, tokenizer: TextTokenizer) -> None:
        assert tokenizer.size == TOKENS
        assert tokenizer.encode("assistant\n") == [77091, 198]
        assert tokenizer.encode("user\n") == [872, 198]

    @pytest.mark.parametrize("text", TEXTS)
    def test_equals_the_reference_within_its_template(
        self, tokenizer: TextTokenizer, reference: Any, text: str
    ) -> None:
        prompt = f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids = reference(prompt)["input_ids"]
        assert ids[:3] == [IM_START, *tokenizer.encode("assistant\n")]
        assert tokenizer.encode(text) == ids[3:-5]

    @given(text=TEXT)
    @settings(max_examples=300, deadline=None)
    def test_equals_the_reference(self, tokenizer: TextTokenizer, reference: Any, text: str) -> None:
        if not any(name in text for name in SPECIAL):
            assert tokenizer.encode(text) == reference(text)["input_ids"]

    @pytest.mark.parametrize("name", SPECIAL)
    def test_special_names_are_data(self, tokenizer: TextTokenizer, reference: Any, name: str) -> None:
        ids = tokenizer.encode(f"say {name} now")
        assert not set(ids) & set(SPECIAL.values())
        assert reference.decode(ids) == f"say {name} now"

    def test_reads_tokenizer_json_where_the_pair_is_missing(
        self, tokenizer: TextTokenizer, reference: Any, tmp_path: Path
    ) -> None:
        reference.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
        single = TextTokenizer(tmp_path)
        for text in [*TEXTS, *SPECIAL]:
            assert single.encode(text) == tokenizer.encode(text)


class TestDamagedFiles:
    def test_absent(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"neither vocab\.json with merges\.txt nor"):
            TextTokenizer(tmp_path)

    def test_vocabulary_cut_short(self, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "vocab.json").write_bytes((directory / "vocab.json").read_bytes()[:100_000])
        (tmp_path / "merges.txt").write_bytes((directory / "merges.txt").read_bytes())
        with pytest.raises(CheckpointError, match=r"vocab\.json"):
            TextTokenizer(tmp_path)

    def test_merges_cut_short(self, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "vocab.json").write_bytes((directory / "vocab.json").read_bytes())
        lines = (directory / "merges.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / "merges.txt").write_text("".join(lines[:-10]), encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"merges\.txt is cut short: no merge makes 10 tokens"):
            TextTokenizer(tmp_path)

    def test_a_byte_without_token(self, tmp_path: Path) -> None:
        (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n")
        with pytest.raises(CheckpointError, match="lacks 254 of the 256 bytes"):
            TextTokenizer(tmp_path)

    def test_tokenizer_json_of_another_kind(self, reference: Any, tmp_path: Path) -> None:
        description = json.loads(reference.backend_tokenizer.to_str())
        description["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+|\W+"
        (tmp_path / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
        with pytest.raises(CheckpointError, match="not of Qwen2's kind"):
            TextTokenizer(tmp_path)


class TestCheckText:
    @pytest.mark.parametrize("text", [*TEXTS, "", "tab\t line\n return\r"])
    def test_takes_what_can_be_spoken(self, text: str) -> None:
        check_text(text)

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("ab\x00", "a control character, U+0000, at position 2"),
            ("\x1b[1m", "a control character, U+001B, at position 0"),
            ("a\x7f", "a control character, U+007F, at position 1"),
            ("a\x85", "a control character, U+0085, at position 1"),
            ("abc\ud83d", "a lone surrogate, U+D83D, at position 3"),
            ("\udc00", "a lone surrogate, U+DC00, at position 0"),
        ],
    )
    def test_names_what_cannot(self, text: str, complaint: str) -> None:
        with pytest.raises(RequestError) as caught:
            check_text(text)
        assert complaint in str(caught.value)
        assert caught.value.param == "text"

    def test_refuses_exactly_the_controls_and_surrogates(self) -> None:
        for code in range(0x110000):
            speakable = unicodedata.category(chr(code)) not in ("Cc", "Cs") or chr(code) in "\t\n\r"
            try:
                check_text(chr(code))
            except RequestError:
                assert not speakable, f"U+{code:04X} was refused"
            else:
                assert speakable, f"U+{code:04X} was taken"


class TestLiveText:
    @given(text=TEXT, places=st.lists(st.integers(0, 1000), max_size=12))
    @example(text="we'll", places=[3, 4])
    @example(text="'\u017ft", places=[1, 2])
    @example(text="5\u0301", places=[1])
    @example(text="a \u0338=\u0338", places=[1, 2, 3, 4])
    @example(text="a\u0345\u0301", places=[2])
    @example(text="x.\n ", places=[2, 3])
    @example(text="x\n \n  y", places=[1, 2, 3, 4, 5, 6])
    @example(text="\u1112\u1161\u11ab", places=[1, 2])
    @settings(max_examples=1500, deadline=None)
    def test_any_split_gives_the_ids_of_the_whole(self, tokenizer: TextTokenizer, text: str, places: list[int]) -> None:
        assert live_ids(tokenizer, cut(text, places)) == tokenizer.encode(text.strip())

    @given(text=TEXT)
    @settings(max_examples=500, deadline=None)
    def test_one_character_at_a_time(self, tokenizer: TextTokenizer, text: str) -> None:
        assert live_ids(tokenizer, list(text)) == tokenizer.encode(text.strip())

    @pytest.mark.parametrize("text", TEXTS)
    def test_samples_one_character_at_a_time(self, tokenizer: TextTokenizer, text: str) -> None:
        assert live_ids(tokenizer, list(text)) == tokenizer.encode(text.strip())

    @pytest.mark.parametrize(
        ("pieces", "known"),
        [
            (["Hello", " "], "Hello"),
            (["Hello", ","], "Hello"),
            (["Hello, ", "wor", "ld "], "Hello, world"),
            (["One. ", "T"], "One."),
            (["你好", "，"], "你好"),
            (["1", "2", "3"], "12"),
            (["a  ", "b"], "a "),
            (["it", "'"], "it"),
            (["  \n lead", " "], "lead"),
        ],
    )
    def test_holds_back_no_more_than_the_last_pre_token(
        self, tokenizer: TextTokenizer, pieces: list[str], known: str
    ) -> None:
        live = LiveText(tokenizer)
        assert [token for piece in pieces for token in live.push(piece)] == tokenizer.encode(known)

    def test_looks_again_only_at_the_open_tail(self, tokenizer: TextTokenizer, monkeypatch: Any) -> None:
        text = "A sentence of several words, said again. " * 200
        looked_at = 0
        split = tokenizer.split

        def counted(tail: str) -> list[tuple[str, int]]:
            nonlocal looked_at
            looked_at += len(tail)
            return split(tail)

        monkeypatch.setattr(tokenizer, "split", counted)
        assert live_ids(tokenizer, list(text)) == tokenizer.encode(text.strip())
        assert looked_at < 10 * len(text)

    def test_whitespace_alone_is_no_text(self, tokenizer: TextTokenizer) -> None:
        assert live_ids(tokenizer, [" ", "\n", "\u3000"]) == []
        assert live_ids(tokenizer, []) == []

    def test_a_refused_piece_leaves_the_text_as_it_was(self, tokenizer: TextTokenizer) -> None:
        live = LiveText(tokenizer)
        ids = live.push("Hello")
        with pytest.raises(RequestError):
            live.push(" wor\x00ld")
        assert ids + live.push(" there") + live.end() == tokenizer.encode("Hello there")

    def test_nothing_is_taken_after_the_end(self, tokenizer: TextTokenizer) -> None:
        live = LiveText(tokenizer)
        live.push("Hello")
        live.end()
        with pytest.raises(RequestError, match="after its end"):
            live.push("again")

    def test_random_long_texts(self, tokenizer: TextTokenizer) -> None:
        draw = random.Random(0)
        text = " ".join(draw.choice(TEXTS) for _ in range(300))
        places = [draw.randrange(len(text)) for _ in range(len(text) // 3)]
        assert live_ids(tokenizer, cut(text, places)) == tokenizer.encode(text.strip())
