"""The opt-in check of sharding's one assumption: every rank of the group holds identical inputs.

One small all-gather compares a checksum per tensor. Only if some differ does a second one compare a checksum per row,
so that the error can name the ranks that differ from the majority, the tensor and the first row that differs.
Every rank decides from the same gathered numbers, so all raise or none does. It reads values back to the host.

Shapes: ``G`` ranks; tensors are compared by their bytes, row = index along dimension 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kpool.sharding import Group, all_gather

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_ELEMENTS = 1 << 22


def check_replicated(tensors: Mapping[str, Tensor | None], group: Group, rank: int, size: int) -> None:
    """Raise unless every rank passes the same tensors.

    Args:
        tensors: name to tensor; None entries must be None on every rank.
        group, rank, size: the group and the caller's place in it.

    Raises:
        RuntimeError: names the tensor, the ranks that differ from the majority (with no majority: all), and the first
            differing row; the same on every rank.
    """
    names = list(tensors)
    device = next(t.device for t in tensors.values() if t is not None)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    rows = {name: none if t is None else _row_checksums(t) for name, t in tensors.items()}
    mine = torch.stack([_whole(tensors[name], rows[name]) for name in names])
    everyone = all_gather(mine[None], group, size).cpu()  # [G, names, 2]: shape and content
    for column, name in enumerate(names):
        shapes, contents = everyone[:, column, 0].tolist(), everyone[:, column, 1].tolist()
        if len(set(shapes)) > 1:
            raise RuntimeError(_message(name, shapes, rank, "its shape or dtype, or whether it is given, differs"))
        if len(set(contents)) > 1:
            by_row = all_gather(rows[name][None], group, size).cpu()  # [G, rows]
            differs = (by_row != by_row[0]).any(0)
            first = int(differs.nonzero()[0, 0]) if bool(differs.any()) else 0
            raise RuntimeError(_message(name, contents, rank, f"first differing row (index along dim 0): {first}"))


def _message(name: str, values: Sequence[int], rank: int, what: str) -> str:
    counts = Counter(values).most_common()
    tied = len(counts) > 1 and counts[0][1] == counts[1][1]
    odd = list(range(len(values))) if tied else [r for r, value in enumerate(values) if value != counts[0][0]]
    return (
        f"check_replicated: expected identical {name} on every rank of query_shard_group, but rank"
        f"{'s' if len(odd) > 1 else ''} {odd} {'disagree' if tied else 'differ from the majority'}; {what} "
        f"(reported by rank {rank}). Shard query rows only where all ranks hold the same inputs: pass no group when "
        "query rows are local to the rank"
    )


def _whole(tensor: Tensor | None, rows: Tensor) -> Tensor:
    """``[2]`` int64 on the device of ``rows``: a checksum of shape and dtype, and one of the content."""
    if tensor is None:
        return torch.tensor([-1, 0], device=rows.device)
    shape = 0
    for part in (*tensor.shape, tensor.dim(), hash_name(str(tensor.dtype))):
        shape = (shape * 1_000_003 + part + 1) % (2**61 - 1)
    content = (rows * _multipliers(rows.numel(), rows.device)).sum()
    return torch.stack([torch.full_like(content, shape), content])


def hash_name(text: str) -> int:
    """A small stable hash; Python's own differs between processes."""
    value = 0
    for char in text:
        value = (value * 131 + ord(char)) % (2**31 - 1)
    return value


def _multipliers(count: int, device: torch.device) -> Tensor:
    """Odd int64 factors that depend on the position, so that swapped values change the sum (which wraps)."""
    index = torch.arange(count, device=device, dtype=torch.int64)
    mixed = index * -7046029254386353131 + 1442695040888963407
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed | 1


def _row_checksums(tensor: Tensor) -> Tensor:
    """int64 ``[rows]``, one checksum of the bytes of each row (of the whole, for a scalar)."""
    flat = tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, math.prod(tensor.shape[1:]))
    columns = flat.shape[1]
    factors = _multipliers(columns, tensor.device)
    sums = torch.zeros(flat.shape[0], dtype=torch.int64, device=tensor.device)
    piece = max(1, _PIECE_ELEMENTS // max(1, columns))
    for row in range(0, flat.shape[0], piece):
        words = flat[row : row + piece].contiguous().view(_WORDS[tensor.element_size()]).to(torch.int64)
        sums[row : row + piece] = (words * factors).sum(1)
    return sums
