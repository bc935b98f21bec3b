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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kpool_testing.errors import AsyncError as AsyncError
    from kpool_testing.errors import BrokenGroupError as BrokenGroupError
    from kpool_testing.errors import CollectiveError as CollectiveError
    from kpool_testing.errors import DeadlockError as DeadlockError
    from kpool_testing.errors import LimitError as LimitError
    from kpool_testing.errors import MismatchError as MismatchError
    from kpool_testing.errors import RankError as RankError
    from kpool_testing.errors import RefusedError as RefusedError
    from kpool_testing.errors import TimedOutError as TimedOutError
    from kpool_testing.launch.pool import close_pool as close_pool
    from kpool_testing.launch.pool import run_ranks as run_ranks
    from kpool_testing.proof import assert_matches_unsharded as assert_matches_unsharded
    from kpool_testing.proof import assert_replicated as assert_replicated
    from kpool_testing.proof import expect_collectives as expect_collectives
    from kpool_testing.proof import layouts as layouts
    from kpool_testing.proof import with_layout as with_layout
    from kpool_testing.record.call import Call as Call
    from kpool_testing.record.interconnect import INTERCONNECTS as INTERCONNECTS
    from kpool_testing.record.interconnect import Interconnect as Interconnect
    from kpool_testing.record.trace import Run as Run
    from kpool_testing.record.trace import Trace as Trace
    from kpool_testing.replays.group import FakeGroup as FakeGroup
    from kpool_testing.replays.run import replay as replay
    from kpool_testing.simulation.run import simulate as simulate

_HOME = {
    "AsyncError": "errors",
    "BrokenGroupError": "errors",
    "Call": "record.call",
    "CollectiveError": "errors",
    "DeadlockError": "errors",
    "FakeGroup": "replays.group",
    "INTERCONNECTS": "record.interconnect",
    "Interconnect": "record.interconnect",
    "LimitError": "errors",
    "MismatchError": "errors",
    "RankError": "errors",
    "RefusedError": "errors",
    "Run": "record.trace",
    "TimedOutError": "errors",
    "Trace": "record.trace",
    "assert_matches_unsharded": "proof",
    "assert_replicated": "proof",
    "close_pool": "launch.pool",
    "expect_collectives": "proof",
    "layouts": "proof",
    "replay": "replays.run",
    "run_ranks": "launch.pool",
    "simulate": "simulation.run",
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
