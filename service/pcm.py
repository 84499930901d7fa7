"""Turns float samples at 24 kHz into the bytes a client asked for: an encoding, a sample rate, a WAV head.

Streaming: what is cut into chunks comes out equal to what is encoded whole. Knows nothing of
requests, sockets or models.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import soxr

ENGINE_RATE = 24_000  # Hz
MIN_RATE, MAX_RATE = 8_000, 48_000  # Hz
UNKNOWN_SIZE = 0xFFFFFFFF  # in a WAV header: the length is not known when the header is sent


def to_pcm16(samples: np.ndarray) -> np.ndarray:
    """Float samples in ±1 as int16: rounded to nearest, clipped, full scale 32767."""
    return np.clip(np.rint(np.asarray(samples, dtype=np.float64) * 32767), -32768, 32767).astype("<i2")


def pcm_s16le(samples: np.ndarray) -> bytes:
    """Little-endian signed 16 bit."""
    return to_pcm16(samples).tobytes()


def pcm_f32le(samples: np.ndarray) -> bytes:
    """Little-endian 32 bit float, as the engine made them."""
    return np.asarray(samples, dtype="<f4").tobytes()


def pcm_mulaw(samples: np.ndarray) -> bytes:
    """G.711 µ-law, one byte a sample (ITU-T G.711, table 2a: bias 33 on a 14-bit magnitude)."""
    linear = to_pcm16(samples).astype(np.int32) >> 2
    magnitude = np.minimum(np.abs(linear) + 33, 8191)
    segment = np.floor(np.log2(magnitude)).astype(np.int32) - 5
    mantissa = (magnitude >> (segment + 1)) & 0x0F
    sign = np.where(linear < 0, 0x80, 0)
    return (~(sign | segment << 4 | mantissa) & 0xFF).astype(np.uint8).tobytes()


def pcm_alaw(samples: np.ndarray) -> bytes:
    """G.711 A-law, one byte a sample (ITU-T G.711, table 1a: a 13-bit magnitude, even bits inverted)."""
    linear = to_pcm16(samples).astype(np.int32) >> 3
    magnitude = np.where(linear < 0, -linear - 1, linear)  # [0, 4095]
    segment = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int32) - 4, 0)
    mantissa = (magnitude >> np.maximum(segment, 1)) & 0x0F
    sign = np.where(linear < 0, 0, 0x80)
    return ((sign | segment << 4 | mantissa) ^ 0x55).astype(np.uint8).tobytes()


ENCODINGS: dict[str, Callable[[np.ndarray], bytes]] = {
    "pcm_s16le": pcm_s16le,
    "pcm_f32le": pcm_f32le,
    "pcm_mulaw": pcm_mulaw,
    "pcm_alaw": pcm_alaw,
}


class Encoder:
    """Samples of one utterance to bytes, chunk by chunk.

    ``encode`` takes float32 ``[n]`` at 24 kHz; ``finish`` gives what the resampler still holds. At
    24 kHz no resampler runs and the samples pass unchanged.

    Raises ``ValueError`` for an unknown encoding or a rate outside 8 to 48 kHz.
    """

    def __init__(self, encoding: str = "pcm_s16le", sample_rate: int = ENGINE_RATE) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"unknown encoding {encoding!r}; known: {', '.join(ENCODINGS)}")
        if not MIN_RATE <= sample_rate <= MAX_RATE:
            raise ValueError(f"sample rate {sample_rate} is outside {MIN_RATE}..{MAX_RATE} Hz")
        self._pack = ENCODINGS[encoding]
        self._resampler: Any = None
        if sample_rate != ENGINE_RATE:
            self._resampler = soxr.ResampleStream(ENGINE_RATE, sample_rate, 1, dtype="float32")

    def encode(self, samples: np.ndarray) -> bytes:
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(np.ascontiguousarray(samples, dtype=np.float32))
        return self._pack(samples)

    def finish(self) -> bytes:
        if self._resampler is None:
            return b""
        return self._pack(self._resampler.resample_chunk(np.zeros(0, dtype=np.float32), last=True))


def wav_header(sample_rate: int = ENGINE_RATE, data_bytes: int | None = None) -> bytes:
    """The 44 bytes before mono 16-bit samples; both sizes are 0xFFFFFFFF where the length is not known."""
    data = UNKNOWN_SIZE if data_bytes is None else data_bytes
    riff = UNKNOWN_SIZE if data_bytes is None else data_bytes + 36
    form = struct.pack("<HHIIHH", 1, 1, sample_rate, sample_rate * 2, 2, 16)
    return (
        b"RIFF"
        + struct.pack("<I", riff)
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", data)
    )
