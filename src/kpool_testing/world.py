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

import torch
import torch.distributed as dist

from kpool_testing.baton import Baton, Seat, Unwind
from kpool_testing.bits import poison
from kpool_testing.checks import AsyncError, CollectiveError, DeadlockError, MismatchError
from kpool_testing.faults import DropOut, Fault, Faults
from kpool_testing.install import installed, leave_groups
from kpool_testing.isolation import CallerModes, RankState
from kpool_testing.matching import Answer, Request, Slot, snapshot
from kpool_testing.p2p import Mailbox
from kpool_testing.process_group import SimGroup
from kpool_testing.report import diagnosed_once, failure_of, raise_outcome, rank_lines
from kpool_testing.store import SimStore
from kpool_testing.trace import Call, Run, Trace, user_site
from kpool_testing.watchdog import watch
from kpool_testing.works import PollWait, SimWork, SlotWait, SlotWork, wait_for_results

DIALECTS = ("portable", "gloo", "nccl")
_POLLS_WITHOUT_PROGRESS = 1000

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
    simulation = Simulation(size, dialect, order, seed, faults, backend, allow_unwaited)
    return simulation.run(fn, isolate, limit)


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
    """One run: its ranks, its open calls and its record."""

    def __init__(
        self,
        size: int,
        dialect: str,
        order: Sequence[int] | str | None,
        seed: int,
        faults: Sequence[Fault],
        backend: str | None,
        allow_unwaited: bool,
    ) -> None:
        self.size, self.dialect, self.seed = size, dialect, seed
        self.backend = backend or ("nccl" if dialect == "nccl" else "gloo")
        self.allow_unwaited = allow_unwaited
        self.faults = Faults(faults, size, seed)
        self.trace = Trace(size=size)
        self.slots: dict[tuple[str, int], Slot] = {}
        self.group_ranks: dict[str, tuple[int, ...]] = {}
        self.store = SimStore(self)
        self.mailboxes: dict[str, Mailbox] = {}
        self.messages: dict[tuple[str, int], int] = {}
        self.pending: list[dict[SimWork, None]] = [{} for _ in range(size)]
        self.failures: list[Seat] = []
        self.failure: CollectiveError | None = None
        self.lines: list[str] | None = None
        self.limit: float | None = None
        self.abandoned = False  # a thread was left behind: what still runs must not touch the process's state
        shuffled = order == "shuffled" or self.faults.reorder
        turns = None if order is None or isinstance(order, str) else order
        shuffle = random.Random(seed) if shuffled else None
        self.state: RankState | None = None
        self.baton = Baton(size, turns, shuffle, self._stalled, self._leave, self._enter)

    # -- the run

    def run(self, fn: Callable[[SimGroup], Any], isolate: Sequence[str], limit: float | None) -> Run:
        """Run fn on every rank and return what they returned, or raise what went wrong."""
        __tracebackhide__ = True
        modes = CallerModes()
        self.limit = limit
        contexts = [contextvars.copy_context() for _ in self.baton.seats]
        _active.append(self)
        try:
            with diagnosed_once(), installed(self) as state_of:
                self.state = state_of(isolate)
                try:
                    for seat, context in zip(self.baton.seats, contexts, strict=True):
                        body = (seat, fn, modes, context)
                        name = f"rank {seat.rank}"
                        seat.thread = threading.Thread(target=self._body, args=body, name=name, daemon=True)
                        seat.thread.start()
                    watch(self, limit)
                finally:
                    self.state.restore()
        finally:
            _active.clear()
        raise_outcome(self)
        return Run([seat.result for seat in self.baton.seats], self.trace)

    def _body(
        self, seat: Seat, fn: Callable[[SimGroup], Any], modes: CallerModes, context: contextvars.Context
    ) -> None:
        __tracebackhide__ = True
        try:
            self.baton.take(seat)
            try:
                self.baton.check(seat)
                group = self._join(seat.rank)
                with ExitStack() as stack:
                    modes.enter(stack)
                    seat.result = context.run(fn, group)
                    self._check_waited(seat)
            except Unwind:
                pass
            except BaseException as error:
                seat.error = error
                self.failures.append(seat)
            if not self.abandoned:
                leave_groups()
        except Unwind:
            pass
        finally:
            self.baton.leave(seat)

    def _join(self, rank: int) -> SimGroup:
        hook = sys.excepthook
        dist.init_process_group("kpool", rank=rank, world_size=self.size, store=self.store)
        sys.excepthook = hook
        group = dist.group.WORLD
        if not isinstance(group, SimGroup):
            raise RuntimeError(f"expected the simulated backend to be used, got {group!r}")
        return group

    def _check_waited(self, seat: Seat) -> None:
        if self.pending[seat.rank]:
            wait_for_results(seat.result)
        left = [str(work) for work in self.pending[seat.rank]]
        if left and not self.allow_unwaited:
            raise AsyncError(f"rank {seat.rank} never waited for {'; '.join(left)}")

    def _leave(self, seat: Seat) -> None:
        if self.state is not None and not self.abandoned:
            self.state.leave(seat.rank)

    def _enter(self, seat: Seat) -> None:
        if self.state is not None and not self.abandoned:
            self.state.enter(seat.rank)

    # -- calls

    def seat(self) -> Seat:
        """The seat of the calling thread; raises RuntimeError on a thread that is not a rank's."""
        seat = self.baton.running
        if seat is None or threading.current_thread() is not seat.thread:
            raise RuntimeError("a simulated collective was called on a thread that is not a rank's own")
        return seat

    def running_rank(self) -> int:
        """The rank that holds the baton, -1 outside of all ranks."""
        seat = self.baton.running
        return -1 if seat is None else seat.rank

    def post(
        self,
        group: SimGroup,
        kind: str,
        fingerprint: tuple[tuple[str, Any], ...],
        sent: Any,
        outputs: Sequence[torch.Tensor],
        compute: Callable[[list[Any]], Answer],
        *,
        inputs: Sequence[torch.Tensor] = (),
        spoiled: Sequence[torch.Tensor] | None = None,
        agree: Callable[[list[Request]], str | None] | None = None,
        async_op: bool = False,
        detail: str = "",
    ) -> SlotWork:
        """Make one rank's part of a collective; block until it is complete unless `async_op`.

        Args:
            sent: what this rank sends; `compute` gets the list of all ranks' in group order.
            outputs: tensors that receive this rank's part of what `compute` returns.
            inputs: tensors that are only read.
            spoiled: outputs to poison while in flight; all of them by default. A rank that is alone waits for nobody:
                its result is there at once, so that a program which reads too early is right on one rank and wrong on
                more, and a comparison of the two says so.
        """
        seat = self.seat()
        self.baton.check(seat)
        site, seq = user_site(), group.next_seq()
        what = f"{kind}#{seq} on group {group.label()} at {site}"
        self._record(seat, group, kind, seq, sent, outputs, site, detail)
        sent = self.faults.apply(self, seat, what, sent)
        request = Request(seat.rank, group.rank(), kind, fingerprint, sent, outputs, site)
        slot = self.slots.get((group.key, seq))
        if slot is None:
            slot = self.slots[group.key, seq] = Slot(group.label(), group.ranks, seq, compute, agree)
        work = SlotWork(self, slot, request, what)
        if async_op:
            request.sent = snapshot(sent)
            for output in outputs if spoiled is None else spoiled:
                poison(output, seat.rank)
            self.pending[seat.rank][work] = None
        if slot.add(request):
            del self.slots[group.key, seq]
            slot.finish()
            self.wake_slot(slot)
            if async_op and len(group.ranks) == 1:
                work.arrive()
        if async_op:
            work.watch(inputs)
        if not async_op:
            work.wait()
        return work

    def _record(
        self,
        seat: Seat,
        group: SimGroup,
        kind: str,
        seq: int,
        sent: Any,
        outputs: Sequence[torch.Tensor],
        site: str,
        detail: str,
    ) -> None:
        tensors = list(_tensors(sent)) or list(outputs)
        shape = tuple(tensors[0].shape) if tensors else ()
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.trace.append(Call(seat.rank, kind, group.label(), group.ranks, seq, shape, dtype, size, site, detail))

    def block_on(self, slot: Slot, request: Request) -> None:
        """Wait until the slot is complete."""
        self.baton.block(self.seat(), SlotWait(slot, request))

    def wake_slot(self, slot: Slot) -> bool:
        """Let the ranks that wait for this slot run; True if there were any."""
        woken = False
        for rank in slot.ranks:
            seat = self.baton.seats[rank]
            if isinstance(seat.wait, SlotWait) and seat.wait.slot is slot:
                self.baton.wake(seat)
                woken = True
        return woken

    def raise_if_failed(self, slot: Slot) -> None:
        """Raise the slot's error, a copy for each rank."""
        error = slot.error
        if isinstance(error, CollectiveError):
            raise type(error)(str(error))
        if error is not None:
            raise error

    def forget(self, work: SimWork) -> None:
        """The work has been waited for."""
        self.pending[self.seat().rank].pop(work, None)

    def poll(self, what: str) -> None:
        """A rank asks whether its call is complete: let the others run, and find polling that can never end."""
        seat = self.seat()
        self.baton.yield_turn(seat)
        seat.polls = seat.polls + 1 if seat.calls == len(self.trace.calls) else 0
        seat.calls = len(self.trace.calls)
        if seat.polls > _POLLS_WITHOUT_PROGRESS:
            self.baton.block(seat, PollWait(what))

    def meet_group(self, name: str, ranks: tuple[int, ...]) -> None:
        """A rank has created a group; raises MismatchError if another rank means other members by the same name."""
        known = self.group_ranks.setdefault(name, ranks)
        if known != ranks:
            raise MismatchError(
                f"ranks disagree on group {name}: rank {self.running_rank()} creates it for ranks {list(ranks)} "
                f"at {user_site()}, another rank for {list(known)}; every rank must call new_group for every group, "
                "in the same order"
            )

    def mailbox(self, group: str) -> Mailbox:
        """The point-to-point messages of a group that have not met yet."""
        return self.mailboxes.setdefault(group, Mailbox())

    def next_message(self, group: str, rank: int) -> int:
        """The number of the rank's next point-to-point call on a group."""
        number = self.messages.get((group, rank), 0)
        self.messages[group, rank] = number + 1
        return number

    # -- the end

    def _stalled(self) -> bool:
        """Nobody can run: raise a mismatch in the ranks concerned, or note the deadlock."""
        woken = False
        for key, slot in list(self.slots.items()):
            if slot.differs:
                slot.error, slot.done = slot.mismatch(), True
                del self.slots[key]
                woken = self.wake_slot(slot) or woken
        if woken:
            return True
        if self.failure is None:
            self.lines = rank_lines(self)
            self.failure = failure_of(self, DeadlockError, "no rank can make progress:")
        return False

    def dropped(self) -> list[Seat]:
        """Ranks that an injected fault has removed."""
        return [seat for seat in self.failures if isinstance(seat.error, DropOut)]


def _tensors(sent: Any) -> Sequence[torch.Tensor]:
    if isinstance(sent, torch.Tensor):
        return (sent,)
    if isinstance(sent, (list, tuple)):
        return [tensor for part in sent for tensor in _tensors(part)]
    return ()
