# type: ignore (Triton compiles these functions from their text)
"""The programs of the ``triton`` kernel: imported only where Triton is installed.

Each has BLOCK queries or keys of one pair of sample and head, and goes through the others in STEPs.
``q``, ``k``, ``v`` and ``dy`` are the first numbers of (B, H, N, d), followed by the strides of B,
H and N; ``y``, ``dq``, ``dk`` and ``dv`` lie as (B, N, H, d). WIDTH is d, padded. ``bias`` is None
or (H, BLOCK, length), the last rows of matrices b(i − j), the last first. If TIED, keys and values
are the queries, and if CENTRED all are taken relative to the first token, the centre.
"""

import triton
import triton.language as tl


@triton.jit
def _places(start, first, stride, tokens, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Addresses of some rows of (N, d) from ``first`` on, and which of them are in it."""
    rows, channels = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    start += tl.cast(first, tl.int64) * stride
    return start + rows * stride + channels, (first + rows < tokens) & (channels < D)


@triton.jit
def _tile(
    start, first, stride, centre, tokens,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows of (N, d), zeros after its end; minus the centre, if there is one."""
    places, inside = _places(start, first, stride, tokens, D, WIDTH, ROWS)
    tile = tl.load(places, mask=inside, other=0.0)
    if centre is not None:
        tile -= centre[None, :]
    return tile


@triton.jit
def _write(
    start, first, stride, tile, tokens, D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    places, inside = _places(start, first, stride, tokens, D, WIDTH, ROWS)
    tl.store(places, tile.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _first_row(start, D: tl.constexpr, WIDTH: tl.constexpr):
    channels = tl.arange(0, WIDTH)
    return tl.load(start + channels, mask=channels < D, other=0.0)


@triton.jit
def _lengths(keys, scale, TIED: tl.constexpr):
    """What distances subtract from the logits of each key: scale ‖k_j‖²/2; else zero."""
    if TIED:
        keys = keys.to(tl.float32)
        return tl.sum(keys * keys, 1) * (0.5 * scale)
    else:
        return tl.zeros([keys.shape[0]], tl.float32)


@triton.jit
def _biased(s, queries, keys, distance, bias, length, BLOCK: tl.constexpr):
    """s + b(i − j), −∞ for keys after the query, of tiles that begin ``distance`` apart."""
    if bias is None:
        return tl.where(distance + queries >= keys, s, float("-inf"))
    else:
        rows = (BLOCK - 1 - queries) * length
        return s + tl.load(bias + (length - BLOCK - distance) + rows + keys)


@triton.jit
def forward(
    y, log_mass,
    q, q_sample, q_head, q_token, k, k_sample, k_head, k_token, v, v_sample, v_head, v_token,
    bias, length, scale, heads, tokens,
    TIED: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y and log Σ_j exp S_ij of a block of queries; the last block, which sees most, first."""
    pair, first = tl.program_id(0), (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK
    sample, head = tl.cast(pair // heads, tl.int64), pair % heads
    q += sample * q_sample + head * q_head
    k += sample * k_sample + head * k_head
    v += sample * v_sample + head * v_head
    y += (sample * tokens * heads + head) * D
    log_mass += tl.cast(pair, tl.int64) * tokens
    if bias is not None:
        bias += head * BLOCK * length
    i, j = tl.arange(0, BLOCK), tl.arange(0, STEP)
    centre = _first_row(q, D, WIDTH) if CENTRED else None
    queries = _tile(q, first, q_token, centre, tokens, D, WIDTH, BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)  # finite: −∞ − top is then never NaN
    mass = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(0, first + BLOCK, STEP):
        keys = _tile(k, start, k_token, centre, tokens, D, WIDTH, STEP)
        values = keys
        if not TIED:
            values = _tile(v, start, v_token, centre, tokens, D, WIDTH, STEP)
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        s -= _lengths(keys, scale, TIED)[None, :]
        s = _biased(s, i[:, None], j[None, :], first - start, bias, length, BLOCK)
        higher = tl.maximum(top, tl.max(s, 1))
        p, shrink = tl.exp(s - higher[:, None]), tl.exp(top - higher)
        mass = mass * shrink + tl.sum(p, 1)
        total *= shrink[:, None]
        total = tl.dot(p.to(values.dtype), values, total, input_precision=PRECISION)
        top = higher
    total /= mass[:, None]
    if CENTRED:
        total += centre[None, :]
    _write(y, first, heads * D, total, tokens, D, WIDTH, BLOCK)
    tl.store(log_mass + first + i, top + tl.log(mass), mask=first + i < tokens)


@triton.jit
def backward_queries(
    dq, delta, y, log_mass, dy, dy_sample, dy_head, dy_token,
    q, q_sample, q_head, q_token, k, k_sample, k_head, k_token, v, v_sample, v_head, v_token,
    bias, length, scale, heads, tokens,
    TIED: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """δ_i = ⟨dY_i, Y_i⟩ and scale · dS K of a block of queries, dS = P∘(dY Vᵀ − δ).

    If TIED, of keys relative to their query: rows of dS sum to zero, rounded ones nearly.
    """
    pair, first = tl.program_id(0), (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK
    sample, head = tl.cast(pair // heads, tl.int64), pair % heads
    q += sample * q_sample + head * q_head
    k += sample * k_sample + head * k_head
    v += sample * v_sample + head * v_head
    dy += sample * dy_sample + head * dy_head
    y += (sample * tokens * heads + head) * D
    dq += (sample * tokens * heads + head) * D
    log_mass += tl.cast(pair, tl.int64) * tokens
    delta += tl.cast(pair, tl.int64) * tokens
    if bias is not None:
        bias += head * BLOCK * length
    i, j = tl.arange(0, BLOCK), tl.arange(0, STEP)
    centre = _first_row(q, D, WIDTH) if CENTRED else None
    outer = _tile(dy, first, dy_token, None, tokens, D, WIDTH, BLOCK)
    means = _tile(y, first, heads * D, centre, tokens, D, WIDTH, BLOCK)
    means = tl.sum(outer.to(tl.float32) * means.to(tl.float32), 1)
    tl.store(delta + first + i, means, mask=first + i < tokens)
    masses = tl.load(log_mass + first + i, mask=first + i < tokens, other=float("inf"))
    queries = _tile(q, first, q_token, centre, tokens, D, WIDTH, BLOCK)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    row_sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, first + BLOCK, STEP):
        keys = _tile(k, start, k_token, centre, tokens, D, WIDTH, STEP)
        values = keys
        if not TIED:
            values = _tile(v, start, v_token, centre, tokens, D, WIDTH, STEP)
        s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        s -= _lengths(keys, scale, TIED)[None, :]
        s = _biased(s, i[:, None], j[None, :], first - start, bias, length, BLOCK)
        dp = tl.dot(outer, tl.trans(values), input_precision=PRECISION)
        ds = (tl.exp(s - masses[:, None]) * (dp - means[:, None])).to(keys.dtype)
        total = tl.dot(ds, keys, total, input_precision=PRECISION)
        if TIED:
            row_sums += tl.sum(ds.to(tl.float32), 1)
    if TIED:
        total -= row_sums[:, None] * queries.to(tl.float32)
    _write(dq, first, heads * D, scale * total, tokens, D, WIDTH, BLOCK)


@triton.jit
def backward_keys(
    dq, dk, dv, delta, log_mass, dy, dy_sample, dy_head, dy_token,
    q, q_sample, q_head, q_token, k, k_sample, k_head, k_token, v, v_sample, v_head, v_token,
    bias, length, scale, heads, tokens,
    TIED: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale · dSᵀ Q and Pᵀ dY of a block of keys; if TIED added to dq, with that of lengths."""
    pair, first = tl.program_id(0), tl.program_id(1) * BLOCK
    sample, head = tl.cast(pair // heads, tl.int64), pair % heads
    q += sample * q_sample + head * q_head
    k += sample * k_sample + head * k_head
    v += sample * v_sample + head * v_head
    dy += sample * dy_sample + head * dy_head
    log_mass += tl.cast(pair, tl.int64) * tokens
    delta += tl.cast(pair, tl.int64) * tokens
    if bias is not None:
        bias += head * BLOCK * length
    i, j = tl.arange(0, STEP), tl.arange(0, BLOCK)
    centre = _first_row(q, D, WIDTH) if CENTRED else None
    keys = _tile(k, first, k_token, centre, tokens, D, WIDTH, BLOCK)
    values = keys
    if not TIED:
        values = _tile(v, first, v_token, centre, tokens, D, WIDTH, BLOCK)
    lengths = _lengths(keys, scale, TIED)
    of_keys = tl.zeros([BLOCK, WIDTH], tl.float32)
    of_values = tl.zeros([BLOCK, WIDTH], tl.float32)
    of_lengths = tl.zeros([BLOCK], tl.float32)
    for start in range(first, tokens, STEP):
        queries = _tile(q, start, q_token, centre, tokens, D, WIDTH, STEP)
        outer = _tile(dy, start, dy_token, None, tokens, D, WIDTH, STEP)
        masses = tl.load(log_mass + start + i, mask=start + i < tokens, other=float("inf"))
        means = tl.load(delta + start + i, mask=start + i < tokens, other=0.0)
        s = tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale - lengths[:, None]
        s = _biased(s, i[None, :], j[:, None], start - first, bias, length, BLOCK)
        p = tl.exp(s - masses[None, :])
        of_values = tl.dot(p.to(outer.dtype), outer, of_values, input_precision=PRECISION)
        dp = tl.dot(values, tl.trans(outer), input_precision=PRECISION)
        ds = (p * (dp - means[None, :])).to(queries.dtype)
        of_keys = tl.dot(ds, queries, of_keys, input_precision=PRECISION)
        if TIED:
            of_lengths += tl.sum(ds.to(tl.float32), 1)
    here = (sample * tokens * heads + head) * D
    if TIED:
        total = of_values + scale * (of_keys - of_lengths[:, None] * keys.to(tl.float32))
        total += _tile(dq + here, first, heads * D, None, tokens, D, WIDTH, BLOCK).to(tl.float32)
        _write(dq + here, first, heads * D, total, tokens, D, WIDTH, BLOCK)
    else:
        _write(dk + here, first, heads * D, scale * of_keys, tokens, D, WIDTH, BLOCK)
        _write(dv + here, first, heads * D, of_values, tokens, D, WIDTH, BLOCK)


@triton.jit
def backward_bias(
    dbias, batch, samples, delta, log_mass, dy, dy_sample, dy_head, dy_token,
    q, q_sample, q_head, q_token, k, k_sample, k_head, k_token, v, v_sample, v_head, v_token,
    bias, length, scale, heads, tokens,
    TIED: tl.constexpr, CENTRED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ dS of the tiles at one distance from the diagonal, of one head in some ``samples``.

    They lie as the bias without its first BLOCK columns, the last row last: (parts, H, BLOCK,
    blocks · BLOCK).
    """
    part, width = tl.program_id(0), tl.num_programs(1) * STEP
    column = (tl.num_programs(1) - 1 - tl.program_id(1)) * STEP
    distance, begin, head = width - BLOCK - column, part // heads * samples, part % heads
    bias += head * BLOCK * length
    i, j = tl.arange(0, BLOCK), tl.arange(0, STEP)
    total = tl.zeros([BLOCK, STEP], tl.float32)
    for index in range(begin, tl.minimum(begin + samples, batch)):
        sample = tl.cast(index, tl.int64)
        of_queries = q + sample * q_sample + head * q_head
        of_keys = k + sample * k_sample + head * k_head
        of_values = v + sample * v_sample + head * v_head
        of_outer = dy + sample * dy_sample + head * dy_head
        pair = (sample * heads + head) * tokens
        centre = _first_row(of_queries, D, WIDTH) if CENTRED else None
        for first in range(tl.cdiv(tl.maximum(distance, 0), BLOCK) * BLOCK, tokens, BLOCK):
            queries = _tile(of_queries, first, q_token, centre, tokens, D, WIDTH, BLOCK)
            outer = _tile(of_outer, first, dy_token, None, tokens, D, WIDTH, BLOCK)
            rows, inside = pair + first + i, first + i < tokens
            masses = tl.load(log_mass + rows, mask=inside, other=float("inf"))
            means = tl.load(delta + rows, mask=inside, other=0.0)
            start = first - distance
            keys = _tile(of_keys, start, k_token, centre, tokens, D, WIDTH, STEP)
            values = keys
            if not TIED:
                values = _tile(of_values, start, v_token, centre, tokens, D, WIDTH, STEP)
            s = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
            s -= _lengths(keys, scale, TIED)[None, :]
            s = _biased(s, i[:, None], j[None, :], distance, bias, length, BLOCK)
            dp = tl.dot(outer, tl.trans(values), input_precision=PRECISION)
            total += tl.exp(s - masses[:, None]) * (dp - means[:, None])
    dbias += tl.cast(part, tl.int64) * BLOCK * width
    tl.store(dbias + i[:, None] * width + column + j[None, :], total)
