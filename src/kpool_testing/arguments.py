"""How calls spell their arguments, and what tells one rank's call from another's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from kpool_testing.matching import Request

Pairs = tuple[tuple[str, Any], ...]


def describe(*tensors: Tensor) -> Pairs:
    """The part of a fingerprint that tells what tensors a rank sends."""
    if len(tensors) == 1:
        return (("shape", list(tensors[0].shape)), ("dtype", dtype_name(tensors[0])))
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


def entries_match(requests: list[Request]) -> str | None:
    """Complaint if a rank's list entries do not have the shapes that the others send."""
    for request in requests:
        for place, output in enumerate(request.outputs):
            sent = requests[place].sent
            if output.shape != sent.shape:
                return (
                    f"rank {request.rank} expects {list(output.shape)} from rank {requests[place].rank}, "
                    f"which sends {list(sent.shape)}"
                )
    return None


def splits_match(requests: list[Request]) -> str | None:
    """Complaint if what one rank sends to another is not what that one expects."""
    for sender in requests:
        for receiver in requests:
            sends, expects = sender.sent[1][receiver.place], receiver.sent[2][sender.place]
            if sends != expects:
                return (
                    f"rank {sender.rank} sends {sends} rows to rank {receiver.rank}, which expects {expects} "
                    f"(input splits {sender.sent[1]} against output splits {receiver.sent[2]})"
                )
    return None


def shapes_match(requests: list[Request]) -> str | None:
    """Complaint if a list entry of all_to_all has not the shape that its receiver expects."""
    for sender in requests:
        for receiver in requests:
            sends, expects = sender.sent[receiver.place].shape, receiver.outputs[sender.place].shape
            if sends != expects:
                return f"rank {sender.rank} sends {list(sends)} to rank {receiver.rank}, which expects {list(expects)}"
    return None
