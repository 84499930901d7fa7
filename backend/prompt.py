"""A request's ids into the prompt that the talker reads before its first frame, and the text that follows.

A prompt is two aligned rows, text and codec, whose embeddings are added. Everything here is a number: it
knows no weights. The layouts are those of `Qwen3TTSForConditionalGeneration.generate` and
`generate_icl_prompt` in qwen-tts 0.1.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from backend.config import ModelConfig, SpecialIds
from backend.errors import RequestError
from backend.text import TextTokenizer

TextMode: TypeAlias = Literal["streamed", "whole"]

AUTO = "auto"


class Voiceprint(Enum):
    """Marks the position whose codec element is a cloned voice's x-vector, the one element that is no id."""

    X_VECTOR = "x-vector"


X_VECTOR = Voiceprint.X_VECTOR

ReferenceFrame: TypeAlias = tuple[int, ...]

# What the codec row adds at a position: nothing; a row of the talker's embedding; the x-vector; or a
# reference frame of one code a group, whose embeddings are summed.
CodecElement: TypeAlias = int | Voiceprint | ReferenceFrame | None


class Reference(NamedTuple):
    """What a cloned voice's recording says: its transcript's ids and its frames, each of one code a group."""

    text_ids: tuple[int, ...]
    frames: tuple[ReferenceFrame, ...]


@dataclass(frozen=True)
class Prompt:
    """The positions to prefill, and the text ids to add afterwards, one per generated frame.

    ``text[i]`` and ``codec[i]`` make position *i*. ``trailing`` ends with ``tts_eos`` unless the prompt
    holds all the text already; past its end comes ``tts_pad`` for ever. While ``open``, the text is still
    being written: ``trailing`` then lacks the ids to come and the ``tts_eos`` after them.
    """

    text: tuple[int, ...]
    codec: tuple[CodecElement, ...]
    trailing: tuple[int, ...]
    open: bool

    def __post_init__(self) -> None:
        if len(self.text) != len(self.codec):
            raise ValueError(f"{len(self.text)} text ids do not align with {len(self.codec)} codec elements")

    def __len__(self) -> int:
        return len(self.text)


class _Part(NamedTuple):
    """A stretch of positions."""

    text: tuple[int, ...]
    codec: tuple[CodecElement, ...]


def default_text_mode(kind: str) -> TextMode:
    """How each kind reads its text where a request does not say, as qwen-tts does."""
    return "streamed" if kind == "base" else "whole"


def role_ids(tokenizer: TextTokenizer, ids: SpecialIds) -> tuple[int, ...]:
    """The ids that open the model's own turn: ``<|im_start|>assistant\\n``."""
    return (ids.im_start, *tokenizer.encode("assistant\n"))


def instruction_ids(tokenizer: TextTokenizer, ids: SpecialIds, instruction: str) -> tuple[int, ...]:
    """The ids of ``<|im_start|>user\\n{instruction}<|im_end|>\\n``, the instruction being plain text."""
    return (ids.im_start, *tokenizer.encode(f"user\n{instruction}"), ids.im_end, *tokenizer.encode("\n"))


def resolve_speaker(config: ModelConfig, speaker: str) -> str:
    """The checkpoint's own spelling of a named speaker; case does not matter.

    Raises ``RequestError`` that lists the known speakers.
    """
    for name in config.speakers:
        if name.lower() == speaker.lower():
            return name
    known = ", ".join(sorted(config.speakers)) or f"none, as a {config.kind} checkpoint has no named voices"
    raise RequestError(f"unknown voice {speaker!r}; known: {known}", "voice")


def resolve_language(config: ModelConfig, language: str, speaker: str | None = None) -> int | None:
    """The codec id of ``language``; None leaves it to the model ("auto"). Case does not matter.

    A speaker of a dialect speaks it where the language is Chinese or auto. Raises ``RequestError`` that lists
    the known languages.
    """
    wanted = language.lower()
    known = {name.lower(): name for name in config.spoken_languages}
    if wanted != AUTO and wanted not in known:
        listed = ", ".join([AUTO, *sorted(known)])
        raise RequestError(f"unknown language {language!r}; known: {listed}", "language")
    if speaker is not None and wanted in ("chinese", AUTO):
        dialect = config.dialects.get(resolve_speaker(config, speaker))
        if dialect is not None:
            return config.languages[dialect]
    return None if wanted == AUTO else config.languages[known[wanted]]


def needed_text_ids(text_mode: TextMode, reference: Reference | None = None) -> int | None:
    """How many text ids must be known before a prompt over open text can be built; None means all of them.

    A streamed prompt holds the first id only; with a reference, as many as the reference's frames outlast its
    transcript.
    """
    if text_mode == "whole":
        return None
    if reference is None:
        return 1
    return max(1, _icl_length(reference) - len(reference.text_ids))


def build_prompt(
    config: ModelConfig,
    *,
    role: tuple[int, ...],
    text_ids: Sequence[int],
    text_mode: TextMode,
    language: str = AUTO,
    speaker: str | None = None,
    x_vector: bool = False,
    reference: Reference | None = None,
    instruction: tuple[int, ...] = (),
    open: bool = False,
) -> Prompt:
    """Lay out the prompt of one utterance.

    ``role`` and ``instruction`` are the ids that ``role_ids`` and ``instruction_ids`` return. The voice is a
    named ``speaker``, an ``x_vector``, or nobody's. A ``reference`` is spoken before the text (in-context
    cloning) and comes with its x-vector. ``open`` says that ``text_ids`` are only the first ids of a text
    that is still being written; ``needed_text_ids`` says how many it takes.

    Raises ``RequestError`` for an unknown speaker or language, and ``ValueError`` for too little text.
    """
    text = tuple(text_ids)
    _check_text_suffices(text, text_mode, reference, open)
    cloned = x_vector or reference is not None
    if cloned and speaker is not None:
        raise ValueError("the voice is either a named speaker or a cloned one")
    parts = [_Part(instruction, (None,) * len(instruction)), _Part(role, (None,) * len(role))]
    parts.append(_tags(config, resolve_language(config, language, speaker), _voice(config, speaker, cloned)))
    closed = text if open else (*text, config.ids.tts_eos)
    if reference is not None:
        body, trailing = _icl_body(config, closed, reference, text_mode)
    elif text_mode == "whole":
        body, trailing = _whole_body(config, closed), ()
    else:
        body, trailing = _Part(text[:1], (config.ids.codec_bos,)), closed[1:]
    parts.append(body)
    return Prompt(
        text=tuple(element for part in parts for element in part.text),
        codec=tuple(element for part in parts for element in part.codec),
        trailing=trailing,
        open=open,
    )


def _check_text_suffices(text: tuple[int, ...], text_mode: TextMode, reference: Reference | None, open: bool) -> None:
    if text_mode not in ("streamed", "whole"):
        raise ValueError(f"text_mode {text_mode!r} is neither 'streamed' nor 'whole'")
    needed = needed_text_ids(text_mode, reference) if open else 1
    if needed is None:
        raise ValueError("a prompt over the whole text cannot be built while the text is open")
    if len(text) < needed:
        raise ValueError(f"the prompt needs {needed} text ids, got {len(text)}")


def _voice(config: ModelConfig, speaker: str | None, cloned: bool) -> tuple[CodecElement, ...]:
    if cloned:
        return (X_VECTOR,)
    return () if speaker is None else (config.speakers[resolve_speaker(config, speaker)],)


def _tags(config: ModelConfig, language: int | None, voice: tuple[CodecElement, ...]) -> _Part:
    """Language and voice; ``codec_pad`` closes the row here, ``codec_bos`` belongs to the body."""
    ids = config.ids
    think = (
        (ids.codec_nothink, ids.codec_think_bos, ids.codec_think_eos)
        if language is None
        else (ids.codec_think, ids.codec_think_bos, language, ids.codec_think_eos)
    )
    codec = (*think, *voice, ids.codec_pad)
    return _Part((ids.tts_pad,) * (len(codec) - 1) + (ids.tts_bos,), codec)


def _whole_body(config: ModelConfig, closed: tuple[int, ...]) -> _Part:
    ids = config.ids
    return _Part((*closed, ids.tts_pad), (ids.codec_pad,) * len(closed) + (ids.codec_bos,))


def _icl_length(reference: Reference) -> int:
    """Positions of the reference's codec row: ``codec_bos``, then its frames."""
    return 1 + len(reference.frames)


def _icl_body(
    config: ModelConfig, closed: tuple[int, ...], reference: Reference, text_mode: TextMode
) -> tuple[_Part, tuple[int, ...]]:
    """The transcript and the text, against the reference's frames; and the text that is left over.

    Whole: one after the other, the text over ``codec_pad`` and ``tts_pad`` over the frames. Streamed: side by
    side, the shorter text padded, the longer one trailing.
    """
    ids = config.ids
    text = (*reference.text_ids, *closed)
    codec = (ids.codec_bos, *reference.frames)
    if text_mode == "whole":
        return _Part(text + (ids.tts_pad,) * len(codec), (ids.codec_pad,) * len(text) + codec), ()
    padding = (ids.tts_pad,) * (len(codec) - len(text))
    return _Part(text[: len(codec)] + padding, codec), text[len(codec) :]
