"""Collectives that autograd can walk through, and where the rows of a context-parallel rank lie.

Each function is a pair: what it does forward, and its transpose backward. With no group, or a group of one, each is the
identity and calls nothing. The collectives are looked up on `torch.distributed` at each call.

    gather_rows   [n, ...]     -> [G * n, ...]   backward: sum and scatter
    scatter_sum   [G * n, ...] -> [n, ...]       backward: gather
    enter         identity                       backward: sum over ranks
    sum_over      sum over ranks                 backward: identity

Zigzag, for context parallelism of `C` ranks: a document is cut into `2 C` chunks and rank `c` holds the chunks `c` and
`2 C - 1 - c`, so that every rank has early and late rows. Example: documents of 16 and 8 tokens on two ranks:
rank 0 holds 0-3, 12-15, 16-17, 22-23; rank 1 holds 4-11, 18-21.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kpool.sharding import Group, all_gather

__all__ = ["enter", "gather_rows", "group_size", "packed_order", "scatter_sum", "sum_over", "zigzag_positions"]


def group_size(group: Group | None) -> int:
    """Ranks of a group; 1 without one."""
    return 1 if group is None else int(group.size())


def gather_rows(x: Tensor, group: Group | None) -> Tensor:
    """Concatenate `x [n, ...]` of all ranks along dimension 0, rank 0 first."""
    return x if group_size(group) == 1 else _Gather.apply(x, group)  # type: ignore[no-untyped-call]


def scatter_sum(x: Tensor, group: Group | None) -> Tensor:
    """Sum `x [G * n, ...]` over ranks and return this rank's `[n, ...]`.

    Raises:
        ValueError: the rows cannot be dealt equally.
    """
    size = group_size(group)
    if size == 1:
        return x
    if x.shape[0] % size:
        raise ValueError(f"x: expected a number of rows divisible by {size} ranks, got {x.shape[0]}; pad the sequence")
    return _Scatter.apply(x, group)  # type: ignore[no-untyped-call,no-any-return]


def enter(x: Tensor, group: Group | None) -> Tensor:
    """Enter a region where every rank computes something else from the same `x`."""
    return x if group_size(group) == 1 else _Enter.apply(x, group)  # type: ignore[no-untyped-call]


def sum_over(x: Tensor, group: Group | None) -> Tensor:
    """Sum `x` over ranks; every rank gets the sum."""
    return x if group_size(group) == 1 else _Sum.apply(x, group)  # type: ignore[no-untyped-call]


def zigzag_positions(rows: int, cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """Packed positions of the `rows` rows of one context-parallel rank.

    Args:
        rows: `S / C`, rows of the rank, those past the last document included.
        cu_seqlens: int `[docs + 1]` of the whole sequence; every document a multiple of `2 C` tokens.
        size, rank: `C` and the rank.

    Returns:
        int64 `[rows]`; rows past the last document get positions past it, different on every rank.

    Raises:
        ValueError: (on CPU) a document that does not divide, or more tokens than rows.
    """
    edges = cu_seqlens.to(torch.int64)
    _check_documents(edges, rows, size)
    local = edges // size
    row = torch.arange(rows, device=edges.device)
    last = edges.shape[0] - 2
    doc = torch.searchsorted(local, row, right=True).sub_(1).clamp_(max=max(last, 0))
    if last < 0:  # no document at all
        return row + rank * rows
    within = row - local[doc]
    half = (local[doc + 1] - local[doc]) // 2
    early = edges[doc] + rank * half + within
    late = edges[doc] + (2 * size - 1 - rank) * half + within - half
    padding = edges[-1] + rank * (rows - local[-1]) + (row - local[-1])
    return torch.where(row >= local[-1], padding, torch.where(within < half, early, late))


def packed_order(rows: int, cu_seqlens: Tensor, size: int) -> Tensor:
    """Index that puts rank-concatenated rows `[C * rows]` into packed order, int64."""
    held = torch.cat([zigzag_positions(rows, cu_seqlens, size, rank) for rank in range(size)])
    return torch.argsort(held)


def _check_documents(edges: Tensor, rows: int, size: int) -> None:
    if edges.device.type != "cpu" or type(edges) is not Tensor or torch.compiler.is_compiling():
        return
    lengths = edges.diff()
    if bool((lengths % (2 * size)).any()):
        length = int(lengths[lengths % (2 * size) != 0][0])
        raise ValueError(
            f"cu_seqlens: expected every document padded to a multiple of 2 x {size} tokens for context parallelism, "
            f"got one of {length}"
        )
    if edges.numel() and int(edges[-1]) > rows * size:
        raise ValueError(f"cu_seqlens: expected at most {rows * size} tokens on {size} ranks, got {int(edges[-1])}")


def _all_reduce(x: Tensor, group: Any) -> Tensor:
    import torch.distributed as dist

    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _reduce_scatter(x: Tensor, group: Any) -> Tensor:
    import torch.distributed as dist

    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, x.contiguous(), group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_gather(x, group, group.size())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.group, ctx.group.size()), None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
