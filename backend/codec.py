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
from megakernel.graphs import Ladder, Progress, Size, to_device
from megakernel.linear import Linear, make_linear
from megakernel.reference import rms_norm, rotate

_USAGE_FLOOR = 1e-5  # what an unused codebook entry's count is raised to before the division
FRAME_RUNGS = (8, 4, 2, 1)  # frames of a captured step; it takes neither more nor fewer
LANE_RUNGS = (1, 2, 4, 8, 16)  # lanes of a captured step; a spare lane fills it up


class Codec:
    """The decoder for ``lanes`` utterances at a time.

    ``read(name)`` returns the tensors called ``codec.…`` in ``backend/checkpoint.py``. Weights and sums are
    float32. With ``captured`` (None: on a GPU) steps run as captured graphs, in pieces of sizes that were captured.
    """

    def __init__(
        self,
        config: CodecConfig,
        read: Read,
        lanes: int = 1,
        device: str | torch.device = "cpu",
        captured: bool | None = None,
    ) -> None:
        self.config, self.device, self.lanes = config, torch.device(device), lanes
        _compute_in_float32(self.device)
        self.histories = Histories(lanes + 1, self.device)  # the last is nobody's: what fills a step up goes there
        self.position = [0] * lanes

        def load(name: str) -> Tensor:
            return read(f"codec.{name}").to(self.device, torch.float32)

        self.table = _fold_codebooks(config, load)  # [groups, codebook_size, quantized_dim]
        self.groups = torch.arange(config.groups, device=self.device)
        self.pre_conv = CausalConv(self.histories, load("pre_conv.weight"), load("pre_conv.bias"))
        self.transformer = SlidingTransformer(config, load, self.histories)
        self.waves = WaveDecoder(config, load, self.histories)
        self.ladder = self._make_ladder() if captured or (captured is None and self.device.type == "cuda") else None

    def warm_up(self, progress: Progress | None = None) -> None:
        """Capture now what the first chunks would wait for; ``progress`` hears what it is."""
        if self.ladder is not None:
            self.ladder.capture(progress)

    @torch.inference_mode()
    def decode(self, codes: Tensor, lanes: list[int]) -> Tensor:
        """The next frames of ``lanes``: ``[len(lanes), frames, groups]`` int64 to ``[len(lanes), samples]``.

        All lanes of one call take the same number of frames. Samples are float32 within ±1. Of a frame that ends
        an utterance, and holds a code that is none of the codebook's, the samples mean nothing.
        """
        codes = codes.to(self.device)
        if self.ladder is None:
            return self.compute(codes, self._advance(lanes, codes.shape[1], len(lanes)))
        return self._climb(self.ladder, codes, lanes)

    def compute(self, codes: Tensor, places: Tensor) -> Tensor:
        """What the device does of `decode`: ``places`` ``[2, lanes]`` int64 are each lane's index and position.

        Shapes alone decide what it launches, and it never asks the device for a number: so it can be captured.
        """
        lanes, position = places.unbind(0)
        return self.waves(self._hidden(codes, lanes, position), lanes)

    @torch.inference_mode()
    def prime(self, codes: Tensor, lane: int) -> None:
        """Put the lane where it would be after ``codes`` ``[frames, groups]``, without making their samples.

        The transformer goes over all of them; the convolutions only over what they look back at.
        """
        index, position = self._advance([lane], len(codes), 1).unbind(0)
        hidden = self._hidden(codes[None].to(self.device), index, position)
        self.waves(hidden[:, -self.waves.frames_back :], index)

    def reset(self, lane: int) -> None:
        """Start the lane afresh."""
        self.histories.reset(lane)
        self.position[lane] = 0

    def rebuild(self) -> None:
        """Start every lane afresh, whatever happened before."""
        self.histories.clear()
        self.position[:] = [0] * self.lanes

    def take(self, lane: int) -> tuple[int, list[Tensor]]:
        """A copy of the lane's state, for `put`."""
        return self.position[lane], self.histories.take(lane)

    def put(self, lane: int, state: tuple[int, list[Tensor]]) -> None:
        self.position[lane], tensors = state
        self.histories.put(lane, tensors)

    def _hidden(self, codes: Tensor, lanes: Tensor, position: Tensor) -> Tensor:
        codes = codes.clamp(0, self.config.codebook_size - 1)
        x = self.table[self.groups, codes].sum(dim=2)  # [lanes, frames, quantized_dim]
        return self.transformer(self.pre_conv(x, lanes), lanes, position)

    def _advance(self, lanes: list[int], frames: int, width: int) -> Tensor:
        """The places of ``lanes``, filled up to ``width`` with the spare lane's; they then are ``frames`` further."""
        filling = [self.lanes] * (width - len(lanes))
        places = [[*lanes, *filling], [*(self.position[lane] for lane in lanes), *([0] * len(filling))]]
        for lane in lanes:
            self.position[lane] += frames
        return to_device(places, self.device)

    def _climb(self, ladder: Ladder, codes: Tensor, lanes: list[int]) -> Tensor:
        """`decode` in pieces that are on the ladder: as many lanes, and of them as many frames, as a rung takes."""
        most = ladder.sizes[-1][1]
        rows = []
        for start in range(0, len(lanes), most):
            some, left = lanes[start : start + most], codes[start : start + most]
            pieces = []
            while frames := left.shape[1]:
                taken = next(rung for rung in FRAME_RUNGS if rung <= frames)
                size = ladder.fit(taken, len(some))
                assert size is not None, f"no rung holds {taken} frames of {len(some)} lanes"
                samples = ladder(size, left[:, :taken], self._advance(some, taken, size[1]))
                pieces.append(samples[: len(some)])
                left = left[:, taken:]
            rows.append(torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0])
        return torch.cat(rows) if len(rows) > 1 else rows[0]

    def _make_ladder(self) -> Ladder:
        enough = next((rung for rung in LANE_RUNGS if rung >= self.lanes), LANE_RUNGS[-1])
        sizes = [(frames, lanes) for frames in FRAME_RUNGS for lanes in LANE_RUNGS if lanes <= enough]
        return Ladder("codec: {} frames of {} lanes", self.compute, self._blank, sizes, self.device)

    def _blank(self, size: Size) -> tuple[Tensor, Tensor]:
        frames, lanes = size
        codes = torch.zeros(lanes, frames, self.config.groups, dtype=torch.int64, device=self.device)
        return codes, self._advance([], 0, lanes)


def _compute_in_float32(device: torch.device) -> None:
    """Have convolutions on a GPU computed in float32.

    By default cuDNN may round their inputs to TF32, ten bits of mantissa, and samples are to equal the reference's
    within float32's rounding. The codec is a small part of a frame's work: that is the wrong place to save. The switch
    is the process's own; that of matrices is off by default.
    """
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False


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

    def __call__(self, x: Tensor, lanes: Tensor, start: Tensor) -> Tensor:
        x = self.input(x)
        position = start.view(-1, 1) + torch.arange(x.shape[1], device=x.device)  # [lanes, frames]
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
