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

from kpool.windows import RowWindows

ORDERS = ("score", "position")
_HIDDEN = -(2**31)  # key of a pool the row cannot see
_NAN = _HIDDEN + 1  # key of a visible NaN: below -inf, above hidden
_EXPAND_ELEMENTS = 1 << 22  # tokens expanded at a time: bounds the temporaries, 16 MiB each


def order_key(scores: Tensor) -> Tensor:
    """fp32 scores to int32 that compare the same way: -0.0 equals 0.0, NaN is below -inf.

    Positive floats already order as their bits; negative ones order backwards, so their magnitude bits are flipped.
    """
    bits = (scores + 0.0).view(torch.int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key.masked_fill_(scores.isnan(), _NAN)


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
    width = scores.shape[-1]
    key = order_key(scores)
    if visible is not None:
        key = key.masked_fill_(~visible, _HIDDEN)
    key = key.to(torch.int64).bitwise_left_shift_(32)
    key |= torch.arange(width - 1, -1, -1, device=scores.device)
    take = min(budget, width)
    best = torch.topk(key, take, dim=-1, sorted=order == "score").values
    column = (width - 1) - (best & 0xFFFFFFFF)
    ids = (column + first_id).to(torch.int32)
    hidden = (best >> 32) == _HIDDEN
    if order == "position":
        last = torch.iinfo(torch.int32).max
        ids = ids.masked_fill_(hidden, last).sort(-1).values
        ids = ids.masked_fill_(ids == last, -1)
    else:
        ids = ids.masked_fill_(hidden, -1)
    return ids if take == budget else torch.nn.functional.pad(ids, (0, budget - take), value=-1)


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
    out = ids.new_full((batch, rows, -(-width // width_multiple) * width_multiple), -1)
    piece = max(1, _EXPAND_ELEMENTS // max(1, batch * selected))
    starts = starts if starts.dim() == 2 else starts[None]
    edge = torch.arange(pool_size - 1, device=ids.device, dtype=torch.int32)
    for row in range(0, rows, piece):
        part = slice(row, row + piece)
        window = _rows(windows, part)
        _write_pools(out[:, part, :selected], ids[:, part], starts, pool_size)
        _write_head(out[:, part, :selected], ids[:, part], window, edge)
        if always_select_tail:
            tail = window.tail_start[..., None] + edge
            keep = (tail < window.end[..., None]) & _finite(window.mask, tail)
            if window.tail_in_pools:
                repeated = (ids[:, part] == (window.tail_start // pool_size)[..., None]).any(-1, keepdim=True)
                keep = keep & ~repeated
            out[:, part, selected:width] = torch.where(keep, tail, -1)
    return out


def _rows(windows: RowWindows, part: slice) -> RowWindows:
    names = ("start", "end", "pool_lo", "pool_hi", "tail_start", "head_end")
    cut = {name: getattr(windows, name)[:, part] for name in names}
    mask = None if windows.mask is None else windows.mask[:, part]
    return RowWindows(**cut, mask=mask, tail_in_pools=windows.tail_in_pools)


def _write_pools(out: Tensor, ids: Tensor, starts: Tensor, pool_size: int) -> None:
    """``out [B, r, M * P]`` gets ``P`` consecutive key slots for each id of ``[B, r, M]``."""
    if starts.shape[1] == 0:
        return
    unused = ids < 0
    index = ids.clamp_min(0).to(torch.int64)
    base = starts[0][index] if starts.shape[0] == 1 else starts.gather(1, index.flatten(1)).view_as(index)
    tokens = base[..., None] + torch.arange(pool_size, device=ids.device, dtype=torch.int32)
    out.view(*ids.shape, pool_size).copy_(tokens.masked_fill_(unused[..., None], -1))


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
