"""What a decoder carries from frame to frame, one record a lane.

Everything is allocated once. Memory that has not been written is never read: tests fill it with
NaN to prove it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megakernel.sampling import DrawParams, DrawTable
from megakernel.spec import DecoderSpec, StackSpec


class Cache:
    """Keys and values of one stack, ``[layers, lanes, kv_heads, positions, head_dim]`` each."""

    def __init__(self, spec: StackSpec, lanes: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (spec.layers, lanes, spec.kv_heads, positions, spec.head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)

    def window(self, lanes: slice, start: int, end: int) -> CacheWindow:
        return CacheWindow(self, lanes, start, end)


class CacheWindow:
    """Positions ``start`` to ``end`` of some lanes of a cache, to be written; and all before ``end``, to be read.

    The views of all layers are made at once: made layer by layer they cost as much as the arithmetic.
    """

    def __init__(self, cache: Cache, lanes: slice, start: int, end: int) -> None:
        k, v = cache.k[:, lanes, :, :end], cache.v[:, lanes, :, :end]
        self.k, self.v = k.unbind(0), v.unbind(0)
        self.new_k, self.new_v = k[:, :, :, start:].unbind(0), v[:, :, :, start:].unbind(0)

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[lanes, positions, kv_heads, head_dim]``; all up to ``end``, ``[lanes, kv_heads, end, head_dim]``."""
        self.new_k[layer].copy_(k.transpose(1, 2))
        self.new_v[layer].copy_(v.transpose(1, 2))
        return self.k[layer], self.v[layer]


class LaneState:
    """The state of ``lanes`` utterances of at most ``positions`` prompt positions and frames each.

    ``length`` is how many cache positions a lane has filled, ``frame`` how many frames it has made
    (both known to the host); ``hidden`` ``[lanes, talker.hidden]`` and ``logits`` ``[lanes, talker.vocab]``
    are the talker's last output, from which the next frame is drawn; ``seen`` marks the group-0
    codes so far. ``predictor_logits`` ``[lanes, groups - 1, predictor.vocab]`` are those of the last frame.
    ``predictor_input`` ``[lanes, predictor.hidden]``, kept by the kernel alone, is ``hidden`` through the projection.
    """

    def __init__(self, spec: DecoderSpec, lanes: int, positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self.lanes, self.positions = lanes, positions
        self.cache = Cache(spec.talker, lanes, positions, dtype, device)
        self.predictor_cache = Cache(spec.predictor, lanes, spec.groups, dtype, device)
        self.length = [0] * lanes
        self.frame = [0] * lanes
        self.seed = [0] * lanes
        self.hidden = torch.empty(lanes, spec.talker.hidden, device=device)
        self.predictor_input = torch.empty(lanes, spec.predictor.hidden, device=device)
        self.logits = torch.empty(lanes, spec.talker.vocab, device=device)
        self.predictor_logits = torch.empty(lanes, spec.groups - 1, spec.predictor.vocab, device=device)
        self.seen = torch.zeros(lanes, spec.talker.vocab, dtype=torch.bool, device=device)
        self.penalty = torch.ones(lanes, 1, device=device)
        self.talker_draw = DrawTable(lanes, spec.talker.vocab, device)
        self.predictor_draw = DrawTable(lanes, spec.predictor.vocab, device)

    def clear(self) -> None:
        """Empty every lane."""
        self.length[:] = self.frame[:] = [0] * self.lanes
        self.seen.zero_()

    def reset(self, lane: int, seed: int, talker: DrawParams, predictor: DrawParams, penalty: float) -> None:
        """Give the lane to a new utterance; its cache counts as empty.

        ``seed`` is any integer; its low 64 bits are the key of the random numbers.
        """
        if penalty <= 0:
            raise ValueError(f"repetition_penalty must be positive, got {penalty}")
        self.length[lane] = self.frame[lane] = 0
        self.seed[lane] = _signed64(seed)
        self.seen[lane] = False
        self.penalty[lane] = penalty
        self.talker_draw.set(lane, talker)
        self.predictor_draw.set(lane, predictor)


def _signed64(seed: int) -> int:
    """The low 64 bits of ``seed`` as the signed number that an int64 tensor holds."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
