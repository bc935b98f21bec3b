"""How calls spell their arguments, and what tells one rank's call from another's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Pairs = tuple[tuple[str, Any], ...]


def describe(*tensors: Tensor) -> Pairs:
    """The part of a fingerprint that tells what tensors a rank sends."""
    if len(tensors) == 1:
        layout = (("layout", "sparse"),) if tensors[0].is_sparse else ()
        return (("shape", list(tensors[0].shape)), ("dtype", dtype_name(tensors[0])), *layout)
    shapes = [list(tensor.shape) for tensor in tensors]
    return (("shapes", shapes), ("dtypes", [dtype_name(tensor) for tensor in tensors]))


def reduce_op(opts: Any) -> str:
    """The name of the reduce op that options, or a bare op, ask for: SUM where they say nothing."""
    if opts is None:
        return "SUM"
    op = getattr(opts, "reduceOp", opts)
    return str(getattr(op, "op", op)).rsplit(".", 1)[-1]


def root_of(opts: Any) -> int:
    """The group rank that options, or a bare number, name as root."""
    return int(opts if isinstance(opts, int) else getattr(opts, "rootRank", 0))


def dtype_name(tensor: Tensor) -> str:
    """A dtype's name without "torch."."""
    return str(tensor.dtype).removeprefix("torch.")


def as_list(tensors: Any) -> list[Tensor]:
    """A tensor as a list of one; a list as it is."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def single(tensors: Any) -> Tensor:
    """The tensor of a list of one."""
    return tensors if isinstance(tensors, Tensor) else tensors[0]


def first_list(lists: Any) -> list[Tensor]:
    """The list of a list of one list."""
    return list(lists[0]) if lists and not isinstance(lists[0], Tensor) else list(lists)
