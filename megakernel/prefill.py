"""Prompts through the talker as captured graphs, for a ladder of lengths.

A prompt is padded at its end up to the next rung. Attention is causal, so its own positions do not see the padding;
keys and values go to a staging cache, and from there those of the prompt alone to the lane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megakernel import reference as twin
from megakernel.graphs import Ladder, Progress, Size, to_device
from megakernel.state import Cache
from megakernel.weights import DecoderWeights

RUNGS = (16, 32, 64, 128, 256, 512, 1024)  # positions; a longer prompt is read uncaptured


class CapturedPrefill:
    """Reads a prompt into an empty lane; ``cos`` and ``sin`` are the talker's, ``[positions, head_dim]``."""

    def __init__(self, weights: DecoderWeights, cos: Tensor, sin: Tensor) -> None:
        self.weights, self.cos, self.sin = weights, cos, sin
        spec, device = weights.spec.talker, weights.device
        rungs = [rung for rung in RUNGS if rung <= len(cos)]
        self.staging = Cache(spec, 1, max(rungs, default=0), weights.dtype, device)
        self.ladder = Ladder("prompt of {} positions", self._read, self._blank, [(rung,) for rung in rungs], device)

    def capture(self, progress: Progress | None = None) -> None:
        self.ladder.capture(progress)

    def fits(self, positions: int) -> bool:
        return self.ladder.fit(positions) is not None

    def __call__(self, embeddings: Tensor, cache: Cache, lane: int) -> Tensor:
        """``[positions, hidden]`` into positions 0 and up of the lane; the last one's final norm ``[1, hidden]``."""
        positions = len(embeddings)
        size = self.ladder.fit(positions)
        assert size is not None, f"a prompt of {positions} positions is beyond the ladder"
        hidden = self.ladder(size, embeddings[None].float(), to_device([positions - 1], self.weights.device))
        cache.k[:, lane, :, :positions].copy_(self.staging.k[:, 0, :, :positions])
        cache.v[:, lane, :, :positions].copy_(self.staging.v[:, 0, :, :positions])
        return hidden

    def _blank(self, size: Size) -> tuple[Tensor, Tensor]:
        device = self.weights.device
        embeddings = torch.zeros(1, size[0], self.weights.spec.talker.hidden, device=device)
        return embeddings, torch.zeros(1, dtype=torch.int64, device=device)

    def _read(self, embeddings: Tensor, last: Tensor) -> Tensor:
        """``[1, rung, hidden]`` to the final norm of position ``last`` ``[1]``; nothing here asks the device."""
        rung = embeddings.shape[1]
        window = self.staging.window(slice(1), 0, rung)
        causal = torch.ones(rung, rung, dtype=torch.bool, device=embeddings.device).tril()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            visible = causal if q.shape[1] == rung else causal.index_select(0, last)
            return twin.attend_visible(q, *window.store(layer, k, v), visible)

        cos, sin = self.cos[:rung, None], self.sin[:rung, None]
        return twin.run_stack(embeddings, self.weights.talker, cos, sin, attend, last)
