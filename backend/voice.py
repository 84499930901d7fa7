"""A cloned voice: what a recording leaves behind that a `base` checkpoint can speak with.

An x-vector, and with the recording's transcript also its codes, which the model then continues
(in-context cloning). Voices are saved as safetensors files; nothing in them is executed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from backend.errors import CheckpointError

FORMAT = "qwen3-tts-voice/1"


@dataclass(frozen=True, eq=False)
class Voice:
    """``x_vector`` ``[hidden]`` float32; ``codes`` ``[frames, groups]`` int64 and ``text`` together or not at all."""

    x_vector: np.ndarray
    codes: np.ndarray | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        if self.x_vector.ndim != 1 or not np.isfinite(self.x_vector).all():
            raise ValueError("x_vector must be one row of finite numbers")
        if (self.codes is None) != (self.text is None):
            raise ValueError("a voice has both codes and their text, or neither")
        if self.codes is not None and self.codes.ndim != 2:
            raise ValueError(f"codes must be [frames, groups], got {self.codes.ndim} dimensions")

    def save(self, path: str | Path) -> None:
        """Write the voice to a safetensors file."""
        tensors: dict[str, np.ndarray] = {"x_vector": np.ascontiguousarray(self.x_vector, dtype=np.float32)}
        if self.codes is not None:
            tensors["codes"] = np.ascontiguousarray(self.codes, dtype=np.int32)
        save_file(tensors, path, {"format": FORMAT, "text": json.dumps(self.text)})

    @classmethod
    def load(cls, path: str | Path) -> Voice:
        """Read a voice that `save` wrote. Raises `CheckpointError` for any other file."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise CheckpointError(f"{path} is not a voice file of this project ({FORMAT})")
                codes = file.get_tensor("codes").astype(np.int64) if "codes" in file.keys() else None  # noqa: SIM118
                return cls(file.get_tensor("x_vector"), codes, json.loads(metadata["text"]))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} cannot be read as a voice: {error}") from error
