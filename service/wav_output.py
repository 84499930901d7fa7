"""Turns float chunks into a `.wav` or raw `.pcm` file, or into a stream on stdout, as they come.

It does not know where the chunks are from.
"""

from __future__ import annotations

import os
import sys
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Literal, Protocol

import numpy as np

from service.pcm import ENGINE_RATE, pcm_s16le, wav_header

Form = Literal["wav", "pcm"]


class Output(Protocol):
    """Takes chunks of float samples at 24 kHz."""

    def write(self, samples: np.ndarray) -> None: ...


@contextmanager
def opened(target: str, form: Form | None) -> Iterator[Output]:
    """An output for a path, or for ``-``, stdout. ``form`` None follows the path's ending, wav by default.

    Raises ``OSError`` where the file cannot be written, ``BrokenPipeError`` where nobody reads on.
    """
    form = form or ("pcm" if target.lower().endswith((".pcm", ".raw")) else "wav")
    if target == "-":
        yield _Stream(sys.stdout.buffer, form)
        return
    with open(target, "wb") as file:
        if form == "pcm":
            yield _Stream(file, form)
        else:
            # Closing it writes the true sizes into the header.
            with wave.open(file, "wb") as wav:
                wav.setparams((1, 2, ENGINE_RATE, 0, "NONE", "not compressed"))
                yield _WavFile(wav)


class _Stream:
    def __init__(self, file: BinaryIO, form: Form) -> None:
        self._file = file
        self._head = wav_header() if form == "wav" else b""

    def write(self, samples: np.ndarray) -> None:
        self._file.write(self._head + pcm_s16le(samples))
        self._file.flush()
        self._head = b""


class _WavFile:
    def __init__(self, file: wave.Wave_write) -> None:
        self._file = file

    def write(self, samples: np.ndarray) -> None:
        self._file.writeframes(pcm_s16le(samples))


def discard_stdout() -> None:
    """After a broken pipe: what Python still flushes at exit goes nowhere instead of failing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
