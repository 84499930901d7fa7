"""Checkpoint: exactly the tensors of qwen-tts, every fault named, never more in memory than is read."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from backend.checkpoint import CODEC_FILE, MODEL_FILE, Checkpoint, tensor_table
from backend.config import ModelConfig
from backend.errors import CheckpointError
from backend.tensor_file import TensorFile
from tests import reference, released  # noqa: F401 - makes qwen_tts importable

Shapes = dict[str, tuple[int, ...]]


@pytest.fixture
def copy(tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny("custom_voice"), tmp_path / "copy"))


def upstream_shapes(module: torch.nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def table_shapes(directory: Path, file: str) -> Shapes:
    entries = tensor_table(ModelConfig.read(directory)).values()
    return {entry.foreign: entry.shape for entry in entries if entry.file == file}


@pytest.mark.parametrize(("size", "kind"), released.RELEASED)
def test_the_table_is_the_model_of_qwen_tts(tmp_path: Path, size: str, kind: str) -> None:
    from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration

    values = released.model_config(size, kind)
    with torch.device("meta"):
        model = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**values))
    assert table_shapes(released.write_configs(tmp_path, values), MODEL_FILE) == upstream_shapes(model)


def test_the_table_is_the_codec_of_qwen_tts(tmp_path: Path) -> None:
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    with torch.device("meta"):
        codec = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**released.codec_config()))
    assert table_shapes(released.write_configs(tmp_path), CODEC_FILE) == upstream_shapes(codec)


def test_released_sizes(tmp_path: Path) -> None:
    """906 M parameters in 402 tensors, and 496 tensors of codec, as published."""
    table = tensor_table(ModelConfig.read(released.write_configs(tmp_path))).values()
    model = [entry for entry in table if entry.file == MODEL_FILE]
    assert len(model) == 402
    assert len(table) - len(model) == 496
    assert round(sum(torch.Size(entry.shape).numel() for entry in model) / 1e6) == 906


def test_names_on_both_sides_are_unique(tmp_path: Path) -> None:
    config = ModelConfig.read(released.write_configs(tmp_path, released.model_config("1b7", "base")))
    table = tensor_table(config)
    assert len({(entry.file, entry.foreign) for entry in table.values()}) == len(table)


@pytest.mark.parametrize("kind", ["custom_voice", "base", "voice_design"])
def test_every_tensor_is_read_under_our_name(tiny: Callable[[str], Path], kind: str) -> None:
    checkpoint = Checkpoint(tiny(kind))
    stored = {file: load_file(tiny(kind) / file) for file in (MODEL_FILE, CODEC_FILE)}
    for name, entry in checkpoint.table.items():
        tensor = checkpoint.read(name)
        assert torch.equal(tensor, stored[entry.file].pop(entry.foreign)), name
        assert tensor.dtype == checkpoint.dtype(name)
        assert tensor.is_contiguous()
    assert not stored[MODEL_FILE]
    assert not stored[CODEC_FILE]


def test_our_names(tiny: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(tiny("base"))
    foreign = {name: entry.foreign for name, entry in checkpoint.table.items()}
    assert foreign["talker.layers.2.gate"] == "talker.model.layers.2.mlp.gate_proj.weight"
    assert foreign["predictor.heads.14"] == "talker.code_predictor.lm_head.14.weight"
    assert foreign["text.fc2.bias"] == "talker.text_projection.linear_fc2.bias"
    assert foreign["codec.codebooks.5.sum"] == "decoder.quantizer.rvq_rest.vq.layers.4._codebook.embedding_sum"
    assert foreign["codec.blocks.3.units.2.snake1.beta"] == "decoder.decoder.4.block.4.act1.beta"
    assert foreign["codec_encoder.downsample.conv.weight"] == "encoder.downsample.conv.weight"
    assert foreign["speaker_encoder.fc.bias"] == "speaker_encoder.fc.bias"


def test_reading_a_part(tiny: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(tiny("base"))
    part = dict(checkpoint.read_under("speaker_encoder."))
    assert part["fc.weight"].shape == (72, 96, 1)
    assert len(part) == sum(name.startswith("speaker_encoder.") for name in checkpoint.table)
    size = sum(tensor.nbytes for tensor in part.values())
    assert checkpoint.stored_bytes("speaker_encoder.") == size
    assert checkpoint.stored_bytes() > checkpoint.stored_bytes("talker.", "predictor.") > size


def test_a_read_tensor_is_the_callers_own(tiny: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(tiny("custom_voice"))
    first = checkpoint.read("talker.norm")
    first.zero_()
    assert checkpoint.read("talker.norm").abs().sum() > 0


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("file", [MODEL_FILE, CODEC_FILE])
def test_missing_extra_and_misshapen_tensors_are_named(copy: Path, file: str) -> None:
    victims = [entry for entry in Checkpoint(copy).table.values() if entry.file == file]
    missing, misshapen = victims[0].foreign, victims[-1].foreign

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["some.stranger"] = torch.zeros(3)
        tensors[misshapen] = torch.zeros(7, 9)
        del tensors[missing]

    rewrite(copy / file, damage)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(copy)
    message = str(caught.value)
    assert str(copy / file) in message
    assert f"1 missing: {missing}" in message
    assert "1 unknown: some.stranger" in message
    assert f"1 of another shape: {misshapen} [7, 9] (expected {list(victims[-1].shape)})" in message


def test_the_weights_of_another_kind_are_refused(tiny: Callable[[str], Path], copy: Path) -> None:
    shutil.copy(tiny("base") / MODEL_FILE, copy / MODEL_FILE)
    with pytest.raises(CheckpointError, match=r"unknown: speaker_encoder\..* more"):
        Checkpoint(copy)


def test_an_unreadable_type_is_named(copy: Path) -> None:
    rewrite(copy / MODEL_FILE, lambda tensors: tensors.update({"talker.codec_head.weight": torch.zeros(2).int()}))
    with pytest.raises(CheckpointError, match=r"talker\.codec_head\.weight is stored as I32"):
        Checkpoint(copy)


@pytest.mark.parametrize("file", [MODEL_FILE, CODEC_FILE])
def test_a_missing_file_is_named(copy: Path, file: str) -> None:
    (copy / file).unlink()
    with pytest.raises(CheckpointError, match=r"is missing.*download") as caught:
        Checkpoint(copy)
    assert str(copy / file) in str(caught.value)


@pytest.mark.parametrize("kept", [0, 7, 8, 1000, -1])
def test_a_truncated_file_is_named(copy: Path, kept: int) -> None:
    file = copy / CODEC_FILE
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="download") as caught:
        Checkpoint(copy)
    assert str(file) in str(caught.value)


def test_a_file_with_a_tail_is_refused(copy: Path) -> None:
    with (copy / MODEL_FILE).open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        Checkpoint(copy)


def test_a_file_that_shrinks_later_is_named(copy: Path) -> None:
    checkpoint = Checkpoint(copy)
    last = next(reversed([name for name, entry in checkpoint.table.items() if entry.file == MODEL_FILE]))
    file = copy / MODEL_FILE
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match="has changed since"):
        checkpoint.read(last)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_damaged_header_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "damaged.safetensors"
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(5).bfloat16()}, file)
    content = bytearray(file.read_bytes())
    for position in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[position] = data.draw(st.integers(0, 255))
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(CheckpointError):
        opened = TensorFile(file)
        for name in opened.records:
            opened.read(name)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}},
        {"a": 3},
        [],
        {f"{i}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for i in range(2)},
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "lying.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=r"lying\.safetensors"):
        TensorFile(file)


def shard(directory: Path, count: int = 3) -> dict[str, str]:
    """Cut the model's file into shards with an index and return tensor -> shard."""
    tensors = load_file(directory / MODEL_FILE)
    (directory / MODEL_FILE).unlink()
    places = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(tensors)}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == place}, directory / place)
    (directory / (MODEL_FILE + ".index.json")).write_text(json.dumps({"weight_map": places}))
    return places


def test_shards_are_one_model(tiny: Callable[[str], Path], copy: Path) -> None:
    shard(copy)
    whole, cut = Checkpoint(tiny("custom_voice")), Checkpoint(copy)
    assert all(torch.equal(whole.read(name), cut.read(name)) for name in whole.table)


def test_a_missing_shard_is_named(copy: Path) -> None:
    lost = copy / min(shard(copy).values())
    lost.unlink()
    with pytest.raises(CheckpointError, match="is missing") as caught:
        Checkpoint(copy)
    assert str(lost) in str(caught.value)


def test_a_tensor_in_two_shards_is_named(copy: Path) -> None:
    first, second, _ = sorted(set(shard(copy).values()))
    rewrite(copy / second, lambda tensors: tensors.update(load_file(copy / first)))
    with pytest.raises(CheckpointError, match=f"is also in {first}"):
        Checkpoint(copy)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": 3}}'],
)
def test_a_broken_index_is_named(copy: Path, content: str) -> None:
    (copy / MODEL_FILE).unlink()
    (copy / (MODEL_FILE + ".index.json")).write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        Checkpoint(copy)


PEAK = """
import re, sys
from pathlib import Path
from backend.tensor_file import TensorFile
file = TensorFile(Path(sys.argv[1]))
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
before = peak()
for name in file.records:
    file.read(name)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_reading_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Eight tensors of 32 MiB are read into nothing; the file's 256 MiB never become resident.

    Not `ru_maxrss`: a new process inherits the peak of the one that started it.
    """
    size = 32 << 20
    header = json.dumps(
        {f"{i}": {"dtype": "F32", "shape": [size // 4], "data_offsets": [i * size, (i + 1) * size]} for i in range(8)}
    ).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 8 * size)
    command = [sys.executable, "-c", PEAK, str(path)]
    root = Path(__file__).parents[2]
    grown = int(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)
    assert grown < 72, f"reading one tensor at a time grew the process by {grown} MiB"
