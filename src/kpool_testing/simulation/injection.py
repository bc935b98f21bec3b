"""How the faults of `kpool_testing.faults` happen in a simulated run.

One seed reproduces everything: which fault, where, and what is corrupted. Delays are virtual time: a rank that is late
is one that everybody else waits for; nobody sleeps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from kpool_testing.errors import LimitError
from kpool_testing.faults import Corrupt, Delay, Drop, Fault, InjectedError, Raise, Reorder
from kpool_testing.simulation.turns import Turns


class DropOut(BaseException):
    """Ends a rank as if its process had been killed."""


class Faults:
    """The faults of one run, and how often each rank has made a call."""

    def __init__(self, faults: Sequence[Fault], size: int, seed: int, limit: float | None) -> None:
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
        self.limit, self.late = limit, [0.0] * size

    def note(self) -> str:
        """For an error's note: the faults, if any."""
        return f", faults={self.faults}" if self.faults else ""

    def apply(self, turns: Turns, rank: int, what: str, sent: Any) -> Any:
        """Do what is due at this call of this rank, whose turn it is; returns what the rank really sends."""
        count = self.counts[rank]
        self.counts[rank] += 1
        if not self.faults:
            return sent
        for number, fault in enumerate(self.faults):
            if isinstance(fault, Reorder) or fault.rank != rank or number in self.spent:
                continue
            if isinstance(fault, Corrupt):
                if count >= fault.at and _has_elements(sent):
                    self.spent.add(number)
                    sent = self._corrupted(sent)
            elif count == fault.at:
                self._strike(turns, rank, what, fault)
        return sent

    def _strike(self, turns: Turns, rank: int, what: str, fault: Raise | Drop | Delay) -> None:
        if isinstance(fault, Raise):
            raise InjectedError(f"injected fault on rank {rank} in {what}")
        if isinstance(fault, Drop):
            raise DropOut(f"dropped out (injected fault) before {what}")
        turns.block(_Late(fault, what), fault.seconds)
        self.late[rank] += fault.seconds
        if self.limit is not None and self.late[rank] > self.limit:
            raise LimitError(
                f"rank {rank} was {fault.seconds:g} s late (injected fault) for {what}: limit {self.limit:g} s"
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
