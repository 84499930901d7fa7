"""The configuration files of a checkpoint directory as one frozen, checked record of numbers and ids.

Reads `config.json`, `speech_tokenizer/config.json` and `generation_config.json`; whatever the rest of
the project needs from them is a field here, under this project's own word for it. Knows no tensors and no
text.

A key that the released files may leave out takes the default of the configuration classes of qwen-tts 0.1.1
(of `MimiConfig` for the codec's encoder); a key that has no safe default is required.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from backend.errors import CheckpointError
from megakernel.spec import DecoderSpec, StackSpec

MODEL_TYPE = "qwen3_tts"
CODEC_TYPE = "qwen3_tts_tokenizer_12hz"
KINDS = ("custom_voice", "base", "voice_design")

# qwen-tts never draws the last 1024 ids of the talker's vocabulary, except the one that ends the speech
# (`suppress_tokens` in Qwen3TTSForConditionalGeneration.generate).
CONTROL_IDS = 1024

DOWNLOAD_AGAIN = "the download is incomplete or damaged: download the checkpoint again"


@dataclass(frozen=True)
class SpecialIds:
    """Ids with a meaning: the first five are text ids, the `codec_` ones rows of the talker's embedding."""

    im_start: int
    im_end: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    codec_pad: int
    codec_bos: int
    codec_eos: int
    codec_think: int
    codec_nothink: int
    codec_think_bos: int
    codec_think_eos: int


@dataclass(frozen=True)
class SamplingDefaults:
    """How codes are drawn when a request does not say: `generation_config.json`.

    `top_k` 0 means no limit. `greedy` and `predictor_greedy` are the files' `do_sample` and
    `subtalker_dosample`, negated. Defaults: qwen-tts, `Qwen3TTSModel._merge_generate_kwargs`.
    """

    temperature: float = 0.9
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.05
    greedy: bool = False
    predictor_temperature: float = 0.9
    predictor_top_k: int = 50
    predictor_top_p: float = 1.0
    predictor_greedy: bool = False
    max_frames: int = 2048

    def __post_init__(self) -> None:
        for name in ("temperature", "predictor_temperature", "repetition_penalty"):
            _require(getattr(self, name) > 0, f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("top_k", "predictor_top_k"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("top_p", "predictor_top_p"):
            _require(0 < getattr(self, name) <= 1, f"{name} must lie in (0, 1], got {getattr(self, name)}")
        _require(self.max_frames >= 1, f"max_frames must be at least 1, got {self.max_frames}")


@dataclass(frozen=True)
class CodecConfig:
    """The codec's decoder: `groups` codes a frame in, `samples_per_frame` samples out.

    `codebook_dim` is the width of one codebook vector, `quantized_dim` the width after the projections
    of the semantic and the acoustic sum. `window` counts the frames that a position attends to, itself
    included.
    """

    codebook_size: int
    codebook_dim: int
    quantized_dim: int
    groups: int
    latent: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_base: float
    window: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int
    sample_rate: int

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(self.groups >= 2, f"a frame needs at least 2 code groups, got {self.groups}")
        _require(
            self.heads % self.kv_heads == 0,
            f"{self.heads} query heads do not divide over {self.kv_heads} key/value heads",
        )
        _require(self.head_dim % 2 == 0, f"rotary embedding needs an even head_dim, got {self.head_dim}")
        halvings = 2 ** len(self.upsample_rates)
        _require(
            self.decoder_dim % halvings == 0,
            f"decoder_dim {self.decoder_dim} cannot be halved {len(self.upsample_rates)} times",
        )

    @property
    def samples_per_frame(self) -> int:
        return math.prod(self.upsampling_ratios) * math.prod(self.upsample_rates)

    @property
    def frame_rate(self) -> float:
        """Frames a second."""
        return self.sample_rate / self.samples_per_frame


@dataclass(frozen=True)
class CodecEncoderConfig:
    """The codec's encoder (Mimi's): needed to know its tensors; only cloning with a transcript runs it."""

    channels: int
    filters: int
    ratios: tuple[int, ...]
    kernel: int
    last_kernel: int
    residual_kernel: int
    residual_layers: int
    compress: int
    shortcut: bool
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    codebook_size: int
    codebook_dim: int
    vector_dim: int
    groups: int
    semantic_groups: int
    sample_rate: int
    frame_rate: float

    def __post_init__(self) -> None:
        _require_positive(self)
        _require(
            self.semantic_groups < self.groups,
            f"{self.semantic_groups} semantic of {self.groups} groups leave no acoustic one",
        )

    @property
    def downsample(self) -> int:
        """The factor by which the convolutions' output is still too fast for `frame_rate`; 1 for none."""
        convolved = math.ceil(self.sample_rate / math.prod(self.ratios))
        return int(convolved / self.frame_rate) if convolved != self.frame_rate else 1


@dataclass(frozen=True)
class SpeakerEncoderConfig:
    """The ECAPA-TDNN that turns a reference's mel spectrogram into an x-vector `dim` wide (base only)."""

    mel_dim: int
    dim: int
    channels: tuple[int, ...]
    kernels: tuple[int, ...]
    dilations: tuple[int, ...]
    attention_channels: int
    res2net_scale: int
    se_channels: int
    sample_rate: int

    def __post_init__(self) -> None:
        _require_positive(self)
        layers = len(self.channels)
        _require(
            layers == len(self.kernels) == len(self.dilations) and layers >= 3,
            "enc_channels, enc_kernel_sizes and enc_dilations must have one length, of at least 3",
        )
        first, *middle, last = self.channels
        _require(
            all(width == first for width in middle) and sum(middle) == last,
            f"enc_channels {list(self.channels)} must be equal, but for the last: all without the first",
        )
        _require(
            first % self.res2net_scale == 0,
            f"enc_channels {first} do not divide by enc_res2net_scale {self.res2net_scale}",
        )


@dataclass(frozen=True)
class ModelConfig:
    """Everything that a checkpoint directory says about its model, without the weights.

    `kind` is one of `KINDS`, `size` the released name of the size ("0b6", "1b7"). `languages` maps
    every language, the dialects included, to its id; `speakers` the named voices (none in `base` and
    `voice_design`); `dialects` the speakers that bring their own language. `max_positions` is the
    longest prompt plus speech that the talker was made for. `random` says that the weights were drawn,
    not trained.
    """

    kind: str
    size: str
    spec: DecoderSpec
    text_vocab: int
    text_hidden: int
    max_positions: int
    ids: SpecialIds
    languages: Mapping[str, int]
    speakers: Mapping[str, int]
    dialects: Mapping[str, str]
    codec: CodecConfig
    codec_encoder: CodecEncoderConfig
    speaker_encoder: SpeakerEncoderConfig | None
    sampling: SamplingDefaults
    random: bool = False

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, f"tts_model_type {self.kind!r} is none of {', '.join(KINDS)}")
        self._check_text_ids()
        self._check_codec_ids()
        self._check_codec_fits()
        _require(
            (self.speaker_encoder is not None) == (self.kind == "base"),
            "a speaker encoder belongs to kind base and to no other",
        )
        if self.speaker_encoder is not None:
            _require(
                self.speaker_encoder.dim == self.spec.talker.hidden,
                f"the speaker encoder's enc_dim {self.speaker_encoder.dim} is not the talker's hidden_size "
                f"{self.spec.talker.hidden}",
            )

    def _check_text_ids(self) -> None:
        for name in ("im_start", "im_end", "tts_pad", "tts_bos", "tts_eos"):
            value = getattr(self.ids, name)
            _require(0 <= value < self.text_vocab, f"{name}_token_id {value} is outside {self.text_vocab} text ids")

    def _check_codec_ids(self) -> None:
        vocab = self.spec.talker.vocab
        rows = {field.name: getattr(self.ids, field.name) for field in fields(self.ids)}
        named = {name: value for name, value in rows.items() if name.startswith("codec_")}
        for name, value in [*named.items(), *self.languages.items(), *self.speakers.items()]:
            _require(0 <= value < vocab, f"the id {value} of {name} is outside the vocabulary of {vocab}")
        for speaker, dialect in self.dialects.items():
            _require(dialect in self.languages, f"{speaker} speaks {dialect}, which has no language id")

    def _check_codec_fits(self) -> None:
        spec, codec = self.spec, self.codec
        _require(
            spec.groups == codec.groups,
            f"num_code_groups {spec.groups} is not the codec's num_quantizers {codec.groups}",
        )
        for name, codes in (("talker", spec.suppress_from), ("code predictor", spec.predictor.vocab)):
            _require(
                codes <= codec.codebook_size,
                f"the {name} can draw {codes} codes but the codec's codebooks hold {codec.codebook_size}",
            )

    @property
    def has_instruction(self) -> bool:
        """Whether an instruction text is listened to; the small custom-voice model was trained without."""
        return self.kind == "voice_design" or (self.kind == "custom_voice" and self.size != "0b6")

    @property
    def spoken_languages(self) -> list[str]:
        """The languages that may be asked for by name: not the dialects, which come with their speakers."""
        return [name for name in self.languages if "dialect" not in name]

    @classmethod
    def read(cls, directory: str | Path) -> ModelConfig:
        """Read and check the three configuration files of a checkpoint directory.

        Raises `CheckpointError` naming the file and the key that is missing, malformed or unsupported.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory")
        model = _Section.load(directory / "config.json")
        model.expect("model_type", MODEL_TYPE)
        model.expect("tokenizer_type", CODEC_TYPE)
        codec = _Section.load(directory / "speech_tokenizer" / "config.json")
        codec.expect("model_type", CODEC_TYPE)
        generation = _Section.load(directory / "generation_config.json")
        try:
            return _model(model, codec, generation)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{directory}: {error}") from error


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive(record: Any) -> None:
    for field in fields(record):
        value = getattr(record, field.name)
        values = value if isinstance(value, tuple) else (value,)
        sound = bool(values) and all(isinstance(number, bool) or number > 0 for number in values)
        _require(sound, f"{field.name} must be above 0, got {value}")


T = TypeVar("T", int, float, str, bool)
_MISSING: Any = object()


class _Section:
    """One JSON object together with where it stands, so that every complaint can say so."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where

    @classmethod
    def load(cls, path: Path) -> _Section:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; is this a Qwen3-TTS checkpoint? If so, {DOWNLOAD_AGAIN}")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not readable JSON ({error}); {DOWNLOAD_AGAIN}") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} does not hold a JSON object; {DOWNLOAD_AGAIN}")
        return cls(values, str(path))

    def fail(self, key: str, complaint: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {key} {complaint}")

    def get(self, key: str, kind: type[T], default: Any = _MISSING) -> T:
        value = self.values.get(key)
        if value is None:
            if default is _MISSING:
                raise self.fail(key, "is missing")
            return default
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.fail(key, f"must be of type {kind.__name__}, got {value!r}")
        return kind(value)

    def numbers(self, key: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        value = self.values.get(key, default)
        if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
            raise self.fail(key, f"must be a list of whole numbers, got {value!r}")
        return tuple(value)

    def section(self, key: str, default: dict[str, Any] | None = None) -> _Section:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, dict):
            raise self.fail(key, "is missing" if value is None else f"must be an object, got {value!r}")
        return _Section(value, f"{self.where}: {key}")

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter(self.values.items())

    def ids(self, key: str) -> dict[str, int]:
        section = self.section(key, {})
        return {name: section.get(name, int) for name in section.values}

    def expect(self, key: str, *allowed: Any, default: Any = None) -> None:
        value = self.values.get(key, default)
        if value not in allowed:
            wanted = " or ".join(repr(choice) for choice in allowed)
            raise self.fail(key, f"is {value!r}, but only {wanted} is supported")


def _model(model: _Section, codec: _Section, generation: _Section) -> ModelConfig:
    talker = model.section("talker_config")
    kind = model.get("tts_model_type", str)
    return ModelConfig(
        kind=kind,
        size=model.get("tts_model_size", str),
        spec=_decoder_spec(talker),
        text_vocab=talker.get("text_vocab_size", int),
        text_hidden=talker.get("text_hidden_size", int, 2048),
        max_positions=talker.get("max_position_embeddings", int, 32768),
        ids=_special_ids(model, talker),
        languages=talker.ids("codec_language_id"),
        speakers=talker.ids("spk_id"),
        dialects=_dialects(talker.section("spk_is_dialect", {})),
        codec=_codec(codec),
        codec_encoder=_codec_encoder(codec),
        speaker_encoder=_speaker_encoder(model) if kind == "base" else None,
        sampling=_sampling(generation),
        random=model.get("random_weights", bool, False),
    )


def _special_ids(model: _Section, talker: _Section) -> SpecialIds:
    return SpecialIds(
        im_start=model.get("im_start_token_id", int, 151644),
        im_end=model.get("im_end_token_id", int, 151645),
        tts_pad=model.get("tts_pad_token_id", int, 151671),
        tts_bos=model.get("tts_bos_token_id", int, 151672),
        tts_eos=model.get("tts_eos_token_id", int, 151673),
        # The classes' defaults for these lie outside the released vocabulary, so they are required.
        codec_pad=talker.get("codec_pad_id", int),
        codec_bos=talker.get("codec_bos_id", int),
        codec_eos=talker.get("codec_eos_token_id", int),
        codec_think=talker.get("codec_think_id", int),
        codec_nothink=talker.get("codec_nothink_id", int),
        codec_think_bos=talker.get("codec_think_bos_id", int),
        codec_think_eos=talker.get("codec_think_eos_id", int),
    )


def _dialects(section: _Section) -> dict[str, str]:
    """Speaker -> dialect; the file says false for speakers who have none."""
    spoken = {name: value for name, value in section.items() if value is not False and value is not None}
    return {name: section.get(name, str) for name in spoken}


def _decoder_spec(talker: _Section) -> DecoderSpec:
    predictor = talker.section("code_predictor_config")
    rope = talker.section("rope_scaling")
    rope.expect("rope_type", "default", default=rope.values.get("type"))
    predictor.expect("rope_scaling", None)
    predictor.expect("layer_types", None, ["full_attention"] * predictor.get("num_hidden_layers", int, 5))
    groups = talker.get("num_code_groups", int, 32)
    predictor.expect("num_code_groups", groups, default=32)
    vocab = talker.get("vocab_size", int, 3072)
    return DecoderSpec(
        talker=_talker_stack(talker, vocab),
        predictor=_predictor_stack(predictor),
        groups=groups,
        eos=talker.get("codec_eos_token_id", int),
        suppress_from=vocab - CONTROL_IDS,
    )


def _share(hidden: int, heads: int) -> int:
    """A head's width where the file gives none; a count of heads that is not positive is refused later."""
    return hidden // max(heads, 1)


def _check_stack(stack: _Section) -> None:
    stack.expect("hidden_act", "silu", default="silu")
    for key in ("attention_bias", "use_sliding_window", "tie_word_embeddings"):
        stack.expect(key, False, default=False)


def _talker_stack(talker: _Section, vocab: int) -> StackSpec:
    _check_stack(talker)
    hidden = talker.get("hidden_size", int, 1024)
    heads = talker.get("num_attention_heads", int, 16)
    return StackSpec(
        layers=talker.get("num_hidden_layers", int, 20),
        hidden=hidden,
        ffn=talker.get("intermediate_size", int, 2048),
        heads=heads,
        kv_heads=talker.get("num_key_value_heads", int, 2),
        head_dim=talker.get("head_dim", int, _share(hidden, heads)),
        vocab=vocab,
        norm_eps=talker.get("rms_norm_eps", float, 1e-6),
        rope_base=talker.get("rope_theta", float, 10000.0),
    )


def _predictor_stack(predictor: _Section) -> StackSpec:
    _check_stack(predictor)
    heads = predictor.get("num_attention_heads", int, 16)
    return StackSpec(
        layers=predictor.get("num_hidden_layers", int, 5),
        hidden=predictor.get("hidden_size", int, 1024),
        ffn=predictor.get("intermediate_size", int, 3072),
        heads=heads,
        kv_heads=predictor.get("num_key_value_heads", int, 8),
        head_dim=predictor.get("head_dim", int, 128),
        vocab=predictor.get("vocab_size", int, 2048),
        norm_eps=predictor.get("rms_norm_eps", float, 1e-6),
        rope_base=predictor.get("rope_theta", float, 10000.0),
    )


def _codec(codec: _Section) -> CodecConfig:
    decoder = codec.section("decoder_config")
    decoder.expect("hidden_act", "silu", default="silu")
    decoder.expect("attention_bias", False, default=False)
    decoder.expect("rope_scaling", None)
    decoder.expect("num_semantic_quantizers", 1, default=1)
    hidden = decoder.get("hidden_size", int, 1024)
    heads = decoder.get("num_attention_heads", int, 16)
    quantized = decoder.get("codebook_dim", int)
    if quantized % 2:
        raise decoder.fail("codebook_dim", f"must be even, got {quantized}")
    config = CodecConfig(
        codebook_size=decoder.get("codebook_size", int, 2048),
        codebook_dim=quantized // 2,
        quantized_dim=quantized,
        groups=decoder.get("num_quantizers", int, 16),
        latent=decoder.get("latent_dim", int, 1024),
        hidden=hidden,
        ffn=decoder.get("intermediate_size", int, 3072),
        layers=decoder.get("num_hidden_layers", int, 8),
        heads=heads,
        kv_heads=decoder.get("num_key_value_heads", int, 16),
        head_dim=decoder.get("head_dim", int, _share(hidden, heads)),
        norm_eps=decoder.get("rms_norm_eps", float, 1e-5),
        rope_base=decoder.get("rope_theta", float, 10000.0),
        window=decoder.get("sliding_window", int, 72),
        upsampling_ratios=decoder.numbers("upsampling_ratios", (2, 2)),
        upsample_rates=decoder.numbers("upsample_rates", (8, 5, 4, 3)),
        decoder_dim=decoder.get("decoder_dim", int, 1536),
        sample_rate=codec.get("output_sample_rate", int, 24000),
    )
    codec.expect("decode_upsample_rate", config.samples_per_frame, default=1920)
    codec.expect("encoder_valid_num_quantizers", config.groups, default=16)
    return config


def _codec_encoder(codec: _Section) -> CodecEncoderConfig:
    encoder = codec.section("encoder_config")
    encoder.expect("attention_bias", False, default=False)
    hidden = encoder.get("hidden_size", int, 512)
    heads = encoder.get("num_attention_heads", int, 8)
    return CodecEncoderConfig(
        channels=encoder.get("audio_channels", int, 1),
        filters=encoder.get("num_filters", int, 64),
        ratios=encoder.numbers("upsampling_ratios", (8, 6, 5, 4)),
        kernel=encoder.get("kernel_size", int, 7),
        last_kernel=encoder.get("last_kernel_size", int, 3),
        residual_kernel=encoder.get("residual_kernel_size", int, 3),
        residual_layers=encoder.get("num_residual_layers", int, 1),
        compress=encoder.get("compress", int, 2),
        shortcut=encoder.get("use_conv_shortcut", bool, False),
        hidden=hidden,
        ffn=encoder.get("intermediate_size", int, 2048),
        layers=encoder.get("num_hidden_layers", int, 8),
        heads=heads,
        kv_heads=encoder.get("num_key_value_heads", int, 8),
        head_dim=encoder.get("head_dim", int, _share(hidden, heads)),
        codebook_size=encoder.get("codebook_size", int, 2048),
        codebook_dim=encoder.get("codebook_dim", int, 256),
        vector_dim=encoder.get("vector_quantization_hidden_dimension", int, 256),
        groups=encoder.get("num_quantizers", int, 32),
        semantic_groups=encoder.get("num_semantic_quantizers", int, 1),
        sample_rate=encoder.get("sampling_rate", int, 24000),
        frame_rate=encoder.get("_frame_rate", float, encoder.get("frame_rate", float, 12.5)),
    )


def _speaker_encoder(model: _Section) -> SpeakerEncoderConfig:
    encoder = model.section("speaker_encoder_config", {})
    return SpeakerEncoderConfig(
        mel_dim=encoder.get("mel_dim", int, 128),
        dim=encoder.get("enc_dim", int, 1024),
        channels=encoder.numbers("enc_channels", (512, 512, 512, 512, 1536)),
        kernels=encoder.numbers("enc_kernel_sizes", (5, 3, 3, 3, 1)),
        dilations=encoder.numbers("enc_dilations", (1, 2, 3, 4, 1)),
        attention_channels=encoder.get("enc_attention_channels", int, 128),
        res2net_scale=encoder.get("enc_res2net_scale", int, 8),
        se_channels=encoder.get("enc_se_channels", int, 128),
        sample_rate=encoder.get("sample_rate", int, 24000),
    )


def _sampling(generation: _Section) -> SamplingDefaults:
    default = SamplingDefaults()
    return SamplingDefaults(
        temperature=generation.get("temperature", float, default.temperature),
        top_k=generation.get("top_k", int, default.top_k),
        top_p=generation.get("top_p", float, default.top_p),
        repetition_penalty=generation.get("repetition_penalty", float, default.repetition_penalty),
        greedy=not generation.get("do_sample", bool, True),
        predictor_temperature=generation.get("subtalker_temperature", float, default.predictor_temperature),
        predictor_top_k=generation.get("subtalker_top_k", int, default.predictor_top_k),
        predictor_top_p=generation.get("subtalker_top_p", float, default.predictor_top_p),
        predictor_greedy=not generation.get("subtalker_dosample", bool, True),
        max_frames=generation.get("max_new_tokens", int, default.max_frames),
    )
