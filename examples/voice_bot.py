"""A voice bot: your speech to text, a language model's answer, spoken by Qwen3-TTS.

Start our server (`make serve`), then `OPENAI_API_KEY=… python examples/voice_bot.py` and open the page that it
names. Needs `pip install "pipecat-ai[runner,webrtc,openai]"`. Written for Pipecat 1.14.

Environment: QWEN3_TTS_URL (http://127.0.0.1:8000), QWEN3_TTS_API_KEY where the server asks for one,
OPENAI_API_KEY for hearing and answering.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The service is a file at the root of the repository, and is found there without an installation.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipecat.audio.vad.silero import SileroVADAnalyzer
from pipecat.frames.frames import LLMRunFrame
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineParams, PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import (
    LLMContextAggregatorPair,
    LLMUserAggregatorParams,
)
from pipecat.processors.frame_processor import FrameProcessor
from pipecat.runner.types import RunnerArguments
from pipecat.runner.utils import create_transport
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.stt import OpenAISTTService
from pipecat.services.tts_service import TextAggregationMode
from pipecat.transports.base_transport import BaseTransport, TransportParams
from pipecat.workers.runner import WorkerRunner

from pipecat_tts_service import Qwen3TTSService

INSTRUCTION = "You are a friendly voice assistant. Answer in one or two short spoken sentences, without markup."
TRANSPORTS = {"webrtc": lambda: TransportParams(audio_in_enabled=True, audio_out_enabled=True)}


def speech() -> Qwen3TTSService:
    """The voice: answers are spoken while the language model still writes them."""
    return Qwen3TTSService(
        url=os.environ.get("QWEN3_TTS_URL", "http://127.0.0.1:8000"),
        api_key=os.environ.get("QWEN3_TTS_API_KEY"),
        text_aggregation_mode=TextAggregationMode.TOKEN,
    )


def conversation(ear: list[FrameProcessor], llm: FrameProcessor, mouth: list[FrameProcessor]) -> Pipeline:
    """Ear (audio in, speech to text), language model, mouth (text to speech, audio out), with a shared memory."""
    user = LLMUserAggregatorParams(vad_analyzer=SileroVADAnalyzer())
    memory = LLMContextAggregatorPair(LLMContext(), user_params=user)
    return Pipeline([*ear, memory.user(), llm, *mouth, memory.assistant()])


async def run_bot(transport: BaseTransport, runner_args: RunnerArguments) -> None:
    key = os.environ["OPENAI_API_KEY"]
    llm = OpenAILLMService(
        api_key=key, settings=OpenAILLMService.Settings(model="gpt-4o-mini", system_instruction=INSTRUCTION)
    )
    ear = [transport.input(), OpenAISTTService(api_key=key)]
    pipeline = conversation(ear, llm, [speech(), transport.output()])
    params = PipelineParams(audio_out_sample_rate=24_000, enable_metrics=True)
    worker = PipelineWorker(pipeline, params=params)

    @transport.event_handler("on_client_connected")
    async def greet(_transport: BaseTransport, _client: object) -> None:
        await worker.queue_frame(LLMRunFrame())

    @transport.event_handler("on_client_disconnected")
    async def leave(_transport: BaseTransport, _client: object) -> None:
        await worker.cancel()

    runner = WorkerRunner(handle_sigint=runner_args.handle_sigint)
    await runner.add_workers(worker)
    await runner.run()


async def bot(runner_args: RunnerArguments) -> None:
    """What Pipecat's runner calls for each visitor."""
    await run_bot(await create_transport(runner_args, TRANSPORTS), runner_args)


if __name__ == "__main__":
    from pipecat.runner.run import main

    main()
