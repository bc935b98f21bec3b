"""Faults to inject into a simulated run: a rank raises, drops out, is late, sends garbage, or the ranks' order changes.

    simulate(fn, 4, faults=[Raise(rank=2, at=5)])       # rank 2 raises at its call number 5, counted from 0
    simulate(fn, 4, faults=random_faults(seed=7, size=4, calls=10))

One seed reproduces everything: which fault, where, and what is corrupted. Delays are virtual time: a rank that is late
is one that everybody else waits for; nobody sleeps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kpool_testing.checks import LimitError

if TYPE_CHECKING:
    from kpool_testing.baton import Seat
    from kpool_testing.world import Simulation


class InjectedError(RuntimeError):
    """What a rank raises under the fault `Raise`."""


class DropOut(BaseException):
    """Ends a rank as if its process had been killed."""


@dataclass(frozen=True)
class Raise:
    """The rank raises InjectedError when it makes its call number `at`."""

    rank: int
    at: int = 0


@dataclass(frozen=True)
class Drop:
    """The rank ends silently when it makes its call number `at`."""

    rank: int
    at: int = 0


@dataclass(frozen=True)
class Delay:
    """The rank makes its call number `at` only after `seconds` of virtual time."""

    rank: int
    at: int = 0
    seconds: float = 1.0


@dataclass(frozen=True)
class Corrupt:
    """One element of what the rank sends in its call number `at` has other bits; the rank's own tensors are untouched.

    The first call from `at` on that sends at least one element is the one that is spoiled.
    """

    rank: int
    at: int = 0


@dataclass(frozen=True)
class Reorder:
    """The ranks take turns in an order drawn from the run's seed."""


Fault = Raise | Drop | Delay | Corrupt | Reorder


def random_faults(
    seed: int, size: int, calls: int, kinds: Sequence[type] = (Raise, Drop, Delay, Corrupt)
) -> list[Fault]:
    """One fault of a random kind on a random rank at one of its first `calls` calls, and sometimes a reordering.

    Raises ValueError if size or calls is below 1 or kinds is empty.
    """
    if size < 1 or calls < 1 or not kinds:
        raise ValueError(f"size and calls must be at least 1 and kinds not empty, got {size}, {calls}, {list(kinds)}")
    draw = random.Random(seed)
    kind = draw.choice(list(kinds))
    rank, at = draw.randrange(size), draw.randrange(calls)
    faults: list[Fault] = [Reorder()] if draw.random() < 0.5 else []
    if kind is Reorder:
        return [Reorder()]
    if kind is Delay:
        return [*faults, Delay(rank, at, draw.choice([0.5, 5.0, 1e6]))]
    fault: Fault = kind(rank, at)
    return [*faults, fault]


class Faults:
    """The faults of one run, and how often each rank has made a call."""

    def __init__(self, faults: Sequence[Fault], size: int, seed: int) -> None:
        for fault in faults:
            if not isinstance(fault, (Raise, Drop, Delay, Corrupt, Reorder)):
                raise ValueError(f"unknown fault {fault!r}")
            if not isinstance(fault, Reorder) and not 0 <= fault.rank < size:
                raise ValueError(f"the rank of {fault!r} is not in [0, {size})")
        self.faults = list(faults)
        self.reorder = any(isinstance(fault, Reorder) for fault in faults)
        self.draw = random.Random(seed)
        self.counts = [0] * size
        self.spent: set[int] = set()

    def note(self) -> str:
        """For an error's note: the faults, if any."""
        return f", faults={self.faults}" if self.faults else ""

    def apply(self, simulation: Simulation, seat: Seat, what: str, sent: Any) -> Any:
        """Do what is due at this call of this rank; returns what the rank really sends."""
        count = self.counts[seat.rank]
        self.counts[seat.rank] += 1
        if not self.faults:
            return sent
        for number, fault in enumerate(self.faults):
            if isinstance(fault, Reorder) or fault.rank != seat.rank or number in self.spent:
                continue
            if isinstance(fault, Corrupt):
                if count >= fault.at and _has_elements(sent):
                    self.spent.add(number)
                    sent = self._corrupted(sent)
            elif count == fault.at:
                self._strike(simulation, seat, what, fault)
        return sent

    def _strike(self, simulation: Simulation, seat: Seat, what: str, fault: Raise | Drop | Delay) -> None:
        if isinstance(fault, Raise):
            raise InjectedError(f"injected fault on rank {seat.rank} in {what}")
        if isinstance(fault, Drop):
            raise DropOut(f"dropped out (injected fault) before {what}")
        simulation.baton.sleep(seat, fault.seconds, _Late(fault, what))
        limit = simulation.limit
        if limit is not None and simulation.baton.clock > limit:
            raise LimitError(
                f"rank {seat.rank} was {fault.seconds:g} s late (injected fault) for {what}: limit {limit:g} s"
            )

    def _corrupted(self, sent: Any) -> Any:
        if isinstance(sent, torch.Tensor):
            spoiled = sent.detach().clone(memory_format=torch.contiguous_format)
            raw = spoiled.view(-1).view(torch.uint8)
            width = spoiled.element_size()
            element = self.draw.randrange(spoiled.numel())
            # The last byte holds sign and exponent, or the highest bits: never a change that rounding hides.
            position = element * width + width - 1
            raw[position] = int(raw[position]) ^ (1 if spoiled.dtype is torch.bool else 0x41)
            return spoiled
        parts = list(sent)
        index = self.draw.choice([i for i, part in enumerate(parts) if _has_elements(part)])
        parts[index] = self._corrupted(parts[index])
        return type(sent)(parts)


class _Late:
    """Why a rank sleeps."""

    def __init__(self, fault: Delay, what: str) -> None:
        self.fault, self.what = fault, what

    def describe(self) -> str:
        """The injected delay and the call it holds up."""
        return f"is {self.fault.seconds:g} s late (injected fault) for {self.what}"


def _has_elements(sent: Any) -> bool:
    if isinstance(sent, torch.Tensor):
        return sent.numel() > 0
    return isinstance(sent, (list, tuple)) and any(_has_elements(part) for part in sent)
