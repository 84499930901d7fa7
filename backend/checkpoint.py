"""A checkpoint directory as tensors under this project's names, checked whole before anything is loaded.

The one place that knows the names of qwen-tts: `tensor_table` lists, for a configuration, every tensor of
both files with its name there, its name here and its shape. `Checkpoint` holds the files to that list in
both directions. Knows nothing of what is computed with the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from backend.config import (
    DOWNLOAD_AGAIN,
    CodecConfig,
    CodecEncoderConfig,
    ModelConfig,
    SpeakerEncoderConfig,
)
from backend.errors import CheckpointError
from backend.tensor_file import TensorFile
from megakernel.spec import StackSpec

MODEL_FILE = "model.safetensors"
CODEC_FILE = "speech_tokenizer/model.safetensors"
UNIT_DILATIONS = (1, 3, 9)  # Of the three residual units in each block of the codec's decoder.

Shape = tuple[int, ...]
Rows = Iterable[tuple[str, str, Shape]]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its name here, its shape, its `foreign` name in `file` (one of the two files)."""

    name: str
    foreign: str
    shape: Shape
    file: str


def tensor_table(config: ModelConfig) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint that `config` describes, by our name, in the order of the files.

    Source: the modules of qwen-tts 0.1.1 (and of transformers' Mimi for the codec's encoder).
    """
    model = [*_talker(config), *_predictor(config)]
    if config.speaker_encoder is not None:
        model += _renamed("speaker_encoder.", "speaker_encoder.", _speaker_encoder(config.speaker_encoder))
    codec = [*_renamed("codec.", "decoder.", _codec(config.codec))]
    codec += _renamed("codec_encoder.", "encoder.", _codec_encoder(config.codec_encoder))
    entries = [TensorEntry(*row, MODEL_FILE) for row in model] + [TensorEntry(*row, CODEC_FILE) for row in codec]
    return {entry.name: entry for entry in entries}


class Checkpoint:
    """The tensors of a checkpoint directory, read one at a time by our names.

    Opening reads only the headers: it raises `CheckpointError` for a file that is missing or damaged and
    for tensors that are missing, unknown or of another shape than the configuration implies.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.config = ModelConfig.read(self.directory)
        self.table = tensor_table(self.config)
        self._files: dict[str, dict[str, TensorFile]] = {}
        for file in (MODEL_FILE, CODEC_FILE):
            found = _open(self.directory / file)
            wanted = {entry.foreign: entry.shape for entry in self.table.values() if entry.file == file}
            _check(self.directory / file, wanted, {name: found[name].records[name].shape for name in found})
            self._files[file] = found

    def read(self, name: str) -> torch.Tensor:
        """The tensor of that name: contiguous, owned by the caller, in the stored type."""
        entry = self.table[name]
        return self._files[entry.file][entry.foreign].read(entry.foreign)

    def release(self) -> None:
        """Let go of the files until the next read."""
        for file in {id(file): file for files in self._files.values() for file in files.values()}.values():
            file.release()

    def read_under(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor whose name starts with `prefix`, one at a time, with the rest of its name."""
        for name in self.table:
            if name.startswith(prefix):
                yield name.removeprefix(prefix), self.read(name)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which the tensor is stored."""
        entry = self.table[name]
        return self._files[entry.file][entry.foreign].records[entry.foreign].dtype

    def stored_bytes(self, *prefixes: str) -> int:
        """Bytes of all tensors whose names start with one of `prefixes` (of all tensors, without any)."""
        names = [name for name in self.table if not prefixes or name.startswith(prefixes)]
        return sum(math.prod(self.table[name].shape) * self.dtype(name).itemsize for name in names)


def _open(path: Path) -> dict[str, TensorFile]:
    """Foreign name -> the file that holds it; a file may be cut into shards, listed in its index."""
    index = path.with_name(path.name + ".index.json")
    shards = [path.name] if path.is_file() or not index.is_file() else _shards(index)
    found: dict[str, TensorFile] = {}
    for shard in shards:
        file = TensorFile(path.with_name(shard))
        twice = found.keys() & file.records.keys()
        if twice:
            raise CheckpointError(f"{file.path}: {min(twice)} is also in {found[min(twice)].path.name}")
        found |= dict.fromkeys(file.records, file)
    return found


def _shards(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        plain = bool(names) and all(Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read ({error!r}); {DOWNLOAD_AGAIN}") from error
    if not plain:
        raise CheckpointError(f"{index} names no shard, or one outside its directory; {DOWNLOAD_AGAIN}")
    return names


def _check(path: Path, wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    misshapen = [
        f"{name} {list(found[name])} (expected {list(shape)})"
        for name, shape in wanted.items()
        if found.get(name, shape) != shape
    ]
    faults = {"missing": missing, "unknown": extra, "of another shape": misshapen}
    listed = [f"{len(names)} {fault}: {_few(names)}" for fault, names in faults.items() if names]
    if listed:
        raise CheckpointError(
            f"{path} does not hold the tensors that its configuration implies: {'; '.join(listed)}. "
            "The weights and the configuration are of different models: download the checkpoint again"
        )


def _few(names: list[str], count: int = 3) -> str:
    rest = len(names) - count
    return ", ".join(names[:count]) + (f" and {rest} more" if rest > 0 else "")


def _renamed(ours: str, foreign: str, rows: Rows) -> Iterator[tuple[str, str, Shape]]:
    """The rows under a prefix on either side."""
    for name, foreign_name, shape in rows:
        yield ours + name, foreign + foreign_name, shape


def _biased(ours: str, foreign: str, *shape: int, bias: int | None = None) -> Rows:
    """Weight and bias; the bias has the first length of the weight unless told."""
    yield f"{ours}.weight", f"{foreign}.weight", shape
    yield f"{ours}.bias", f"{foreign}.bias", (shape[0] if bias is None else bias,)


def _kept(name: str, *shape: int) -> Rows:
    """Weight and bias under the foreign name."""
    return _biased(name, name, *shape)


def _talker(config: ModelConfig) -> Rows:
    spec, text = config.spec.talker, config.text_hidden
    yield from _stack("talker", "talker.model", spec)
    yield "talker.head", "talker.codec_head.weight", (spec.vocab, spec.hidden)
    yield "talker.embedding", "talker.model.codec_embedding.weight", (spec.vocab, spec.hidden)
    yield "text.embedding", "talker.model.text_embedding.weight", (config.text_vocab, text)
    yield from _biased("text.fc1", "talker.text_projection.linear_fc1", text, text)
    yield from _biased("text.fc2", "talker.text_projection.linear_fc2", spec.hidden, text)


def _predictor(config: ModelConfig) -> Rows:
    talker, spec = config.spec.talker, config.spec.predictor
    yield from _stack("predictor", "talker.code_predictor.model", spec)
    for g in range(config.spec.groups - 1):
        head = f"talker.code_predictor.lm_head.{g}.weight"
        embedding = f"talker.code_predictor.model.codec_embedding.{g}.weight"
        yield f"predictor.heads.{g}", head, (spec.vocab, spec.hidden)
        yield f"predictor.embeddings.{g}", embedding, (spec.vocab, talker.hidden)
    if config.spec.projects:
        projection = "talker.code_predictor.small_to_mtp_projection"
        yield from _biased("predictor.projection", projection, spec.hidden, talker.hidden)


def _stack(ours: str, foreign: str, spec: StackSpec) -> Rows:
    for i in range(spec.layers):
        yield from _renamed(f"{ours}.layers.{i}.", f"{foreign}.layers.{i}.", _stack_layer(spec))
    yield f"{ours}.norm", f"{foreign}.norm.weight", (spec.hidden,)


def _stack_layer(spec: StackSpec) -> Rows:
    yield from _layer(spec.hidden, spec.ffn, spec.q_width, spec.kv_width)
    yield "q_norm", "self_attn.q_norm.weight", (spec.head_dim,)
    yield "k_norm", "self_attn.k_norm.weight", (spec.head_dim,)


def _layer(hidden: int, ffn: int, q_width: int, kv_width: int) -> Rows:
    yield "input_norm", "input_layernorm.weight", (hidden,)
    yield "q", "self_attn.q_proj.weight", (q_width, hidden)
    yield "k", "self_attn.k_proj.weight", (kv_width, hidden)
    yield "v", "self_attn.v_proj.weight", (kv_width, hidden)
    yield "o", "self_attn.o_proj.weight", (hidden, q_width)
    yield "post_norm", "post_attention_layernorm.weight", (hidden,)
    yield "gate", "mlp.gate_proj.weight", (ffn, hidden)
    yield "up", "mlp.up_proj.weight", (ffn, hidden)
    yield "down", "mlp.down_proj.weight", (hidden, ffn)


def _codec(codec: CodecConfig) -> Rows:
    yield from _codec_quantizer(codec)
    yield from _biased("pre_conv", "pre_conv.conv", codec.latent, codec.quantized_dim, 3)
    yield from _renamed("transformer.", "pre_transformer.", _codec_transformer(codec))
    for i, ratio in enumerate(codec.upsampling_ratios):
        yield from _renamed(f"upsample.{i}.", f"upsample.{i}.", _codec_upsample(codec.latent, ratio))
    yield from _codec_convolutions(codec)


def _codec_quantizer(codec: CodecConfig) -> Rows:
    vector, quantized = codec.codebook_dim, codec.quantized_dim
    for ours, foreign in (("semantic", "rvq_first"), ("acoustic", "rvq_rest")):
        yield f"project.{ours}", f"quantizer.{foreign}.output_proj.weight", (quantized, vector, 1)
        # Stored by training; decoding never projects into the codebooks' space.
        yield f"project_in.{ours}", f"quantizer.{foreign}.input_proj.weight", (vector, quantized, 1)
    for g in range(codec.groups):
        layer = "rvq_first.vq.layers.0" if g == 0 else f"rvq_rest.vq.layers.{g - 1}"
        foreign = f"quantizer.{layer}._codebook"
        yield f"codebooks.{g}.sum", f"{foreign}.embedding_sum", (codec.codebook_size, vector)
        yield f"codebooks.{g}.usage", f"{foreign}.cluster_usage", (codec.codebook_size,)


def _codec_transformer(codec: CodecConfig) -> Rows:
    hidden, head_dim = codec.hidden, codec.head_dim
    yield from _biased("input", "input_proj", hidden, codec.latent)
    yield from _biased("output", "output_proj", codec.latent, hidden)
    yield "norm", "norm.weight", (hidden,)
    layer = [
        *_layer(hidden, codec.ffn, codec.heads * head_dim, codec.kv_heads * head_dim),
        ("attention_scale", "self_attn_layer_scale.scale", (hidden,)),
        ("mlp_scale", "mlp_layer_scale.scale", (hidden,)),
    ]
    for i in range(codec.layers):
        yield from _renamed(f"layers.{i}.", f"layers.{i}.", layer)


def _codec_upsample(width: int, ratio: int) -> Rows:
    yield from _biased("transposed", "0.conv", width, width, ratio)
    yield from _biased("depthwise", "1.dwconv.conv", width, 1, 7)
    yield from _biased("norm", "1.norm", width)
    yield from _biased("expand", "1.pwconv1", 4 * width, width)
    yield from _biased("contract", "1.pwconv2", width, 4 * width)
    yield "gamma", "1.gamma", (width,)


def _codec_convolutions(codec: CodecConfig) -> Rows:
    width, blocks = codec.decoder_dim, len(codec.upsample_rates)
    yield from _biased("conv_in", "decoder.0.conv", width, codec.latent, 7)
    for i, rate in enumerate(codec.upsample_rates):
        yield from _renamed(f"blocks.{i}.", f"decoder.{i + 1}.block.", _codec_block(width, rate))
        width //= 2
    yield from _snake("snake_out", f"decoder.{blocks + 1}", width)
    yield from _biased("conv_out", f"decoder.{blocks + 2}.conv", 1, width, 7)


def _codec_block(width: int, rate: int) -> Rows:
    half = width // 2
    yield from _snake("snake", "0", width)
    yield from _biased("transposed", "1.conv", width, half, 2 * rate, bias=half)
    for j in range(len(UNIT_DILATIONS)):
        ours, foreign = f"units.{j}", f"{j + 2}"
        yield from _snake(f"{ours}.snake1", f"{foreign}.act1", half)
        yield from _biased(f"{ours}.conv1", f"{foreign}.conv1.conv", half, half, 7)
        yield from _snake(f"{ours}.snake2", f"{foreign}.act2", half)
        yield from _biased(f"{ours}.conv2", f"{foreign}.conv2.conv", half, half, 1)


def _snake(ours: str, foreign: str, width: int) -> Rows:
    yield f"{ours}.alpha", f"{foreign}.alpha", (width,)
    yield f"{ours}.beta", f"{foreign}.beta", (width,)


def _same(rows: Iterable[tuple[str, Shape]]) -> Rows:
    """Rows whose name stays the foreign one."""
    for name, shape in rows:
        yield name, name, shape


def _codec_encoder(encoder: CodecEncoderConfig) -> Rows:
    yield from _encoder_convolutions(encoder)
    for i in range(encoder.layers):
        prefix = f"encoder_transformer.layers.{i}."
        yield from _renamed(prefix, prefix, _same(_encoder_layer(encoder)))
    if encoder.downsample > 1:
        shape = (encoder.hidden, encoder.hidden, 2 * encoder.downsample)
        yield from _same([("downsample.conv.weight", shape)])
    acoustic = encoder.groups - encoder.semantic_groups
    for part, groups in (("semantic", encoder.semantic_groups), ("acoustic", acoustic)):
        prefix = f"quantizer.{part}_residual_vector_quantizer."
        yield from _renamed(prefix, prefix, _same(_encoder_quantizer(encoder, groups)))


def _encoder_convolutions(encoder: CodecEncoderConfig) -> Rows:
    """The convolutions' places in their list count the activations between them, which have no tensors."""
    width, place = encoder.filters, 1
    yield from _kept("encoder.layers.0.conv", width, encoder.channels, encoder.kernel)
    for ratio in reversed(encoder.ratios):
        for _ in range(encoder.residual_layers):
            yield from _encoder_residual(f"encoder.layers.{place}", encoder, width)
            place += 1
        yield from _kept(f"encoder.layers.{place + 1}.conv", 2 * width, width, 2 * ratio)
        width, place = 2 * width, place + 2
    yield from _kept(f"encoder.layers.{place + 1}.conv", encoder.hidden, width, encoder.last_kernel)


def _encoder_residual(name: str, encoder: CodecEncoderConfig, width: int) -> Rows:
    inner = width // encoder.compress
    yield from _kept(f"{name}.block.1.conv", inner, width, encoder.residual_kernel)
    yield from _kept(f"{name}.block.3.conv", width, inner, 1)
    if encoder.shortcut:
        yield from _kept(f"{name}.shortcut.conv", width, width, 1)


def _encoder_layer(encoder: CodecEncoderConfig) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = encoder.hidden, encoder.ffn
    q_width, kv_width = encoder.heads * encoder.head_dim, encoder.kv_heads * encoder.head_dim
    yield "self_attn.q_proj.weight", (q_width, hidden)
    yield "self_attn.k_proj.weight", (kv_width, hidden)
    yield "self_attn.v_proj.weight", (kv_width, hidden)
    yield "self_attn.o_proj.weight", (hidden, q_width)
    yield "mlp.fc1.weight", (ffn, hidden)
    yield "mlp.fc2.weight", (hidden, ffn)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", (hidden,)
        yield f"{norm}.bias", (hidden,)
    yield "self_attn_layer_scale.scale", (hidden,)
    yield "mlp_layer_scale.scale", (hidden,)


def _encoder_quantizer(encoder: CodecEncoderConfig, groups: int) -> Iterator[tuple[str, Shape]]:
    if encoder.vector_dim != encoder.hidden:
        yield "input_proj.weight", (encoder.vector_dim, encoder.hidden, 1)
        yield "output_proj.weight", (encoder.hidden, encoder.vector_dim, 1)
    for i in range(groups):
        yield f"layers.{i}.codebook.initialized", (1,)
        yield f"layers.{i}.codebook.cluster_usage", (encoder.codebook_size,)
        yield f"layers.{i}.codebook.embed_sum", (encoder.codebook_size, encoder.codebook_dim)


def _speaker_encoder(encoder: SpeakerEncoderConfig) -> Rows:
    first, *middle, last = encoder.channels
    yield from _kept("blocks.0.conv", first, encoder.mel_dim, encoder.kernels[0])
    for i, width in enumerate(middle, start=1):
        yield from _speaker_block(f"blocks.{i}", width, encoder.kernels[i], encoder)
    yield from _kept("mfa.conv", last, last, encoder.kernels[-1])
    yield from _kept("asp.tdnn.conv", encoder.attention_channels, 3 * last, 1)
    yield from _kept("asp.conv", last, encoder.attention_channels, 1)
    yield from _kept("fc", encoder.dim, 2 * last, 1)


def _speaker_block(name: str, width: int, kernel: int, encoder: SpeakerEncoderConfig) -> Rows:
    part = width // encoder.res2net_scale
    yield from _kept(f"{name}.tdnn1.conv", width, width, 1)
    for j in range(encoder.res2net_scale - 1):
        yield from _kept(f"{name}.res2net_block.blocks.{j}.conv", part, part, kernel)
    yield from _kept(f"{name}.tdnn2.conv", width, width, 1)
    yield from _kept(f"{name}.se_block.conv1", encoder.se_channels, width, 1)
    yield from _kept(f"{name}.se_block.conv2", width, encoder.se_channels, 1)
