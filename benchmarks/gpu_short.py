"""The shortest run that launches everything: what a sanitizer can watch in a minute.

Small random weights, several lanes, one of them idle, a few frames in every weight format, and the codec.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from backend.checkpoint import Checkpoint
from backend.codec import Codec
from backend.make_checkpoint import make_checkpoint
from benchmarks.gpu_engines import check, draw_weights, kernel_decoder, start

LANES, PROMPT, FRAMES = 2, 5, 2


def short(weight_format: str, device: torch.device) -> torch.Tensor:
    """The codes ``[lanes, frames, groups]`` of a few frames, the second lane joining after the first."""
    decoder = kernel_decoder(draw_weights("small", weight_format, device), LANES, PROMPT + FRAMES + 1)
    text = start(decoder, PROMPT)
    decoder.step([0], text[:1])
    codes = torch.stack([decoder.step([0, 1], text) for _ in range(FRAMES)], dim=1)
    check(decoder)
    return codes


def decode(codes: torch.Tensor, device: torch.device) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Checkpoint(make_checkpoint(Path(directory) / "tiny"))
        codec = Codec(checkpoint.config.codec, checkpoint.read, LANES, device)
        groups = checkpoint.config.codec.groups // codes.shape[2]  # the small decoder has fewer
        return codec.decode(codes.repeat(1, 1, groups), list(range(LANES)))


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--device", default="cuda")
    options.add_argument("--formats", nargs="+", default=["float32", "bfloat16", "q8_0"])
    given = options.parse_args(arguments)
    device = torch.device(given.device)
    for form in given.formats:
        codes = short(form, device)
        samples = decode(codes, device)
        assert samples.isfinite().all(), f"samples of {form} are not finite"
        print(f"{form}: {codes[:, -1].tolist()}")


if __name__ == "__main__":
    main()
