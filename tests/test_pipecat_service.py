"""Pipecat's services over the engine and over the server: samples, live text, barge-in, settings, errors.

Pipecat's own Cartesia and OpenAI services speak to our server; Qwen3TTSService speaks to both.
"""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soxr

pytest.importorskip("pipecat", reason="the extra 'pipecat' is not installed")

from pipecat.frames.frames import (
    CancelFrame,
    EndFrame,
    ErrorFrame,
    Frame,
    InterruptionFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
    LLMRunFrame,
    LLMTextFrame,
    MetricsFrame,
    TextFrame,
    TTSAudioRawFrame,
    TTSSpeakFrame,
    TTSStartedFrame,
    TTSStoppedFrame,
    TTSTextFrame,
    TTSUpdateSettingsFrame,
)
from pipecat.metrics.metrics import TTFBMetricsData
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.cartesia.tts import CartesiaTTSService
from pipecat.services.openai.tts import OpenAITTSService
from pipecat.services.tts_service import TextAggregationMode, TTSService
from pipecat.tests.utils import run_test
from pipecat.transcriptions.language import Language
from pipecat.utils.errors import ErrorCategory
from pipecat.workers.runner import WorkerRunner

from backend import Sampling, SpeechRequest, Synthesizer
from backend.errors import EngineError
from pipecat_tts_service import Qwen3TTSService, Qwen3TTSSettings
from service.openai_speech import own_voice
from service.pcm import pcm_s16le
from tests.service.engine_fixtures import SEED, engine, server, spoken, stand_in, still_server, tiny
from tests.service.serving import ThreadServer, serving
from tests.service.stand_in import StandIn, chunk

__all__ = ["engine", "server", "stand_in", "still_server", "tiny"]

TEXT = "Good morning, how are you?"
TOKENS = ["Good", " mor", "ning", ",", " how are", " you?"]
FOREVER = 1500  # frames: two minutes, which no test waits for
RATE = PipelineParams(audio_out_sample_rate=24_000)
ROOT = Path(__file__).parent.parent

Made = Callable[..., Qwen3TTSService]


@pytest.fixture(params=["engine", "url"])
def make(request: pytest.FixtureRequest, engine: Synthesizer, server: ThreadServer) -> Made:
    """Makes the service over the engine in this process and, in turn, over the server."""
    over: dict[str, Any] = {"engine": engine} if request.param == "engine" else {"url": server.url}
    return lambda settings=None, **more: Qwen3TTSService(**over, settings=settings or settings_of(), **more)


@pytest.fixture(params=["engine", "url"])
def make_still(request: pytest.FixtureRequest, stand_in: StandIn, still_server: ThreadServer) -> Made:
    """The same over an engine that speaks when the test says so."""
    over: dict[str, Any] = {"engine": stand_in} if request.param == "engine" else {"url": still_server.url}
    return lambda **more: Qwen3TTSService(**over, **more)


def settings_of(**fields: Any) -> Qwen3TTSSettings:
    return Qwen3TTSSettings(**{"seed": 3, "max_frames": 12, **fields})


def request_of(engine: Synthesizer, text: str = TEXT, **fields: Any) -> SpeechRequest:
    given: dict[str, Any] = {
        "voice": engine.voices[0],
        "seed": 3,
        "sampling": Sampling(max_frames=12),
        **fields,
    }
    return SpeechRequest(text, **given)


def turn(*pieces: str) -> list[Frame]:
    return [LLMFullResponseStartFrame(), *map(LLMTextFrame, pieces), LLMFullResponseEndFrame()]


def hear(service: FrameProcessor, *frames: Frame) -> tuple[Sequence[Frame], Sequence[Frame]]:
    return asyncio.run(run_test(service, frames_to_send=frames, pipeline_params=RATE))


def audio(frames: Sequence[Frame]) -> bytes:
    return b"".join(frame.audio for frame in frames if isinstance(frame, TTSAudioRawFrame))


def test_speak_frame_is_the_engines_whole_request(engine: Synthesizer, make: Made):
    down, up = hear(make(), TTSSpeakFrame(TEXT))
    assert not [frame for frame in up if isinstance(frame, ErrorFrame)]
    assert audio(down) == spoken(engine, request_of(engine))
    kinds = [type(frame) for frame in down if isinstance(frame, (TTSStartedFrame, TTSAudioRawFrame, TTSStoppedFrame))]
    assert kinds == [TTSStartedFrame, *[TTSAudioRawFrame] * 4, TTSStoppedFrame]
    assert [frame.text for frame in down if isinstance(frame, TTSTextFrame)] == [TEXT]


def test_each_sentence_is_an_utterance(engine: Synthesizer, make: Made):
    down, _ = hear(make(), *turn("One thing. Ano", "ther thing."))
    requests = [request_of(engine, text) for text in ("One thing.", "Another thing.")]
    assert audio(down) == spoken(engine, *requests)
    assert len([frame for frame in down if isinstance(frame, TTSStoppedFrame)]) == 1


def test_tokens_are_one_live_utterance(engine: Synthesizer, make: Made):
    service = make(text_aggregation_mode=TextAggregationMode.TOKEN)
    down, _ = hear(service, *turn(*TOKENS), TTSSpeakFrame("More."))
    expected = [request_of(engine, text, text_mode="streamed") for text in (TEXT, "More.")]
    assert audio(down) == spoken(engine, *expected)


def test_settings_reach_the_engine(engine: Synthesizer, make: Made):
    voice = engine.voices[1]
    settings = settings_of(voice=voice, language=Language.EN_GB, text_mode="streamed", top_k=5, predictor_top_p=0.8)
    down, _ = hear(make(settings), TTSSpeakFrame(TEXT))
    sampling = Sampling(max_frames=12, top_k=5, predictor_top_p=0.8)
    wanted = request_of(engine, voice=voice, language="english", text_mode="streamed", sampling=sampling)
    assert audio(down) == spoken(engine, wanted)


def test_settings_change_between_utterances(engine: Synthesizer, make: Made):
    delta = Qwen3TTSSettings(voice=engine.voices[1], seed=4)
    down, _ = hear(make(), TTSSpeakFrame("One."), TTSUpdateSettingsFrame(delta=delta), TTSSpeakFrame("Two."))
    requests = [request_of(engine, "One."), request_of(engine, "Two.", voice=engine.voices[1], seed=4)]
    assert audio(down) == spoken(engine, *requests)


def test_settings_change_amid_live_text(engine: Synthesizer, make: Made):
    service = make(text_aggregation_mode=TextAggregationMode.TOKEN)
    delta = TTSUpdateSettingsFrame(delta=Qwen3TTSSettings(seed=4))
    start, *tokens, end = turn("One", " thing.", "Another", " thing.")
    down, _ = hear(service, start, *tokens[:2], delta, *tokens[2:], end)
    requests = [request_of(engine, "One thing."), request_of(engine, "Another thing.", seed=4)]
    streamed = [SpeechRequest(**{**vars(request), "text_mode": "streamed"}) for request in requests]
    assert audio(down) == spoken(engine, *streamed)


def test_other_sample_rates_are_resampled(engine: Synthesizer, make: Made):
    down, _ = hear(make(sample_rate=16_000), TTSSpeakFrame(TEXT))
    rates = {frame.sample_rate for frame in down if isinstance(frame, TTSAudioRawFrame)}
    samples = np.concatenate([part.samples for part in engine.stream(request_of(engine))])
    expected = pcm_s16le(soxr.resample(samples, 24_000, 16_000))
    assert rates == {16_000} and len(audio(down)) == len(expected)
    difference = np.frombuffer(audio(down), "<i2").astype(int) - np.frombuffer(expected, "<i2")
    assert np.abs(difference).max() <= 1


def test_first_audio_is_measured(make: Made):
    params = PipelineParams(audio_out_sample_rate=24_000, enable_metrics=True)
    down, _ = asyncio.run(run_test(make(), frames_to_send=[TTSSpeakFrame(TEXT)], pipeline_params=params))
    data = [entry for frame in down if isinstance(frame, MetricsFrame) for entry in frame.data]
    assert any(isinstance(entry, TTFBMetricsData) and entry.value > 0 for entry in data)


def test_pipecats_cartesia_service_speaks_to_our_server(engine: Synthesizer, server: ThreadServer):
    settings = CartesiaTTSService.Settings(voice=engine.voices[1])
    service = CartesiaTTSService(api_key="any", url=server.websocket_url, settings=settings)
    down, up = hear(service, *turn("Hi. How", " so?"))
    wanted = SpeechRequest("Hi. How so?", engine.voices[1], "english", seed=SEED, text_mode="streamed")
    assert audio(down) == spoken(engine, wanted)
    assert not [frame for frame in up if isinstance(frame, ErrorFrame)]


def test_pipecats_cartesia_service_sends_tokens(engine: Synthesizer, server: ThreadServer):
    service = CartesiaTTSService(
        api_key="any", url=server.websocket_url, text_aggregation_mode=TextAggregationMode.TOKEN
    )
    down, _ = hear(service, *turn("Well", " then"))
    wanted = SpeechRequest("Well then", engine.voices[0], "english", seed=SEED, text_mode="streamed")
    assert audio(down) == spoken(engine, wanted)


def test_pipecats_openai_service_speaks_to_our_server(engine: Synthesizer, server: ThreadServer):
    service = OpenAITTSService(api_key="any", base_url=f"{server.url}/v1")
    down, _ = hear(service, TTSSpeakFrame("Well."))
    wanted = SpeechRequest("Well.", own_voice("alloy", engine.voices), seed=SEED)
    assert audio(down) == spoken(engine, wanted)


class Stage:
    """A running pipeline around a service, and the frames that leave it."""

    def __init__(self, worker: PipelineWorker, service: TTSService) -> None:
        self.worker = worker
        self.service = service
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()

    async def send(self, *frames: Frame) -> None:
        for frame in frames:
            await self.worker.queue_frame(frame)

    async def until(self, kind: type[Frame]) -> list[Frame]:
        """The frames up to and with the first of that kind."""
        heard: list[Frame] = []
        while not heard or not isinstance(heard[-1], kind):
            heard.append(await asyncio.wait_for(self.frames.get(), 20))
        return heard


class Ear(FrameProcessor):
    """Puts what passes in a queue, in either direction."""

    def __init__(self) -> None:
        super().__init__(enable_direct_mode=True)
        self.stage: Stage | None = None

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if self.stage is not None:
            self.stage.frames.put_nowait(frame)
        await self.push_frame(frame, direction)


@asynccontextmanager
async def stage(service: TTSService) -> AsyncIterator[Stage]:
    before, after = Ear(), Ear()
    worker = PipelineWorker(Pipeline([before, service, after]), cancel_on_idle_timeout=False, params=RATE)
    made = before.stage = after.stage = Stage(worker, service)
    started = asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def _started(_worker: PipelineWorker, _frame: Frame) -> None:
        started.set()

    runner = WorkerRunner()
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    try:
        await asyncio.wait_for(started.wait(), 10)
        yield made
    finally:
        await worker.queue_frame(CancelFrame())
        await asyncio.wait_for(running, 10)


def acted(play: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(play, 50))


async def taken(waiting: Callable[[], Any]) -> Any:
    """What a blocking ``take`` of the stand-in gives, without blocking the loop."""
    return await asyncio.to_thread(waiting)


@pytest.mark.parametrize("mode", list(TextAggregationMode))
def test_interruption_cancels_the_utterance(stand_in: StandIn, make_still: Made, mode: TextAggregationMode):
    stand_in.on_open = lambda utterance: utterance.deliver(chunk())

    async def play() -> None:
        async with stage(make_still(text_aggregation_mode=mode)) as on:
            await on.send(LLMFullResponseStartFrame(), LLMTextFrame("One thing. Another"))
            await on.until(TTSAudioRawFrame)
            utterance = await taken(stand_in.take)
            assert not utterance.cancelled
            await on.send(InterruptionFrame())
            assert await taken(lambda: stand_in.freed.get(timeout=10)) is utterance

    acted(play())


def test_interruption_before_any_audio(stand_in: StandIn, make_still: Made):
    async def play() -> None:
        async with stage(make_still()) as on:
            await on.send(TTSSpeakFrame("One."))
            utterance = await taken(stand_in.take)
            await on.send(InterruptionFrame())
            assert await taken(lambda: stand_in.freed.get(timeout=10)) is utterance

    acted(play())


@pytest.mark.parametrize("last", [EndFrame, CancelFrame])
def test_the_pipelines_end_leaves_no_utterance(stand_in: StandIn, make_still: Made, last: type[Frame]):
    def answer(utterance) -> None:
        utterance.deliver(chunk())
        if last is EndFrame:
            utterance.finish("stop")

    stand_in.on_open = answer

    async def play() -> None:
        async with stage(make_still()) as on:
            await on.send(LLMFullResponseStartFrame(), LLMTextFrame("One thing. And an"))
            await on.until(TTSAudioRawFrame)
            await on.send(last())

    acted(play())
    assert all(utterance.finish_reason for utterance in stand_in.utterances)


def test_after_an_interruption_the_next_turn_is_served(engine: Synthesizer, make: Made):
    """Three turns for ever on two lanes, each interrupted; then one that must get a lane."""

    async def play() -> None:
        async with stage(make(settings_of(max_frames=FOREVER))) as on:
            for _ in range(3):
                await on.send(TTSSpeakFrame(TEXT))
                await on.until(TTSAudioRawFrame)
                await on.send(InterruptionFrame())
                await on.until(InterruptionFrame)
            short = Qwen3TTSSettings(max_frames=12)
            await on.send(TTSUpdateSettingsFrame(delta=short), TTSSpeakFrame(TEXT))
            await on.until(TTSStartedFrame)
            assert audio(await on.until(TTSStoppedFrame)) == spoken(engine, request_of(engine))

    acted(play())


def test_live_text_is_spoken_before_it_is_all_there(engine: Synthesizer, make: Made):
    async def play() -> None:
        async with stage(make(text_aggregation_mode=TextAggregationMode.TOKEN)) as on:
            await on.send(LLMFullResponseStartFrame(), *map(LLMTextFrame, TOKENS[:5]))
            first = await on.until(TTSAudioRawFrame)
            await on.send(LLMTextFrame(TOKENS[5]), LLMFullResponseEndFrame())
            rest = await on.until(TTSStoppedFrame)
            heard = audio([*first, *rest])
            assert heard == spoken(engine, request_of(engine, text_mode="streamed"))

    acted(play())


def test_text_outside_a_turn_ends_by_itself(engine: Synthesizer, make: Made):
    async def play() -> None:
        async with stage(make()) as on:
            await on.send(TextFrame("One thing. An"))
            heard = await on.until(TTSStoppedFrame)
            assert audio(heard) == spoken(engine, request_of(engine, "One thing."))

    acted(play())


def errors(frames: Sequence[Frame]) -> list[ErrorFrame]:
    return [frame for frame in frames if isinstance(frame, ErrorFrame)]


@pytest.mark.parametrize(
    ("settings", "text", "category", "word"),
    [
        ({"voice": "nobody"}, TEXT, ErrorCategory.INVALID_REQUEST, "nobody"),
        ({"language": "nl"}, TEXT, ErrorCategory.INVALID_REQUEST, "english"),
        ({}, "a\x07b", ErrorCategory.APPLICATION, "U+0007"),
        ({"temperature": -1.0}, TEXT, ErrorCategory.APPLICATION, "temperature"),
    ],
)
@pytest.mark.parametrize("mode", list(TextAggregationMode))
def test_errors_are_reported_and_the_turn_ends(
    make: Made, mode: TextAggregationMode, settings: dict, text: str, category: ErrorCategory, word: str
):
    service = make(settings_of(**settings), text_aggregation_mode=mode)
    down, up = hear(service, TTSSpeakFrame(text))
    assert errors(up)[0].category is category and word in errors(up)[0].error
    assert not audio(down) and any(isinstance(frame, TTSStoppedFrame) for frame in down)
    assert service.is_usable == (category is not ErrorCategory.INVALID_REQUEST)


def test_a_sentence_over_the_limit_is_an_error_of_the_text(make: Made):
    _, up = hear(make(), TTSSpeakFrame("long " * 1000))
    assert errors(up)[0].category is ErrorCategory.APPLICATION and "4096" in errors(up)[0].error


def test_a_failing_engine_is_a_servers_error(stand_in: StandIn, make_still: Made):
    stand_in.on_open = lambda utterance: utterance.fail(EngineError("broken"))
    _, up = hear(make_still(), TTSSpeakFrame("One."))
    assert errors(up)[0].category is ErrorCategory.SERVER


def test_a_server_that_is_away_is_an_error_and_is_tried_again(stand_in: StandIn):
    def answer(utterance) -> None:
        utterance.deliver(chunk())
        utterance.finish("stop")

    stand_in.on_open = answer
    with serving(stand_in) as running:
        port = int(running.address.rpartition(":")[2])

    async def play() -> None:
        async with stage(Qwen3TTSService(url=f"http://127.0.0.1:{port}")) as on:
            await on.send(TTSSpeakFrame("One."))
            [error] = errors(await on.until(ErrorFrame))
            assert error.category is ErrorCategory.CONNECTIVITY
            with serving(stand_in, port=port):
                await on.send(TTSSpeakFrame("Two."))
                assert audio(await on.until(TTSAudioRawFrame))

    acted(play())


def test_a_wrong_key_is_an_authentication_error(stand_in: StandIn):
    """The service is of no use then, and yet a turn ends; it does not wait for silence to be noticed."""

    async def play() -> None:
        async with stage(Qwen3TTSService(url=running.url, api_key="wrong", stop_frame_timeout_s=3600)) as on:
            [error] = errors(await on.until(ErrorFrame))
            assert error.category is ErrorCategory.AUTHENTICATION and not on.service.is_usable
            await on.send(TTSSpeakFrame("One."))
            await on.until(TTSStoppedFrame)

    with serving(stand_in, api_key="right") as running:
        acted(play())


def test_cleanup_twice_and_before_anything(make: Made):
    async def clean() -> None:
        service = make()
        await service.cleanup()
        await service.cleanup()

    asyncio.run(clean())


def test_exactly_one_of_engine_and_url():
    for wrong in ({}, {"engine": StandIn(), "url": "http://127.0.0.1:8000"}):
        with pytest.raises(ValueError, match="either"):
            Qwen3TTSService(**wrong)
    with pytest.raises(ValueError, match="no server URL"):
        Qwen3TTSService(url="127.0.0.1:8000")


@pytest.mark.parametrize(
    ("language", "name"), [(Language.EN, "english"), (Language.PT_BR, "portuguese"), (Language.NL, "nl")]
)
def test_language_map(language: Language, name: str):
    service = Qwen3TTSService(url="http://127.0.0.1:8000", settings=Qwen3TTSSettings(language=language))
    assert service.language_to_service_language(language) == name
    assert service.settings.language == name  # type: ignore[attr-defined]


class Scripted(FrameProcessor):
    """A language model with one answer."""

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMContextFrame):
            for piece in turn(*TOKENS):
                await self.push_frame(piece)
        else:
            await self.push_frame(frame, direction)


def test_the_example_bot_speaks(engine: Synthesizer, make: Made):
    """The pipeline of `examples/voice_bot.py` with a scripted language model; its token mode, our voice."""
    spec = importlib.util.spec_from_file_location("voice_bot", ROOT / "examples" / "voice_bot.py")
    assert spec is not None and spec.loader is not None
    voice_bot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(voice_bot)
    assert voice_bot.speech()._text_aggregation_mode is TextAggregationMode.TOKEN
    service = make(text_aggregation_mode=TextAggregationMode.TOKEN)
    pipeline = voice_bot.conversation([], Scripted(), [service])
    down, _ = hear(pipeline, LLMRunFrame())
    assert audio(down) == spoken(engine, request_of(engine, text_mode="streamed"))


def test_a_remote_service_loads_no_torch():
    script = (
        "import sys; from pipecat_tts_service import Qwen3TTSService; Qwen3TTSService(url='http://127.0.0.1:8000');"
        "assert not {'torch', 'backend', 'megakernel', 'fastapi'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
