"""Text to codes to samples: checkpoints, prompts, lanes and voices. Synchronous, and unaware of any network."""

from backend.errors import CheckpointError, EngineError, RequestError
from backend.request import Sampling, SpeechRequest
from backend.synthesizer import SpeechStream, Synthesizer
from backend.utterance import Chunk, Utterance
from backend.voice import Voice

__all__ = [
    "CheckpointError",
    "Chunk",
    "EngineError",
    "RequestError",
    "Sampling",
    "SpeechRequest",
    "SpeechStream",
    "Synthesizer",
    "Utterance",
    "Voice",
]
