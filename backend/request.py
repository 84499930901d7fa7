"""What a caller asks for: the words of a request and how its codes are to be drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from backend.config import SamplingDefaults
from backend.errors import RequestError
from backend.prompt import TextMode
from backend.voice import Voice
from megakernel import DrawParams

T = TypeVar("T", int, float)


@dataclass(frozen=True)
class Sampling:
    """How codes are drawn; what is None comes from the checkpoint's ``generation_config.json``.

    The plain names are for group 0 (the talker), those with ``predictor_`` for groups 1 and up.
    ``top_k`` 0 keeps every code. ``max_frames`` bounds the speech, at 80 ms a frame; without it the bound
    follows from the length of the text. ``greedy`` takes the likeliest code everywhere.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    predictor_temperature: float | None = None
    predictor_top_k: int | None = None
    predictor_top_p: float | None = None
    max_frames: int | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "predictor_temperature", "repetition_penalty"):
            self._check(name, lambda value: 0 < value < float("inf"), "a positive number")
        for name in ("top_k", "predictor_top_k"):
            self._check(name, lambda value: value >= 0, "0 (off) or a positive whole number")
        for name in ("top_p", "predictor_top_p"):
            self._check(name, lambda value: 0 < value <= 1, "above 0 and at most 1")
        self._check("max_frames", lambda value: value >= 1, "at least 1")

    def _check(self, name: str, sound: Callable[[float], bool], wanted: str) -> None:
        value = getattr(self, name)
        if value is not None and not sound(value):
            hint = "; for no randomness set greedy" if name.endswith("temperature") else ""
            raise RequestError(f"{name} must be {wanted}, got {value}{hint}", param=name)

    def talker(self, default: SamplingDefaults) -> DrawParams:
        return DrawParams(
            _or(self.temperature, default.temperature),
            _or(self.top_k, default.top_k),
            _or(self.top_p, default.top_p),
            self.greedy or default.greedy,
        )

    def predictor(self, default: SamplingDefaults) -> DrawParams:
        return DrawParams(
            _or(self.predictor_temperature, default.predictor_temperature),
            _or(self.predictor_top_k, default.predictor_top_k),
            _or(self.predictor_top_p, default.predictor_top_p),
            self.greedy or default.predictor_greedy,
        )

    def penalty(self, default: SamplingDefaults) -> float:
        return _or(self.repetition_penalty, default.repetition_penalty)


@dataclass(frozen=True)
class SpeechRequest:
    """One utterance.

    ``text`` is spoken as plain text; None means that it will be pushed while it is spoken. ``voice`` names a
    speaker of the checkpoint or is a `Voice` from ``clone``. ``language`` is a name of the checkpoint's or
    ``"auto"``. ``instruction`` describes the voice or its manner, where the checkpoint listens to one.
    ``seed`` fixes the codes; None draws one. ``text_mode`` is ``"streamed"`` (text beside the speech) or
    ``"whole"`` (text before it); None takes the habit of the checkpoint's kind.
    """

    text: str | None
    voice: str | Voice | None = None
    language: str = "auto"
    instruction: str | None = None
    seed: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    text_mode: TextMode | None = None


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
