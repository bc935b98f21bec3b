"""Test distributed PyTorch code without a cluster: every rank in one process, with real data.

    from kpool_testing import assert_replicated, simulate

    def test_sum_is_the_same_everywhere():
        run = simulate(my_sharded_sum, size=4)
        assert_replicated(run.results)

`replay` needs nothing but a patched all-gather; `simulate` is a whole process group; `run_ranks` takes the same
function to real gloo or NCCL processes. Names are loaded on first use: importing this package does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kpool_testing.checks import CollectiveError as CollectiveError
    from kpool_testing.checks import DeadlockError as DeadlockError
    from kpool_testing.checks import MismatchError as MismatchError
    from kpool_testing.checks import RankError as RankError
    from kpool_testing.group import FakeGroup as FakeGroup
    from kpool_testing.interconnect import INTERCONNECTS as INTERCONNECTS
    from kpool_testing.interconnect import Interconnect as Interconnect
    from kpool_testing.launch import close_pool as close_pool
    from kpool_testing.launch import run_ranks as run_ranks
    from kpool_testing.proof import assert_matches_unsharded as assert_matches_unsharded
    from kpool_testing.proof import assert_replicated as assert_replicated
    from kpool_testing.proof import expect_collectives as expect_collectives
    from kpool_testing.proof import layouts as layouts
    from kpool_testing.proof import with_layout as with_layout
    from kpool_testing.replay import replay as replay
    from kpool_testing.trace import Call as Call
    from kpool_testing.trace import Run as Run
    from kpool_testing.trace import Trace as Trace
    from kpool_testing.world import simulate as simulate

_HOME = {
    "Call": "trace",
    "CollectiveError": "checks",
    "DeadlockError": "checks",
    "FakeGroup": "group",
    "INTERCONNECTS": "interconnect",
    "Interconnect": "interconnect",
    "MismatchError": "checks",
    "RankError": "checks",
    "Run": "trace",
    "Trace": "trace",
    "assert_matches_unsharded": "proof",
    "assert_replicated": "proof",
    "close_pool": "launch",
    "expect_collectives": "proof",
    "layouts": "proof",
    "replay": "replay",
    "run_ranks": "launch",
    "simulate": "world",
    "with_layout": "proof",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `kpool_testing.replay` the function: importing the module of that name would otherwise hide it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
