"""The key-value store of a simulated run: one for all ranks, and waiting for a key hands the baton on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from kpool_testing.trace import user_site

if TYPE_CHECKING:
    from kpool_testing.baton import Seat
    from kpool_testing.world import Simulation

_Base: Any = torch._C._distributed_c10d.Store


class SimStore(_Base):  # type: ignore[misc]
    """What torch.distributed and its users put values in: `set`, `get`, `add`, `wait` and what is built on them.

    A rank that waits for a key which nobody sets is part of the deadlock report, like one that waits in a collective.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[Seat, str]] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value and wake whoever waits for it."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        for entry in [entry for entry in self._waiting if entry[1] == key]:
            self._waiting.remove(entry)
            self._simulation.baton.wake(entry[0])

    def get(self, key: str) -> bytes:
        """The value of a key, once there is one."""
        self._wait_for(key)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, 0 if there is none, and return the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Put `desired` if the key holds `expected`, or has no value and `expected` is empty; return what it holds."""
        before = self._values.get(key, b"")
        if before == (expected.encode() if isinstance(expected, str) else bytes(expected)):
            self.set(key, desired)
        return self._values.get(key, b"")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Remove a key; True if it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Number of keys with a value."""
        return len(self._values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys have a value; the timeout is ignored, a key that nobody sets is a deadlock."""
        for key in keys:
            self._wait_for(key)

    # The names under which torch's C++ wrappers look them up.
    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys

    def _wait_for(self, key: str) -> None:
        simulation = self._simulation
        while key not in self._values:
            seat = simulation.seat()
            self._waiting.append((seat, key))
            simulation.baton.block(seat, _KeyWait(key, user_site()))


class _KeyWait:
    """A rank waits for a key."""

    def __init__(self, key: str, site: str) -> None:
        self.key, self.site = key, site

    def describe(self) -> str:
        """The key and where it is waited for."""
        return f"waits for key {self.key!r} of the store at {self.site}"
