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


class InjectedError(RuntimeError):
    """What a rank raises under the fault `Raise`."""


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
