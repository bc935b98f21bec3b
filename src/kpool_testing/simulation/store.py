"""The key-value store of a simulated run: one for all ranks, and waiting for a key gives the turn away."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from kpool_testing.errors import TimedOutError
from kpool_testing.record.call import user_site
from kpool_testing.simulation.turns import RankThread, Turns

_Base: Any = torch._C._distributed_c10d.Store


class StoreTimedOutError(TimedOutError, torch.distributed.DistStoreError):
    """Nobody has set the key in time; of the type that torch's stores raise."""


class SimStore(_Base):  # type: ignore[misc]
    """What torch.distributed and its users put values in: `set`, `get`, `add`, `wait` and what is built on them.

    A rank that waits for a key which nobody sets is part of the deadlock report, like one that waits in a collective.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[RankThread, str]] = []
        self._timeout: float | None = None

    def set_timeout(self, timeout: timedelta) -> None:
        """`get` and `wait` without a limit of their own wait this long, where no rank can make progress before."""
        self._timeout = timeout.total_seconds()

    def set(self, key: str, value: str | bytes) -> None:
        """Put a value and wake whoever waits for it."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        for entry in [entry for entry in self._waiting if entry[1] == key]:
            self._waiting.remove(entry)
            self._turns.wake(entry[0])

    def get(self, key: str) -> bytes:
        """The value of a key, once there is one."""
        self._wait_for(key, self._timeout)
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
        """Return when all keys have a value.

        Raises TimedOutError if no rank can make progress within `timeout`.
        """
        for key in keys:
            self._wait_for(key, self._timeout if timeout is None else timeout.total_seconds())

    # The names under which torch's C++ wrappers look them up.
    compareSet, deleteKey, getNumKeys, setTimeout = compare_set, delete_key, num_keys, set_timeout

    def _wait_for(self, key: str, timeout: float | None) -> None:
        while key not in self._values:
            entry = (self._turns.me(), key)
            self._waiting.append(entry)
            if not self._turns.block(_KeyWait(key, user_site()), timeout) and key not in self._values:
                self._waiting.remove(entry)
                raise StoreTimedOutError(f"wait timeout after {(timeout or 0) * 1000:g}ms, keys: {key}")


class _KeyWait:
    """A rank waits for a key."""

    def __init__(self, key: str, site: str) -> None:
        self.key, self.site = key, site

    def describe(self) -> str:
        """The key and where it is waited for."""
        return f"waits for key {self.key!r} of the store at {self.site}"
