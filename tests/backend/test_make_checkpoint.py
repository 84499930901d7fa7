"""make_checkpoint: qwen-tts itself loads what it writes, and what it writes behaves like a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from backend.checkpoint import CODEC_FILE, MODEL_FILE, Checkpoint, tensor_table
from backend.config import ModelConfig
from backend.make_checkpoint import make_checkpoint
from tests import released
from tests.reference import qwen_tts

KINDS = ["custom_voice", "base", "voice_design"]
Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def upstream(tiny: Tiny) -> Callable[[str], Any]:
    """``upstream(kind)`` is the tiny checkpoint as qwen-tts loads it."""
    return cache(lambda kind: qwen_tts.Qwen3TTSModel.from_pretrained(str(tiny(kind))))


@pytest.mark.parametrize("kind", KINDS)
def test_qwen_tts_finds_every_tensor_where_it_looks(tiny: Tiny, kind: str) -> None:
    from qwen_tts.core.models import Qwen3TTSForConditionalGeneration
    from transformers import AutoModel

    qwen_tts.Qwen3TTSModel.from_pretrained(str(tiny(kind)))  # Registers its classes with transformers.
    # The model's own from_pretrained swallows the report, so that of its parent class is asked.
    load_model = super(Qwen3TTSForConditionalGeneration, Qwen3TTSForConditionalGeneration).from_pretrained
    for load, directory in (
        (load_model, tiny(kind)),
        (AutoModel.from_pretrained, tiny(kind) / "speech_tokenizer"),
    ):
        _, report = load(str(directory), output_loading_info=True)
        assert set(report) >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
        assert not any(report.values()), report


@pytest.mark.parametrize("kind", KINDS)
def test_qwen_tts_holds_the_values_that_we_read(upstream: Callable[[str], Any], tiny: Tiny, kind: str) -> None:
    checkpoint = Checkpoint(tiny(kind))
    model = upstream(kind).model
    states = {MODEL_FILE: model.state_dict(), CODEC_FILE: model.speech_tokenizer.model.state_dict()}
    for name, entry in checkpoint.table.items():
        assert torch.equal(states[entry.file][entry.foreign], checkpoint.read(name)), name


def loudness(samples: np.ndarray) -> float:
    return float(np.sqrt(np.mean(samples.astype(np.float64) ** 2)))


def test_a_named_speaker_is_heard(upstream: Callable[[str], Any]) -> None:
    torch.manual_seed(0)
    (samples,), rate = upstream("custom_voice").generate_custom_voice(
        text="Hello world.", speaker="Eric", language="auto", instruct="Be happy.", max_new_tokens=20
    )
    assert rate == 24000
    assert len(samples) % 1920 == 0
    assert 0.05 < loudness(samples) < 0.4
    assert np.mean(np.abs(samples) >= 1.0) < 0.001
    assert abs(samples.mean()) < 0.02


def test_a_described_voice_is_heard(upstream: Callable[[str], Any]) -> None:
    torch.manual_seed(0)
    (samples,), _ = upstream("voice_design").generate_voice_design(
        text="Hello world.", instruct="A deep voice.", language="english", max_new_tokens=20
    )
    assert 0.05 < loudness(samples) < 0.4


@pytest.mark.parametrize("with_text", [False, True])
def test_cloning_runs_and_depends_on_the_reference(upstream: Callable[[str], Any], with_text: bool) -> None:
    rng = np.random.default_rng(0)
    model = upstream("base")
    noise = (0.1 * rng.standard_normal(48000)).astype(np.float32)
    tone = (0.5 * np.sin(0.05 * np.arange(48000))).astype(np.float32)
    items = [
        model.create_voice_clone_prompt((reference, 24000), ref_text="Hi there.", x_vector_only_mode=not with_text)[0]
        for reference in (noise, tone)
    ]
    vectors = [item.ref_spk_embedding for item in items]
    assert all(0.1 < float(vector.std()) < 10 for vector in vectors)
    assert float((vectors[0] - vectors[1]).abs().max()) > 0.1
    if with_text:
        assert items[0].ref_code.shape == (25, 16)
        assert len(items[0].ref_code.unique()) > 40
    (samples,), _ = model.generate_voice_clone(
        text="Hello.", language="english", voice_clone_prompt=[items[0]], max_new_tokens=12
    )
    assert 0.05 < loudness(samples) < 0.4


def test_greedy_speech_lasts_and_varies(upstream: Callable[[str], Any]) -> None:
    """Parity is compared over 64 greedy frames: they must not end early or stand still."""
    model = upstream("custom_voice")
    frames: list[torch.Tensor] = []
    decode = model.model.speech_tokenizer.decode
    model.model.speech_tokenizer.decode = lambda items: (
        frames.append(items[0]["audio_codes"]),
        decode(items),
    )[1]
    try:
        model.generate_custom_voice(
            text="The quick brown fox jumps over the lazy dog.",
            speaker="ryan",
            language="english",
            max_new_tokens=70,
            do_sample=False,
            subtalker_dosample=False,
        )
    finally:
        model.model.speech_tokenizer.decode = decode
    (codes,) = frames
    assert codes.shape == (69, 16)
    assert all(len(codes[:, group].unique()) > 5 for group in range(16))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_has_the_ids_of_the_configuration(tiny: Tiny, kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny(kind)))
    values = json.loads((tiny(kind) / "config.json").read_text())
    ids = ModelConfig.read(tiny(kind)).ids
    role = tokenizer("<|im_start|>assistant\nHello<|im_end|>\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(role[:3]) == ["<|im_start|>", "assistant", "Ċ"]
    assert role[:2] == [ids.im_start, values["assistant_token_id"]]
    assert role[-2] == ids.im_end
    assert tokenizer.decode(role) == "<|im_start|>assistant\nHello<|im_end|>\n"
    user = tokenizer("<|im_start|>user\n")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(user) == ["<|im_start|>", "user", "Ċ"]
    names = ["<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]
    assert tokenizer.convert_tokens_to_ids(names) == [ids.tts_pad, ids.tts_bos, ids.tts_eos]


@pytest.mark.parametrize("text", ["Hello, world! It's 1999…", "你好，世界。", "naïve 🙂\t\n  end", "\u0301a"])
def test_any_text_can_be_spelt(tiny: Tiny, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(tiny("custom_voice")))
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < ModelConfig.read(tiny("custom_voice")).text_vocab
    assert tokenizer.decode(ids) == text


def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backend.make_checkpoint._write_weights", lambda *_: None)


PRESETS = {"0b6": "0.6b", "1b7": "1.7b"}


@pytest.mark.parametrize(("size", "kind"), released.RELEASED)
def test_the_large_presets_have_the_released_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: str, kind: Any
) -> None:
    without_weights(monkeypatch)
    made = make_checkpoint(tmp_path / "made", PRESETS[size], kind)  # pyright: ignore[reportArgumentType]
    ours = ModelConfig.read(made)
    theirs = ModelConfig.read(released.write_configs(tmp_path / "released", released.model_config(size, kind)))
    for name in (
        "kind",
        "size",
        "spec",
        "ids",
        "codec",
        "codec_encoder",
        "speaker_encoder",
        "speakers",
        "dialects",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert (ours.text_vocab, ours.text_hidden) == (theirs.text_vocab, theirs.text_hidden)
    assert ours.spoken_languages == theirs.spoken_languages
    assert [entry.shape for entry in tensor_table(ours).values()] == [
        entry.shape for entry in tensor_table(theirs).values()
    ]
    tokenizer = AutoTokenizer.from_pretrained(str(made))
    role = tokenizer("<|im_start|>assistant\n<|im_end|><tts_pad><tts_text_bos><tts_text_eod>")["input_ids"]
    assert role == [151644, 77091, 198, 151645, 151671, 151672, 151673]


def test_tiny_is_small_and_odd(tiny: Tiny) -> None:
    config = ModelConfig.read(tiny("custom_voice"))
    talker = config.spec.talker
    assert sum(file.stat().st_size for file in tiny("custom_voice").rglob("*") if file.is_file()) < 5e6
    assert talker.hidden & (talker.hidden - 1)
    assert talker.ffn % 128
    assert talker.group == config.spec.predictor.group == 4
    assert config.spec.projects
    assert config.codec.samples_per_frame == 1920
    assert sorted(config.speakers)[:3] == ["aiden", "dylan", "eric"]
    assert config.dialects == {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}


def test_the_seed_decides_every_byte(tiny: Tiny, tmp_path: Path) -> None:
    again = make_checkpoint(tmp_path / "again", "tiny", "custom_voice", seed=0)
    other = make_checkpoint(tmp_path / "other", "tiny", "custom_voice", seed=1)
    for file in (MODEL_FILE, CODEC_FILE):
        assert (again / file).read_bytes() == (tiny("custom_voice") / file).read_bytes()
        assert (other / file).read_bytes() != (again / file).read_bytes()


def test_every_tensor_has_values_of_use(tiny: Tiny) -> None:
    checkpoint = Checkpoint(tiny("base"))
    for name in checkpoint.table:
        tensor = checkpoint.read(name)
        assert tensor.isfinite().all(), name
        assert tensor.numel() == 1 or tensor.std() > 1e-3, name


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    made = make_checkpoint(tmp_path / "made", report=lambda written, total: reports.append((written, total)))
    assert reports[-1][0] == reports[-1][1] == Checkpoint(made).stored_bytes()
    assert [written for written, _ in reports] == sorted(written for written, _ in reports)


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists already"):
        make_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_make_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(written: int, total: int) -> None:
        if written > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint(tmp_path / "made", report=interrupt)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset_and_kind", [("huge", "base"), ("tiny", "singing")])
def test_an_unknown_preset_or_kind_is_refused(tmp_path: Path, preset_and_kind: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="no preset"):
        make_checkpoint(tmp_path / "made", *preset_and_kind)


def test_making_and_reading_need_no_qwen_tts() -> None:
    code = (
        "import sys, backend.make_checkpoint, backend.hub\n"
        "loaded = {'qwen_tts', 'transformers', 'huggingface_hub', 'librosa'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
