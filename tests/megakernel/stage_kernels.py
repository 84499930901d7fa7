"""Kernels of one stage each, for the tests of that stage alone: what a frame has requested early is requested here."""

import triton
import triton.language as tl

from megakernel.drawing import draw, gumbel_noise, keep_top_k, keep_top_p, talker_logits, uniform
from megakernel.stages import (
    attend,
    feed_forward_down,
    feed_forward_up,
    project_output,
    project_qkv,
    request,
    score,
    wide,
)


@triton.jit
def run_project_qkv(w, layer, s, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr):
    ROWS: tl.constexpr = T.qkv
    early = request(w.qkv, wide(layer) * T.qkv.count, S, ROWS)
    project_qkv(early, w, layer, s.x, s.qkv, active, S, T, POS)


@triton.jit
def run_attend(w, layer, s, cache, start, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr):
    attend(w, layer, s.qkv, cache, cache.cos, cache.sin, start, s.attention, s.weight, active, S, T, POS)


@triton.jit
def run_project_output(w, layer, s, start, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr):
    ROWS: tl.constexpr = T.o
    early = request(w.o, wide(layer) * T.o.count, S, ROWS)
    project_output(early, w, layer, s.x, s.attention, s.weight, start, active, S, T, POS)


@triton.jit
def run_feed_forward_up(w, layer, s, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr):
    ROWS: tl.constexpr = T.up
    first = wide(layer) * 2 * T.up.count
    gate, up = request(w.gate_up, first, S, ROWS), request(w.gate_up, first + T.up.count, S, ROWS)
    feed_forward_up(gate, up, w, layer, s.x, s.ffn, active, S, T, POS)


@triton.jit
def run_feed_forward_down(w, layer, s, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr):
    ROWS: tl.constexpr = T.down
    early = request(w.down, wide(layer) * T.down.count, S, ROWS)
    feed_forward_down(early, w, layer, s.x, s.ffn, active, S, T, POS)


@triton.jit
def run_score_talker(w, s, u, active, S: tl.constexpr, POS: tl.constexpr):
    T: tl.constexpr = S.talker
    ROWS: tl.constexpr = T.head
    early = request(w.head, 0, S, ROWS)
    score(early, w.head, 0, w.talker.norm, w.head_bias, s.x, u.logits, T.vocab, u, active, S, T, POS, True)


@triton.jit
def run_score_predictor(w, group, s, u, active, S: tl.constexpr, POS: tl.constexpr):
    T: tl.constexpr = S.predictor
    row, heads, norm = wide(group - 1) * T.vocab, w.predictor_heads, w.predictor.norm
    ROWS: tl.constexpr = T.head
    early = request(heads, row, S, ROWS)
    logits = u.predictor_logits + (group - 1) * T.vocab
    score(early, heads, row, norm, norm, s.x, logits, (S.groups - 1) * T.vocab, u, active, S, T, POS, False)


@triton.jit
def run_keep_top_k(logits, top_k, out, vocab: tl.constexpr, count: tl.constexpr):
    """One row of ``logits`` ``[programs, vocab]`` a program, ``top_k`` ``[programs]``."""
    row, code = tl.program_id(0), tl.arange(0, count)
    there = code < vocab
    kept = tl.load(logits + row * vocab + code, mask=there, other=float("-inf"))
    tl.store(out + row * vocab + code, keep_top_k(kept, tl.load(top_k + row)), mask=there)


@triton.jit
def run_keep_top_p(logits, cut, out, vocab: tl.constexpr, count: tl.constexpr):
    row, code = tl.program_id(0), tl.arange(0, count)
    there = code < vocab
    kept = tl.load(logits + row * vocab + code, mask=there, other=float("-inf"))
    tl.store(out + row * vocab + code, keep_top_p(kept, tl.load(cut + row)), mask=there)


@triton.jit
def run_uniform(words, out, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(out + at, uniform(tl.load(words + at)))


@triton.jit
def run_gumbel_noise(seed, first_frame, group, out, frames: tl.constexpr, count: tl.constexpr):
    """The noise of many frames at once, ``[frames, count]``: a column of frames in the place of one."""
    frame = tl.arange(0, frames)[:, None]
    noise = gumbel_noise(tl.load(seed), first_frame + frame, group, count)
    tl.store(out + frame * count + tl.arange(0, count)[None, :], noise)


@triton.jit
def run_draw(logits, draws, seed, frame, group, out, vocab: tl.constexpr, count: tl.constexpr):
    """A code a program, of its row of ``logits`` ``[programs, vocab]`` and of ``draws`` ``[programs, 4]``."""
    row, code = tl.program_id(0), tl.arange(0, count)
    x = tl.load(logits + row * vocab + code, mask=code < vocab, other=float("-inf"))
    drawn = draw(x, draws + row * 4, tl.load(seed + row), tl.load(frame + row), tl.load(group + row), vocab, count)
    tl.store(out + row, drawn)


@triton.jit
def run_talker_logits(u, frame, out, S: tl.constexpr):
    """One lane a program; ``frame`` ``[lanes]``."""
    lane, code, vocab = tl.program_id(0), tl.arange(0, S.talker.codes), S.talker.vocab
    seen, penalty = u.seen + lane * vocab, tl.load(u.penalty + lane)
    x = talker_logits(u.logits + lane * vocab, seen, penalty, tl.load(frame + lane), S)
    tl.store(out + lane * S.talker.codes + code, x)
