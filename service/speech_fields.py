"""Turns the fields that every door shares (language, seed, sampling …) into an engine's request.

The names are those of the JSON bodies; unknown fields are ignored, wrong types are not. It does not
know which door they came through.
"""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from backend import Sampling, SpeechRequest
from backend.errors import RequestError
from service.languages import language_name


class SpeechFields(BaseModel):
    """What a client may say beside text and voice. None leaves the checkpoint's default."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)

    language: str | None = None
    instructions: str | None = Field(default=None, validation_alias=AliasChoices("instructions", "instruction"))
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    text_mode: Literal["streamed", "whole"] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    predictor_temperature: float | None = None
    predictor_top_k: int | None = None
    predictor_top_p: float | None = None
    max_frames: int | None = Field(default=None, validation_alias=AliasChoices("max_new_tokens", "max_frames"))
    greedy: bool = False

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            predictor_temperature=self.predictor_temperature,
            predictor_top_k=self.predictor_top_k,
            predictor_top_p=self.predictor_top_p,
            max_frames=self.max_frames,
            greedy=self.greedy,
        )

    def request(self, text: str | None, voice: str | None, default_seed: int | None = None) -> SpeechRequest:
        """The engine's request; ``text`` None is live text."""
        return SpeechRequest(
            text=text,
            voice=voice,
            language=language_name(self.language),
            instruction=self.instructions or None,
            seed=default_seed if self.seed is None else self.seed,
            sampling=self.sampling(),
            text_mode=self.text_mode,
        )


def check_length(text: str, limit: int) -> None:
    """Raises ``RequestError`` where one utterance would get more than ``limit`` characters."""
    if len(text) > limit:
        raise RequestError(f"the text has {len(text)} characters; the limit is {limit}", "input")
