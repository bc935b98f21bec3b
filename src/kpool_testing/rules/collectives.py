"""What each collective returns, as pure functions of all ranks' tensors, listed in group order.

Shapes: `n` ranks, each sending a tensor [d0, ...]. Results are new tensors; the arguments are never written to.
Reductions run over the ranks in ascending order and in the tensors' own dtype, so a result has the same bits on every
rank and in every run.

    all_gather_single([tensor([0, 1]), tensor([10, 11])])  ->  tensor([0, 1, 10, 11])
    reduce_scatter_single([tensor([0, 1]), tensor([10, 11])], "SUM")  ->  [tensor([10]), tensor([12])]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

REDUCE_OPS = tuple(_PAIRWISE)


def reduce(tensors: Sequence[Tensor], op: str = "SUM") -> Tensor:
    """All ranks' tensors [d0, ...], combined element by element with a `REDUCE_OPS` name.

    SUM of booleans is OR and PRODUCT is AND, as on real backends; sparse tensors are summed. Raises ValueError on an
    unknown op.
    """
    if op not in _PAIRWISE:
        raise ValueError(f"unknown reduce op {op!r}, expected one of {REDUCE_OPS}")
    total = tensors[0].detach().clone()
    if total.is_sparse:
        for tensor in tensors[1:]:
            total = total + tensor.detach()
        return total.coalesce()
    boolean = total.dtype is torch.bool
    combine = _PAIRWISE[op]
    if boolean:
        combine = {"SUM": torch.logical_or, "PRODUCT": torch.logical_and}.get(op, combine)
    for tensor in tensors[1:]:
        total = combine(total, tensor.detach())
    if op == "AVG" and not boolean:
        exact = total.is_floating_point() or total.is_complex()
        total = total / len(tensors) if exact else total // len(tensors)
    return total.to(tensors[0].dtype)


def all_gather_single(tensors: Sequence[Tensor]) -> Tensor:
    """[n * d0, ...]: the ranks' tensors one after the other along dim 0; 0-dim tensors give [n]."""
    if tensors[0].dim() == 0:
        return torch.stack([tensor.detach() for tensor in tensors])
    return torch.cat([tensor.detach() for tensor in tensors])


def all_gather(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The list every rank receives: a copy of each rank's tensor."""
    return [tensor.detach().clone() for tensor in tensors]


def reduce_scatter_single(tensors: Sequence[Tensor], op: str = "SUM") -> list[Tensor]:
    """Per rank, its flat n-th part of the reduced tensor: n tensors [numel / n]."""
    flat = reduce([tensor.reshape(-1) for tensor in tensors], op)
    part = flat.numel() // len(tensors)
    return [flat[i * part : (i + 1) * part] for i in range(len(tensors))]


def reduce_scatter(inputs: Sequence[Sequence[Tensor]], op: str = "SUM") -> list[Tensor]:
    """Per rank r, the reduction of every rank's r-th tensor; `inputs[s]` is the list that rank s sends."""
    return [reduce([sent[rank] for sent in inputs], op) for rank in range(len(inputs))]


def all_to_all(inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Per rank r, the list of what ranks 0, 1, ... sent to it: `result[r][s]` is `inputs[s][r]`."""
    return [[sent[rank].detach().clone() for sent in inputs] for rank in range(len(inputs))]


def all_to_all_single(tensors: Sequence[Tensor], splits: Sequence[Sequence[int]]) -> list[Tensor]:
    """Per rank, [rows received, ...]: rank s cuts its dim 0 by `splits[s]` and sends piece r to rank r."""
    pieces = [torch.split(tensor.detach(), list(sizes)) for tensor, sizes in zip(tensors, splits, strict=True)]
    return [torch.cat([sent[rank] for sent in pieces]) for rank in range(len(tensors))]
