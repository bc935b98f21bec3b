"""Scores to pool ids to tokens. The tie rule lives here.

Per row, the ``min(M, visible)`` visible pools of highest score win; ties go to the lowest pool id; -0.0 equals 0.0;
NaN ranks below every number but above what the row cannot see. That is one total order, written as one int64 key per
(row, pool): the score as an order-preserving int32 in the upper half, the negated pool id in the lower. The keys of a
row are distinct, so *any* correct top-k returns the same set, whatever its own idea of ties.

Worked example, ``P = 2``, ``K = 4``, row window ``[0, 7)``, scores ``[1.0, 5.0, 5.0]``: pools 1 and 2 tie and win,
order ``[1, 2]``; tokens ``[2, 3, 4, 5]``; tail ``[6]``; the row is ``[2, 3, 4, 5, 6]``.

Shapes: ``S`` rows, ``B`` batch, ``N`` pools, ``M`` pool budget, ``K = M * P`` selected tokens, ``P`` pool size, ``T``
keys, ``Bv`` either 1 or ``B``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kpool.visibility import on_cpu
from kpool.windows import RowWindows

ORDERS = ("score", "position")
HIDDEN = -(2**31)  # order key of a pool the row cannot see
_NAN = HIDDEN + 1  # order key of a visible NaN: below -inf, above hidden
_EXPAND_ELEMENTS = 1 << 18  # tokens expanded at a time: 1 MiB, stays in cache
_EXPAND_ELEMENTS_ELSEWHERE = 1 << 23  # 32 MiB, few launches
_TAIL_ROWS = 1 << 14  # rows whose tail is written at a time
_FLAT_SORT_ELEMENTS = 1 << 15  # from this size on torch sorts a flat integer tensor by radix


def order_key(scores: Tensor, *, clean: bool = False) -> Tensor:
    """fp32 scores to int32 that compare the same way: -0.0 equals 0.0, NaN is below -inf.

    Positive floats already order as their bits; negative ones order backwards, so their magnitude bits are flipped.
    ``clean``: the caller knows that there is no NaN and no -0.0.
    """
    bits = (scores if clean else scores + 0.0).view(torch.int32)
    key = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)
    return key if clean else key.masked_fill_(scores.isnan(), _NAN)


def top_pools(scores: Tensor, visible: Tensor | None, budget: int, order: str, first_id: int | Tensor = 0) -> Tensor:
    """The winning pools of each row.

    Args:
        scores: fp32 ``[..., W]``, one column per pool.
        visible: bool, broadcastable to ``[..., W]``, or None if every column is visible.
        budget: ``M``.
        order: ``"score"`` (score descending, then id) or ``"position"`` (id ascending).
        first_id: pool id of column 0, an int or ``[..., 1]``.

    Returns:
        int32 pool ids ``[..., M]``, -1 in unused slots at the end.
    """
    key = order_key(scores)
    if visible is not None:
        key = key.masked_fill_(~visible, HIDDEN)
    return take_top(key, budget, order, first_id)


def take_top(key: Tensor, budget: int, order: str, first_id: int | Tensor = 0) -> Tensor:
    """``top_pools`` of order keys: int32 ``[..., W]``, ``HIDDEN`` where the row cannot see the pool."""
    width = key.shape[-1]
    take = min(budget, width)
    unique = key.to(torch.int64).bitwise_left_shift_(32)
    unique |= torch.arange(width - 1, -1, -1, device=key.device)
    best = torch.topk(unique, take, dim=-1, sorted=False).values
    column = (width - 1) - (best & 0xFFFFFFFF)
    column.masked_fill_((best >> 32) == HIDDEN, width)  # behind every real column
    if order == "position":
        column = _sort_rows(column.to(torch.int32), width + 1)
    else:
        bits = width.bit_length()
        rank = (best >> 32).neg_().add_(2**31 - 1).bitwise_left_shift_(bits)  # 0 for the best possible score
        column = (_sort_rows(rank.bitwise_or_(column), 1 << (32 + bits)) & ((1 << bits) - 1)).to(torch.int32)
    ids = (column + first_id).masked_fill_(column == width, -1).to(torch.int32)
    return ids if take == budget else torch.nn.functional.pad(ids, (0, budget - take), value=-1)


def _sort_rows(values: Tensor, bound: int) -> Tensor:
    """Sort the last dimension of integers in ``[0, bound)``, ascending.

    On the CPU many rows are sorted faster as one flat tensor, each row lifted above the one before.
    """
    rows = values.shape[:-1].numel()
    fits = rows * bound <= torch.iinfo(values.dtype).max
    if values.device.type != "cpu" or values.numel() < _FLAT_SORT_ELEMENTS or not fits:
        return values.sort(-1).values
    floor = torch.arange(rows, dtype=values.dtype, device=values.device).mul_(bound).view(*values.shape[:-1], 1)
    return (values + floor).flatten().sort().values.view_as(values).sub_(floor)


def expand(
    ids: Tensor,
    starts: Tensor,
    windows: RowWindows,
    *,
    pool_size: int,
    always_select_tail: bool = True,
    width_multiple: int = 1,
) -> Tensor:
    """Pool ids to tokens, with head and tail.

    Args:
        ids: int32 ``[B, S, M]`` pool ids, -1 unused.
        starts: int32 ``[N]`` or ``[B, N]``, first key slot of each pool.
        windows: the row windows, ``[Bv, S]``.
        pool_size: ``P``.
        always_select_tail: append ``P - 1`` tail slots.
        width_multiple: round the width up with -1.

    Returns:
        int32 ``[B, S, W]``, ``W = M * P (+ P - 1)`` rounded up. Every id is -1 or a key slot; none twice in a row.
    """
    batch, rows, budget = ids.shape
    selected = budget * pool_size
    width = selected + (pool_size - 1 if always_select_tail else 0)
    out = ids.new_empty((batch, rows, -(-width // width_multiple) * width_multiple))
    out[..., width:] = -1
    elements = _EXPAND_ELEMENTS if ids.device.type == "cpu" else _EXPAND_ELEMENTS_ELSEWHERE
    piece = max(1, elements // max(1, batch * selected))
    table = _token_table(starts if starts.dim() == 2 else starts[None], pool_size)
    edge = torch.arange(pool_size - 1, device=ids.device, dtype=torch.int32)
    heads = windows.heads and not (on_cpu(windows.start) and torch.equal(windows.start, windows.head_end))
    for row in range(0, rows, piece):
        part = slice(row, row + piece)
        _write_pools(out[:, part, :selected], ids[:, part], table)
        if heads:
            _write_head(out[:, part, :selected], ids[:, part], _rows(windows, part), edge)
    for row in range(0, rows if always_select_tail else 0, _TAIL_ROWS):
        part = slice(row, row + _TAIL_ROWS)
        out[:, part, selected:width] = _tail(ids[:, part], _rows(windows, part), edge)
    return out


def _token_table(starts: Tensor, pool_size: int) -> Tensor:
    """The tokens of every pool, int32 ``[Bv, 1 + N, P]``: row ``1 + id``; row 0, for an unused slot, is all -1."""
    tokens = starts[..., None] + torch.arange(pool_size, device=starts.device, dtype=torch.int32)
    return torch.nn.functional.pad(tokens, (0, 0, 1, 0), value=-1)


def _tail(ids: Tensor, window: RowWindows, edge: Tensor) -> Tensor:
    """Tail slots ``[B or Bv, r, P - 1]`` of the rows, -1 behind them."""
    tail = window.tail_start[..., None] + edge
    keep = (tail < window.end[..., None]) & _finite(window.mask, tail)
    if window.tail_in_pools:
        repeated = (ids == (window.tail_start // (edge.numel() + 1))[..., None]).any(-1, keepdim=True)
        keep = keep & ~repeated
    return torch.where(keep, tail, -1)


def _rows(windows: RowWindows, part: slice) -> RowWindows:
    names = ("start", "end", "pool_lo", "pool_hi", "tail_start", "head_end")
    cut = {name: getattr(windows, name)[:, part] for name in names}
    mask = None if windows.mask is None else windows.mask[:, part]
    return RowWindows(**cut, mask=mask, heads=windows.heads, tail_in_pools=windows.tail_in_pools)


def _write_pools(out: Tensor, ids: Tensor, table: Tensor) -> None:
    """``out [B, r, M * P]`` gets the ``P`` tokens of each id of ``[B, r, M]``."""
    views, entries, pool_size = table.shape
    index = ids + 1
    if views > 1:
        index += torch.arange(views, device=ids.device, dtype=torch.int32)[:, None, None] * entries
    # copying one 8- or 16-byte element is faster than copying a row of 2 or 4
    whole = {2: torch.int64, 4: torch.complex128}.get(pool_size)
    lines = table.view(-1, pool_size) if whole is None else table.view(whole).flatten()
    tokens = lines.index_select(0, index.flatten())
    out.copy_((tokens if whole is None else tokens.view(torch.int32)).view(out.shape))


def _write_head(out: Tensor, ids: Tensor, window: RowWindows, edge: Tensor) -> None:
    """Write the head right behind the selected pools of ``out [B, r, K]``; a row without a free slot drops it.

    A free slot is a whole unused pool, ``P`` tokens, so a head either fits entirely or not at all.
    """
    if edge.numel() == 0:
        return
    budget, pool_size = ids.shape[-1], edge.numel() + 1
    used = (ids >= 0).sum(-1, keepdim=True)
    slot = used.clamp(max=budget - 1) * pool_size + edge
    head = window.start[..., None] + edge
    keep = (head < window.head_end[..., None]) & (used < budget) & _finite(window.mask, head)
    out.scatter_(-1, slot, torch.where(keep, head, out.gather(-1, slot)))


def _finite(mask: Tensor | None, tokens: Tensor) -> Tensor | bool:
    """Whether the mask ``[Bv, r, T]`` lets each row see its ``tokens [Bv, r, e]``."""
    if mask is None:
        return True
    if mask.shape[-1] == 0:
        return False
    return torch.isfinite(mask.gather(-1, tokens.clamp(0, mask.shape[-1] - 1).to(torch.int64)))
