"""The configurations of the five released checkpoints: the files of one, and what the others change in them.

`released/` holds the published `config.json` of the 0.6B custom-voice checkpoint and that of its codec.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RELEASED = [
    ("0b6", "custom_voice"),
    ("0b6", "base"),
    ("1b7", "custom_voice"),
    ("1b7", "base"),
    ("1b7", "voice_design"),
]
HERE = Path(__file__).with_name("released")


def model_config(size: str = "0b6", kind: str = "custom_voice") -> dict[str, Any]:
    """The `config.json` of a released checkpoint."""
    config = json.loads((HERE / "config.json").read_text())
    talker = config["talker_config"]
    config |= {"tts_model_size": size, "tts_model_type": kind}
    if size == "1b7":
        talker |= {"hidden_size": 2048, "intermediate_size": 6144}
    if kind != "custom_voice":
        talker |= {"spk_id": {}, "spk_is_dialect": {}}
    if kind == "base":
        config["speaker_encoder_config"] = {"enc_dim": talker["hidden_size"], "sample_rate": 24000}
    return config


def codec_config() -> dict[str, Any]:
    """The `speech_tokenizer/config.json` that all five share."""
    return json.loads((HERE / "speech_tokenizer.json").read_text())


def write_configs(
    directory: Path,
    model: dict[str, Any] | None = None,
    codec: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """Write the three files that `ModelConfig.read` wants; the released ones unless given."""
    (directory / "speech_tokenizer").mkdir(parents=True, exist_ok=True)
    for name, values in (
        ("config.json", model_config() if model is None else model),
        ("speech_tokenizer/config.json", codec_config() if codec is None else codec),
        ("generation_config.json", {"max_new_tokens": 8192} if generation is None else generation),
    ):
        (directory / name).write_text(json.dumps(values))
    return directory
