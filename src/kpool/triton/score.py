"""Score kernel: ``q [S, B, H, D]`` against pooled keys ``[N, B, D]``, one fp32 score per visible (row, pool).

    score[s, n] = sum over h of w[s, h] * f(q[s, h, :] . key[n, :])

The product is taken as ``key . q^T``: a tile holds ``BN`` pools by ``R`` rows times ``HP`` heads, q stays in place
while pools stream by, and heads are summed inside the tile. Tiles lie on the *global* grid of rows and pools, so a
score comes from the same instructions on the same inputs whatever piece of the rows a launch covers: its bits are a
function of that row and that pool alone.

What is written is not the float but its *rank key*, an int32 that orders exactly as selection does:

    excluded (not visible) < NaN < -inf < ... < -0.0 == 0.0 < ... < inf

Worked example: scores ``[2.0, -0.0, NaN]``, the last pool not visible: keys ``[0x40000000, 0, EXCLUDED]``.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(16)  # pools per group whose largest key is written beside the keys
EXCLUDED = tl.constexpr(-(2**31))  # below the key of every float
NAN_KEY = tl.constexpr(-(2**31) + 1)
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def rank_key(score):
    """int32 that orders like the score: 1.0 -> 0x3F800000, -0.0 -> 0, -1.0 -> -0x3F800001, NaN below -inf."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, NAN_KEY, key)


@triton.jit
def row_of(local, first, block, stride):
    """Global row of a local row: with first 4, block 2, stride 8, local rows 0 1 2 3 are rows 4 5 12 13."""
    return (local // block) * stride + first + local % block


# Of what differs between ranks or pieces nothing may choose another binary: no specialisation on these.
ROW_ARGS = ["first", "block", "stride", "count", "total", "row_tiles", "q_local", "skip"]


@triton.jit(do_not_specialize=ROW_ARGS)
def score_kernel(
    q,  # bf16 [S or count, B, H, D], strides q_*
    keys,  # bf16 [N, B, D], strides k_*
    weights,  # bf16 or fp32 [S, B, H], strides w_*
    pool_lo,  # int32 [Bv, S], batch stride v_batch (0 if shared)
    pool_hi,  # int32 [Bv, S]
    mask,  # fp32 [Bv, S, T], strides m_*; unread without MASKED
    out,  # int32 [B, count, ld]: rank keys
    best,  # int32 [B, count, ld // GROUP]: largest key of each group
    q_row,
    q_batch,
    q_head,
    q_dim,
    k_pool,
    k_batch,
    k_dim,
    w_row,
    w_batch,
    w_head,
    v_batch,
    m_batch,
    m_row,
    m_token,
    pools,  # N
    ld,  # N rounded up to BN
    dot_scale,
    first,  # local row i is global row (i // block) * stride + first + i % block
    block,
    stride,
    count,  # local rows of this launch
    total,  # S; rows past it are padding
    row_tiles,  # row tiles a block touches
    q_local,  # 1: q holds the local rows; 0: all rows
    skip,  # rows that see at most this many pools need no scores; -1: every row does
    H: tl.constexpr,
    HP: tl.constexpr,  # H rounded up to a power of two
    D: tl.constexpr,
    DP: tl.constexpr,  # D rounded up to a power of two, at least 16
    R: tl.constexpr,  # rows a tile
    BN: tl.constexpr,  # pools a tile
    TILES: tl.constexpr,  # pool tiles a program
    P: tl.constexpr,
    RELU: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,  # the interpreter multiplies bf16 as raw integers
):
    """One program: one row tile of the global grid against ``TILES`` pool tiles, those no row of it sees left out."""
    nth = tl.program_id(0) // row_tiles
    start = first + nth * stride
    top = (start // R + tl.program_id(0) % row_tiles) * R
    b = tl.program_id(2).to(tl.int64)

    row = top + tl.arange(0, R)
    local = nth * block + row - start
    mine = (row >= start) & (row < start + block) & (row < total) & (local < count)
    lo = tl.load(pool_lo + b * v_batch + row, mask=mine, other=0)
    hi = tl.minimum(tl.load(pool_hi + b * v_batch + row, mask=mine, other=0), pools)
    busy = (hi > lo) & (hi - lo > skip)
    begin = tl.min(tl.where(busy, lo, _FAR), 0) // BN
    end = tl.cdiv(tl.max(tl.where(busy, hi, 0), 0), BN)
    begin = tl.maximum(begin, tl.program_id(1) * TILES)
    end = tl.minimum(end, (tl.program_id(1) + 1) * TILES)

    if begin < end:
        column = tl.arange(0, R * HP)
        head = column % HP
        dim = tl.arange(0, DP)
        col_row = top + column // HP
        col_local = nth * block + col_row - start
        col_mine = (col_row >= start) & (col_row < start + block) & (col_row < total) & (col_local < count)
        col_mine = col_mine & (head < H)
        from_row = tl.where(q_local != 0, col_local, col_row).to(tl.int64)
        queries = tl.load(
            q + b * q_batch + from_row[None, :] * q_row + head[None, :] * q_head + dim[:, None] * q_dim,
            mask=col_mine[None, :] & (dim < D)[:, None],
            other=0.0,
        )
        weight = tl.load(
            weights + b * w_batch + col_row.to(tl.int64) * w_row + head * w_head, mask=col_mine, other=0.0
        ).to(tl.float32)
        if UPCAST:
            queries = queries.to(tl.float32)
        at = (b * count + local.to(tl.int64))[None, :]

        for tile in range(begin, end):
            pool = tile * BN + tl.arange(0, BN)
            key = tl.load(
                keys + b * k_batch + pool.to(tl.int64)[:, None] * k_pool + dim[None, :] * k_dim,
                mask=(pool < pools)[:, None] & (dim < D)[None, :],
                other=0.0,
            )
            if UPCAST:
                key = key.to(tl.float32)
            dots = tl.dot(key, queries, input_precision="ieee")
            if SCALED:
                dots = dots * dot_scale
            if RELU:
                dots = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
            terms = dots * weight[None, :]
            if H != HP:  # a padded head is 0 * key, which is NaN where the key is not finite
                terms = tl.where((head < H)[None, :], terms, 0.0)
            scores = tl.sum(tl.reshape(terms, (BN, R, HP)), axis=2)

            seen = (pool[:, None] >= lo[None, :]) & (pool[:, None] < hi[None, :])
            if MASKED:
                token = pool.to(tl.int64)[:, None] * P * m_token + row.to(tl.int64)[None, :] * m_row
                visible = seen
                for p in tl.static_range(P):
                    value = tl.load(mask + b * m_batch + token + p * m_token, mask=visible, other=0.0)
                    seen = seen & (tl.abs(value) < float("inf"))
            ranks = tl.where(seen, rank_key(scores), EXCLUDED)
            tl.store(out + at * ld + pool[:, None], ranks, mask=mine[None, :])
            largest = tl.max(tl.reshape(ranks, (BN // GROUP, GROUP, R)), axis=1)
            group = tile * (BN // GROUP) + tl.arange(0, BN // GROUP)
            tl.store(best + at * (ld // GROUP) + group[:, None], largest, mask=mine[None, :])
