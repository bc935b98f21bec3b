"""simulate(): every rank of a process group in one process, on one thread each, one running at a time.

    def double_sum(group):
        x = torch.full((2,), float(group.rank()))
        torch.distributed.all_reduce(x)
        return x

    run = simulate(double_sum, size=3)
    run.results          # [tensor([3., 3.]), tensor([3., 3.]), tensor([3., 3.])]
    print(run.trace.lanes())

`fn` sees an initialised `torch.distributed`: the default group is simulated, `new_group`, `DeviceMesh`, DTensor, DDP
and FSDP2 work, and names bound by `from torch.distributed import ...` work, because no collective is replaced: the
group itself is a registered backend. A deadlock is known the moment no rank can run. Nothing stays changed afterwards.
"""

from __future__ import annotations

import contextvars
import random
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.distributed import constants

from kpool_testing.errors import AsyncError, DeadlockError
from kpool_testing.faults import Fault
from kpool_testing.record.trace import Run, Trace
from kpool_testing.simulation import isolation, native_waits
from kpool_testing.simulation.calls import Calls, Member
from kpool_testing.simulation.context import Context, Settings, Unwaited
from kpool_testing.simulation.injection import Faults
from kpool_testing.simulation.messages import Messages
from kpool_testing.simulation.process_group import SimGroup
from kpool_testing.simulation.report import Outcome, diagnosed_once
from kpool_testing.simulation.store import SimStore
from kpool_testing.simulation.turns import RESTING, Rank, RankThread, Turns, Unwind
from kpool_testing.simulation.watch import Watcher
from kpool_testing.simulation.works import wait_for_results

DIALECTS = ("portable", "gloo", "nccl")

_active: list[Simulation] = []


def simulate(
    fn: Callable[[SimGroup], Any],
    size: int,
    *,
    dialect: str = "portable",
    order: Sequence[int] | str | None = None,
    seed: int = 0,
    faults: Sequence[Fault] = (),
    isolate: Sequence[str] = (),
    limit: float | None = 60.0,
    backend: str | None = None,
    allow_unwaited: bool = False,
) -> Run:
    """Run `fn(group)` once per rank of a simulated process group, all in this process.

    Args:
        fn: takes the rank's default group. Its tensors are real; every answer comes from what all ranks really sent.
        size: number of ranks, at least 1.
        dialect: whose rules a call must meet. "portable" refuses what either gloo or NCCL refuses or silently spoils;
            "gloo" and "nccl" refuse with that backend's own exception types.
        order: the order in which ranks take turns: None is ascending, a permutation of range(size), or "shuffled",
            which draws every next rank from `seed`.
        seed: start of every rank's torch generator (a different stream on each rank), of the shuffle and of faults.
            Python's and numpy's global generators start on every rank where the caller's stand.
        faults: what goes wrong in this run, from `kpool_testing.faults`.
        isolate: names of modules whose globals every rank has for itself, such as "megatron.core.parallel_state".
        limit: seconds the run may take; None is no limit. Time spent in a debugger does not count.
        backend: what `get_backend()` says; by default "nccl" for that dialect, else "gloo".
        allow_unwaited: do not mind works that nobody waited for.

    Returns:
        A `Run`: `results[r]` is what fn returned on rank r, `trace` every call of the run.

    Raises:
        RankError: a rank raised; `__cause__` is the exception, and the message has one line per rank.
        MismatchError: ranks disagree on a call, and no rank caught that.
        RefusedError: a rank made a call that a real backend refuses (dialect "portable"), and did not catch that.
        DeadlockError: no rank can make progress.
        AsyncError: a tensor was changed in flight, or a Work was never waited for.
        LimitError: the run took longer than `limit`.
        RuntimeError: called inside another simulation, or under torch modes that cannot reach the ranks.
        ValueError: size, dialect, order or limit out of range.
    """
    __tracebackhide__ = True
    _check_arguments(size, dialect, order, limit)
    claimed = backend or ("nccl" if dialect == "nccl" else "gloo")
    settings = Settings(size, dialect, claimed, seed, limit, allow_unwaited)
    return Simulation(settings, order, Faults(faults, size, seed, limit)).run(fn, isolate)


def _check_arguments(size: int, dialect: str, order: Sequence[int] | str | None, limit: float | None) -> None:
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if dialect not in DIALECTS:
        raise ValueError(f"unknown dialect {dialect!r}, expected one of {DIALECTS}")
    if isinstance(order, str):
        if order != "shuffled":
            raise ValueError(f'order must be None, "shuffled" or a permutation of range({size}), got {order!r}')
    elif order is not None and sorted(order) != list(range(size)):
        raise ValueError(f"order must be a permutation of range({size}), got {list(order)}")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be positive, got {limit}")
    if _active:
        raise RuntimeError("simulate was called inside another simulation: nested simulations are refused")


class Simulation:
    """One run: its parts, put together."""

    def __init__(self, settings: Settings, order: Sequence[int] | str | None, faults: Faults) -> None:
        self.settings, self.faults = settings, faults
        shuffled = order == "shuffled" or faults.reorder
        turns = None if order is None or isinstance(order, str) else order
        shuffle = random.Random(settings.seed) if shuffled else None
        self.turns = Turns(settings.size, turns, shuffle, self._stalled, self._switch, self._rested)
        self.context = Context(settings, self.turns, Trace(size=settings.size), Unwaited(settings.size))
        self.calls = Calls(self.context, faults)
        self.messages, self.store = Messages(self.calls), SimStore(self.turns)
        note = f"simulated with size={settings.size}, dialect={settings.dialect!r}, seed={settings.seed}{faults.note()}"
        self.outcome = Outcome(self.turns.ranks, self.context.trace, note, [])
        self.watcher = Watcher(self.turns, self.outcome, settings.limit)
        self.state: isolation.Swapped | None = None
        self._patience = 20  # times that a stall with tasks in a queue is not yet taken for a deadlock

    def run(self, fn: Callable[[SimGroup], Any], isolate: Sequence[str]) -> Run:
        """Run fn on every rank and return what they returned, or raise what went wrong."""
        __tracebackhide__ = True
        modes = isolation.CallerModes()
        _active.append(self)
        try:
            with diagnosed_once(), isolation.apart(self._create, self.settings, self.turns, isolate) as self.state:
                for rank in self.turns.ranks:
                    body = (rank, fn, modes, contextvars.copy_context())
                    thread = threading.Thread(target=self._body, args=body, name=f"rank {rank.number}", daemon=True)
                    self.turns.add(rank.number, thread, main=True)
                    thread.start()
                self.watcher.watch()
        finally:
            _active.clear()
        self.outcome.raise_it()
        self.calls.check_groups()
        return Run([rank.result for rank in self.turns.ranks], self.context.trace)

    def _body(
        self, rank: Rank, fn: Callable[[SimGroup], Any], modes: isolation.CallerModes, context: contextvars.Context
    ) -> None:
        __tracebackhide__ = True
        main = rank.main
        assert main is not None
        main.thread._daemonic = False  # type: ignore[attr-defined]  # what its threads inherit
        try:
            self.turns.begin(main)
            try:
                group = self._join(rank.number)
                with ExitStack() as stack:
                    modes.enter(stack)
                    rank.result = context.run(fn, group)
                    self.turns.await_threads()
                    self._check_waited(rank)
            except Unwind:
                pass
            except BaseException as error:
                rank.error = error
                self.outcome.raised.append(rank)
            if not self.watcher.abandoned:
                isolation.forget_groups()
        except Unwind:
            pass
        finally:
            self.turns.leave(main)

    def _join(self, rank: int) -> SimGroup:
        hook = sys.excepthook
        dist.init_process_group(isolation.BACKEND, rank=rank, world_size=self.settings.size, store=self.store)
        sys.excepthook = hook
        group = dist.group.WORLD
        if not isinstance(group, SimGroup):
            raise RuntimeError(f"expected the simulated backend to be used, got {group!r}")
        return group

    def _create(self, options: Any) -> SimGroup:
        """A rank has asked torch for a group."""
        ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        name = str(options.group_id)
        whole = name == "0" and len(ranks) == self.settings.size
        label = "world" if whole else f"{name} {list(ranks)}"
        usual = (constants.default_pg_timeout, constants.default_pg_nccl_timeout)
        timeout = None if options.timeout in usual else options.timeout.total_seconds()
        return SimGroup(self.calls, self.messages, Member(name, label, ranks, options.group_rank, timeout))

    def _check_waited(self, rank: Rank) -> None:
        if self.context.unwaited.of(rank.number):
            wait_for_results(rank.result)
        left = "; ".join(map(str, self.context.unwaited.of(rank.number)))
        if left and not self.settings.allow_unwaited:
            raise AsyncError(
                f"rank {rank.number} never waited for {left}; wait for it, or pass allow_unwaited=True if that is meant"
            )

    # -- what the scheduler asks

    def _switch(self, rank: int) -> None:
        if self.state is not None and not self.watcher.abandoned:
            self.state.switch(rank)

    def _rested(self, rank: int) -> None:
        self.calls.rested(rank)

    def _stalled(self) -> bool | None:
        """No rank can run: raise a mismatch in the ranks concerned, let a time-out pass, or note the deadlock."""
        if self.turns.unwinding:
            return False
        if self.calls.raise_mismatches():
            return True
        if any(map(self._may_wake, self.turns.threads())) or self.turns.somebody_ends() or self._awaits_executor():
            return None
        if self.turns.expire():
            return True
        if self.outcome.failure is None:
            self.outcome.fail(DeadlockError, "no rank can make progress:")
        return False

    def _awaits_executor(self) -> bool:
        """Whether a task may begin any moment: it was submitted not long ago."""
        if not any(rank.queued for rank in self.turns.ranks):
            return False
        self._patience -= 1
        return self._patience > 0

    def _may_wake(self, thread: RankThread) -> bool:
        if thread.status != RESTING or self.calls.awaits_future(thread.rank.number):
            return False
        return native_waits.wakes_by_itself(thread.thread)
