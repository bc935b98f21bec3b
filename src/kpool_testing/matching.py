"""How the calls of different ranks find each other: a rank's n-th call on a group meets every other rank's n-th.

A `Slot` collects one call of all members. When all are there and agree, its results are computed once; each rank then
takes its own. Point-to-point calls meet in a `Mailbox` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kpool_testing.checks import AsyncError, CollectiveError, MismatchError

Answer = Sequence[Sequence[Tensor | None]]


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


@dataclass(slots=True)
class Slot:
    """The n-th call on a group."""

    group: str
    ranks: tuple[int, ...]
    seq: int
    compute: Callable[[list[Any]], Answer]
    agree: Callable[[list[Request]], str | None] | None = None
    requests: dict[int, Request] = field(default_factory=dict)
    answers: Answer | None = None
    error: CollectiveError | Exception | None = None
    done: bool = False
    differs: bool = False

    def add(self, request: Request) -> bool:
        """Take in one member's call; True if it was the last one missing."""
        if self.requests:
            first = next(iter(self.requests.values()))
            if (first.kind, first.fingerprint) != (request.kind, request.fingerprint):
                self.differs = True
        self.requests[request.place] = request
        return len(self.requests) == len(self.ranks)

    def missing(self) -> list[int]:
        """Global ranks of the members that have not made the call."""
        return [rank for place, rank in enumerate(self.ranks) if place not in self.requests]

    def finish(self) -> None:
        """Compute the answers, or the error that every member gets."""
        self.done = True
        requests = [self.requests[place] for place in range(len(self.ranks))]
        if self.differs:
            self.error = self.mismatch()
            return
        try:
            complaint = _shared_outputs(requests) or (self.agree(requests) if self.agree is not None else None)
            if complaint is not None:
                self.error = self.mismatch(complaint)
                return
            with torch.no_grad():
                self.answers = self.compute([request.sent for request in requests])
        except Exception as error:
            self.error = error

    def mismatch(self, complaint: str = "") -> MismatchError:
        """The error that shows every side of the call."""
        kinds = sorted({request.kind for request in self.requests.values()})
        label = f"ranks disagree on call #{self.seq} of group {self.group}"
        lines = [f"{label} ({' / '.join(kinds)})" + (f": {complaint}" if complaint else ":")]
        for place, rank in enumerate(self.ranks):
            request = self.requests.get(place)
            lines.append(f"  rank {rank}: {request if request is not None else 'has not made this call'}")
        return MismatchError("\n".join(lines))


def _shared_outputs(requests: list[Request]) -> str | None:
    """Why the ranks' outputs are not their own: in real processes no two ranks can write to the same memory.

    Where all ranks receive the same values and give none of their own to the same tensor, sharing does no harm.
    """
    if requests[0].kind.startswith(("broadcast", "all_gather")):
        return None
    owners: dict[int, int] = {}
    for request in requests:
        for tensor in request.outputs:
            if tensor.numel() == 0 or tensor.is_meta:
                continue
            owner = owners.setdefault(tensor.data_ptr(), request.rank)
            if owner != request.rank and tensor.data_ptr() != 0:
                return (
                    f"ranks {owner} and {request.rank} pass the same memory as output; "
                    "make the tensor inside fn, every rank its own"
                )
    return None


def deliver(outputs: Sequence[Tensor], answers: Sequence[Tensor | None]) -> None:
    """Write a rank's answers to its outputs; None leaves an output as it is."""
    with torch.no_grad():
        for output, answer in zip(outputs, answers, strict=True):
            if answer is not None:
                output.detach().copy_(answer.reshape(output.shape))


def snapshot(sent: Any) -> Any:
    """The same structure of lists and tuples with every tensor copied."""
    if isinstance(sent, Tensor):
        return sent.detach().clone()
    if isinstance(sent, (list, tuple)):
        return type(sent)(snapshot(part) for part in sent)
    return sent


class Watched:
    """The tensors of a call in flight, and whether anybody has written to them since it was posted."""

    __slots__ = ("tensors", "versions")

    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        named = [("input", tensor) for tensor in inputs] + [("output", tensor) for tensor in outputs]
        # Inference tensors keep no version.
        self.tensors = [(name, tensor) for name, tensor in named if not tensor.is_inference()]
        self.versions = [tensor._version for _, tensor in self.tensors]

    def check(self, what: str) -> None:
        """Raises AsyncError if one of the tensors was changed."""
        for (name, tensor), version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                shape = list(tensor.shape)
                raise AsyncError(f"{what}: {name} {shape} was changed in flight, before wait()")
