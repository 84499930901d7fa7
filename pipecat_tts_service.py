"""Qwen3-TTS as a Pipecat service: text frames in, audio frames out, over an engine or a server's URL.

Each audio context has a queue of text and a task that speaks it and appends the audio. Tokens go
live into one utterance a turn, sentences into one each. It does not know how speech is made; with a
URL it loads no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pipecat.frames.frames import CancelFrame, EndFrame, ErrorFrame, Frame, TTSAudioRawFrame, TTSStoppedFrame
from pipecat.processors.frame_processor import FrameProcessorSetup
from pipecat.services.settings import TTSSettings
from pipecat.services.tts_service import TTSService
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory, classify_http_status_code
from pipecat.utils.tracing.service_decorators import traced_tts
from pipecat.utils.types import NOT_GIVEN, NotGiven

from service.languages import language_name
from service.remote import RemoteEngine, RemoteError

if TYPE_CHECKING:
    from backend import Synthesizer

SAMPLING = (
    *("temperature", "top_k", "top_p", "repetition_penalty"),
    *("predictor_temperature", "predictor_top_k", "predictor_top_p", "max_frames", "greedy"),
)
LASTING_PARAMS = ("voice", "language", "instruction", "instructions")


def _not_given() -> Any:
    return field(default_factory=lambda: NOT_GIVEN)


@dataclass
class Qwen3TTSSettings(TTSSettings):
    """Settings for Qwen3TTSService; None leaves the checkpoint's own default.

    Parameters:
        instruction: How to speak, in words, for checkpoints that take it.
        seed: The same seed gives the same audio for the same text.
        text_mode: ``"streamed"`` or ``"whole"``, for whole sentences.
        temperature: Of the talker; with ``top_k``, ``top_p`` and ``repetition_penalty``.
        predictor_temperature: Of the code predictor; with its ``top_k`` and ``top_p``.
        max_frames: At most so many frames (80 ms each) an utterance.
        greedy: Take the likeliest code always.
    """

    instruction: str | NotGiven | None = _not_given()
    seed: int | NotGiven | None = _not_given()
    text_mode: str | NotGiven | None = _not_given()
    temperature: float | NotGiven | None = _not_given()
    top_k: int | NotGiven | None = _not_given()
    top_p: float | NotGiven | None = _not_given()
    repetition_penalty: float | NotGiven | None = _not_given()
    predictor_temperature: float | NotGiven | None = _not_given()
    predictor_top_k: int | NotGiven | None = _not_given()
    predictor_top_p: float | NotGiven | None = _not_given()
    max_frames: int | NotGiven | None = _not_given()
    greedy: bool | NotGiven = _not_given()


def _complete_settings() -> Qwen3TTSSettings:
    unset = dict.fromkeys(("voice", "language", "instruction", "seed", "text_mode", *SAMPLING))
    return Qwen3TTSSettings(**{**unset, "model": "qwen3-tts", "greedy": False})


class Qwen3TTSService(TTSService):
    """Qwen3-TTS text-to-speech service.

    Speaks through an engine in this process or through a running server. In
    ``TextAggregationMode.TOKEN`` the text goes live into one utterance a turn; in ``SENTENCE`` each
    sentence is an utterance. An interruption cancels the utterance and frees its lane. The engine is
    the caller's: it is not closed here.
    """

    Settings = Qwen3TTSSettings
    _settings: Qwen3TTSSettings

    def __init__(
        self,
        *,
        engine: Synthesizer | None = None,
        url: str | None = None,
        api_key: str | None = None,
        sample_rate: int | None = None,
        settings: Qwen3TTSSettings | None = None,
        stop_frame_timeout_s: float = 15.0,
        **kwargs: Any,
    ) -> None:
        """Initialize the service over exactly one of an engine and a URL.

        Args:
            engine: A ``backend.Synthesizer`` that already runs.
            url: A running server, e.g. ``http://127.0.0.1:8000``.
            api_key: The server's key.
            sample_rate: Output rate in Hz; the pipeline's when None.
            settings: Runtime-updatable settings.
            stop_frame_timeout_s: Silence after which a context is given up. Contexts are ended
                explicitly, so this only has to cover waiting for a lane and for the language model.
            **kwargs: Passed to ``TTSService``.
        """
        if (engine is None) == (url is None):
            raise ValueError("pass either engine= (a running Synthesizer) or url= (a running server)")
        complete = _complete_settings()
        if settings is not None:
            complete.apply_update(settings)
        super().__init__(
            sample_rate=sample_rate,
            settings=complete,
            push_start_frame=True,
            stop_frame_timeout_s=stop_frame_timeout_s,
            **kwargs,
        )
        self._remote = RemoteEngine(url, api_key) if url is not None else None
        self._engine: _Engine = self._remote or _local(engine)
        self._turns: dict[str, _Turn] = {}

    def can_generate_metrics(self) -> bool:
        """Report that metrics are generated."""
        return True

    @property
    def supports_processing_metrics(self) -> bool:
        """``run_tts`` only hands text over, so its duration says nothing."""
        return False

    def language_to_service_language(self, language: Language) -> str | None:
        """Convert a language to the model's name of it, e.g. ``"english"``.

        Args:
            language: The language to convert.

        Returns:
            The name; for a language that no checkpoint speaks its code, which the engine refuses.
        """
        return language_name(str(language))

    async def setup(self, setup: FrameProcessorSetup) -> None:
        """Set up the service and connect to the server, if there is one.

        Args:
            setup: Configuration object containing setup parameters.
        """
        await super().setup(setup)
        if self._remote is not None:
            try:
                await self._remote.connect()
            except RemoteError as error:
                # Tried again when there is text; until then nothing is lost.
                await self.push_error(error_msg=str(error), exception=error, category=_category(error))

    async def stop(self, frame: EndFrame) -> None:
        """Speak the text that has come, then stop.

        Args:
            frame: The end frame.
        """
        for turn in self._turns.values():
            turn.finish()
        await super().stop(frame)

    async def cancel(self, frame: CancelFrame) -> None:
        """Stop speaking at once.

        Args:
            frame: The cancel frame.
        """
        await self._cancel_turns()
        await super().cancel(frame)

    async def cleanup(self) -> None:
        """Cancel what is spoken and close the connection; may be called again."""
        await super().cleanup()
        await self._cancel_turns()
        if self._remote is not None:
            await self._remote.close()

    async def flush_audio(self, context_id: str | None = None) -> None:
        """End the text of a context; its audio still comes.

        Args:
            context_id: The context; the active one when None.
        """
        name = context_id or self.get_active_audio_context_id() or ""
        if name in self._turns:
            self._turns[name].finish()
        elif self.audio_context_available(name):
            # Its text never came here, as when the service is not usable.
            await self._end_context(name)

    async def on_audio_context_interrupted(self, context_id: str) -> None:
        """Cancel the utterance of an interrupted context.

        Args:
            context_id: The context that was interrupted.
        """
        await self.stop_all_metrics()
        await self._cancel_turn(context_id)
        await super().on_audio_context_interrupted(context_id)

    @traced_tts
    async def run_tts(self, text: str, context_id: str) -> AsyncGenerator[Frame | None, None]:
        """Queue text to be spoken; the context's task appends its audio.

        Args:
            text: The text to synthesize into speech.
            context_id: The context that the audio belongs to.

        Yields:
            None: the audio comes through the audio context.
        """
        turn = self._turns.get(context_id)
        if turn is None:
            turn = self._turns[context_id] = _Turn(context_id, self._is_streaming_tokens)
            turn.task = self.create_task(self._speak(turn), name="qwen3-tts-turn")
        turn.add(text, self._fields())
        if context_id != self._turn_context_id:
            # Text outside a turn is a context of its own, and nobody will say that it has ended.
            turn.finish()
        await self.start_tts_usage_metrics(text)
        yield None

    def _fields(self) -> dict[str, Any]:
        """The settings under the names that the engine's doors know; what is None is left out."""
        settings = self._settings
        fields: dict[str, Any] = {name: getattr(settings, name) for name in ("voice", "language", "seed", *SAMPLING)}
        fields["instructions"] = settings.instruction
        if not self._is_streaming_tokens:
            fields["text_mode"] = settings.text_mode
        return {name: value for name, value in fields.items() if value is not None}

    async def _speak(self, turn: _Turn) -> None:
        """Speaks a turn's parts in order and then ends its audio context."""
        try:
            while (part := await turn.parts.get()) is not None:
                await self._speak_part(turn.context_id, part)
        except Exception as error:  # noqa: BLE001 whatever it is, Pipecat must hear of it and the turn must end
            frame = ErrorFrame(error=f"{self}: {error}", exception=error, category=_category(error))
            await self.append_to_audio_context(turn.context_id, frame)
        finally:
            if self._turns.get(turn.context_id) is turn:
                del self._turns[turn.context_id]
        if self.audio_context_available(turn.context_id):
            await self._end_context(turn.context_id)

    async def _end_context(self, context_id: str) -> None:
        await self.append_to_audio_context(context_id, TTSStoppedFrame(context_id=context_id))
        await self.remove_audio_context(context_id)

    async def _speak_part(self, context_id: str, part: _Part) -> None:
        utterance = await self._engine.open(part.fields, self.sample_rate)
        try:
            async with asyncio.TaskGroup() as tasks:
                await part.begin(utterance)
                tasks.create_task(part.feed(utterance))
                tasks.create_task(self._append_audio(context_id, utterance))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            await utterance.cancel()

    async def _append_audio(self, context_id: str, utterance: _Utterance) -> None:
        async with aclosing(utterance.audio()) as audio:
            async for data in audio:
                if not self.audio_context_available(context_id) and context_id != self._turn_context_id:
                    await utterance.cancel()
                    return
                frame = TTSAudioRawFrame(data, self.sample_rate, 1, context_id=context_id)
                await self.append_to_audio_context(context_id, frame)

    async def _cancel_turn(self, context_id: str) -> None:
        turn = self._turns.pop(context_id, None)
        if turn is not None and turn.task is not None:
            await self.cancel_task(turn.task)

    async def _cancel_turns(self) -> None:
        for context_id in list(self._turns):
            await self._cancel_turn(context_id)


class _Utterance(Protocol):
    """What a part is spoken with: one of the engine or one of a server."""

    async def push(self, text: str) -> None: ...

    async def end(self, text: str = "") -> None: ...

    async def cancel(self) -> None: ...

    def audio(self) -> AsyncGenerator[bytes, None]: ...


class _Engine(Protocol):
    async def open(self, fields: dict[str, Any], sample_rate: int) -> _Utterance: ...


def _local(engine: Any) -> _Engine:
    # Only a service over an engine in this process may load what the engine needs.
    from service.local import LocalEngine

    return LocalEngine(engine)


@dataclass
class _Part:
    """What one utterance speaks: a sentence, or the tokens between two changes of the settings."""

    fields: dict[str, Any]
    is_live: bool
    pieces: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)

    async def begin(self, utterance: _Utterance) -> None:
        """Says the first piece, before which there is no audio to wait for."""
        first = await self.pieces.get() or ""
        await (utterance.push(first) if self.is_live else utterance.end(first))

    async def feed(self, utterance: _Utterance) -> None:
        while (piece := await self.pieces.get()) is not None:
            await utterance.push(piece)
        if self.is_live:
            await utterance.end()


class _Turn:
    """The text of one audio context, as parts that are spoken one after the other."""

    def __init__(self, context_id: str, is_live: bool) -> None:
        self.context_id = context_id
        self.task: asyncio.Task | None = None
        self.parts: asyncio.Queue[_Part | None] = asyncio.Queue()
        self._is_live = is_live
        self._last: _Part | None = None

    def add(self, text: str, fields: dict[str, Any]) -> None:
        """Adds a piece. Changed fields, or a sentence, begin another part."""
        if self._last is None or self._last.fields != fields:
            self._close_part()
            self._last = _Part(fields, self._is_live)
            self.parts.put_nowait(self._last)
        self._last.pieces.put_nowait(text)
        if not self._is_live:
            self._close_part()

    def finish(self) -> None:
        """No more text will come."""
        self._close_part()
        self.parts.put_nowait(None)

    def _close_part(self) -> None:
        if self._last is not None:
            self._last.pieces.put_nowait(None)
            self._last = None


def _category(error: Exception) -> ErrorCategory:
    """What Pipecat should do about an error: wrong settings last, a wrong text is gone with its turn."""
    status = getattr(error, "status", None)
    if isinstance(error, RemoteError) and status is None:
        return ErrorCategory.CONNECTIVITY
    if status not in (None, 400):
        return classify_http_status_code(status)
    if isinstance(error, (RemoteError, ValueError)):
        param = (getattr(error, "param", None) or "").partition(".")[0]
        return ErrorCategory.INVALID_REQUEST if param in LASTING_PARAMS else ErrorCategory.APPLICATION
    return ErrorCategory.SERVER
