"""Where pools lie: the plain grid, one grid per packed document, one grid per left-padded batch row.

Every grid is the same thing: a list of documents, each cut into pools of ``P`` tokens from its own first
token. The plain grid has one document, ``[0, T)``. Pools are numbered through all documents in order; the last
``length mod P`` tokens of a document form no pool.

Shapes: ``S`` rows, ``T`` keys, ``B`` batch, ``P`` pool size, ``N = T // P`` pools, ``Bv`` either 1 (shared by the
batch) or ``B``. Nothing here reads a value back to the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PoolGrid:
    """Documents and the pools cut from them.

    Attributes:
        edges: int64 ``[Bv, docs + 1]``, ascending; document ``d`` holds the key slots ``[edges[d], edges[d + 1])``.
        offsets: int64 ``[Bv, docs + 1]``; document ``d`` owns the pool ids ``[offsets[d], offsets[d + 1])``.
        pool_size: ``P``.
        num_pools: ``N``, the number of pool slots, real or not.

    Example: ``P = 2`` and documents of 3 and 5 tokens give ``edges [0, 3, 8]``, ``offsets [0, 1, 3]`` and pools
    that start at ``[0, 3, 5, -1]``: the fourth slot exists because ``N = 8 // 2``, but holds no pool.
    """

    edges: Tensor
    offsets: Tensor
    pool_size: int
    num_pools: int

    @staticmethod
    def plain(tokens: int, pool_size: int, device: torch.device) -> PoolGrid:
        """One document ``[0, T)``: pool ``j`` holds the tokens ``[jP, jP + P)``."""
        # arange, not torch.tensor: a copy from the host is not allowed while a CUDA graph is captured
        return PoolGrid._cut(torch.arange(2, device=device)[None] * tokens, pool_size, tokens)

    @staticmethod
    def packed(cu_seqlens: Tensor, tokens: int, pool_size: int) -> PoolGrid:
        """One grid per document of ``cu_seqlens [docs + 1]``; tokens past ``cu_seqlens[-1]`` are in no document."""
        edges = cu_seqlens.to(torch.int64)[None]
        if edges.shape[1] == 1:  # no document at all: one empty document says the same
            edges = edges.expand(1, 2)
        return PoolGrid._cut(edges, pool_size, tokens)

    @staticmethod
    def left_padded(first: Tensor, last: Tensor, tokens: int, pool_size: int) -> PoolGrid:
        """Batch row ``b`` is one document, the key slots ``[first[b], last[b])``; ``first``, ``last`` int64 ``[B]``."""
        return PoolGrid._cut(torch.stack([first, last], dim=1), pool_size, tokens)

    @staticmethod
    def _cut(edges: Tensor, pool_size: int, tokens: int) -> PoolGrid:
        pools = (edges[:, 1:] - edges[:, :-1]) // pool_size
        offsets = torch.nn.functional.pad(pools.cumsum(1), (1, 0))
        return PoolGrid(edges, offsets, pool_size, tokens // pool_size)

    def starts(self) -> Tensor:
        """First key slot of every pool, int32 ``[N]`` (``[B, N]`` for a left-padded batch), -1 where there is none."""
        ids = torch.arange(self.num_pools, device=self.edges.device).expand(self.edges.shape[0], -1).contiguous()
        ends = self.offsets[:, 1:].contiguous()
        doc = torch.searchsorted(ends, ids, right=True).clamp_(max=ends.shape[1] - 1)
        base = self.edges.gather(1, doc) + (ids - self.offsets.gather(1, doc)) * self.pool_size
        base = torch.where(ids < self.offsets[:, -1:], base, -1).to(torch.int32)
        return base[0] if base.shape[0] == 1 else base

    def document_of(self, slot: Tensor) -> Tensor:
        """Document that holds each key slot, int64, same shape ``[Bv, S]``; the nearest one for slots in none."""
        ends = self.edges[:, 1:].contiguous()
        doc = torch.searchsorted(ends[0] if ends.shape[0] == 1 else ends, slot.contiguous(), right=True)
        return doc.clamp_(max=ends.shape[1] - 1)
