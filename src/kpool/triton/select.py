"""Select kernels: rank keys (see `kpool.triton.score`) to the ``M`` best pools of each row, exactly.

Three small kernels, one program a row, no atomics on anything that is returned:

1. `prune_kernel` reads only the largest key of each group of 16 pools. The M-th largest of those is a lower bound of
   the M-th largest key (M groups each hold a key that large), so groups below it hold no winner. It is taken from the
   upper 16 bits alone, which rounds it down and keeps it a bound. Out: the ids of the groups that stay, ascending.
2. `select_kernel` finds the exact M-th largest key among those groups by four rounds of 8-bit histograms, then writes
   the pools above it, and as many equal to it as are still needed, lowest ids first. Ids come out ascending.
3. `order_kernel` ranks the winners by (score descending, id ascending) by counting.

Worked example, ``M = 2``, keys ``[5, 7, 7, 7]``: threshold 7, two of three equal keys needed, ids ``[1, 2]``.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import triton
import triton.language as tl

from kpool.triton.score import EXCLUDED, GROUP, row_of


@triton.jit
def _window(pool_lo, pool_hi, b, v_batch, row, total, pools):
    """Visible pools ``[lo, hi)`` of a row; padding rows see ``[0, 0)``."""
    real = row < total
    lo = tl.load(pool_lo + b * v_batch + row, mask=real, other=0)
    hi = tl.load(pool_hi + b * v_batch + row, mask=real, other=0)
    return lo, tl.minimum(hi, pools)


@triton.jit
def _read(source, groups, at, begin, end, LISTED: tl.constexpr):
    """Ids, keys as uint32 in the same order, and validity of candidates ``at``.

    Plain: candidate i is entry i of ``source``. Listed: candidate i is member ``i % 16`` of group ``groups[i // 16]``.
    """
    inside = (at >= begin) & (at < end)
    item = at
    if LISTED:
        item = tl.load(groups + at // GROUP, mask=inside, other=0) * GROUP + at % GROUP
    key = tl.load(source + item, mask=inside, other=EXCLUDED)
    return item, key.to(tl.uint32, bitcast=True) ^ 0x80000000, inside & (key != EXCLUDED)


@triton.jit
def _threshold(source, groups, begin, end, budget, LISTED: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    """Upper ``8 * ROUNDS`` bits of the budget-th largest key, and how many keys equal in those bits are needed.

    With fewer than ``budget`` keys the threshold is 0, which is below every valid key.
    """
    bins = tl.arange(0, 256)
    prefix = tl.full((), 0, tl.uint32)
    need = budget
    origin = (begin // BLOCK) * BLOCK
    for r in tl.static_range(ROUNDS):
        counts = tl.zeros((256,), tl.int32)
        for c in range(origin, end, BLOCK):
            _, key, valid = _read(source, groups, c + tl.arange(0, BLOCK), begin, end, LISTED)
            if r > 0:
                valid = valid & ((key >> (32 - 8 * r)) == (prefix >> (32 - 8 * r)))
            digit = ((key >> (24 - 8 * r)) & 255).to(tl.int32)
            counts += tl.histogram(digit, 256, mask=valid)
        at_least = tl.cumsum(counts, 0, reverse=True)
        chosen = tl.max(tl.where(at_least >= need, bins, 0), 0)
        need = need - tl.sum(tl.where(bins > chosen, counts, 0), 0)
        prefix = prefix | (chosen.to(tl.uint32) << (24 - 8 * r))
    return prefix, need


@triton.jit(do_not_specialize=["first", "block", "stride", "count", "total", "direct"])
def prune_kernel(
    best,  # int32 [B, count, groups_ld]: largest key of each group
    pool_lo,  # int32 [Bv, S], batch stride v_batch
    pool_hi,  # int32 [Bv, S]
    groups,  # out int32 [B, count, groups_ld]: ids of the groups that stay
    stay,  # out int32 [B, count]: how many
    v_batch,
    pools,  # N
    groups_ld,
    budget,  # M
    first,
    block,
    stride,
    count,
    total,
    direct,  # rows that see at most this many pools need no selection; -1: every row does
    BLOCK: tl.constexpr,
):
    """One program: one row."""
    local = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    lo, hi = _window(pool_lo, pool_hi, b, v_batch, row_of(local, first, block, stride), total, pools)
    at = b * count + local
    kept = 0
    if hi - lo > tl.maximum(direct, 0):
        begin = lo // GROUP
        end = tl.cdiv(hi, GROUP)
        source = best + at * groups_ld
        bound = tl.full((), 0, tl.uint32)
        if end - begin > budget:
            bound, _ = _threshold(source, groups, begin, end, budget, False, 2, BLOCK)
        for c in range((begin // BLOCK) * BLOCK, end, BLOCK):
            group, key, valid = _read(source, groups, c + tl.arange(0, BLOCK), begin, end, False)
            keep = (valid & (key >= bound)).to(tl.int32)
            tl.store(groups + at * groups_ld + kept + tl.cumsum(keep, 0) - 1, group, mask=keep != 0)
            kept += tl.sum(keep, 0)
    tl.store(stay + at, kept)


@triton.jit(do_not_specialize=["first", "block", "stride", "count", "total", "direct", "out_first", "out_rows"])
def select_kernel(
    keys,  # int32 [B, count, ld]: rank keys
    groups,  # int32 [B, count, ld // GROUP]
    stay,  # int32 [B, count]
    pool_lo,  # int32 [Bv, S], batch stride v_batch
    pool_hi,  # int32 [Bv, S]
    out,  # int32 [B, out_rows, M], rows out_first + local
    v_batch,
    pools,  # N
    ld,
    budget,  # M
    first,
    block,
    stride,
    count,
    total,
    direct,
    out_first,
    out_rows,
    WIDTH: tl.constexpr,  # at least M
    BLOCK: tl.constexpr,
):
    """One program: one row. Ids ascending, -1 after them."""
    local = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    lo, hi = _window(pool_lo, pool_hi, b, v_batch, row_of(local, first, block, stride), total, pools)
    at = b * count + local
    row_out = out + (b * out_rows + out_first + local) * budget
    slot = tl.arange(0, WIDTH)
    if hi - lo <= tl.maximum(direct, 0):
        tl.store(row_out + slot, tl.where(lo + slot < hi, lo + slot, -1), mask=slot < budget)
    else:
        source = keys + at * ld
        listed = groups + at * (ld // GROUP)
        end = tl.load(stay + at) * GROUP
        bound, need = _threshold(source, listed, 0, end, budget, True, 4, BLOCK)
        above = 0
        equal = 0
        for c in range(0, end, BLOCK):
            pool, key, valid = _read(source, listed, c + tl.arange(0, BLOCK), 0, end, True)
            greater = valid & (key > bound)
            same = valid & (key == bound)
            packed = tl.cumsum(greater.to(tl.int32) + (same.to(tl.int32) << 16), 0)
            nth_above = above + (packed & 0xFFFF)
            nth_equal = equal + (packed >> 16)
            take = greater | (same & (nth_equal <= need))
            tl.store(row_out + nth_above + tl.minimum(nth_equal, need) - 1, pool, mask=take)
            above += tl.sum(greater.to(tl.int32), 0)
            equal += tl.sum(same.to(tl.int32), 0)
        found = above + tl.minimum(equal, need)
        tl.store(row_out + slot, tl.full((WIDTH,), -1, tl.int32), mask=(slot >= found) & (slot < budget))


@triton.jit(do_not_specialize=["count", "out_first", "out_rows"])
def order_kernel(
    keys,  # int32 [B, count, ld]: rank keys
    ascending,  # int32 [B, count, M]: ids ascending, then -1
    out,  # int32 [B, out_rows, M], rows out_first + local: the same ids by (score descending, id ascending)
    ld,
    budget,  # M
    count,
    out_first,
    out_rows,
    WIDTH: tl.constexpr,  # at least M
    PIECE: tl.constexpr,
):
    """One program: one row. The place of an id is the number of ids that come before it."""
    local = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    at = b * count + local
    slot = tl.arange(0, WIDTH)
    pool = tl.load(ascending + at * budget + slot, mask=slot < budget, other=-1)
    key = tl.load(keys + at * ld + pool, mask=pool >= 0, other=EXCLUDED)
    place = tl.zeros((WIDTH,), tl.int32)
    for c in range(0, budget, PIECE):
        other_slot = c + tl.arange(0, PIECE)
        other_pool = tl.load(ascending + at * budget + other_slot, mask=other_slot < budget, other=-1)
        other = tl.load(keys + at * ld + other_pool, mask=other_pool >= 0, other=EXCLUDED)
        before = (other[None, :] > key[:, None]) | (
            (other[None, :] == key[:, None]) & (other_slot[None, :] < slot[:, None])
        )
        before = before & (other_slot < budget)[None, :]
        place += tl.sum(before.to(tl.int32), 1)
    tl.store(out + (b * out_rows + out_first + local) * budget + place, pool, mask=slot < budget)
