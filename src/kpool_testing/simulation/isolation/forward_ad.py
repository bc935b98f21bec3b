"""Forward-mode differentiation: torch's C++ code has one level a process, which the ranks share.

A rank's own level is a module global, which follows the turn (`attributes`). The level in C++ is entered with the first
rank that needs it and left with the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch._functorch.predispatch as predispatch
import torch.autograd.forward_ad as forward_ad

from kpool_testing.simulation.isolation.worlds import RankOf

_NAMES = ("_enter_dual_level_impl", "_exit_dual_level_impl")


@contextmanager
def shared_level(rank_of: RankOf) -> Iterator[None]:
    """While active, the level is left only when no rank is inside it."""
    module: Any = predispatch
    enter, leave = (getattr(module, name) for name in _NAMES)
    inside = 0

    def entered() -> int:
        nonlocal inside
        nested = forward_ad._current_level >= 0
        if rank_of() is None or nested or inside == 0:
            level: int = enter()  # refuses a nested one
        else:
            level = 0
        inside += rank_of() is not None
        return level

    def left(*, level: int) -> None:
        nonlocal inside
        inside -= rank_of() is not None
        if inside == 0:
            leave(level=level)

    module._enter_dual_level_impl, module._exit_dual_level_impl = entered, left
    try:
        yield
    finally:
        module._enter_dual_level_impl, module._exit_dual_level_impl = enter, leave
        if inside:
            leave(level=0)
