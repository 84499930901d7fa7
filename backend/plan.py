"""A request checked against a checkpoint, and turned into what the lanes need to speak it.

Everything that can be wrong with a request is found here, before anything is queued.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from backend.config import ModelConfig
from backend.errors import RequestError
from backend.prompt import (
    Prompt,
    Reference,
    TextMode,
    build_prompt,
    default_text_mode,
    instruction_ids,
    needed_text_ids,
    resolve_language,
    resolve_speaker,
    role_ids,
)
from backend.request import SpeechRequest
from backend.text import LiveText, TextTokenizer, check_text
from backend.utterance import TextFeed
from backend.voice import Voice
from megakernel import DrawParams

# A bound for speech without an end of its own. At two words a second and 1.3 ids a word, slow speech takes five
# frames a text id; three times that cuts nobody off.
_FRAMES_PER_TEXT_ID = 16
_FRAMES_AT_LEAST = 64


@dataclass(frozen=True)
class Plan:
    """How one utterance is prompted and drawn."""

    config: ModelConfig
    role: tuple[int, ...]
    instruction: tuple[int, ...]
    speaker: str | None
    voice: Voice | None
    reference: Reference | None
    language: str
    text_mode: TextMode
    seed: int
    talker: DrawParams
    predictor: DrawParams
    penalty: float
    max_frames: int | None

    def ready(self, ids: list[int], closed: bool) -> bool:
        """Whether the text known so far suffices for the prompt, or will never be more."""
        needed = needed_text_ids(self.text_mode, self.reference)
        return closed or (needed is not None and len(ids) >= needed)

    def prompt(self, ids: list[int], closed: bool) -> Prompt:
        """The prompt over the text known so far, which must be `ready` and not empty."""
        return build_prompt(
            self.config,
            role=self.role,
            text_ids=ids,
            text_mode=self.text_mode,
            language=self.language,
            speaker=self.speaker,
            x_vector=self.voice is not None,
            reference=self.reference,
            instruction=self.instruction,
            open=not closed,
        )

    def frame_limit(self, text_ids: int) -> int:
        """How many frames a text of that many ids may take."""
        if self.max_frames is not None:
            return self.max_frames
        return min(self.config.sampling.max_frames, _FRAMES_AT_LEAST + _FRAMES_PER_TEXT_ID * text_ids)

    @cached_property
    def x_vector(self) -> Tensor | None:
        return None if self.voice is None else torch.from_numpy(self.voice.x_vector).float()

    @cached_property
    def reference_codes(self) -> Tensor | None:
        """``[frames, groups]``: what the codec has heard before the first frame."""
        if self.voice is None or self.voice.codes is None:
            return None
        return torch.from_numpy(self.voice.codes)


class Planner:
    """Checks requests against one checkpoint. ``max_characters`` bounds the text and the instruction."""

    def __init__(self, config: ModelConfig, tokenizer: TextTokenizer, max_characters: int) -> None:
        self.config, self.tokenizer, self.max_characters = config, tokenizer, max_characters
        self.role = role_ids(tokenizer, config.ids)

    def plan(self, request: SpeechRequest) -> Plan:
        """Raises `RequestError` naming the field at fault and what it may be."""
        speaker, voice = self._voice(request.voice)
        resolve_language(self.config, request.language, speaker)
        defaults, sampling = self.config.sampling, request.sampling
        return Plan(
            config=self.config,
            role=self.role,
            instruction=self._instruction(request.instruction),
            speaker=speaker,
            voice=voice,
            reference=self._reference(voice),
            language=request.language,
            text_mode=self._text_mode(request),
            seed=secrets.randbits(63) if request.seed is None else request.seed,
            talker=sampling.talker(defaults),
            predictor=sampling.predictor(defaults),
            penalty=sampling.penalty(defaults),
            max_frames=sampling.max_frames,
        )

    def feed(self, text: str | None) -> TextFeed:
        """The text of a request as ids, or an open feed for live text."""
        if text is None:
            return TextFeed([], LiveText(self.tokenizer), self.max_characters)
        self._check(text, "text")
        if not text.strip():
            raise RequestError("text is empty: give at least one character that can be spoken", "text")
        return TextFeed(self.tokenizer.encode(text.strip()))

    def _check(self, text: str, param: str) -> None:
        if len(text) > self.max_characters:
            raise RequestError(
                f"{param} has {len(text)} characters, more than {self.max_characters}: send it in parts",
                param,
            )
        check_text(text, param)

    def _voice(self, voice: str | Voice | None) -> tuple[str | None, Voice | None]:
        kind, config = self.config.kind, self.config
        if isinstance(voice, Voice):
            if kind != "base":
                raise RequestError(f"a cloned voice needs a base checkpoint; this one is {kind}", "voice")
            self._check_voice(voice)
            return None, voice
        if voice:
            return resolve_speaker(config, voice), None
        if kind == "base":
            raise RequestError("a base checkpoint speaks with a cloned voice: make one with clone(...)", "voice")
        if kind == "custom_voice":
            raise RequestError(f"no voice is named; known: {', '.join(sorted(config.speakers))}", "voice")
        return None, None

    def _check_voice(self, voice: Voice) -> None:
        width, groups = self.config.spec.talker.hidden, self.config.spec.groups
        if len(voice.x_vector) != width:
            raise RequestError(
                f"the voice was made with another checkpoint: its x-vector has {len(voice.x_vector)} numbers, "
                f"this checkpoint's have {width}",
                "voice",
            )
        if voice.codes is not None and voice.codes.shape[1] != groups:
            raise RequestError(f"the voice has {voice.codes.shape[1]} codes a frame instead of {groups}", "voice")

    def _reference(self, voice: Voice | None) -> Reference | None:
        if voice is None or voice.codes is None or voice.text is None:
            return None
        frames = tuple(tuple(int(code) for code in frame) for frame in voice.codes)
        return Reference(tuple(self.tokenizer.encode(voice.text)), frames)

    def _instruction(self, instruction: str | None) -> tuple[int, ...]:
        if not instruction:
            return ()
        if not self.config.has_instruction:
            raise RequestError(
                f"this checkpoint ({self.config.kind}, {self.config.size}) takes no instruction: leave it out",
                "instruction",
            )
        self._check(instruction, "instruction")
        return instruction_ids(self.tokenizer, self.config.ids, instruction)

    def _text_mode(self, request: SpeechRequest) -> TextMode:
        if request.text_mode not in (None, "streamed", "whole"):
            raise RequestError(f"text_mode {request.text_mode!r} is neither 'streamed' nor 'whole'", "text_mode")
        if request.text is None:
            if request.text_mode == "whole":
                raise RequestError("live text is read as it comes: text_mode must be 'streamed'", "text_mode")
            return "streamed"
        return request.text_mode or default_text_mode(self.config.kind)
