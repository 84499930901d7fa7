"""The frame kernel: everything between two frames, for up to 16 lanes, in one launch.

    draw code 0 -> 15 x [ predictor stack -> head -> draw ] -> sum of embeddings + text -> talker stack -> head

A persistent grid of at most one program a multiprocessor goes through the stages of `megakernel.stages` together,
meeting at a barrier after each. Before it waits, a program asks for the weights of its next stage. What a stage
is, which rows a program owns and what a barrier costs is in docs/kernel.md; the same frame in plain PyTorch is
`megakernel.decoder.Decoder.step`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from megakernel.barrier import STAGES, meet
from megakernel.drawing import DRAW_WORDS, draw, talker_logits
from megakernel.stages import (
    add_row,
    announce,
    attend,
    feed_forward_down,
    feed_forward_up,
    project_output,
    project_qkv,
    request,
    score,
    wide,
)


class CachePointers(NamedTuple):
    """Keys and values of one stack, ``[layers, lanes, kv_heads, positions, head_dim]``, and its rotation tables."""

    k: Any
    v: Any
    cos: Any  # [positions, head_dim] float32
    sin: Any


class Scratch(NamedTuple):
    """What one stage leaves for the next; ``columns`` is twice the lanes, as a predictor begins with two positions."""

    x: Any  # [columns, widest hidden] float32: the residual stream
    qkv: Any  # [columns, widest qkv]
    attention: Any  # [splits, columns, widest q]
    weight: Any  # [splits, columns, most heads]
    ffn: Any  # [columns, widest ffn], of the activations' type
    position: Any  # [groups, lanes] int32: row g is the predictor cache's length before step g
    sync: Any  # [SYNC_WORDS] int32: the barrier and the fault word


class Utterances(NamedTuple):
    """What the kernel reads and writes of every lane; ``control`` says which row of a frame is which lane's."""

    control: Any  # [1 + 3 * lanes] int32: active lanes as bits; lengths; frames; rows
    seed: Any  # [lanes] int64
    draws: Any  # [lanes, 2, DRAW_WORDS] float32: how the talker's and the predictor's codes are drawn
    penalty: Any  # [lanes] float32
    seen: Any  # [lanes, talker.vocab] uint8
    text: Any  # [rows, talker.hidden] float32: the text row that follows the frame
    forced: Any  # [rows, groups] int64: codes to take, or -1 to draw
    codes: Any  # [rows, groups] int64, written
    hidden: Any  # [lanes, talker.hidden] float32: the talker's final norm
    predictor_input: Any  # [lanes, predictor.hidden] float32: the same through the projection
    logits: Any  # [lanes, talker.vocab] float32
    predictor_logits: Any  # [lanes, groups - 1, predictor.vocab] float32, written


DRAW, QKV, ATTEND, OUTPUT, UP, DOWN, SCORE = (tl.constexpr(n) for n in range(1, len(STAGES) + 1))
WORDS = tl.constexpr(DRAW_WORDS)


@triton.jit
def run_stack(early, w, head, head_first, cache, s, start, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr):
    """All layers of a stack over ``s.x``.

    ``early`` is the first layer's tile of QKV, already requested; the tile of ``head`` from row ``head_first`` on is
    returned.
    """
    P: tl.constexpr = S.programs
    QKV_ROWS: tl.constexpr = T.qkv
    O_ROWS: tl.constexpr = T.o
    UP_ROWS: tl.constexpr = T.up
    DOWN_ROWS: tl.constexpr = T.down
    HEAD_ROWS: tl.constexpr = T.head
    tile = early
    for layer in range(T.layers):
        deep = wide(layer)
        project_qkv(tile, w, layer, s.x, s.qkv, active, S, T, POS)
        output = request(w.o, deep * T.o.count, S, O_ROWS)
        meet(s.sync, QKV, P)
        attend(w, layer, s.qkv, cache, cache.cos, cache.sin, start, s.attention, s.weight, active, S, T, POS)
        announce(w.gate_up, deep * 2 * T.up.count, S, UP_ROWS)
        announce(w.gate_up, deep * 2 * T.up.count + T.up.count, S, UP_ROWS)
        meet(s.sync, ATTEND, P)
        project_output(output, w, layer, s.x, s.attention, s.weight, start, active, S, T, POS)
        gate = request(w.gate_up, deep * 2 * T.up.count, S, UP_ROWS)
        up = request(w.gate_up, deep * 2 * T.up.count + T.up.count, S, UP_ROWS)
        meet(s.sync, OUTPUT, P)
        feed_forward_up(gate, up, w, layer, s.x, s.ffn, active, S, T, POS)
        down = request(w.down, deep * T.down.count, S, DOWN_ROWS)
        meet(s.sync, UP, P)
        feed_forward_down(down, w, layer, s.x, s.ffn, active, S, T, POS)
        if T.qkv.early > 0:
            if layer + 1 < T.layers:
                tile = request(w.qkv, (deep + 1) * T.qkv.count, S, QKV_ROWS)
            else:
                tile = request(head, head_first, S, HEAD_ROWS)
        meet(s.sync, DOWN, P)
    return tile


@triton.jit
def draw_talker(lane, w, s, u, S: tl.constexpr):
    """Group 0 of ``lane``'s frame, and the predictor's first two positions: the talker's output and the code."""
    frame = tl.load(u.control + 1 + S.lanes + lane)
    logits = talker_logits(
        u.logits + lane * S.talker.vocab, u.seen + lane * S.talker.vocab, tl.load(u.penalty + lane), frame, S
    )
    code = draw(logits, u.draws + lane * 2 * WORDS, tl.load(u.seed + lane), frame, 0, S.talker.vocab, S.talker.codes)
    code = take_code(lane, 0, code, u, S)
    tl.store(u.seen + lane * S.talker.vocab + code, 1)
    width: tl.constexpr = S.predictor.hidden
    copy_row(u.predictor_input + lane * width, s.x + lane * 2 * width, width)
    copy_row(w.first_input + code * width, s.x + (lane * 2 + 1) * width, width)


@triton.jit
def draw_predictor(lane, group, w, s, u, S: tl.constexpr):
    """Group ``group`` of ``lane``'s frame, and the predictor's next position; after the last the talker's."""
    vocab: tl.constexpr = S.predictor.vocab
    code = tl.arange(0, S.predictor.codes)
    logits = u.predictor_logits + (lane * (S.groups - 1) + group - 1) * vocab
    logits = tl.load(logits + code, mask=code < vocab, other=float("-inf"), cache_modifier=".cg")
    frame = tl.load(u.control + 1 + S.lanes + lane)
    params = u.draws + (lane * 2 + 1) * WORDS
    code = draw(logits, params, tl.load(u.seed + lane), frame, group, vocab, S.predictor.codes)
    code = take_code(lane, group, code, u, S)
    if group + 1 < S.groups:
        width: tl.constexpr = S.predictor.hidden
        copy_row(w.later_inputs + ((group - 1) * vocab + code) * width, s.x + lane * width, width)
    else:
        tl.debug_barrier()  # the frame's codes were stored by other threads of this program
        embed_frame(lane, w, s, u, S)


@triton.jit
def take_code(lane, group, code, u, S: tl.constexpr):
    """The code that was drawn, or the one that is forced; written to the frame."""
    place = tl.load(u.control + 1 + 2 * S.lanes + lane) * S.groups + group
    forced = tl.load(u.forced + place)
    code = tl.where(forced >= 0, forced, code.to(tl.int64))
    tl.store(u.codes + place, code)
    return code


@triton.jit
def embed_frame(lane, w, s, u, S: tl.constexpr):
    """The talker's input: the sum of the embeddings of ``lane``'s frame and its text row."""
    width: tl.constexpr = S.talker.hidden
    vocab: tl.constexpr = S.predictor.vocab
    row = tl.load(u.control + 1 + 2 * S.lanes + lane)
    codes = u.codes + row * S.groups
    x = add_row(w.embedding + tl.load(codes) * width, 0.0, width)
    for group in range(1, S.groups):
        code = tl.load(codes + group)
        x = add_row(w.predictor_embedding + ((group - 1) * vocab + code) * width, x, width)
    x = add_row(u.text + row * width, x, width)
    k = tl.arange(0, triton.next_power_of_2(width))
    tl.store(s.x + lane * width + k, x, mask=k < width)


@triton.jit
def copy_row(source, target, width: tl.constexpr):
    k = tl.arange(0, triton.next_power_of_2(width))
    tl.store(target + k, tl.load(source + k, mask=k < width).to(tl.float32), mask=k < width)


@triton.jit
def predict(early, start, group, w, cache, s, u, active, S: tl.constexpr, POS: tl.constexpr):
    """One predictor step: the stack, the head of ``group``, the draw.

    Returns the requested first tile of what follows.
    """
    T: tl.constexpr = S.predictor
    P: tl.constexpr = S.programs
    heads, norm = w.predictor_heads, w.predictor.norm
    row = wide(group - 1) * T.vocab
    tile = run_stack(early, w.predictor, heads, row, cache, s, start, active, S, T, POS)
    logits = u.predictor_logits + (group - 1) * T.vocab
    score(tile, heads, row, norm, norm, s.x, logits, (S.groups - 1) * T.vocab, u, active, S, T, POS, False)
    QKV_ROWS: tl.constexpr = T.qkv
    early = request(w.predictor.qkv, 0, S, QKV_ROWS)
    meet(s.sync, SCORE, P)
    for lane in range(tl.program_id(0), S.lanes, P):
        if ((active >> lane) & 1) != 0:
            draw_predictor(lane, group, w, s, u, S)
    meet(s.sync, DRAW, P)
    return early


@triton.jit
def frame_kernel(
    w, talker_cache, predictor_cache, s, u, S: tl.constexpr, TALKER: tl.constexpr, PREDICTOR: tl.constexpr
):
    """One frame of the active lanes, each from its talker's last logits to its next ones.

    ``w`` is a `PackedDecoder`, ``s`` a `Scratch`, ``u`` the `Utterances`, ``S`` the `FrameShape`. ``PREDICTOR`` and
    ``TALKER`` switch the two halves on: both for a frame, one for a measurement of that half.
    """
    P: tl.constexpr = S.programs
    active = tl.load(u.control)
    lengths = u.control + 1
    if PREDICTOR:
        FIRST_ROWS: tl.constexpr = S.predictor.qkv
        early = request(w.predictor.qkv, 0, S, FIRST_ROWS)
        for lane in range(tl.program_id(0), S.lanes, P):
            if ((active >> lane) & 1) != 0:
                draw_talker(lane, w, s, u, S)
        meet(s.sync, DRAW, P)
        early = predict(early, s.position, 1, w, predictor_cache, s, u, active, S, 2)
        for group in range(2, S.groups):
            start = s.position + group * S.lanes
            early = predict(early, start, group, w, predictor_cache, s, u, active, S, 1)
    if TALKER:
        T: tl.constexpr = S.talker
        QKV_ROWS: tl.constexpr = T.qkv
        early = request(w.talker.qkv, 0, S, QKV_ROWS)
        tile = run_stack(early, w.talker, w.head, 0, talker_cache, s, lengths, active, S, T, 1)
        score(tile, w.head, 0, w.talker.norm, w.head_bias, s.x, u.logits, T.vocab, u, active, S, T, 1, True)
