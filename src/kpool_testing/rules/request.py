"""One rank's part in a call, and whether the parts of all ranks fit together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Request:
    """One rank's part in a call.

    Attributes:
        rank, place: global rank of the caller, and its rank in the group.
        fingerprint: what all members must agree on, as (name, value) pairs.
        sent: what the rank sends, in the form the call's `compute` expects.
        outputs: the tensors that receive results.
    """

    rank: int
    place: int
    kind: str
    fingerprint: tuple[tuple[str, Any], ...]
    sent: Any
    outputs: Sequence[Tensor]
    site: str

    def __str__(self) -> str:
        parts = ", ".join(f"{name}={value}" for name, value in self.fingerprint)
        return f"{self.kind}({parts}) at {self.site}"


def own_outputs(requests: Sequence[Request]) -> str | None:
    """Complaint if two ranks pass the same memory as output: real processes have none in common.

    Where all ranks receive the same values and give none of their own to the same tensor, sharing does no harm.
    """
    if requests[0].kind.startswith(("broadcast", "all_gather")):
        return None
    owners: dict[int, int] = {}
    for request in requests:
        for tensor in request.outputs:
            if tensor.numel() == 0 or tensor.is_meta or tensor.is_sparse:
                continue
            address = tensor.data_ptr()
            owner = owners.setdefault(address, request.rank)
            if owner != request.rank and address != 0:
                return (
                    f"ranks {owner} and {request.rank} pass the same memory as output; "
                    "make the tensor inside fn, every rank its own"
                )
    return None


def entries_match(requests: Sequence[Request]) -> str | None:
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


def splits_match(requests: Sequence[Request]) -> str | None:
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


def shapes_match(requests: Sequence[Request]) -> str | None:
    """Complaint if a list entry of all_to_all has not the shape that its receiver expects."""
    for sender in requests:
        for receiver in requests:
            sends, expects = sender.sent[receiver.place].shape, receiver.outputs[sender.place].shape
            if sends != expects:
                return f"rank {sender.rank} sends {list(sends)} to rank {receiver.rank}, which expects {list(expects)}"
    return None
