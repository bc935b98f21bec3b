"""One window per query row, and the pools, head and tail that follow from it.

A row sees the key slots of its window ``[start, end)``. On a pool grid that means

- visible pools, ids ``[pool_lo, pool_hi)``: every token of the pool lies in the window;
- a *tail* ``[tail_start, end)``: the tokens after the last grid boundary at or before ``end``;
- a *head* ``[start, head_end)``: the tokens before the first boundary, disjoint from the tail.

Worked example, ``P = 4``, plain grid, window ``[1, 10)``: head ``[1, 4)``, pool 1 ``[4, 8)``, tail ``[8, 10)``.

Shapes: ``S`` rows, ``T`` keys, ``P`` pool size, ``Bv`` either 1 (shared by the batch) or ``B``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kpool.grid import PoolGrid


@dataclass(frozen=True, eq=False)
class RowWindows:
    """The window of every row, and what follows from it. All tensors are int32 ``[Bv, S]`` in key slots or pool ids.

    Attributes:
        start, end: the window, half open; empty windows are ``[0, 0)``.
        pool_lo, pool_hi: visible pool ids, half open.
        tail_start: the tail is ``[tail_start, end)``, fewer than ``P`` tokens.
        head_end: the head is ``[start, head_end)``, fewer than ``P`` tokens.
        mask: fp32 ``[Bv, S, T]`` or None; only finiteness counts, and only inside the window.
        heads: False if every head is known to be empty: windows that start where a document does.
        tail_in_pools: the tail may lie in a visible pool (no limit was given), so it must be compared with the
            selection.
    """

    start: Tensor
    end: Tensor
    pool_lo: Tensor
    pool_hi: Tensor
    tail_start: Tensor
    head_end: Tensor
    mask: Tensor | None = None
    heads: bool = True
    tail_in_pools: bool = False

    @staticmethod
    def on_grid(
        grid: PoolGrid, start: Tensor, end: Tensor, mask: Tensor | None = None, *, heads: bool = True
    ) -> RowWindows:
        """Derive pools, tail and head of the windows ``[start, end)``, int64 ``[Bv, S]``, on ``grid``."""
        pool_size = grid.pool_size
        empty = end <= start
        start, end = start.masked_fill(empty, 0), end.masked_fill(empty, 0)
        first_doc, last_doc = grid.document_of(start), grid.document_of((end - 1).clamp_min(0))
        first_edge, last_edge = at(grid.edges, first_doc), at(grid.edges, last_doc)

        before = (start - first_edge + pool_size - 1) // pool_size
        pool_lo = torch.minimum(at(grid.offsets, first_doc) + before, at(grid.offsets, first_doc + 1))
        complete = (end - last_edge) // pool_size
        pool_hi = torch.maximum(at(grid.offsets, last_doc) + complete, pool_lo)

        tail_start = torch.maximum(start, last_edge + complete * pool_size)
        boundary = torch.minimum(first_edge + before * pool_size, at(grid.edges, first_doc + 1))
        head_end = torch.maximum(start, torch.minimum(boundary, tail_start))
        pool_lo, tail_start = pool_lo.masked_fill(empty, 0), tail_start.masked_fill(empty, 0)
        pool_hi, head_end = pool_hi.masked_fill(empty, 0), head_end.masked_fill(empty, 0)
        start, end, pool_lo, pool_hi, tail_start, head_end = (
            part.to(torch.int32) for part in (start, end, pool_lo, pool_hi, tail_start, head_end)
        )
        return RowWindows(start, end, pool_lo, pool_hi, tail_start, head_end, mask, heads)


def at(table: Tensor, index: Tensor) -> Tensor:
    """``table [Bt, E]`` read at ``index [Bv, S]``, ``Bt`` and ``Bv`` equal or 1."""
    if table.shape[0] == 1:
        return table[0][index]
    return table.gather(1, index.expand(table.shape[0], -1))
