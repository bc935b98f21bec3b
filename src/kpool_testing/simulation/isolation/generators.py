"""Random generators that are the process's own, one stream a rank."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from kpool_testing.simulation.isolation.swapped import Lazy

_cuda_started: Callable[[], bool] = torch.cuda.is_initialized  # untyped in torch


class TorchRandom:
    """torch's default generators, on the CPU and on every GPU.

    Distinct streams, as in processes that nobody seeded: code that forgets to seed must not look replicated.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator = torch.default_generator
        self.gpus = _cuda_started()
        self.original = self._take()
        self.saved: dict[int, tuple[Any, Any]] = {}

    def leave(self, rank: int) -> None:
        """Put the rank's state aside."""
        self.saved[rank] = self._take()

    def enter(self, rank: int) -> None:
        """Put the rank's state in place."""
        saved = self.saved.get(rank)
        if saved is not None:
            self._put(saved)
            return
        self.generator.manual_seed(rank_seed(self.seed, rank))
        if self.gpus:
            torch.cuda.manual_seed_all(rank_seed(self.seed, rank))

    def restore(self) -> None:
        """Put the caller's state in place."""
        self._put(self.original)

    def _take(self) -> tuple[Any, Any]:
        return self.generator.get_state(), torch.cuda.get_rng_state_all() if self.gpus else None

    def _put(self, state: tuple[Any, Any]) -> None:
        self.generator.set_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state_all(state[1])


def rank_seed(seed: int, rank: int) -> int:
    """The torch seed a rank starts with."""
    return (seed * 1_000_003 + 7919 * (rank + 1)) % (2**63)


def python_random() -> Lazy:
    """The generator behind the module `random`. A few words of its state show every draw and every seeding."""
    instance: Any = random._inst
    address = id(instance) + object.__basicsize__
    words = ctypes.c_uint32 * 625

    def peek() -> tuple[int, ...]:
        found = words.from_address(address)
        return (found[0], found[1], found[2])

    state = random.getstate()[1]
    known = sys.implementation.name == "cpython" and peek() == (state[624], state[0], state[1])
    probe: Callable[[], Any] = (lambda: (peek(), instance.gauss_next)) if known else random.getstate
    return Lazy(probe, random.getstate, random.setstate)


def numpy_random() -> Lazy | None:
    """The generator behind `numpy.random`'s functions; None where numpy is not loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    source = numpy.random

    def whole() -> Any:
        kind, keys, *rest = source.get_state()
        return (kind, keys.tobytes(), *rest)

    probe: Callable[[], Any] = whole
    state = source.get_state()
    if state[0] == "MT19937" and hasattr(source, "get_bit_generator"):
        words = (ctypes.c_uint32 * 625).from_address(source.get_bit_generator().ctypes.state_address)
        if (words[0], words[1], words[624]) == (int(state[1][0]), int(state[1][1]), state[2]):
            probe = lambda: (words[0], words[1], words[624])  # noqa: E731
    return Lazy(probe, source.get_state, source.set_state)
