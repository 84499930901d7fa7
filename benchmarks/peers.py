"""How long do a frame and the first audio take others? The same checkpoint and text, each peer in its own process.

A directory (the environment variable PEERS_PATH, or build/peers) has one directory for each peer with that peer's
packages alone, so that versions do not mix; what is missing there is taken from the Python that runs this. Fill it with

    python -m benchmarks.peers --install

On a machine that cannot reach a package index, `pip download --no-deps` what `INSTALL` names elsewhere, for the Python
and the platform of that machine (about 30 MB of wheels in all), carry them there and add `--wheels DIR`. torch,
accelerate, safetensors and numpy come from the machine; what the peers import and do not use here,
`benchmarks/peer.py` stands in for.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from backend.checkpoint import Checkpoint
from benchmarks.conditions import ROOT, GpuConditions
from benchmarks.device import measure_machine
from benchmarks.floors import MILLISECONDS, Floors, Work
from benchmarks.options import TEXT, checkpoint_directory, parser
from benchmarks.peer import SPEAKERS, Answer, Call
from benchmarks.report import Report

QUESTION = "how long do a frame and the first audio take other implementations?"
PATH_VARIABLE = "PEERS_PATH"

INSTALL = {
    "qwen-tts": (
        "qwen-tts==0.1.1",
        "transformers==4.57.3",
        "tokenizers==0.22.2",
        "huggingface-hub==0.36.2",
    ),
    "faster-qwen3-tts": (
        "faster-qwen3-tts==0.5.4",
        "qwen-tts-hf==0.1.1.post1",  # qwen-tts for transformers 5
        "transformers==5.15.1",  # later ones have moved what qwen-tts-hf reads
        "tokenizers==0.22.2",
        "huggingface-hub==1.33.0",
    ),
}


def place(name: str) -> Path:
    """Where the packages of that peer are."""
    return Path(os.environ.get(PATH_VARIABLE) or ROOT / "build" / "peers").resolve() / name


def install(name: str, wheels: Path | None = None) -> None:
    """Put the packages of that peer, and nothing that they depend on, in their place."""
    source = [] if wheels is None else ["--no-index", "--find-links", str(wheels)]
    call = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(place(name))]
    subprocess.run([*call, *source, *INSTALL[name]], check=True)


def ask_apart(name: str, call: Call, limit: float) -> Answer:
    """The peer's answer from a process of its own, with its packages first on the path; at most ``limit`` seconds."""
    command = [sys.executable, "-m", "benchmarks.peer", name, json.dumps(asdict(call))]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(name), capture_output=True, text=True, check=True, timeout=limit
        )
        return Answer(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Answer([], {}, {}, absent=f"it took more than {limit:.0f} s")
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit status {error.returncode}"]
        return Answer([], {}, {}, absent=said[-1])


def _environment(name: str) -> dict[str, str]:
    paths = [str(place(name)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Question:
    """What all peers are asked about one checkpoint."""

    checkpoint: Checkpoint
    call: Call

    @classmethod
    def about(cls, directory: Path, **options: Any) -> Question:
        """``options`` are those of `Call`."""
        checkpoint = Checkpoint(directory)
        return cls(checkpoint, Call(str(directory.resolve()), TEXT, next(iter(checkpoint.config.speakers)), **options))

    @property
    def floor(self) -> Work:
        return Floors.of(self.checkpoint, self.call.dtype).frame()

    @property
    def setting(self) -> dict[str, Any]:
        config, call = self.checkpoint.config, self.call
        return {
            "kind": config.kind,
            "size": config.size,
            "device": call.device,
            "dtype": call.dtype,
            "weights": "random" if config.random else "trained",
            "lanes": 1,
            "frames": call.frames,
        }


def add_peer(result: Report, name: str, question: Question, limit: float) -> Answer:
    """Ask one peer and report its figures, or why there are none."""
    answer = ask_apart(name, question.call, limit)
    if answer.absent:
        print(f"  {name} is absent: {answer.absent}\n  to have it: python -m benchmarks.peers --install {name}")
        return answer
    where = {**question.setting, "engine": name, "versions": answer.versions}
    ceiling = question.floor.ceiling(result.machine)
    milliseconds = [seconds * MILLISECONDS for seconds in answer.frame_seconds]
    figure = result.add_many("frame", milliseconds, "ms", ceiling, **where)
    assert figure.value, f"{name} made no frame"
    result.add("frame, share of the bandwidth", ceiling.value / figure.value, "x", None, **where)
    for frames, seconds in answer.first_audio.items():
        result.add_many("first audio", [s * MILLISECONDS for s in seconds], "ms", **where, first_chunk=frames)
    return answer


def main(arguments: list[str] | None = None) -> None:
    options = parser(QUESTION)
    options.add_argument("--install", nargs="*", choices=list(INSTALL), help="install these peers, or all; no more")
    options.add_argument("--wheels", type=Path, metavar="DIR", help="install from the wheels there")
    options.add_argument("--device", default="cuda", help="cuda or cpu; faster-qwen3-tts needs cuda")
    options.add_argument("--frames", type=int, default=50, help="frames of an utterance")
    options.add_argument("--runs", type=int, default=2, help="utterances of each")
    options.add_argument("--limit", type=float, default=600, help="seconds that a peer may take")
    given = options.parse_args(arguments)
    if given.install is None:
        measure(given)
    for name in [] if given.install is None else given.install or INSTALL:
        install(name, given.wheels)


def measure(given: argparse.Namespace) -> None:
    device = torch.device(given.device)
    conditions = GpuConditions(measure_machine(device), device) if device.type == "cuda" else None
    with Report("peers", QUESTION, given.out, given.dry, conditions) as result:
        for dtype in given.dtype or ["bfloat16"]:
            options = {"device": given.device, "dtype": dtype, "frames": given.frames, "runs": given.runs}
            asked = Question.about(checkpoint_directory(given), **options)
            for name in SPEAKERS:
                add_peer(result, name, asked, given.limit)


if __name__ == "__main__":
    main()
