"""Turns settings into a running engine, saying in the log what it loads and what its voice is.

Without a model it makes a small random checkpoint once and keeps it in the user's cache directory.
It does not know what the engine is used for.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from service.settings import Settings

if TYPE_CHECKING:
    from backend import Synthesizer

logger = logging.getLogger("qwen3_tts")

NOISE = "this checkpoint is random: its voice is NOISE, for trying things out; name a trained model with --model"


def load(settings: Settings, *, progress: bool = False) -> Synthesizer:
    """A running engine; returns when it can speak, with everything compiled.

    Raises ``backend.errors.CheckpointError`` where the model cannot be read, ``RequestError`` where the
    engine that was asked for cannot run.
    """
    _keep_compiled_kernels()
    from backend import Synthesizer

    model = settings.model or str(noise_checkpoint())
    logger.info("loading %s (%s, %s)", model, settings.device, settings.dtype or "default dtype")
    begun = time.monotonic()
    synthesizer = Synthesizer.from_pretrained(
        model,
        device=settings.device,
        engine=settings.engine,
        dtype=settings.dtype,
        lanes=settings.lanes,
        lead=settings.lead_seconds,
        max_characters=settings.max_input_chars,
        offline=settings.offline,
        revision=settings.revision,
        progress=progress,
    )
    facts = synthesizer.info()
    logger.info("loaded in %.1f s: %s, %d lanes", time.monotonic() - begun, facts["kind"], facts["lanes"])
    logger.info("frames are made by the %s, on %s in %s", facts["engine"], facts["device"], facts["dtype"])
    if synthesizer.noise:
        logger.warning(NOISE)
    return synthesizer


def noise_checkpoint() -> Path:
    """The directory of the small random checkpoint, made on the first call and cached.

    Its name carries a digest of the maker's source: a changed maker makes a new one.
    """
    maker = importlib.import_module("backend.make_checkpoint")
    digest = hashlib.sha256(Path(str(maker.__file__)).read_bytes()).hexdigest()[:8]
    home = _cache() / f"tiny-custom_voice-{digest}"
    if not home.exists():
        logger.info("no model named: making a small random checkpoint in %s", home)
        try:
            maker.make_checkpoint(home, preset="tiny", kind="custom_voice", seed=0)
        except OSError:
            # Where another process was first, its copy is as good.
            if not home.exists():
                raise
    return home


def _keep_compiled_kernels() -> None:
    """Have Triton keep what it compiles beside our other files, from run to run; `TRITON_CACHE_DIR` wins."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(_cache() / "triton"))


def _cache() -> Path:
    return platformdirs.user_cache_path("qwen3-tts", appauthor=False)
