"""The twin under a CUDA graph: a whole frame of one or more lanes, recorded once and replayed.

What a kernel has to beat. The stages are the twin's own, from `megakernel/reference.py` and `megakernel/sampling.py`;
the weights are those that the kernel reads, as plain matrices for all lanes at once, and no step waits for the host. A
graph is recorded for one cache length, so that attention reads no position that is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel import Decoder, DecoderWeights, DrawParams
from megakernel import reference as twin
from megakernel.linear import Linear, RowsLinear
from megakernel.sampling import gumbel_blocks, penalize
from megakernel.state import LaneState
from megakernel.weights import LayerWeights, StackWeights


def record(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """``work`` as a CUDA graph: what is returned repeats it, and returns the same tensor with its new numbers."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # libraries choose and allocate
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class TogetherLinear:
    """A matrix ``[out, in]`` applied to all lanes in one product, as the library chooses to."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.dtype, self.weight, self.bias = weight.dtype, weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class GraphedTwin:
    """All lanes of ``decoder`` side by side, every one at the same length, drawn alike.

    ``decoder`` holds weights in the layout of the kernel, not quantised; its lanes are prefilled before `begin`.
    """

    def __init__(self, decoder: Decoder, draw: DrawParams | None = None) -> None:
        self.weights, self.spec = _together(decoder.weights), decoder.spec
        device, lanes = decoder.weights.device, decoder.state.lanes
        self.decoder = decoder
        self.state = LaneState(self.spec, lanes, decoder.state.positions, self.weights.dtype, device)
        for lane in range(lanes):
            self.state.talker_draw.set(lane, draw or DrawParams())
            self.state.predictor_draw.set(lane, draw or DrawParams())
        every = list(range(lanes)), torch.arange(lanes, device=device)
        self.talker_draw = self.state.talker_draw.take(*every)
        self.predictor_draw = self.state.predictor_draw.take(*every)
        self.seed, self.frame = (torch.zeros(lanes, dtype=torch.int64, device=device) for _ in range(2))
        self.text = torch.zeros(lanes, self.spec.talker.hidden, device=device)
        self.codes = torch.zeros(lanes, self.spec.groups, dtype=torch.int64, device=device)
        self.groups = torch.arange(self.spec.groups, device=device)

    @torch.inference_mode()
    def begin(self) -> int:
        """Take over what the decoder's lanes hold; the length that they have in common."""
        mine, given = self.state, self.decoder.state
        for target, source in (
            (mine.cache.k, given.cache.k),
            (mine.cache.v, given.cache.v),
            (mine.hidden, given.hidden),
            (mine.logits, given.logits),
            (mine.seen, given.seen),
            (mine.penalty, given.penalty),
        ):
            target.copy_(source)
        self.seed.copy_(torch.tensor(given.seed))
        self.frame.copy_(torch.tensor(given.frame))
        (length,) = set(given.length)
        return length

    @torch.inference_mode()
    def step(self, length: int) -> Tensor:
        """One frame of every lane, ``[lanes, groups]``, after ``length`` positions.

        What is launched depends on no number in a tensor, so `record` can keep it.
        """
        codes = self.draw_frame()
        x = self.embed_frame(codes) + self.text
        hidden = self.talk(x, length)
        self.state.hidden.copy_(hidden)
        self.state.logits.copy_(self.score(hidden, self.weights.head))
        self.frame += 1
        self.codes.copy_(codes)
        return self.codes

    @torch.inference_mode()
    def draw_frame(self) -> Tensor:
        state, weights = self.state, self.weights
        noise = self.noise()
        codes = [self.talker_draw.sample(self.talker_logits(), noise[0])]
        state.seen.scatter_(1, codes[0][:, None], True)
        x = torch.stack([state.hidden, F.embedding(codes[0], weights.embedding).float()], dim=1)
        for group in range(1, self.spec.groups):
            hidden = self.predict(x, start=0 if group == 1 else group)
            logits = self.score(hidden, weights.predictor_heads[group - 1])
            codes.append(self.predictor_draw.sample(logits, noise[group]))
            x = F.embedding(codes[group], weights.predictor_embedding[group - 1]).float()[:, None]
        return torch.stack(codes, dim=1)

    def noise(self) -> list[Tensor]:
        decoder, spec = self.decoder, self.spec
        groups = gumbel_blocks(self.seed, self.frame, *decoder.noise_blocks).split_with_sizes(
            decoder.noise_sizes, dim=1
        )
        return [groups[0][:, : spec.talker.vocab], *(noise[:, : spec.predictor.vocab] for noise in groups[1:])]

    def talker_logits(self) -> Tensor:
        decoder, state = self.decoder, self.state
        early = (self.frame < self.spec.min_frames)[:, None]
        mask = torch.where(early, decoder.suppressed_early, decoder.suppressed)
        return penalize(state.logits, state.seen, state.penalty).masked_fill(mask, float("-inf"))

    def predict(self, x: Tensor, start: int) -> Tensor:
        end = start + x.shape[1]
        window = self.state.predictor_cache.window(slice(None), start, end)
        if self.weights.projection is not None:
            x = self.weights.projection(x.to(self.weights.dtype)).float()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = window.store(layer, k, v)
            if start == 0:
                return twin.attend_causal(q, keys, values)
            return twin.attend_cache(q[:, 0], keys, values)[:, None]

        decoder = self.decoder
        cos, sin = decoder.predictor_cos[start:end, None], decoder.predictor_sin[start:end, None]
        return twin.run_stack(x, self.weights.predictor, cos, sin, attend)

    def embed_frame(self, codes: Tensor) -> Tensor:
        later = self.weights.predictor_embedding[self.groups[1:] - 1, codes[:, 1:]]
        return self.weights.embedding[codes[:, 0]].float() + later.float().sum(dim=-2)

    @torch.inference_mode()
    def talk(self, x: Tensor, length: int) -> Tensor:
        window = self.state.cache.window(slice(None), length, length + 1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return twin.attend_cache(q[:, 0], *window.store(layer, k, v))[:, None]

        cos, sin = self.decoder.cos[length, None, None], self.decoder.sin[length, None, None]
        return twin.run_stack(x[:, None], self.weights.talker, cos, sin, attend)

    def score(self, hidden: Tensor, head: Linear) -> Tensor:
        return head(hidden[:, None].to(head.dtype))[:, 0].float()


def _together(weights: DecoderWeights) -> DecoderWeights:
    """The same weights, in the same memory, every matrix for all lanes at once."""
    return replace(
        weights,
        talker=_stack(weights.talker),
        head=_matrix(weights.head),
        predictor=_stack(weights.predictor),
        predictor_heads=[_matrix(head) for head in weights.predictor_heads],
        projection=None if weights.projection is None else _matrix(weights.projection),
    )


def _stack(stack: StackWeights) -> StackWeights:
    return replace(stack, layers=[_layer(layer) for layer in stack.layers])


def _layer(layer: LayerWeights) -> LayerWeights:
    matrices = {name: _matrix(getattr(layer, name)) for name in ("qkv", "o", "gate_up", "down")}
    return replace(layer, **matrices)


def _matrix(linear: Linear) -> Linear:
    if not isinstance(linear, RowsLinear) or linear.scales is not None:
        raise ValueError("a graphed twin takes weights in the kernel's layout, in float32 or bfloat16")
    return TogetherLinear(linear.rows, linear.bias)
