"""Codes to samples: the speech tokenizer's decoder, streaming with exact state, many lanes at once.

Frames ``[lanes, frames, groups]`` go in, in any split; ``samples_per_frame`` samples a frame come out, equal
to a decode of the whole utterance at once because every layer carries what it looks back at. Knows
nothing of text, of sampling or of when a lane is due.

Lifted from the decoder of qwen-tts 0.1.1 (``Qwen3TTSTokenizerV2Decoder``): split residual codebooks, causal
convolution, sliding-window transformer, two ConvNeXt upsamplings, four SnakeBeta upsampling blocks.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.codec_layers import (
    CausalConv,
    ConvNeXtUpsample,
    Histories,
    Read,
    SnakeBeta,
    UpsampleBlock,
)
from backend.config import CodecConfig
from megakernel.linear import Linear, make_linear
from megakernel.reference import rms_norm, rotate

_USAGE_FLOOR = 1e-5  # what an unused codebook entry's count is raised to before the division


class Codec:
    """The decoder for ``lanes`` utterances at a time.

    ``read(name)`` returns the tensors called ``codec.…`` in ``backend/checkpoint.py``. Weights and sums are
    float32.
    """

    def __init__(self, config: CodecConfig, read: Read, lanes: int = 1, device: str | torch.device = "cpu") -> None:
        self.config, self.device = config, torch.device(device)
        self.histories = Histories(lanes, self.device)
        self.position = [0] * lanes

        def load(name: str) -> Tensor:
            return read(f"codec.{name}").to(self.device, torch.float32)

        self.table = _fold_codebooks(config, load)  # [groups, codebook_size, quantized_dim]
        self.groups = torch.arange(config.groups, device=self.device)
        self.pre_conv = CausalConv(self.histories, load("pre_conv.weight"), load("pre_conv.bias"))
        self.transformer = SlidingTransformer(config, load, self.histories)
        self.waves = WaveDecoder(config, load, self.histories)

    @torch.inference_mode()
    def decode(self, codes: Tensor, lanes: list[int]) -> Tensor:
        """The next frames of ``lanes``: ``[len(lanes), frames, groups]`` int64 to ``[len(lanes), samples]``.

        All lanes of one call take the same number of frames. Samples are float32 within ±1.
        """
        index = torch.tensor(lanes, device=self.device)
        return self.waves(self._hidden(codes, lanes, index), index)

    @torch.inference_mode()
    def prime(self, codes: Tensor, lane: int) -> None:
        """Put the lane where it would be after ``codes`` ``[frames, groups]``, without making their samples.

        The transformer goes over all of them; the convolutions only over what they look back at.
        """
        index = torch.tensor([lane], device=self.device)
        hidden = self._hidden(codes[None], [lane], index)
        self.waves(hidden[:, -self.waves.frames_back :], index)

    def reset(self, lane: int) -> None:
        """Start the lane afresh."""
        self.histories.reset(lane)
        self.position[lane] = 0

    def take(self, lane: int) -> tuple[int, list[Tensor]]:
        """A copy of the lane's state, for `put`."""
        return self.position[lane], self.histories.take(lane)

    def put(self, lane: int, state: tuple[int, list[Tensor]]) -> None:
        self.position[lane], tensors = state
        self.histories.put(lane, tensors)

    def _hidden(self, codes: Tensor, lanes: list[int], index: Tensor) -> Tensor:
        codes = codes.to(self.device)
        x = self.table[self.groups, codes].sum(dim=2)  # [lanes, frames, quantized_dim]
        x = self.transformer(self.pre_conv(x, index), index, [self.position[lane] for lane in lanes])
        for lane in lanes:
            self.position[lane] += codes.shape[1]
        return x


def _fold_codebooks(config: CodecConfig, load: Read) -> Tensor:
    """Every codebook through its group's projection, ``[groups, codebook_size, quantized_dim]``."""
    projections = {name: load(f"project.{name}").squeeze(2).T for name in ("semantic", "acoustic")}
    folded = []
    for group in range(config.groups):
        usage = load(f"codebooks.{group}.usage").clamp(min=_USAGE_FLOOR)
        entries = load(f"codebooks.{group}.sum") / usage.unsqueeze(1)
        folded.append(entries @ projections["semantic" if group == 0 else "acoustic"])
    return torch.stack(folded)


class SlidingTransformer:
    """Causal attention over the last ``window`` frames, with rotary positions counted from the start.

    A lane keeps the rotated keys and the values of its last ``window - 1`` frames in every layer.
    """

    def __init__(self, config: CodecConfig, load: Read, histories: Histories) -> None:
        self.config, self.past = config, config.window - 1
        self.input = _dense(load, "transformer.input")
        self.output = _dense(load, "transformer.output")
        self.norm = load("transformer.norm")
        self.layers = [_Layer(config, load, f"transformer.layers.{i}", histories) for i in range(config.layers)]
        half = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=histories.device).float()
        self.frequency = 1.0 / config.rope_base ** (half / config.head_dim)

    def __call__(self, x: Tensor, lanes: Tensor, start: list[int]) -> Tensor:
        x = self.input(x)
        first = torch.tensor(start, device=x.device).view(-1, 1)
        position = first + torch.arange(x.shape[1], device=x.device)  # [lanes, frames]
        cos, sin = self._rotation(position)
        mask = self._visible(position)
        for layer in self.layers:
            x = layer(x, lanes, cos, sin, mask)
        return self.output(rms_norm(x, self.norm, self.config.norm_eps))

    def _rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        angle = position.float()[..., None, None] * self.frequency  # [lanes, frames, 1, head_dim / 2]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def _visible(self, position: Tensor) -> Tensor:
        """Which of the past and new keys a frame sees, ``[lanes, 1, frames, past + frames]`` bool."""
        back = torch.arange(self.past, 0, -1, device=position.device)
        keys = torch.cat([position[:, :1] - back, position], dim=1).unsqueeze(1)
        distance = position.unsqueeze(2) - keys
        return ((keys >= 0) & (distance >= 0) & (distance <= self.past)).unsqueeze(1)


class _Layer:
    def __init__(self, config: CodecConfig, load: Read, prefix: str, histories: Histories) -> None:
        self.config = config
        self.past = config.window - 1
        self.input_norm, self.post_norm = load(f"{prefix}.input_norm"), load(f"{prefix}.post_norm")
        self.qkv = make_linear(torch.cat([load(f"{prefix}.{name}") for name in "qkv"]))
        self.o = make_linear(load(f"{prefix}.o") * load(f"{prefix}.attention_scale").unsqueeze(1))
        self.gate_up = make_linear(torch.cat([load(f"{prefix}.gate"), load(f"{prefix}.up")]))
        self.down = make_linear(load(f"{prefix}.down") * load(f"{prefix}.mlp_scale").unsqueeze(1))
        self.keys = histories.add(config.kv_heads, self.past, config.head_dim)
        self.values = histories.add(config.kv_heads, self.past, config.head_dim)

    def __call__(self, x: Tensor, lanes: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.o(self.attend(rms_norm(x, self.input_norm, self.config.norm_eps), lanes, cos, sin, mask))
        gate, up = self.gate_up(rms_norm(x, self.post_norm, self.config.norm_eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def attend(self, h: Tensor, lanes: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        config = self.config
        qkv = self.qkv(h).view(*h.shape[:2], -1, config.head_dim)
        qk, v = qkv.split([config.heads + config.kv_heads, config.kv_heads], dim=2)
        q, k = rotate(qk, cos, sin).split([config.heads, config.kv_heads], dim=2)
        keys = self._extend(self.keys, k, lanes)
        values = self._extend(self.values, v, lanes)
        grouped = config.heads != config.kv_heads
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(2)

    def _extend(self, history: Tensor, new: Tensor, lanes: Tensor) -> Tensor:
        joined = torch.cat([history[lanes], new.transpose(1, 2)], dim=2)
        history[lanes] = joined[:, :, joined.shape[2] - self.past :]
        return joined


class WaveDecoder:
    """The transformer's output to samples: convolutions only."""

    def __init__(self, config: CodecConfig, load: Read, histories: Histories) -> None:
        ratios, rates = config.upsampling_ratios, config.upsample_rates
        self.upsample = [ConvNeXtUpsample(histories, load, f"upsample.{i}", ratio) for i, ratio in enumerate(ratios)]
        self.conv_in = CausalConv(histories, load("conv_in.weight"), load("conv_in.bias"))
        self.blocks = [UpsampleBlock(histories, load, f"blocks.{i}", rate) for i, rate in enumerate(rates)]
        self.snake_out = SnakeBeta(load("snake_out.alpha"), load("snake_out.beta"))
        self.conv_out = CausalConv(histories, load("conv_out.weight"), load("conv_out.bias"))
        self.frames_back = self._frames_back()

    def __call__(self, x: Tensor, lanes: Tensor) -> Tensor:
        for layer in self.upsample:
            x = layer(x, lanes)
        x = self.conv_in(x, lanes)
        for block in self.blocks:
            x = block(x, lanes)
        return self.conv_out(self.snake_out(x), lanes).flatten(1).clamp_(-1, 1)

    def _frames_back(self) -> int:
        """How many frames before the next one the convolutions look back at."""
        rate, back = 1.0, 0.0
        for layer in self.upsample:
            back, rate = back + layer.frames_back(rate), rate * layer.upsample.rate
        back += self.conv_in.reach / rate
        for block in self.blocks:
            back, rate = back + block.frames_back(rate), rate * block.upsample.rate
        return math.ceil(back + self.conv_out.reach / rate) + 1


def _dense(load: Read, name: str) -> Linear:
    return make_linear(load(f"{name}.weight"), load(f"{name}.bias"))
