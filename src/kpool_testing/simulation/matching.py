"""How the calls of different ranks find each other: a rank's n-th call on a group meets every other rank's n-th.

A `Slot` collects one call of all members. When all are there and agree, its results are computed once; each rank then
takes its own. Point-to-point calls meet in a `Mailbox` instead (see `messages`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from kpool_testing.bits import is_poison, poison, same_bits, values
from kpool_testing.errors import AsyncError, CollectiveError, MismatchError
from kpool_testing.rules.request import Request, own_outputs
from kpool_testing.simulation.turns import RankThread, Turns


class Undefined(Enum):
    """What a backend leaves in a tensor when it promises nothing about it; such a tensor holds poison afterwards."""

    UNDEFINED = "undefined"


UNDEFINED = Undefined.UNDEFINED

# Per rank of the group and per output: the new value, None where the tensor stays as it is, or UNDEFINED.
Answer = Sequence[Sequence[Tensor | Undefined | None]]


@dataclass(slots=True)
class Slot:
    """The n-th call on a group.

    Attributes:
        waiting: threads that are blocked until the call is complete.
        listeners: called once it is.
    """

    group: str
    ranks: tuple[int, ...]
    seq: int
    compute: Callable[[list[Any]], Answer]
    agree: Callable[[Sequence[Request]], str | None] | None = None
    requests: dict[int, Request] = field(default_factory=dict)
    waiting: list[RankThread] = field(default_factory=list)
    listeners: list[Callable[[], None]] = field(default_factory=list)
    answers: Answer | None = None
    error: Exception | None = None
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

    def finish(self, turns: Turns) -> None:
        """All members are there: compute the answers, or the error that every member gets."""
        requests = [self.requests[place] for place in range(len(self.ranks))]
        try:
            complaint = own_outputs(requests) or (self.agree(requests) if self.agree is not None else None)
            if self.differs or complaint is not None:
                self.error = self.mismatch(complaint or "")
            else:
                with torch.no_grad():
                    self.answers = self.compute([request.sent for request in requests])
        except Exception as error:
            self.error = error
        self.end(turns)

    def fail(self, turns: Turns, error: Exception) -> None:
        """End the call with an error for every member, whoever is missing."""
        self.error = error
        self.end(turns)

    def end(self, turns: Turns) -> None:
        """Wake whoever waits."""
        self.done = True
        waiting, self.waiting = self.waiting, []
        for thread in waiting:
            turns.wake(thread)
        for listener in self.listeners:
            listener()

    def mismatch(self, complaint: str = "") -> MismatchError:
        """The error that shows every side of the call."""
        kinds = sorted({request.kind for request in self.requests.values()})
        label = f"ranks disagree on call #{self.seq} of group {self.group}"
        lines = [f"{label} ({' / '.join(kinds)})" + (f": {complaint}" if complaint else ":")]
        for place, rank in enumerate(self.ranks):
            request = self.requests.get(place)
            lines.append(f"  rank {rank}: {request if request is not None else 'has not made this call'}")
        return MismatchError("\n".join(lines))


def raise_own(error: Exception | None) -> None:
    """Raise the error of a call if it has one, a copy for each rank."""
    if isinstance(error, CollectiveError):
        raise type(error)(str(error))
    if error is not None:
        raise error


def deliver(outputs: Sequence[Tensor], answers: Sequence[Tensor | Undefined | None], rank: int) -> None:
    """Write a rank's answers to its outputs."""
    with torch.no_grad():
        for output, answer in zip(outputs, answers, strict=True):
            if answer is UNDEFINED:
                poison(output, rank)
            elif isinstance(answer, Tensor):
                if output.is_sparse:
                    output.copy_(answer)
                else:
                    output.detach().copy_(answer if answer.shape == output.shape else answer.reshape(output.shape))


def snapshot(sent: Any) -> Any:
    """The same structure of lists and tuples with every tensor copied."""
    if isinstance(sent, Tensor):
        return sent.detach().clone()
    if isinstance(sent, (list, tuple)):
        return type(sent)(snapshot(part) for part in sent)
    return sent


class Watched:
    """The tensors of a call in flight, and whether anybody has written to them since it was posted.

    Views of one buffer share one version counter, so a new version alone proves nothing: then the values tell.

    Args:
        kept: tensors that are only read, with the names of their arguments.
        poisoned: outputs that hold the rank's poison.
    """

    __slots__ = ("kept", "poisoned", "rank", "versions")

    def __init__(self, kept: Sequence[tuple[str, Tensor]], poisoned: Sequence[Tensor], rank: int) -> None:
        self.rank = rank
        # Inference tensors keep no version.
        self.kept = [(name, tensor, tensor.detach().clone()) for name, tensor in kept if not tensor.is_inference()]
        self.poisoned = [tensor for tensor in poisoned if not tensor.is_inference()]
        self.versions = [tensor._version for tensor in self._tensors()]

    def check(self, what: str) -> None:
        """Raises AsyncError if one of the tensors was changed."""
        if self.versions == [tensor._version for tensor in self._tensors()]:
            return
        for name, tensor, held in self.kept:
            if not same_bits(values(tensor), values(held)):
                raise AsyncError(f"{what}: {name} {list(tensor.shape)} was changed in flight, before wait()")
        for tensor in self.poisoned:
            if not is_poison(tensor, self.rank):
                raise AsyncError(f"{what}: output {list(tensor.shape)} was changed in flight, before wait()")

    def _tensors(self) -> list[Tensor]:
        return [tensor for _, tensor, _ in self.kept] + self.poisoned
