"""Narrow weights at the true size of 0.6B: how far a long utterance stays from one in which nothing is rounded.

The kernel draws, and its codes are then put through the same weights in float32, all frames at once and with no cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the kernel is written in Triton")

from benchmarks.gpu_engines import check
from megakernel import DecoderWeights
from megakernel import reference as twin
from megakernel.frame import KernelDecoder
from megakernel.q8 import dequantize
from megakernel.weights import StackWeights
from tests.gpu.parity import DEVICE, DRY, FULL, FULL_Q8, ONE, ONE_Q8

PROMPT, FRAMES = (3, 2) if DRY else (24, 200)
LEAST = 0.999  # cosine
KERNELS = [FULL, ONE_Q8] if DRY else [ONE, ONE_Q8, FULL, FULL_Q8]
MATRICES = ("qkv", "o", "gate_up", "down")


class Exact:
    """A matrix of the kernel's in float32, for any number of rows; nothing is rounded to what it is stored in."""

    dtype = torch.float32

    def __init__(self, linear) -> None:
        self.rows = linear.rows.float() if linear.scales is None else dequantize(linear.rows, linear.scales)
        self.bias = None if linear.bias is None else linear.bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rows, self.bias)


def run_stack(x: Tensor, stack: StackWeights, positions: int) -> Tensor:
    """``[rows, positions, hidden]`` to the final norm of every position."""
    cos, sin = (table[:, None] for table in twin.rope_table(stack.spec, positions, DEVICE))
    for layer in stack.layers:
        layer = replace(layer, **{name: Exact(getattr(layer, name)) for name in MATRICES})
        q, k, v = twin.project_qkv(x, layer, stack.spec, cos, sin)
        x = x + layer.o(twin.attend_causal(q, k.transpose(1, 2), v.transpose(1, 2)))
        x = x + twin.feed_forward(x, layer, stack.spec)
    return twin.rms_norm(x, stack.norm, stack.spec.norm_eps)


def exact(weights: DecoderWeights, inputs: Tensor, codes: Tensor) -> dict[str, Tensor]:
    """What each frame should leave, ``[lanes, frames, ...]``.

    ``inputs`` ``[lanes, PROMPT + frames, hidden]`` are the talker's, ``codes`` ``[lanes, frames, groups]``.
    """
    hidden = run_stack(inputs, weights.talker, inputs.shape[1])
    before, after = hidden[:, PROMPT - 1 : -1], hidden[:, PROMPT:]
    embeddings = [weights.embedding[codes[..., 0]].float()]
    later = codes[..., 1:-1].unbind(-1)
    embeddings += [table[group].float() for table, group in zip(weights.predictor_embedding, later, strict=False)]
    x = torch.stack([before, *embeddings], dim=2)  # [lanes, frames, groups, hidden]
    if weights.projection is not None:
        x = Exact(weights.projection)(x)
    heads = [Exact(head) for head in weights.predictor_heads]
    predicted = []
    for lane in x:
        steps = run_stack(lane, weights.predictor, x.shape[2])[:, 1:].unbind(1)
        predicted.append(torch.stack([head(step) for head, step in zip(heads, steps, strict=True)], dim=1))
    return {"hidden": after, "logits": Exact(weights.head)(after), "predictor_logits": torch.stack(predicted)}


def perform(decoder: KernelDecoder, text: Tensor) -> Iterator[dict[str, Tensor]]:
    """What each frame leaves, and its codes; ``text`` ``[lanes, frames, hidden]``."""
    every = list(range(decoder.state.lanes))
    for row in text.unbind(1):
        codes = decoder.step(every, row)
        state = decoder.state
        kept = {name: getattr(state, name).clone() for name in ("hidden", "logits", "predictor_logits")}
        yield kept | {"codes": codes}
    check(decoder)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@torch.inference_mode()
def test_a_long_utterance_stays_near_one_that_is_not_rounded(kernel, built, note) -> None:
    built(kernel)
    decoder, hidden = kernel.decoder(), kernel.spec.talker.hidden
    generator = torch.Generator(DEVICE).manual_seed(6)
    rows = torch.randn(kernel.lanes, PROMPT + FRAMES, hidden, generator=generator, device=DEVICE)
    prompt, text = rows.split([PROMPT, FRAMES], dim=1)
    text = 0.05 * text  # beside the codes' embeddings, of which most of a frame's input is to consist
    for lane in range(kernel.lanes):
        decoder.begin(lane, seed=lane)
        decoder.prefill(lane, prompt[lane])
    frames = list(perform(decoder, text))
    mine = {name: torch.stack([frame[name] for frame in frames], dim=1) for name in frames[0]}
    codes = mine.pop("codes")
    right = exact(kernel.weights, torch.cat([prompt, decoder.embed_frame(codes) + text], dim=1), codes)
    cosines = {name: F.cosine_similarity(mine[name], right[name], dim=-1) for name in mine}
    for name, cosine in cosines.items():
        note(f"{kernel}, {FRAMES} frames, cosine of {name}: mean {cosine.mean():.6f}, least {cosine.min():.6f}")
    for name, cosine in cosines.items():
        worst = cosine.flatten().argmin().item()
        assert cosine.min() >= LEAST, f"cosine of {name}: {cosine.min():.6f}, first at {worst} of {cosine.numel()}"
