"""The twin: every stage of a frame in plain PyTorch, ``[lanes, positions, width]`` throughout.

This is the text that the fused kernel is checked against and, at the same time, the engine on a
CPU. Rounding points: the residual stream, norms and softmax are float32; what enters a weight
matrix is rounded to the weight format, and so is what leaves it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megakernel.spec import StackSpec
from megakernel.weights import LayerWeights, StackWeights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def rope_table(spec: StackSpec, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, ``[positions, head_dim]`` float32, for `rotate`.

    Source: Su et al., RoFormer, in the rotate-half form; the sign of the rotation is in the sines.
    """
    half = torch.arange(0, spec.head_dim, 2, dtype=torch.int64, device=device).float() / spec.head_dim
    angle = torch.arange(positions, device=device).float().unsqueeze(1) * (1.0 / spec.rope_base**half)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` ``[..., heads, head_dim]``; ``cos``, ``sin`` broadcast over heads."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def project_qkv(x: Tensor, layer: LayerWeights, spec: StackSpec, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Norm, QKV projection, per-head norm of q and k, rotation.

    ``x`` ``[lanes, positions, hidden]``; ``cos`` and ``sin`` ``[lanes or 1, positions, 1, head_dim]``.
    Returns q ``[lanes, positions, heads, head_dim]`` and k, v ``[lanes, positions, kv_heads, head_dim]``
    in the weight format.
    """
    h = rms_norm(x, layer.input_norm, spec.norm_eps).to(layer.qkv.dtype)
    qkv = layer.qkv(h).view(*x.shape[:-1], -1, spec.head_dim)
    qk, v = qkv.split_with_sizes([spec.heads + spec.kv_heads, spec.kv_heads], dim=-2)
    qk = rotate(rms_norm(qk.float(), layer.qk_norm, spec.norm_eps), cos, sin).to(qkv.dtype)
    q, k = qk.split_with_sizes([spec.heads, spec.kv_heads], dim=-2)
    return q, k, v


def feed_forward(x: Tensor, layer: LayerWeights, spec: StackSpec) -> Tensor:
    """Norm and SwiGLU, ``[lanes, positions, hidden]`` to the same, in the weight format."""
    h = rms_norm(x, layer.post_norm, spec.norm_eps).to(layer.gate_up.dtype)
    gate, up = layer.gate_up(h).chunk(2, dim=-1)
    return layer.down(F.silu(gate) * up)


def run_stack(
    x: Tensor, stack: StackWeights, cos: Tensor, sin: Tensor, attend: Attend, last: Tensor | None = None
) -> Tensor:
    """All layers and the final norm of the last position: ``[lanes, positions, hidden]`` to ``[lanes, hidden]``.

    ``attend(layer, q, k, v)`` stores k and v where the caller keeps them and returns the attention's
    output for the positions of q, ``[lanes, positions, heads * head_dim]``. Of all but the last position the
    last layer needs k and v only. ``last`` ``[1]`` int64 names another position to count as the last.
    """
    spec = stack.spec
    for index, layer in enumerate(stack.layers):
        q, k, v = project_qkv(x, layer, spec, cos, sin)
        if index == spec.layers - 1:
            x, q = (x[:, -1:], q[:, -1:]) if last is None else (x.index_select(1, last), q.index_select(1, last))
        x = x + layer.o(attend(index, q, k, v))
        x = x + feed_forward(x, layer, spec)
    return rms_norm(x[:, 0], stack.norm, spec.norm_eps)


def attend_cache(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One position a lane against that lane's cache.

    ``q`` ``[lanes, heads, head_dim]``, ``k`` and ``v`` ``[lanes, kv_heads, length, head_dim]``; the
    query heads of a group are the rows of one attention problem. Returns ``[lanes, heads * head_dim]``.
    """
    lanes, kv_heads = k.shape[:2]
    return F.scaled_dot_product_attention(q.reshape(lanes, kv_heads, -1, q.shape[-1]), k, v).flatten(1)


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last positions of a lane, each seeing itself and all before it.

    ``q`` ``[lanes, positions, heads, head_dim]``, ``k`` and ``v`` ``[lanes, kv_heads, length, head_dim]``.
    Returns ``[lanes, positions, heads * head_dim]``.
    """
    positions, length = q.shape[1], k.shape[2]
    visible = torch.ones(positions, length, dtype=torch.bool, device=q.device).tril(length - positions)
    return attend_visible(q, k, v, visible)


def attend_visible(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """As `attend_causal`, each position seeing what ``visible`` ``[positions, length]`` bool says."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)
