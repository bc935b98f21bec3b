"""Who scores which query rows, and the one all-gather that brings the selections together.

A plan is pure arithmetic of ``(rows, size)``: rank ``r`` computes ``R`` local rows, padded so that every rank sends the
same shape. ``contiguous`` gives rank ``r`` the rows ``[r * R, (r + 1) * R)``; ``block_cyclic`` deals blocks of rows
round-robin, which balances causal work, where later rows see more.

    rank r sends      ids      [B, R, M]   int32, padding rows -1
    everyone receives gathered [G * B, R, M]
    ungather          ids      [B, S, M]   in the order of the rows

Shapes: ``S`` rows, ``G`` ranks, ``R`` local rows, ``B`` batch, ``M`` pool budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

PLANS = ("contiguous", "block_cyclic")
_MIN_BLOCK = 8
_BLOCKS_PER_RANK = 4


class Group(Protocol):
    """What the shard group must offer; ``torch.distributed.ProcessGroup`` does."""

    def size(self) -> int:
        """Number of ranks in the group."""

    def rank(self) -> int:
        """Rank of the caller *inside the group*."""


@dataclass(frozen=True)
class RowBlocks:
    """The rows of one rank: local row ``i`` is global row ``i // block * stride + offset + i % block``.

    Rows at or past ``S`` are padding.
    """

    offset: int
    block: int
    stride: int
    count: int

    @staticmethod
    def all(rows: int) -> RowBlocks:
        """Every row, in order."""
        return RowBlocks(0, max(rows, 1), max(rows, 1), rows)

    def spans(self, rows: int) -> list[tuple[int, int, int]]:
        """``(local, first, last)`` per run of real rows; global rows ``[first, last)`` are local from ``local``."""
        spans = []
        for local in range(0, self.count, self.block):
            first = local // self.block * self.stride + self.offset
            last = min(first + min(self.block, self.count - local), rows)
            if first < last:
                spans.append((local, first, last))
        return spans


@dataclass(frozen=True)
class ShardPlan:
    """How ``num_rows`` query rows are dealt to ``size`` ranks. Build it with a constructor.

    Attributes:
        kind: ``"contiguous"`` or ``"block_cyclic"``.
        num_rows, size: ``S`` and ``G``.
        block: rows dealt at a time; ``R`` for the contiguous plan.
        rows_per_rank: ``R``, equal on all ranks, padding included.
    """

    kind: str
    num_rows: int
    size: int
    block: int
    rows_per_rank: int

    @staticmethod
    def contiguous(rows: int, size: int) -> ShardPlan:
        """Rank ``r`` holds rows ``[r * R, min(S, (r + 1) * R))`` with ``R = ceil(S / G)``.

        Example: 5 rows on 4 ranks give ``R = 2`` and the rows ``[0, 1]``, ``[2, 3]``, ``[4]``, ``[]``.
        """
        _check_plan(rows, size)
        share = -(-rows // size)
        return ShardPlan("contiguous", rows, size, share, share)

    @staticmethod
    def block_cyclic(rows: int, size: int, block: int = 128) -> ShardPlan:
        """Deal blocks of ``block`` rows round-robin; the block is halved, not below 8, until every rank gets 4.

        Example: 64 rows on 2 ranks: blocks of 8; rank 0 holds rows 0-7, 16-23, 32-39, 48-55.
        """
        _check_plan(rows, size)
        if block < 1:
            raise ValueError(f"block: expected a positive number of rows, got {block}")
        while block > _MIN_BLOCK and -(-rows // block) < _BLOCKS_PER_RANK * size:
            block = max(block // 2, _MIN_BLOCK)
        blocks = -(-rows // block)
        return ShardPlan("block_cyclic", rows, size, block, -(-blocks // size) * block)

    @staticmethod
    def of(kind: str, rows: int, size: int) -> ShardPlan:
        """The plan called ``kind``; ValueError for an unknown name."""
        if kind == "contiguous":
            return ShardPlan.contiguous(rows, size)
        if kind == "block_cyclic":
            return ShardPlan.block_cyclic(rows, size)
        raise ValueError(f"shard_plan: expected one of {PLANS}, got {kind!r}")

    def blocks(self, rank: int) -> RowBlocks:
        """The rows of ``rank`` as arithmetic, padding included."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank: expected 0 <= rank < {self.size}, got {rank}")
        block = max(self.block, 1)
        return RowBlocks(rank * block, block, self.size * block, self.rows_per_rank)

    def rows(self, rank: int) -> Tensor:
        """The real rows of ``rank``, int64, ascending."""
        spans = self.blocks(rank).spans(self.num_rows)
        return torch.cat([torch.arange(0)] + [torch.arange(first, last) for _, first, last in spans])

    def ungather(self, gathered: Tensor) -> Tensor:
        """Put gathered rows in order: ``[G * B, R, M]``, rank-major, to ``[B, S, M]``.

        Raises:
            ValueError: another shape.
        """
        if gathered.dim() != 3 or gathered.shape[0] % self.size or gathered.shape[1] != self.rows_per_rank:
            raise ValueError(
                f"gathered: expected [G * B, R, M] with G = {self.size}, R = {self.rows_per_rank}, "
                f"got shape {tuple(gathered.shape)}"
            )
        batch, budget = gathered.shape[0] // self.size, gathered.shape[2]
        if self.rows_per_rank == 0:
            return gathered.new_empty(batch, 0, budget)
        dealt = gathered.view(self.size, batch, self.rows_per_rank // self.block, self.block, budget)
        ordered = dealt.permute(1, 2, 0, 3, 4).reshape(batch, self.size * self.rows_per_rank, budget)
        return ordered[:, : self.num_rows]


def _check_plan(rows: int, size: int) -> None:
    if rows < 0 or size < 1:
        raise ValueError(f"rows, size: expected rows >= 0 and size >= 1, got rows = {rows}, size = {size}")


def check_group(group: object) -> tuple[int, int]:
    """``(rank, size)`` of a shard group.

    Raises:
        ValueError: not a group, or this process is not a member of it.
    """
    if isinstance(group, int):  # torch.distributed hands non-members of new_group() a plain integer
        raise ValueError(
            "query_shard_group: expected a group this process belongs to, got the handle torch.distributed gives to "
            "non-members; only members may call"
        )
    rank_of, size_of = getattr(group, "rank", None), getattr(group, "size", None)
    if not callable(rank_of) or not callable(size_of):
        raise ValueError(
            f"query_shard_group: expected an object with rank() and size(), such as a "
            f"ProcessGroup, got {type(group).__name__}"
        )
    rank, size = int(rank_of()), int(size_of())
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"query_shard_group: expected a member, 0 <= rank < size, got rank {rank} of size {size}")
    return rank, size


def all_gather(local: Tensor, group: Group, size: int) -> Tensor:
    """Concatenate ``local [n, ...]`` of every rank along dim 0: ``[G * n, ...]``, rank 0 first.

    The function is looked up on ``torch.distributed`` at each call, so that a test can observe or replace it.
    """
    import torch.distributed as dist

    out = local.new_empty((size * local.shape[0], *local.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, local.contiguous(), group=group)
    return out
