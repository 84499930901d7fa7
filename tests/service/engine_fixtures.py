"""One tiny checkpoint, one engine and one server for all tests of the service and its clients."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backend import SpeechRequest, Synthesizer
from backend.make_checkpoint import make_checkpoint
from service.pcm import pcm_s16le
from tests.service.serving import ThreadServer, serving
from tests.service.stand_in import StandIn

SEED = 7


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a bound of 24 frames where a request names none: noise has no end of its own."""
    made = make_checkpoint(tmp_path_factory.mktemp("service") / "tiny", preset="tiny", seed=0)
    generation = json.loads((made / "generation_config.json").read_text())
    (made / "generation_config.json").write_text(json.dumps({**generation, "max_new_tokens": 24}))
    return made


@pytest.fixture(scope="session")
def deaf(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, called by the size whose released model listens to no instruction."""
    made = tmp_path_factory.mktemp("service") / "deaf"
    shutil.copytree(tiny, made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "tts_model_size": "0b6"}))
    return made


@pytest.fixture(scope="session")
def engine(tiny: Path) -> Iterator[Synthesizer]:
    """Two lanes; a test that leaves them busy makes the next one wait for ever."""
    with Synthesizer.from_pretrained(tiny, lanes=2) as synthesizer:
        yield synthesizer


@pytest.fixture(scope="session")
def server(engine: Synthesizer) -> Iterator[ThreadServer]:
    """The real engine behind the real server, with a seed for clients that cannot send one."""
    with serving(engine, seed=SEED) as running:
        yield running


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def still_server(stand_in: StandIn) -> Iterator[ThreadServer]:
    with serving(stand_in) as running:
        yield running


_HEARD: dict[tuple[int, SpeechRequest], np.ndarray] = {}


def spoken(engine: Synthesizer, *requests: SpeechRequest) -> bytes:
    """What the engine itself says, as 16-bit samples. The same request is asked once."""
    return pcm_s16le(np.concatenate([_samples(engine, request) for request in requests]))


def _samples(engine: Synthesizer, request: SpeechRequest) -> np.ndarray:
    key = (id(engine), request)
    if key not in _HEARD:
        _HEARD[key] = np.concatenate([chunk.samples for chunk in engine.stream(request)])
    return _HEARD[key]
