"""The stages of a frame as Triton functions, each with the name and the meaning of its twin in `megakernel.reference`.

A *column* is one position of one lane: ``column = lane * POS + position``, where POS is how many new positions a lane
has (2 in the predictor's first step, else 1). Activations lie in scratch as ``[columns, width]`` float32; what
enters a matrix is rounded to the weight format, sums are float32 and stay so. A program owns a block of rows of
every matrix (`megakernel.plan.Rows`) and writes their results for all active columns; everything it reads of the
activations was written before the last barrier. Columns of idle lanes are neither read nor written.

Two ways to multiply, chosen when the kernel is compiled. *Rows*: a tile ``[rows, inputs]`` times the activations
``[columns, inputs]``, summed. *Dot*: the inputs are cut into slices, one tensor-core product a slice
``[columns, slice] @ [slice, rows]``, so that each warp takes other slices, and the slices are summed.
"""

import triton
import triton.language as tl

from megakernel.barrier import INTERPRETED, bring_near, fresh, hold


@triton.jit
def wide(n):
    """``n`` as 64 bits: weights and caches have more than 2^31 elements."""
    return tl.cast(n, tl.int64)


# weights


@triton.jit
def load_chunk(matrix, first, tile, chunk, S: tl.constexpr, R: tl.constexpr):
    """One chunk ``[R.tile, R.chunk]`` of a tile of the rows that this program owns, and its scales in Q8_0.

    ``first`` is the row of ``matrix`` (all its layers one below the other) at which the matrix begins. Returns a tuple;
    the scales are ``[R.tile, R.chunk / 32]``. Rows that are not there are zeros and cost nothing.
    """
    within = tile * R.tile + fresh() + tl.arange(0, R.tile)
    row = tl.program_id(0) * R.share + within
    there = ((within < R.share) & (row < R.count))[:, None]
    row = (first + row)[:, None]
    k = chunk * R.chunk + fresh() + tl.arange(0, R.chunk)[None, :]
    part = (tl.load(matrix.rows + row * R.inputs + k, mask=there, other=0, eviction_policy="evict_first"),)
    if S.quantized:
        block = chunk * (R.chunk // 32) + fresh() + tl.arange(0, R.chunk // 32)[None, :]
        place = matrix.scales + row * (R.inputs // 32) + block
        part = part + (tl.load(place, mask=there, other=0, eviction_policy="evict_first"),)
    return part


@triton.jit
def request(matrix, first, S: tl.constexpr, R: tl.constexpr):
    """The first tiles of the next stage, chunk after chunk of each, asked for before the barrier."""
    CHUNKS: tl.constexpr = R.chunks
    EARLY: tl.constexpr = R.early
    early = ()
    for t in tl.static_range(EARLY):
        for c in tl.static_range(CHUNKS):
            early = early + (load_chunk(matrix, first, t, c, S, R),)
    return early


@triton.jit
def announce(matrix, first, S: tl.constexpr, R: tl.constexpr):
    """Ask for this program's rows of a matrix to be brought into the L2."""
    if S.ahead:
        size: tl.constexpr = matrix.rows.dtype.element_ty.primitive_bitwidth // 8
        row = first + tl.minimum(tl.program_id(0) * R.share, R.count - R.share)
        bring_near(matrix.rows + row * R.inputs, (R.share * R.inputs * size) // 128, 512)


@triton.jit
def dequantize(values, scales, R: tl.constexpr):
    """Q8_0: ``value * scale`` of its block, float32 ``[R.tile, R.chunk]``."""
    blocks = tl.reshape(values.to(tl.float32), [R.tile, R.chunk // 32, 32])
    return tl.reshape(blocks * scales.to(tl.float32)[:, :, None], [R.tile, R.chunk])


@triton.jit
def slices(chunk, R: tl.constexpr):
    """``[R.tile, R.chunk]`` as ``[slices, slice, R.tile]``."""
    return tl.permute(tl.reshape(chunk, [R.tile, R.slices, R.slice]), (1, 2, 0))


@triton.jit
def dot(a, b):
    """``a @ b`` in float32, ``a`` of bfloat16 and ``b`` of bfloat16 or int8, which bfloat16 holds exactly.

    The interpreter multiplies the bits of bfloat16 as if they were integers; float32 has the same products.
    """
    if INTERPRETED:
        y = tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        y = tl.dot(a, b.to(tl.bfloat16))
    return y


@triton.jit
def no_sums(S: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr):
    """The empty sums that `accumulate` adds to, one a tile."""
    sums = ()
    TILES: tl.constexpr = R.tiles
    for _ in tl.static_range(TILES):
        if S.dot and not S.quantized:
            sums = sums + (tl.full([R.slices, COLS, R.tile], 0.0, tl.float32),)
        else:
            sums = sums + (tl.full([COLS, R.tile], 0.0, tl.float32),)
    return sums


@triton.jit
def accumulate(sums, early, matrix, first, chunk: tl.constexpr, h, S: tl.constexpr, R: tl.constexpr):
    """Chunk ``chunk`` of this program's rows times the activations ``h`` (as `columns` lays them out), added to
    ``sums``.

    The first tiles are in ``early``, the others are loaded here.
    """
    added = ()
    TILES: tl.constexpr = R.tiles
    for t in tl.static_range(TILES):
        if t < R.early:
            part = (hold(early[t * R.chunks + chunk][0]),)
            if S.quantized:
                part = part + (early[t * R.chunks + chunk][1],)
        else:
            part = load_chunk(matrix, first, t, chunk, S, R)
        added = added + (sums[t] + multiply(part, h, S, R),)
    return added


@triton.jit
def multiply(part, h, S: tl.constexpr, R: tl.constexpr):
    """A chunk of rows times its activations: ``[columns, R.tile]``, or ``[slices, columns, R.tile]`` to be summed."""
    if S.dot:
        y = dot(h, slices(part[0], R))
        if S.quantized:
            y = tl.sum(y * tl.permute(part[1].to(tl.float32), (1, 0))[:, None, :], axis=0)
    else:
        if S.quantized:
            w = dequantize(part[0], part[1], R)
        else:
            w = part[0].to(tl.float32)
        if h.shape[0] == 1:
            y = tl.sum(w * h, axis=1)[None, :]
        else:
            y = tl.sum(w[None, :, :] * h[:, None, :], axis=2)
    return y


@triton.jit
def finish(total, S: tl.constexpr):
    """The result ``[columns, R.tile]`` of one tile's sums."""
    if S.dot and not S.quantized:
        total = tl.sum(total, axis=0)
    return total


# activations


@triton.jit
def inputs(chunk, S: tl.constexpr, R: tl.constexpr):
    """The numbers of the inputs of a chunk, shaped to be combined with `columns`."""
    if S.dot:
        k = tl.arange(0, R.slices)[:, None, None] * R.slice + tl.arange(0, R.slice)[None, None, :]
    else:
        k = tl.arange(0, R.chunk)[None, :]
    return chunk * R.chunk + fresh() + k


@triton.jit
def columns(batch: tl.constexpr, S: tl.constexpr, COLS: tl.constexpr):
    """The numbers of a batch of columns. Activations are ``[columns, chunk]``, or ``[slices, columns, slice]``."""
    if S.dot:
        column = tl.arange(0, COLS)[None, :, None]
    else:
        column = tl.arange(0, COLS)[:, None]
    return batch * COLS + fresh() + column


@triton.jit
def is_active(active, lane):
    """Whether ``lane``, a number or a tensor of them, takes part in this frame."""
    return ((active >> lane) & 1) != 0


@triton.jit
def round_input(x, S: tl.constexpr):
    """What enters a matrix: bfloat16 for narrow weights (as float32 again where no tensor core takes it)."""
    if S.narrow:
        x = x.to(tl.bfloat16)
        if not S.dot:
            x = x.to(tl.float32)
    return x


@triton.jit
def load_inputs(x, chunk, row, there, S: tl.constexpr, R: tl.constexpr):
    """A chunk of the activations ``x`` ``[rows, R.inputs]``, of the rows ``row``; those not ``there`` are zero."""
    place = row * R.inputs + inputs(chunk, S, R)
    return tl.load(x + place, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)


@triton.jit
def load_all(x, row, there, S: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr):
    """All chunks of `load_inputs`, where they are few enough to be kept for `rms_norm`; else nothing."""
    kept = ()
    if COLS <= 4:
        CHUNKS: tl.constexpr = R.chunks
        for c in tl.static_range(CHUNKS):
            kept = kept + (load_inputs(x, c, row, there, S, R),)
    return kept


@triton.jit
def norm_scale(kept, x, row, there, eps: tl.constexpr, S: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr):
    """``1 / sqrt(mean(x^2) + eps)`` of the rows ``row`` of ``x``, broadcastable to a chunk."""
    squares = 0.0
    CHUNKS: tl.constexpr = R.chunks
    for c in tl.static_range(CHUNKS):
        if COLS <= 4:
            part = kept[c]
        else:
            part = load_inputs(x, c, row, there, S, R)
        squares += part * part
    if S.dot:
        total = tl.sum(tl.sum(squares, axis=2, keep_dims=True), axis=0, keep_dims=True)
    else:
        total = tl.sum(squares, axis=1, keep_dims=True)
    return tl.rsqrt(total / R.inputs + eps)


@triton.jit
def rms_norm(
    kept, x, chunk: tl.constexpr, row, there, scale, weight, S: tl.constexpr, R: tl.constexpr, COLS: tl.constexpr
):
    """A chunk of ``x / sqrt(mean(x^2) + eps) * weight``; ``scale`` is from `norm_scale`, ``weight`` a pointer."""
    if COLS <= 4:
        part = kept[chunk]
    else:
        part = load_inputs(x, chunk, row, there, S, R)
    return part * scale * tl.load(weight + inputs(chunk, S, R))


@triton.jit
def own_rows(tile, R: tl.constexpr):
    """Numbers ``[1, R.tile]`` of the rows of a tile of this program, and which of them are there."""
    within = tile * R.tile + fresh() + tl.arange(0, R.tile)
    row = tl.program_id(0) * R.share + within
    return row[None, :], ((within < R.share) & (row < R.count))[None, :]


@triton.jit
def column_numbers(batch: tl.constexpr, COLS: tl.constexpr):
    """The numbers of a batch of columns ``[COLS, 1]``, to be combined with `own_rows`."""
    return batch * COLS + fresh() + tl.arange(0, COLS)[:, None]


# the stages of a layer


@triton.jit
def project_qkv(early, w, layer, x, qkv, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr):
    """``qkv = W_qkv norm(x)``.

    Reads ``x`` ``[columns, hidden]``; writes this program's rows of ``qkv`` ``[columns, qkv_width]``.
    """
    R: tl.constexpr = T.qkv
    BATCH: tl.constexpr = S.batch(POS)
    BATCHES: tl.constexpr = S.batches(POS)
    CHUNKS: tl.constexpr = R.chunks
    TILES: tl.constexpr = R.tiles
    first = wide(layer) * R.count
    for b in tl.static_range(BATCHES):
        column = columns(b, S, BATCH)
        there = is_active(active, column // POS)
        kept = load_all(x, column, there, S, R, BATCH)
        scale = norm_scale(kept, x, column, there, T.norm_eps, S, R, BATCH)
        sums = no_sums(S, R, BATCH)
        for c in tl.static_range(CHUNKS):
            h = round_input(rms_norm(kept, x, c, column, there, scale, w.input_norm + layer * T.hidden, S, R, BATCH), S)
            sums = accumulate(sums, early, w.qkv, first, c, h, S, R)
        column = column_numbers(b, BATCH)
        for t in tl.static_range(TILES):
            row, mine = own_rows(t, R)
            place = qkv + column * T.qkv_width + row
            tl.store(place, finish(sums[t], S), mask=mine & is_active(active, column // POS))


@triton.jit
def norm_and_rotate(qkv, row, width: tl.constexpr, weight, cos, sin, position, T: tl.constexpr, narrow: tl.constexpr):
    """One or more heads of queries or keys: per-head norm, rotary embedding, rounding.

    ``row`` and ``position`` ``[n, 1]`` say where in ``qkv`` each begins and which position it has. Returns the
    two halves ``[n, head_dim / 2]`` float32, which is how rotation pairs them.
    """
    half: tl.constexpr = T.head_dim // 2
    d = fresh() + tl.arange(0, half)[None, :]
    a = tl.load(qkv + row + d, cache_modifier=".cg")
    b = tl.load(qkv + row + half + d, cache_modifier=".cg")
    square = tl.sum(a * a, axis=1, keep_dims=True) + tl.sum(b * b, axis=1, keep_dims=True)
    scale = tl.rsqrt(square / T.head_dim + T.norm_eps)
    a = a * scale * tl.load(weight + d)
    b = b * scale * tl.load(weight + half + d)
    c = tl.load(cos + position * T.head_dim + d)
    s = tl.load(sin + position * T.head_dim + half + d)  # the table's first half has the sign of the rotation
    first, second = a * c - b * s, b * c + a * s
    if narrow:
        first, second = first.to(tl.bfloat16).to(tl.float32), second.to(tl.bfloat16).to(tl.float32)
    return first, second


@triton.jit
def split_of(end, T: tl.constexpr):
    """How many cache positions each part of a lane's attention takes when it goes over ``end`` of them.

    It depends on the lane alone, so that its sums do not change with its company.
    """
    return tl.cdiv(tl.cdiv(end, T.splits), T.keys) * T.keys


@triton.jit
def attend(
    w,
    layer,
    qkv,
    cache,
    cos,
    sin,
    start,
    attention,
    weight,
    active,
    S: tl.constexpr,
    T: tl.constexpr,
    POS: tl.constexpr,
):
    """Softmax attention of the new positions over each lane's cache, to which their keys and values are added.

    Reads ``qkv`` ``[columns, qkv_width]`` and the cache below ``start[lane]``; the program that has the last part of a
    lane and key/value head writes positions ``start .. start + POS - 1`` of it. Writes ``attention``
    ``[splits, columns, q_width]`` and, with several splits, the logarithm ``weight`` ``[splits, columns, heads]`` of
    each part's share. One program a (lane, key/value head, split).
    """
    COLS: tl.constexpr = S.lanes * POS
    Q: tl.constexpr = POS * T.group
    half: tl.constexpr = T.head_dim // 2
    d = fresh() + tl.arange(0, half)[None, :]
    full = fresh() + tl.arange(0, T.head_dim)[None, :]
    q = fresh() + tl.arange(0, Q)
    p = fresh() + tl.arange(0, POS)[:, None]
    for item in range(tl.program_id(0), S.lanes * T.kv_heads * T.splits, S.programs):
        lane = item // (T.kv_heads * T.splits)
        head = (item // T.splits) % T.kv_heads
        split = item % T.splits
        if is_active(active, lane):
            past = tl.load(start + lane)
            end = past + POS
            part = split_of(end, T)
            low = split * part
            if low < end:
                high = tl.minimum(low + part, end)
                place = ((wide(layer) * S.lanes + lane) * T.kv_heads + head) * T.positions * T.head_dim
                keys, values = cache.k + place, cache.v + place
                if high == end:
                    row = (lane * POS + p) * T.qkv_width + T.q_width + head * T.head_dim
                    k_weight = w.qk_norm + (layer * 2 + 1) * T.head_dim
                    a, b = norm_and_rotate(qkv, row, T.qkv_width, k_weight, cos, sin, past + p, T, S.narrow)
                    kind: tl.constexpr = cache.k.dtype.element_ty
                    own = (past + p) * T.head_dim
                    tl.store(keys + own + d, a.to(kind))
                    tl.store(keys + own + half + d, b.to(kind))
                    v = tl.load(qkv + row + T.kv_width + full, cache_modifier=".cg")
                    tl.store(values + own + full, v.to(kind))
                    tl.debug_barrier()  # other threads of this program read them below
                column = lane * POS + q // T.group
                query = (head * T.group + q % T.group) * T.head_dim
                row = (column * T.qkv_width + query)[:, None]
                at = past + q // T.group
                q_weight = w.qk_norm + layer * 2 * T.head_dim
                qa, qb = norm_and_rotate(qkv, row, T.qkv_width, q_weight, cos, sin, at[:, None], T, S.narrow)
                out, log_sum = attend_part(qa, qb, at, keys, values, low, high, T)
                to = attention + ((split * COLS + column) * T.q_width + query)[:, None]
                tl.store(to + full, out)
                if T.splits > 1:
                    tl.store(weight + (split * COLS + column) * T.heads + head * T.group + q % T.group, log_sum)


@triton.jit
def attend_part(qa, qb, at, keys, values, low, high, T: tl.constexpr):
    """Queries ``[n, head_dim]`` (in halves) at positions ``at`` over cache positions ``low .. high``, none after its
    own.

    Returns the output ``[n, head_dim]`` and the logarithm of its sum of exponentials ``[n]``.
    """
    half: tl.constexpr = T.head_dim // 2
    d = fresh() + tl.arange(0, half)[None, :]
    full = fresh() + tl.arange(0, T.head_dim)[None, :]
    top = tl.full([qa.shape[0]], float("-inf"), tl.float32)
    total = tl.full([qa.shape[0]], 0.0, tl.float32)
    out = tl.full([qa.shape[0], T.head_dim], 0.0, tl.float32)
    for first in range(low, high, T.keys):
        n = first + tl.arange(0, T.keys)
        there = (n < high)[:, None]
        row = n[:, None] * T.head_dim
        ka = tl.load(keys + row + d, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        kb = tl.load(keys + row + half + d, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        v = tl.load(values + row + full, mask=there, other=0.0, cache_modifier=".cg").to(tl.float32)
        score = tl.sum(ka[:, None, :] * qa[None, :, :], axis=2) + tl.sum(kb[:, None, :] * qb[None, :, :], axis=2)
        seen = there & (n[:, None] <= at[None, :])
        score = tl.where(seen, score * T.scale, float("-inf"))  # [keys, n]
        higher = tl.maximum(top, tl.max(score, axis=0))
        shrink = tl.exp(top - higher)
        share = tl.exp(score - higher[None, :])
        total = total * shrink + tl.sum(share, axis=0)
        out = out * shrink[:, None] + tl.sum(share[:, :, None] * v[:, None, :], axis=0)
        top = higher
    return out / total[:, None], top + tl.log(total)


@triton.jit
def load_attention(
    attention, weight, chunk, column, there, parts, S: tl.constexpr, T: tl.constexpr, R: tl.constexpr, POS: tl.constexpr
):
    """A chunk of the attention's output for the columns ``column``, put together from ``parts`` parts each."""
    k = inputs(chunk, S, R)
    place = column * T.q_width + k
    if T.splits == 1:
        x = tl.load(attention + place, mask=there, other=0.0, cache_modifier=".cg")
    else:
        COLS: tl.constexpr = S.lanes * POS
        SPLITS: tl.constexpr = T.splits
        log_sum = weight + column * T.heads + k // T.head_dim
        top = tl.full(place.shape, float("-inf"), tl.float32)
        for s in tl.static_range(SPLITS):
            one = tl.load(log_sum + s * COLS * T.heads, mask=s < parts, other=float("-inf"), cache_modifier=".cg")
            top = tl.maximum(top, one)
        top = tl.where(there, top, 0.0)
        x = tl.full(place.shape, 0.0, tl.float32)
        total = tl.full(place.shape, 0.0, tl.float32)
        for s in tl.static_range(SPLITS):
            one = tl.load(log_sum + s * COLS * T.heads, mask=s < parts, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(attention + s * COLS * T.q_width + place, mask=s < parts, other=0.0, cache_modifier=".cg")
            share = tl.exp(one - top)
            x += share * part
            total += share
        x = x / tl.where(there, total, 1.0)
    return x


@triton.jit
def project_output(
    early, w, layer, x, attention, weight, start, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr
):
    """``x += W_o attention``.

    Reads ``attention``; reads and writes this program's rows of ``x`` ``[columns, hidden]``.
    """
    R: tl.constexpr = T.o
    BATCH: tl.constexpr = S.batch(POS)
    BATCHES: tl.constexpr = S.batches(POS)
    CHUNKS: tl.constexpr = R.chunks
    first = wide(layer) * R.count
    for b in tl.static_range(BATCHES):
        column = columns(b, S, BATCH)
        there = is_active(active, column // POS)
        parts = 0
        if T.splits > 1:
            end = tl.load(start + column // POS, mask=there, other=0) + POS
            parts = tl.where(there, tl.cdiv(end, split_of(end, T)), 0)
        sums = no_sums(S, R, BATCH)
        for c in tl.static_range(CHUNKS):
            h = load_attention(attention, weight, c, column, there, parts, S, T, R, POS)
            sums = accumulate(sums, early, w.o, first, c, round_input(h, S), S, R)
        add_to_rows(x, sums, b, active, S, T, R, POS)


@triton.jit
def add_to_rows(x, sums, b: tl.constexpr, active, S: tl.constexpr, T: tl.constexpr, R: tl.constexpr, POS: tl.constexpr):
    """Add finished ``sums`` to the rows of ``x`` ``[columns, hidden]`` that this program owns: the residual."""
    TILES: tl.constexpr = R.tiles
    column = column_numbers(b, S.batch(POS))
    for t in tl.static_range(TILES):
        row, mine = own_rows(t, R)
        mine = mine & is_active(active, column // POS)
        place = x + column * T.hidden + row
        before = tl.load(place, mask=mine, other=0.0, cache_modifier=".cg")
        tl.store(place, before + finish(sums[t], S), mask=mine)


@triton.jit
def feed_forward_up(
    early_gate, early_up, w, layer, x, ffn, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr
):
    """``ffn = silu(W_gate norm(x)) * W_up norm(x)``.

    Writes this program's rows of ``ffn`` ``[columns, ffn]``, rounded.
    """
    R: tl.constexpr = T.up
    BATCH: tl.constexpr = S.batch(POS)
    BATCHES: tl.constexpr = S.batches(POS)
    CHUNKS: tl.constexpr = R.chunks
    TILES: tl.constexpr = R.tiles
    first = wide(layer) * (2 * R.count)
    for b in tl.static_range(BATCHES):
        column = columns(b, S, BATCH)
        there = is_active(active, column // POS)
        kept = load_all(x, column, there, S, R, BATCH)
        scale = norm_scale(kept, x, column, there, T.norm_eps, S, R, BATCH)
        gates, ups = no_sums(S, R, BATCH), no_sums(S, R, BATCH)
        for c in tl.static_range(CHUNKS):
            h = round_input(rms_norm(kept, x, c, column, there, scale, w.post_norm + layer * T.hidden, S, R, BATCH), S)
            gates = accumulate(gates, early_gate, w.gate_up, first, c, h, S, R)
            ups = accumulate(ups, early_up, w.gate_up, first + R.count, c, h, S, R)
        column = column_numbers(b, BATCH)
        for t in tl.static_range(TILES):
            gate = finish(gates[t], S)
            y = gate * tl.sigmoid(gate) * finish(ups[t], S)
            row, mine = own_rows(t, R)
            place = ffn + column * T.ffn + row
            tl.store(place, y.to(ffn.dtype.element_ty), mask=mine & is_active(active, column // POS))


@triton.jit
def feed_forward_down(early, w, layer, x, ffn, active, S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr):
    """``x += W_down ffn``. Reads ``ffn`` ``[columns, ffn]``; reads and writes this program's rows of ``x``."""
    R: tl.constexpr = T.down
    BATCH: tl.constexpr = S.batch(POS)
    BATCHES: tl.constexpr = S.batches(POS)
    CHUNKS: tl.constexpr = R.chunks
    first = wide(layer) * R.count
    for b in tl.static_range(BATCHES):
        column = columns(b, S, BATCH)
        there = is_active(active, column // POS)
        sums = no_sums(S, R, BATCH)
        for c in tl.static_range(CHUNKS):
            h = round_input(load_inputs(ffn, c, column, there, S, R), S)
            sums = accumulate(sums, early, w.down, first, c, h, S, R)
        add_to_rows(x, sums, b, active, S, T, R, POS)


# from a stack to the next


@triton.jit
def score(
    early, matrix, first, norm, bias, x, logits, stride: tl.constexpr, u, active,
    S: tl.constexpr, T: tl.constexpr, POS: tl.constexpr, TALKER: tl.constexpr,
):  # fmt: skip
    """Final norm of every lane's last position and its ``logits``, a row of ``stride`` a lane.

    For the talker, the norm itself is kept as ``u.hidden``, and as ``u.predictor_input`` what the predictor begins
    with: the norm, or its projection, whose rows follow those of the head.
    """
    R: tl.constexpr = T.head
    CHUNKS: tl.constexpr = R.chunks
    TILES: tl.constexpr = R.tiles
    BATCH: tl.constexpr = S.batch(1)
    BATCHES: tl.constexpr = S.batches(1)
    for b in tl.static_range(BATCHES):
        lane = columns(b, S, BATCH)
        there = is_active(active, lane)
        row = lane * POS + POS - 1
        kept = load_all(x, row, there, S, R, BATCH)
        scale = norm_scale(kept, x, row, there, T.norm_eps, S, R, BATCH)
        sums = no_sums(S, R, BATCH)
        for c in tl.static_range(CHUNKS):
            h = rms_norm(kept, x, c, row, there, scale, norm, S, R, BATCH)
            if TALKER:
                keep_hidden(h, c, lane, there, u, S, T, R)
            sums = accumulate(sums, early, matrix, first, c, round_input(h, S), S, R)
        lane = column_numbers(b, BATCH)
        for t in tl.static_range(TILES):
            y = finish(sums[t], S)
            row, mine = own_rows(t, R)
            mine = mine & is_active(active, lane)
            tl.store(logits + lane * stride + row, y, mask=mine & (row < T.vocab))
            if TALKER and S.projects:
                mine = mine & (row >= T.vocab)
                y += tl.load(bias + row - T.vocab, mask=mine, other=0.0)
                if S.narrow:
                    y = y.to(tl.bfloat16).to(tl.float32)
                tl.store(u.predictor_input + lane * S.predictor.hidden + row - T.vocab, y, mask=mine)


@triton.jit
def keep_hidden(h, chunk, lane, there, u, S: tl.constexpr, T: tl.constexpr, R: tl.constexpr):
    """A chunk of the final norm to ``u.hidden`` (and ``u.predictor_input`` if nothing is projected), by program 0."""
    if tl.program_id(0) == 0:
        place = lane * T.hidden + inputs(chunk, S, R)
        tl.store(u.hidden + place, h, mask=there)
        if not S.projects:
            tl.store(u.predictor_input + place, h, mask=there)


@triton.jit
def add_row(row, x, width: tl.constexpr):
    """``x`` and ``row`` ``[width]``, float32, padded to a power of two."""
    k = tl.arange(0, triton.next_power_of_2(width))
    return x + tl.load(row + k, mask=k < width, other=0.0).to(tl.float32)
