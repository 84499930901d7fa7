"""A checkpoint of random weights in the layout of the released ones, for tests, benchmarks and first runs.

Turns a preset, a kind and a seed into a directory that this project and qwen-tts both load. Its voice is
noise, and its `config.json` says so (`random_weights`). The tensors come from the reader's own table.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from backend.checkpoint import CODEC_FILE, MODEL_FILE, TensorEntry, tensor_table
from backend.config import CONTROL_IDS, KINDS, ModelConfig
from backend.made_tokenizer import write_tokenizer
from backend.random_weights import random_values

Preset = Literal["tiny", "0.6b", "1.7b"]
Kind = Literal["custom_voice", "base", "voice_design"]
Json = dict[str, Any]
Report = Callable[[int, int], None]

# The released vocabulary has 2048 codes below its control ids; a smaller codebook moves those down.
RELEASED_CODES = 2048
LANGUAGES = {
    "chinese": 2055, "english": 2050, "german": 2053, "italian": 2070, "portuguese": 2071, "spanish": 2054,
    "japanese": 2058, "korean": 2064, "french": 2061, "russian": 2069,
}  # fmt: skip
DIALECTS = {"beijing_dialect": 2074, "sichuan_dialect": 2062}
SPEAKERS = {
    "serena": 3066, "vivian": 3065, "uncle_fu": 3010, "ryan": 3061, "aiden": 2861, "ono_anna": 2873,
    "sohee": 2864, "eric": 2875, "dylan": 2878,
}  # fmt: skip
SPEAKER_DIALECTS = {"eric": "sichuan_dialect", "dylan": "beijing_dialect"}
CODEC_IDS = {
    "codec_pad_id": 2148, "codec_bos_id": 2149, "codec_eos_token_id": 2150, "codec_think_id": 2154,
    "codec_nothink_id": 2155, "codec_think_bos_id": 2156, "codec_think_eos_id": 2157,
}  # fmt: skip
TEXT_IDS = {
    "im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>", "tts_pad_token_id": "<tts_pad>",
    "tts_bos_token_id": "<tts_text_bos>", "tts_eos_token_id": "<tts_text_eod>",
    "assistant_token_id": "assistant",
}  # fmt: skip

TRANSFORMERS_VERSION = "4.57.3"

GENERATION: Json = {
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_p": 1.0,
    "subtalker_top_k": 50,
    "max_new_tokens": 8192,
}
FEATURES: Json = {
    "chunk_length_s": None,
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "overlap": None,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "sampling_rate": 24000,
}
PROCESSOR: Json = {
    "padding_side": "left",
    "padding_value": 0.0,
    "processor_class": "Qwen3TTSProcessor",
    "return_attention_mask": True,
}


def make_checkpoint(
    out: str | Path,
    preset: Preset = "tiny",
    kind: Kind = "custom_voice",
    seed: int = 0,
    report: Report | None = None,
) -> Path:
    """Write a random checkpoint to the new directory `out` and return its path.

    `preset` `0.6b` and `1.7b` have the released shapes and types (2.5 and 4.5 GB); `tiny` is a few
    MB of float32 with deliberately odd widths. `report(written, total)` is called with bytes as the
    weights grow. The directory appears under its name only when it is complete; raises `FileExistsError`
    if it is there already.
    """
    out = Path(out)
    if preset not in get_args(Preset) or kind not in KINDS:
        raise ValueError(f"no preset {preset!r} of kind {kind!r}")
    if out.exists():
        raise FileExistsError(f"{out} exists already")
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _write(partial, preset, kind, seed, report)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _write(directory: Path, preset: Preset, kind: Kind, seed: int, report: Report | None) -> None:
    places = {} if preset == "tiny" else {"first_special": 151643, "assistant": 77091}
    vocab = write_tokenizer(directory, **places)
    codec = _codec_config(preset)
    (directory / "speech_tokenizer").mkdir()
    _write_json(directory / "config.json", _model_config(preset, kind, vocab, codec))
    _write_json(directory / "generation_config.json", GENERATION)
    _write_json(directory / "preprocessor_config.json", PROCESSOR)
    _write_json(directory / "speech_tokenizer" / "config.json", codec)
    _write_json(directory / "speech_tokenizer" / "preprocessor_config.json", FEATURES)
    _write_weights(directory, torch.float32 if preset == "tiny" else torch.bfloat16, seed, report)


def _write_json(path: Path, values: Json) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_weights(directory: Path, dtype: torch.dtype, seed: int, report: Report | None) -> None:
    config = ModelConfig.read(directory)
    table = tensor_table(config).values()
    dtypes = {MODEL_FILE: dtype, CODEC_FILE: torch.float32}  # The released codec is float32 in every size.
    total = sum(math.prod(entry.shape) * dtypes[entry.file].itemsize for entry in table)
    written = 0
    for file, stored in dtypes.items():
        entries = [entry for entry in table if entry.file == file]
        with (directory / file).open("wb") as stream:
            stream.write(_header(entries, stored))
            for entry in entries:
                for block in random_values(config, entry.name, entry.shape, seed):
                    data = block.to(stored).contiguous().view(torch.uint8).numpy()
                    written += stream.write(data.data)
                    if report is not None:
                        report(written, total)


def _header(entries: Iterable[TensorEntry], dtype: torch.dtype) -> bytes:
    """The head of a safetensors file, with the metadata that transformers writes."""
    kind = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    header: Json = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        begin, end = end, end + math.prod(entry.shape) * dtype.itemsize
        header[entry.foreign] = {"dtype": kind, "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _model_config(preset: Preset, kind: Kind, vocab: dict[str, int], codec: Json) -> Json:
    talker = _talker_config(preset, kind, codec["decoder_config"]["codebook_size"])
    talker["text_vocab_size"] = 151936 if preset != "tiny" else -(-len(vocab) // 64) * 64
    config: Json = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        **{key: vocab[token] for key, token in TEXT_IDS.items()},
        "model_type": "qwen3_tts",
        "random_weights": True,
        "tokenizer_type": codec["model_type"],
        "tts_model_size": {"tiny": "tiny", "0.6b": "0b6", "1.7b": "1b7"}[preset],
        "tts_model_type": kind,
        "talker_config": talker,
        "transformers_version": TRANSFORMERS_VERSION,
    }
    if kind == "base":
        config["speaker_encoder_config"] = _speaker_encoder_config(preset, talker["hidden_size"])
    return config


def _talker_config(preset: Preset, kind: Kind, codes: int) -> Json:
    def moved(ids: dict[str, int]) -> dict[str, int]:
        return {name: value - RELEASED_CODES + codes for name, value in ids.items()}

    named = kind == "custom_voice"
    return {
        "attention_bias": False,
        "attention_dropout": 0,
        "code_predictor_config": _predictor_config(preset, codes),
        **moved(CODEC_IDS),
        "codec_language_id": moved(LANGUAGES | DIALECTS if named else LANGUAGES),
        "spk_id": moved(SPEAKERS) if named else {},
        "spk_is_dialect": {name: SPEAKER_DIALECTS.get(name, False) for name in SPEAKERS} if named else {},
        **_talker_widths(preset),
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "model_type": "qwen3_tts_talker",
        "num_code_groups": 16,
        "pad_token_id": moved(CODEC_IDS)["codec_pad_id"],
        "position_id_per_seconds": 13,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": codes + CONTROL_IDS,
    }


def _talker_widths(preset: Preset) -> Json:
    if preset == "tiny":
        return _widths(3, 72, 200, 8, 2, 16) | {"rope_scaling": _rope([4, 2, 2]), "text_hidden_size": 88}
    hidden, ffn = (1024, 3072) if preset == "0.6b" else (2048, 6144)
    released = _widths(28, hidden, ffn, 16, 8, 128)
    return released | {"rope_scaling": _rope([24, 20, 20]), "text_hidden_size": 2048}


def _widths(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int) -> Json:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _rope(sections: list[int]) -> Json:
    return {"interleaved": True, "mrope_section": sections, "rope_type": "default", "type": "default"}


def _predictor_config(preset: Preset, codes: int) -> Json:
    widths = _widths(2, 56, 152, 4, 1, 16) if preset == "tiny" else _widths(5, 1024, 3072, 16, 8, 128)
    return {
        **widths,
        "attention_bias": False,
        "attention_dropout": 0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * widths["num_hidden_layers"],
        "max_position_embeddings": 65536,
        "model_type": "qwen3_tts_talker_code_predictor",
        "num_code_groups": 16,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": codes,
    }


def _speaker_encoder_config(preset: Preset, hidden: int) -> Json:
    config: Json = {"enc_dim": hidden, "sample_rate": 24000}
    if preset == "tiny":
        config |= {
            "enc_channels": [16, 16, 16, 16, 48],
            "enc_attention_channels": 8,
            "enc_res2net_scale": 4,
            "enc_se_channels": 8,
        }
    return config


def _codec_config(preset: Preset) -> Json:
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": 16,
        "input_sample_rate": 24000,
        "output_sample_rate": 24000,
        "decode_upsample_rate": 1920,
        "encode_downsample_rate": 1920,
        "decoder_config": _codec_decoder_config(preset),
        "encoder_config": _codec_encoder_config(preset),
        "transformers_version": TRANSFORMERS_VERSION,
    }


def _codec_decoder_config(preset: Preset) -> Json:
    released = {
        **_widths(8, 512, 1024, 16, 16, 64),
        "codebook_dim": 512,
        "codebook_size": RELEASED_CODES,
        "decoder_dim": 1536,
        "latent_dim": 1024,
        "sliding_window": 72,
    }
    tiny = {
        **_widths(3, 24, 40, 4, 2, 10),
        "codebook_dim": 28,
        "codebook_size": 64,
        "decoder_dim": 80,
        "latent_dim": 36,
        "sliding_window": 12,
    }
    return {
        **(tiny if preset == "tiny" else released),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "num_quantizers": 16,
        "num_semantic_quantizers": 1,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "semantic_codebook_size": 4096,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
        "vector_quantization_hidden_dimension": 512,
    }


def _codec_encoder_config(preset: Preset) -> Json:
    released = {
        **_widths(8, 512, 2048, 8, 8, 64),
        "codebook_dim": 256,
        "codebook_size": RELEASED_CODES,
        "num_filters": 64,
        "num_quantizers": 32,
        "upsample_groups": 512,
        "vector_quantization_hidden_dimension": 256,
    }
    tiny = {
        **_widths(2, 24, 48, 2, 2, 12),
        "codebook_dim": 14,
        "codebook_size": 64,
        "num_filters": 4,
        "num_quantizers": 18,
        "upsample_groups": 24,
        "vector_quantization_hidden_dimension": 14,
    }
    return {
        **(tiny if preset == "tiny" else released),
        "_frame_rate": 12.5,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "audio_channels": 1,
        "compress": 2,
        "dilation_growth_rate": 2,
        "dtype": "float32",
        "hidden_act": "gelu",
        "initializer_range": 0.02,
        "kernel_size": 7,
        "last_kernel_size": 3,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "norm_eps": 1e-05,
        "normalize": False,
        "num_residual_layers": 1,
        "num_semantic_quantizers": 1,
        "pad_mode": "constant",
        "residual_kernel_size": 3,
        "rope_theta": 10000.0,
        "sampling_rate": 24000,
        "sliding_window": 250,
        "trim_right_ratio": 1.0,
        "upsampling_ratios": [8, 6, 5, 4],
        "use_cache": False,
        "use_causal_conv": True,
        "use_conv_shortcut": False,
        "use_streaming": False,
    }
