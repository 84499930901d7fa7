"""Samples to bytes: rounding, clipping, G.711, WAV heads, and resampling in pieces equal to whole."""

from __future__ import annotations

import io
import warnings
import wave

import numpy as np
import pytest
import soxr

from service.pcm import ENCODINGS, Encoder, pcm_alaw, pcm_mulaw, pcm_s16le, to_pcm16, wav_header

RAMP = np.linspace(-1, 1, 65_536, dtype=np.float32)


def test_pcm16_rounds_and_clips():
    given = np.array([0.0, 1.0, -1.0, 1.5, -1.5, 0.5 / 32767, 1.51 / 32767, -1.51 / 32767])
    assert to_pcm16(given).tolist() == [0, 32767, -32767, 32767, -32768, 0, 2, -2]


@pytest.mark.parametrize("law", ["ulaw", "alaw"])
def test_g711_equals_the_standard_library(law: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        audioop = pytest.importorskip("audioop", reason="removed in Python 3.13")
    ours = (pcm_mulaw if law == "ulaw" else pcm_alaw)(RAMP)
    assert ours == getattr(audioop, f"lin2{law}")(pcm_s16le(RAMP), 2)


def test_float_passes_unchanged():
    assert np.array_equal(np.frombuffer(ENCODINGS["pcm_f32le"](RAMP), "<f4"), RAMP)


def test_wav_head_is_what_the_standard_library_reads():
    data = pcm_s16le(RAMP)
    with wave.open(io.BytesIO(wav_header(24_000, len(data)) + data)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24_000)
        assert file.readframes(file.getnframes()) == data
    assert wav_header()[4:8] == wav_header()[40:44] == b"\xff" * 4


def test_resampled_in_chunks_equals_resampled_whole():
    samples = np.sin(np.arange(24_000) * 0.05).astype(np.float32)
    encoder = Encoder("pcm_s16le", 16_000)
    cuts = np.split(samples, [1920, 5760, 13_440])
    pieces = b"".join(encoder.encode(cut) for cut in cuts) + encoder.finish()
    whole = pcm_s16le(soxr.resample(samples, 24_000, 16_000))
    assert len(pieces) == len(whole) == 2 * 16_000
    difference = np.frombuffer(pieces, "<i2").astype(int) - np.frombuffer(whole, "<i2")
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize(("encoding", "rate"), [("mp3", 24_000), ("pcm_s16le", 7_999), ("pcm_s16le", 48_001)])
def test_what_cannot_be_encoded_is_refused(encoding: str, rate: int):
    with pytest.raises(ValueError, match=r"mp3|outside"):
        Encoder(encoding, rate)
