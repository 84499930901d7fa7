"""ModelConfig: the released configurations are read right, and every bad file is named with its fault."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from backend.config import ModelConfig, SamplingDefaults
from backend.errors import CheckpointError
from backend.make_checkpoint import make_checkpoint
from tests import released


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """``values`` with the entry at a dotted path replaced, or removed for ``...``."""
    *parents, key = path.split(".")
    section = values
    for parent in parents:
        section = section[parent]
    if value is ...:
        section.pop(key)
    else:
        section[key] = value
    return values


def test_the_released_file_is_read_in_our_words(tmp_path: Path) -> None:
    config = ModelConfig.read(released.write_configs(tmp_path))
    talker, predictor, codec = config.spec.talker, config.spec.predictor, config.codec
    assert (config.kind, config.size, config.random) == ("custom_voice", "0b6", False)
    assert (talker.layers, talker.hidden, talker.ffn, talker.vocab) == (28, 1024, 3072, 3072)
    assert (talker.heads, talker.kv_heads, talker.head_dim) == (16, 8, 128)
    assert (talker.norm_eps, talker.rope_base) == (1e-6, 1e6)
    assert (predictor.layers, predictor.hidden, predictor.vocab) == (5, 1024, 2048)
    assert (config.spec.groups, config.spec.eos, config.spec.suppress_from) == (16, 2150, 2048)
    assert (config.text_vocab, config.text_hidden, config.max_positions) == (151936, 2048, 32768)
    assert (codec.codebook_dim, codec.quantized_dim, codec.window) == (256, 512, 72)
    assert (codec.samples_per_frame, codec.sample_rate, codec.frame_rate) == (1920, 24000, 12.5)
    assert (config.ids.im_start, config.ids.tts_eos, config.ids.codec_think_eos) == (151644, 151673, 2157)
    assert config.speakers["ryan"] == 3061
    assert config.dialects == {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
    assert config.languages["beijing_dialect"] == 2074
    assert len(config.spoken_languages) == 10
    assert not [name for name in config.spoken_languages if "dialect" in name]


@pytest.mark.parametrize(("size", "kind"), released.RELEASED)
def test_every_released_checkpoint_is_understood(tmp_path: Path, size: str, kind: str) -> None:
    config = ModelConfig.read(released.write_configs(tmp_path, released.model_config(size, kind)))
    assert (config.kind, config.size) == (kind, size)
    assert config.spec.projects == (size == "1b7")
    assert (config.speaker_encoder is not None) == (kind == "base")
    listens = {("1b7", "custom_voice"), ("1b7", "voice_design")}
    assert config.has_instruction == ((size, kind) in listens)


def test_generation_defaults_are_those_of_qwen_tts_where_the_file_is_silent(tmp_path: Path) -> None:
    config = ModelConfig.read(released.write_configs(tmp_path, generation={}))
    assert config.sampling == SamplingDefaults(
        temperature=0.9,
        top_k=50,
        top_p=1.0,
        repetition_penalty=1.05,
        greedy=False,
        predictor_temperature=0.9,
        predictor_top_k=50,
        predictor_top_p=1.0,
        predictor_greedy=False,
        max_frames=2048,
    )


def test_generation_file_overrides_the_defaults(tmp_path: Path) -> None:
    generation = {
        "do_sample": False,
        "top_k": 7,
        "top_p": 0.5,
        "temperature": 1,
        "repetition_penalty": 1.2,
        "subtalker_dosample": False,
        "subtalker_top_k": 3,
        "subtalker_top_p": 0.25,
        "subtalker_temperature": 0.75,
        "max_new_tokens": 11,
    }
    sampling = ModelConfig.read(released.write_configs(tmp_path, generation=generation)).sampling
    assert sampling == SamplingDefaults(1.0, 7, 0.5, 1.2, True, 0.75, 3, 0.25, True, 11)


BAD_MODEL = [
    ("model_type", "qwen2", "model_type is 'qwen2'"),
    ("model_type", ..., "model_type is None"),
    ("tokenizer_type", "qwen3_tts_tokenizer_25hz", "tokenizer_type"),
    ("tts_model_type", "singing", "singing"),
    ("tts_model_size", ..., "tts_model_size is missing"),
    ("talker_config", ..., "talker_config is missing"),
    ("talker_config", 3, "talker_config must be an object"),
    ("talker_config.text_vocab_size", ..., "text_vocab_size is missing"),
    ("talker_config.codec_eos_token_id", ..., "codec_eos_token_id is missing"),
    ("talker_config.hidden_size", "1024", "hidden_size must be of type int"),
    ("talker_config.hidden_size", True, "hidden_size must be of type int"),
    ("talker_config.num_hidden_layers", 0, "layers must be at least 1"),
    ("talker_config.num_key_value_heads", 3, "do not divide"),
    ("talker_config.num_attention_heads", 0, "heads must be at least 1"),
    ("talker_config.attention_bias", True, "attention_bias"),
    ("talker_config.use_sliding_window", True, "use_sliding_window"),
    ("talker_config.tie_word_embeddings", True, "tie_word_embeddings"),
    ("talker_config.hidden_act", "gelu", "hidden_act"),
    ("talker_config.rope_scaling.rope_type", "yarn", "rope_type is 'yarn'"),
    ("talker_config.rope_scaling", None, "rope_scaling is missing"),
    ("talker_config.vocab_size", 1000, "outside"),
    ("talker_config.vocab_size", 4096, "the talker can draw 3072 codes"),
    ("talker_config.num_code_groups", 8, "num_code_groups"),
    ("talker_config.code_predictor_config.vocab_size", 4096, "code predictor can draw"),
    ("talker_config.code_predictor_config.hidden_act", "relu", "code_predictor_config: hidden_act"),
    ("talker_config.code_predictor_config.layer_types", ["sliding_attention"] * 5, "layer_types"),
    ("talker_config.code_predictor_config.rope_scaling", {"rope_type": "linear"}, "rope_scaling"),
    ("talker_config.spk_id.ryan", 3072, "ryan is outside"),
    ("talker_config.spk_id.ryan", "3061", "ryan must be of type int"),
    ("talker_config.codec_language_id.english", -1, "english is outside"),
    ("talker_config.spk_is_dialect.eric", "klingon_dialect", "klingon_dialect"),
    ("talker_config.spk_is_dialect.eric", True, "eric must be of type str"),
    ("tts_pad_token_id", 151936, "tts_pad"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_MODEL)
def test_a_bad_model_configuration_is_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    model = changed(released.model_config(), path, value)
    with pytest.raises(CheckpointError, match=message) as caught:
        ModelConfig.read(released.write_configs(tmp_path, model))
    assert str(tmp_path) in str(caught.value)


BAD_CODEC = [
    ("model_type", "mimi", "model_type is 'mimi'"),
    ("decoder_config", ..., "decoder_config is missing"),
    ("decoder_config.codebook_dim", ..., "codebook_dim is missing"),
    ("decoder_config.codebook_dim", 511, "must be even"),
    ("decoder_config.sliding_window", 0, "window must be above 0"),
    ("decoder_config.upsample_rates", [8, 5, 4], "decode_upsample_rate"),
    ("decoder_config.upsample_rates", [8, "5", 4, 3], "whole numbers"),
    ("decoder_config.upsampling_ratios", [], "upsampling_ratios"),
    ("decoder_config.decoder_dim", 1000, "halved"),
    ("decoder_config.num_attention_heads", 0, "heads must be above 0"),
    ("decoder_config.attention_bias", True, "attention_bias"),
    ("decoder_config.num_quantizers", 32, "encoder_valid_num_quantizers"),
    ("encoder_config.num_semantic_quantizers", 32, "semantic"),
    ("encoder_config.use_conv_shortcut", "no", "use_conv_shortcut"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_CODEC)
def test_a_bad_codec_configuration_is_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    codec = changed(released.codec_config(), path, value)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(released.write_configs(tmp_path, codec=codec))


BAD_BASE = [
    ("speaker_encoder_config.enc_dim", 192, "enc_dim 192"),
    ("speaker_encoder_config.enc_channels", [512, 512], "one length"),
    ("speaker_encoder_config.enc_channels", [512, 512, 512, 512, 1024], "must be equal"),
    ("speaker_encoder_config.enc_res2net_scale", 7, "enc_res2net_scale"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD_BASE)
def test_a_bad_speaker_encoder_is_refused(tmp_path: Path, path: str, value: Any, message: str) -> None:
    model = changed(released.model_config("0b6", "base"), path, value)
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(released.write_configs(tmp_path, model))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", 0, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("top_p", 1.5, "top_p"),
        ("top_k", -1, "top_k"),
        ("do_sample", 1, "do_sample must be of type bool"),
        ("max_new_tokens", 0, "max_frames"),
    ],
)
def test_bad_generation_defaults_are_refused(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.read(released.write_configs(tmp_path, generation={key: value}))


@pytest.mark.parametrize("name", ["config.json", "speech_tokenizer/config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [None, b"", b'{"model_type": ', b"[1]", b"\xff\xfe\x00"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    file = released.write_configs(tmp_path) / name
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.read(tmp_path)
    assert str(file) in str(caught.value)
    assert "download" in str(caught.value)


def test_a_path_that_is_no_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        ModelConfig.read(tmp_path / "nowhere")


def test_made_checkpoints_say_that_they_are_noise(tmp_path: Path) -> None:
    config = ModelConfig.read(make_checkpoint(tmp_path / "made"))
    assert config.random
    assert config.size == "tiny"
    assert config.has_instruction
    assert json.loads((tmp_path / "made" / "config.json").read_text())["random_weights"] is True
