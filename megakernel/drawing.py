"""Logits to a code inside the kernel: what `megakernel.sampling` does for the twin, for one lane at a time.

The same numbers in the same order: penalty, suppression, temperature, top-k, top-p, Gumbel noise from Philox
counted by (code, group, frame), the largest wins. Thresholds are found by bisection over the logits' bit patterns,
ordered as their values are: no sort, and exact.
"""

import triton
import triton.language as tl

TEMPERATURE, TOP_K, CUT, STOCHASTIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
DRAW_WORDS = 4  # float32 a head and lane: temperature, top-k, 1 - top-p, 1 for a draw and 0 for the largest


@triton.jit
def uniform(words):
    """32-bit words to float32 in (0, 1): the top 23 bits at the middle of their interval."""
    return ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def gumbel_noise(seed, frame, group, count: tl.constexpr):
    """Standard Gumbel noise of codes 0 to ``count - 1``, float32."""
    block = tl.arange(0, count // 4)
    a, b, c, d = tl.philox(seed, block, group, frame, 0)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return -tl.log(-tl.log(uniform(words)))


@triton.jit
def ordered(x):
    """The bits of float32 ``x`` as int32 that compare as the values do; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def middle(low, high):
    """Half way from ``low`` up to ``high``, nearer to ``high`` if there is no middle; no overflow."""
    return (low >> 1) + (high >> 1) + ((low | high) & 1)


@triton.jit
def keep_top_k(logits, top_k):
    """All but the ``top_k`` largest to -inf; ties with the last one stay."""
    key = ordered(logits)
    low, high = tl.min(key, axis=0), tl.max(key, axis=0)
    while low < high:  # the largest key that at least top_k codes reach
        at = middle(low, high)
        count = tl.sum((key >= at).to(tl.int32), axis=0)
        low = tl.where(count >= top_k, at, low)
        high = tl.where(count >= top_k, tl.where(count == top_k, at, high), at - 1)
    return tl.where(key >= low, logits, float("-inf"))


@triton.jit
def keep_top_p(logits, cut):
    """Codes such that all that are at most as likely have a probability of ``cut`` or less to -inf."""
    key = ordered(logits)
    mass = tl.exp(logits - tl.max(logits, axis=0))
    cut = cut * tl.sum(mass, axis=0)
    low, high = tl.min(key, axis=0), tl.max(key, axis=0)
    while low < high:  # the smallest key below and at which there is more than the cut
        at = middle(low, high) - 1
        more = tl.sum(tl.where(key <= at, mass, 0.0), axis=0) > cut
        high = tl.where(more, at, high)
        low = tl.where(more, low, at + 1)
    return tl.where(key >= high, logits, float("-inf"))


@triton.jit
def draw(logits, params, seed, frame, group, vocab: tl.constexpr, count: tl.constexpr):
    """One code from ``logits`` ``[count]``, of which those from ``vocab`` on are -inf.

    ``params`` points to `DRAW_WORDS`.
    """
    if tl.load(params + STOCHASTIC) != 0.0:
        logits = logits / tl.load(params + TEMPERATURE)
        top_k = tl.load(params + TOP_K).to(tl.int32)
        if top_k < vocab:
            logits = keep_top_k(logits, top_k)
        cut = tl.load(params + CUT)
        if cut > 0.0:
            logits = keep_top_p(logits, cut)
        logits = logits + gumbel_noise(seed, frame, group, count)
    return tl.minimum(tl.argmax(logits, axis=0), vocab - 1)


@triton.jit
def talker_logits(logits, seen, penalty, frame, S: tl.constexpr):
    """The logits of group 0 after repetition penalty and suppression, ``[codes]``."""
    vocab: tl.constexpr = S.talker.vocab
    code = tl.arange(0, S.talker.codes)
    there = code < vocab
    x = tl.load(logits + code, mask=there, other=float("-inf"), cache_modifier=".cg")
    repeated = tl.load(seen + code, mask=there, other=0) != 0
    x = tl.where(repeated, tl.where(x < 0, x * penalty, x / penalty), x)
    kept = (code < S.suppress_from) & (code != S.eos) | ((code == S.eos) & (frame >= S.min_frames))
    return tl.where(kept & there, x, float("-inf"))
