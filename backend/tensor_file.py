"""One safetensors file: its header checked at open, its tensors read one at a time into memory of their own.

A page of the mapped file counts as resident for as long as the mapping lives, and a model would then be held twice
while it is packed: so the file is mapped anew after every few tensors. Knows nothing of the model whose tensors these
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from backend.errors import CheckpointError

# Bytes read through one mapping: enough that opening costs nothing, little beside any model worth the care.
MAPPED_BYTES = 32_000_000

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as the header describes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorFile:
    """The tensors of one safetensors file by name.

    Raises ``CheckpointError`` at open if the file is missing, cut short or not a safetensors file, or holds a
    tensor of a type other than float32, bfloat16 or float16.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping: Any = None
        self._mapped_bytes = 0
        if not path.is_file():
            raise self._damaged("is missing")
        try:
            with safe_open(path, framework="pt") as file:
                described = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dict
                self.records = {name: self._record(name, slice_) for name, slice_ in described.items()}
        except (OSError, SafetensorError) as error:
            raise self._damaged(f"is not a whole safetensors file ({error})") from error

    def read(self, name: str) -> torch.Tensor:
        """The tensor, contiguous, in the type that it is stored in; nothing else stays in memory."""
        try:
            if self._mapping is None:
                self._mapping = safe_open(self.path, framework="pt")
            tensor = self._mapping.get_tensor(name).clone()
        except (OSError, SafetensorError) as error:
            raise self._damaged(f"has changed since it was opened ({error})") from error
        self._mapped_bytes += tensor.nbytes
        if self._mapped_bytes > MAPPED_BYTES:
            self.release()
        return tensor

    def release(self) -> None:
        """Let go of the mapping until the next read."""
        self._mapping, self._mapped_bytes = None, 0

    def _record(self, name: str, described) -> TensorRecord:  # noqa: ANN001  the library does not export its type
        kind = described.get_dtype()
        if kind not in DTYPES:
            raise CheckpointError(f"{self.path}: {name} is stored as {kind}; only {', '.join(DTYPES)} can be read")
        return TensorRecord(tuple(described.get_shape()), DTYPES[kind])

    def _damaged(self, complaint: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {complaint}; the download is incomplete or damaged: download the checkpoint again"
        )
