"""The reference behind the two functions every implementation offers: ``impl="reference"``.

Scores are sums in float64, rounded once to fp32, so no order of summation shows. Shapes as in ``tiled``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kpool import reference
from kpool.ranking import Ranking
from kpool.sharding import RowBlocks

# -----------------------------------------------------------------


def scores(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    *,
    pool_size: int,
    use_relu: bool,
    dot_scale: float,
    transform: str,
) -> Tensor:
    """fp32 ``[B, S, N]`` from float64 sums, masked pools -inf; arguments as for ``kpool.tiled.scores``."""
    out = []
    for entry in range(q.shape[1]):
        rows = reference.transform(q[:, entry].cpu(), transform)
        score, _ = reference.score_rows(
            rows, keys[:, entry].cpu(), weights[:, entry].cpu(), use_relu=use_relu, dot_scale=dot_scale
        )
        view = min(entry, pool_lo.shape[0] - 1)
        seen = _seen(pool_lo[view], pool_hi[view], None if mask is None else mask[view], pool_size, keys.shape[0])
        out.append(score.float().masked_fill(~seen, -math.inf))
    return torch.stack(out).to(q.device) if out else q.new_zeros(0, q.shape[0], keys.shape[0], dtype=torch.float32)


def select(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    *,
    pool_size: int,
    budget: int,
    rows: RowBlocks,
    use_relu: bool,
    dot_scale: float,
    transform: str,
    order: str,
    chunk_bytes: int,
) -> Tensor:
    """int32 ``[B, rows.count, M]``; arguments as for ``kpool.tiled.select``. ``chunk_bytes`` does not matter here."""
    del chunk_bytes
    ids = torch.full((q.shape[1], rows.count, budget), -1, dtype=torch.int32, device="cpu")
    for local, first, last in rows.spans(q.shape[0]):
        for entry in range(q.shape[1]):
            mine = reference.transform(q[first:last, entry].cpu(), transform)
            weight = weights[first:last, entry].cpu()
            score, error = reference.score_rows(
                mine, keys[:, entry].cpu(), weight, use_relu=use_relu, dot_scale=dot_scale
            )
            view = min(entry, pool_lo.shape[0] - 1)
            window = None if mask is None else mask[view, first:last]
            seen = _seen(pool_lo[view, first:last], pool_hi[view, first:last], window, pool_size, keys.shape[0])
            best = Ranking(score.float(), error, seen).best(budget)
            if order == "position":
                best = best.masked_fill(best < 0, keys.shape[0]).sort(-1).values
                best = best.masked_fill(best == keys.shape[0], -1)
            ids[entry, local : local + last - first] = best.to(torch.int32)
    return ids.to(q.device)


def _seen(lo: Tensor, hi: Tensor, mask: Tensor | None, pool_size: int, pools: int) -> Tensor:
    seen = torch.zeros(lo.shape[0], pools, dtype=torch.bool, device="cpu")
    for row, (first, last) in enumerate(zip(lo.tolist(), hi.tolist(), strict=True)):
        seen[row, first:last] = True
        if mask is not None:
            whole = torch.isfinite(mask[row, : pools * pool_size].cpu()).view(pools, pool_size).all(1)
            seen[row] &= whole
    return seen
