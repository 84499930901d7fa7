"""One safetensors file: its header checked at open, its tensors read one at a time into memory of their own.

The file is read, never mapped: a mapped file counts as resident for as long as any tensor views it, and a
model would then be held twice while it is packed. Knows nothing of the model whose tensors these are.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from backend.errors import CheckpointError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
MAX_HEADER = 100_000_000  # The limit of the format's own library.


@dataclass(frozen=True)
class TensorRecord:
    """Where a tensor lies: byte range `[begin, end)` of the whole file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int
    end: int


class TensorFile:
    """The tensors of one safetensors file by name.

    Raises `CheckpointError` at open if the file is missing, cut short or not a safetensors file, or holds a
    tensor of a type other than float32, bfloat16 or float16.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise self._damaged("is missing")
        try:
            size, header = self._read_header()
        except OSError as error:
            raise self._damaged(f"cannot be read ({error})") from error
        start = 8 + len(header)
        self.records = {name: self._record(name, entry, start) for name, entry in self._entries(header)}
        self._check_cover(start, size)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, contiguous, in the type that it is stored in; nothing else stays in memory."""
        record = self.records[name]
        tensor = torch.empty(record.shape, dtype=record.dtype)
        if tensor.numel():
            self._fill(tensor.view(-1).view(torch.uint8).numpy().data, record.begin)
        return tensor

    def _fill(self, target: memoryview, offset: int) -> None:
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            filled = 0
            while filled < len(target):
                count = file.readinto(target[filled:])
                if not count:
                    raise self._damaged("has become shorter while it was read")
                filled += count

    def _damaged(self, complaint: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {complaint}; the download is incomplete or damaged: download the checkpoint again"
        )

    def _read_header(self) -> tuple[int, bytes]:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
                raise self._damaged(f"is not a whole safetensors file ({size} bytes)")
            return size, file.read(length)

    def _entries(self, header: bytes) -> list[tuple[str, Any]]:
        try:
            entries = json.loads(header, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"has a header that is not JSON ({error})") from error
        if not isinstance(entries, dict):
            raise self._damaged("has a header that is not a JSON object")
        return [(name, entry) for name, entry in entries.items() if name != "__metadata__"]

    def _record(self, name: str, entry: Any, start: int) -> TensorRecord:
        try:
            shape = tuple(int(length) for length in entry["shape"])
            kind, (begin, end) = str(entry["dtype"]), entry["data_offsets"]
            whole = all(type(number) is int and number >= 0 for number in (*entry["shape"], begin, end))
        except (TypeError, KeyError, ValueError) as error:
            raise self._damaged(f"describes {name} in an unknown way") from error
        if kind not in DTYPES:
            raise CheckpointError(
                f"{self.path}: {name} is stored as {kind}; only {', '.join(DTYPES)} can be read"
            )
        dtype = DTYPES[kind]
        if not whole or end - begin != math.prod(shape) * dtype.itemsize:
            raise self._damaged(f"gives {name} a length that does not fit its shape")
        return TensorRecord(shape, dtype, start + begin, start + end)

    def _check_cover(self, start: int, size: int) -> None:
        """The tensors must lie end to end from the header to the end of the file."""
        ranges = sorted((record.begin, record.end) for record in self.records.values())
        edges = [(start, start), *ranges]
        if any(left[1] != right[0] for left, right in pairwise(edges)):
            raise self._damaged("has gaps or overlaps between its tensors")
        if edges[-1][1] != size:
            raise self._damaged(f"is {size} bytes long where its header promises {edges[-1][1]}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries
