"""The options that all benchmarks share, and the checkpoint and the request that they measure with.

Without ``--model`` a checkpoint of random weights in the released shapes is made once and kept in the user's
cache: how long a frame takes does not depend on the numbers in it. All utterances have one text, so its rows
are projected in the warm-up and not in what is timed.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from backend import Sampling, SpeechRequest, Synthesizer
from backend.make_checkpoint import Preset, make_checkpoint
from benchmarks.report import Report
from megakernel.linear import WEIGHT_FORMATS

TEXT = (
    "Good morning. The train to the coast leaves from platform nine in twelve minutes, "
    "so there is still time for a coffee; shall I hold a seat by the window for you?"
)


def parser(question: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=question)
    model = options.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=get_args(Preset), default="0.6b", help="random weights of this size")
    model.add_argument("--model", type=Path, metavar="DIR", help="a custom-voice checkpoint")
    options.add_argument("--dtype", type=_dtypes, help="one or several of " + ",".join(WEIGHT_FORMATS))
    options.add_argument("--out", type=Path, metavar="FILE", help="where the JSON lines go")
    options.add_argument("--dry", action="store_true", help="write nothing")
    return options


def numbers(text: str) -> list[int]:
    """An option such as ``1,4``."""
    values = [int(number) for number in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text} holds a number below 1")
    return values


def _dtypes(text: str) -> list[str]:
    unknown = set(text.split(",")) - set(WEIGHT_FORMATS)
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return text.split(",")


def report(benchmark: str, question: str, options: argparse.Namespace) -> Report:
    quiet()
    return Report(benchmark, question, options.out, options.dry)


def quiet() -> None:
    """No log of utterances that end at their bound: it is what a benchmark asks for."""
    logging.getLogger("backend").setLevel(logging.ERROR)


def checkpoint_directory(options: argparse.Namespace) -> Path:
    """The checkpoint that the options name, made first if it is a preset that is not there yet."""
    return options.model or made_checkpoint(options.preset)


def made_checkpoint(preset: Preset) -> Path:
    import platformdirs  # only who keeps a checkpoint needs it

    directory = platformdirs.user_cache_path("qwen3-tts", appauthor=False) / "benchmarks" / preset
    if not directory.is_dir():
        with tqdm(desc=f"making {directory}", unit="B", unit_scale=True) as bar:

            def show(written: int, total: int) -> None:
                bar.total = total
                bar.update(written - bar.n)

            make_checkpoint(directory, preset, report=show)
    return directory


def speech_request(synthesizer: Synthesizer, seed: int, frames: int) -> SpeechRequest:
    """The utterance that is measured: sampled as the checkpoint says, at most ``frames`` long."""
    if not synthesizer.voices:
        raise SystemExit(f"{synthesizer.checkpoint.directory} has no named voice: a custom-voice checkpoint is needed")
    return SpeechRequest(TEXT, synthesizer.voices[0], seed=seed, sampling=Sampling(max_frames=frames))


def prompt_positions(synthesizer: Synthesizer) -> int:
    """How many positions the prompt of that utterance has."""
    planner, request = synthesizer.planner, speech_request(synthesizer, seed=0, frames=1)
    prompt = planner.plan(request).prompt(planner.feed(request.text).ids, closed=True)
    return len(prompt)


def setting(synthesizer: Synthesizer, **more: Any) -> dict[str, Any]:
    """What of the model and the engine belongs beside a figure."""
    info = synthesizer.info()
    keys = ("kind", "size", "engine", "device", "dtype")
    return {
        **{key: info[key] for key in keys},
        "groups": synthesizer.config.spec.groups,
        "weights": "random" if synthesizer.noise else "trained",
        **more,
    }
