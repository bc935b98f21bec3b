"""What cannot be kept apart is refused, by name, on the rank that would take or spoil another rank's.

Operators that a rank defines, the profiler and compiled autograd exist once in a process, in C++. RPC agents and the
checkpoint process of torch would wait for peers in other processes.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from kpool_testing.errors import RefusedError
from kpool_testing.simulation.isolation.worlds import RankOf

_REASONS = {
    ("torch.distributed.rpc", "_init_rpc_backend"): "torch.distributed.rpc: a process has one agent",
    (
        "torch.distributed.checkpoint._async_process_executor",
        "_AsyncCheckpointProcess.__init__",
    ): "async_save in a process: use AsyncCheckpointerType.THREAD; a process has one checkpoint process",
}


class Refusals:
    """Guards on functions of torch, put in place as soon as their module is loaded."""

    def __init__(self, rank_of: RankOf) -> None:
        self.rank_of = rank_of
        self.profiling: int | None = None
        self.defined: dict[str, tuple[int, weakref.ref[Any]]] = {}  # operator, to who defined it, and with what
        self.originals: list[tuple[Any, str, Any]] = []
        self.loaded = 0
        self.waiting: dict[tuple[str, str], Callable[..., Any]] = {
            **{place: functools.partial(self._never, reason) for place, reason in _REASONS.items()},
            ("torch.autograd.profiler", "_prepare_profiler"): self._profile,
            ("torch.autograd.profiler", "_disable_profiler"): self._profiled,
            ("torch._library.custom_ops", "CustomOpDef.__init__"): self._custom,
            ("torch.library", "Library.__init__"): self._library,
            ("torch.library", "Library.define"): self._define,
            ("torch.library", "Library.impl"): self._implement,
        }

    def leave(self, rank: int) -> None:
        """Nothing follows the turn."""

    def enter(self, rank: int) -> None:
        """Modules may have been loaded since the last turn."""
        if self.loaded != len(sys.modules):
            self.loaded = len(sys.modules)
            for place in [place for place in self.waiting if place[0] in sys.modules]:
                self._guard(*place, self.waiting.pop(place))

    def restore(self) -> None:
        """Take the guards away."""
        for owner, name, original in reversed(self.originals):
            setattr(owner, name, original)

    def _guard(self, module: str, path: str, check: Callable[..., Any]) -> None:
        *parts, name = path.split(".")
        owner: Any = sys.modules[module]
        for part in parts:
            owner = getattr(owner, part, None)
        original = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            rank = self.rank_of()
            if rank is not None:
                check(rank, *args, **kwargs)
            return original(*args, **kwargs)

        self.originals.append((owner, name, original))
        setattr(owner, name, guarded)

    def _never(self, reason: str, rank: int, *args: Any, **kwargs: Any) -> None:
        raise RefusedError(f'simulated ranks refuse {reason}. Run this test on real ranks (backend="gloo")')

    def _profile(self, rank: int, *args: Any, **kwargs: Any) -> None:
        if self.profiling is not None and self.profiling != rank:
            raise RefusedError(
                f"rank {rank} starts the profiler while rank {self.profiling} profiles: a process has one. Profile on "
                f'one rank, or one rank after the other, or on real ranks (backend="gloo")'
            )
        self.profiling = rank

    def _profiled(self, rank: int, *args: Any, **kwargs: Any) -> None:
        self.profiling = None

    def _custom(self, rank: int, op: Any, namespace: str, name: str, *args: Any, **kwargs: Any) -> None:
        self._claim(rank, op, f"custom_op {namespace}::{name}")

    def _library(self, rank: int, library: Any, ns: str, kind: str, *args: Any, **kwargs: Any) -> None:
        if kind == "DEF":
            self._claim(rank, library, f"the operators of {ns}")

    def _define(self, rank: int, library: Any, schema: str, *args: Any, **kwargs: Any) -> None:
        self._claim(rank, library, f"operator {library.ns}::{schema.split('(')[0].strip()}")

    def _implement(self, rank: int, library: Any, op: Any, fn: Any, dispatch_key: str = "", **kwargs: Any) -> None:
        name = str(op).split("::")[-1]
        self._claim(rank, library, f"operator {library.ns}::{name} for {dispatch_key or library.dispatch_key or 'all'}")

    def _claim(self, rank: int, library: Any, what: str) -> None:
        owner, reference = self.defined.get(what, (rank, None))
        first = None if reference is None else reference()
        alive = getattr(first, "m", first) is not None  # a library that was destroyed has no m
        if owner != rank and alive:
            raise RefusedError(
                f"rank {rank} defines {what}, which rank {owner} has defined: a process has one, and {owner}'s or "
                f"{rank}'s kernel would run on both. Define operators when a module is imported"
            )
        self.defined[what] = (rank, weakref.ref(library))


def refuse_in_compiled_autograd(what: str) -> None:
    """Refuse a collective in a backward pass that compiled autograd runs: no other rank could enter its own.

    Raises:
        RefusedError: this is such a pass.
    """
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and module.in_compiled_autograd_region:
        raise RefusedError(
            f"{what} in a backward pass under compiled autograd: a process runs one such pass at a time, so simulated "
            f'ranks would wait for each other. Run this test on real ranks (backend="gloo")'
        )
