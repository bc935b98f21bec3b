"""One rank runs at a time: the scheduler behind `simulate`.

The turn belongs to a rank. Its threads run while the rank holds the turn. A thread that has to wait for other ranks
blocks, and once no thread of the rank can run, the turn goes to the next rank that can. So execution is deterministic
where every rank has one thread, process-wide state that belongs to a rank can follow the turn, and "no rank can run" is
a deadlock that needs no time-out to be seen.

A thread is in one of five states:

    running    its rank holds the turn
    ready      will run when its rank gets the turn
    blocked    waits for other ranks, perhaps until a deadline
    resting    waits for something that is not seen here: a lock, a queue, another thread (see `native_waits`)
    done

Time is virtual: a deadline passes once no rank can run.
"""

from __future__ import annotations

import _thread
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kpool_testing.simulation import native_waits

RUNNING, READY, BLOCKED, RESTING, DONE = "running", "ready", "blocked", "resting", "done"

_POLLS_WITHOUT_PROGRESS = 1000


class Unwind(BaseException):
    """Takes a rank's thread off the stack after the run has failed; not for catching."""


class Wait(Protocol):
    """What a blocked thread waits for."""

    def describe(self) -> str:
        """One line: the call, where it was made, who is missing."""


class RankThread:
    """One thread of a rank, or a thread of an executor while it carries out a task of the rank."""

    __slots__ = (
        "daemon",
        "deadline",
        "expired",
        "gate",
        "is_task",
        "mark",
        "polls",
        "progress",
        "rank",
        "status",
        "thread",
        "wait",
    )

    def __init__(self, rank: Rank, thread: threading.Thread, status: str, daemon: bool) -> None:
        self.rank, self.thread, self.status, self.daemon = rank, thread, status, daemon
        self.is_task = False
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.wait: Wait | None = None
        self.deadline: float | None = None
        self.expired = False
        self.mark: native_waits.Mark | None = None  # how far it had run when it was last seen resting
        self.polls = self.progress = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the thread that runs the rank's function."""
        return self.rank.main is self


class Rank:
    """A rank, its threads, and how its function ended."""

    __slots__ = ("error", "main", "number", "queued", "result", "threads")

    def __init__(self, number: int) -> None:
        self.number = number
        self.threads: list[RankThread] = []
        self.main: RankThread | None = None
        self.queued = 0  # tasks that the rank has given to an executor and that have not begun
        self.result: Any = None
        self.error: BaseException | None = None

    @property
    def returned(self) -> bool:
        """Whether the rank's function has ended."""
        return self.main is not None and self.main.status == DONE


class ThreadsWait:
    """A rank's function has returned and waits for the threads that it started, as a process does before it exits."""

    def describe(self) -> str:
        """What the main thread waits for."""
        return "returned; waits for the threads it started"


class Turns:
    """Decides which rank runs next.

    Args:
        size: number of ranks.
        order: ranks in the order of their turns; None is ascending.
        shuffle: if given, the next rank is drawn from this generator among those that can run.
        on_stall: called when threads are blocked and no rank can run. True: it has woken one; False: the run has
            failed and unwinds; None: a thread that waits natively may still go on.
        on_switch: called with the number of the rank that gets the turn, before any of its threads runs.
        on_rest: called with the number of a rank whose running threads were seen resting.
    """

    def __init__(
        self,
        size: int,
        order: Sequence[int] | None,
        shuffle: random.Random | None,
        on_stall: Callable[[], bool | None],
        on_switch: Callable[[int], None],
        on_rest: Callable[[int], None],
    ) -> None:
        self.ranks = [Rank(number) for number in range(size)]
        self.order = list(order) if order is not None else list(range(size))
        self.place = {number: place for place, number in enumerate(self.order)}
        self.shuffle = shuffle
        self.on_stall, self.on_switch, self.on_rest = on_stall, on_switch, on_rest
        self.holder: Rank | None = None
        self.clock = 0.0
        self.unwinding = self.over = False
        self.bell = threading.Event()  # rung when the run is over, or has to be looked at from outside
        self._last = len(self.order) - 1  # place of the rank that held the turn last
        self._ending: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._local = threading.local()

    # -- threads come and go

    def add(self, number: int, thread: threading.Thread, main: bool = False) -> RankThread:
        """Make a thread, not started yet, one of the rank's. A main thread begins when the rank gets its first turn."""
        with self._lock:
            rank = self.ranks[number]
            added = RankThread(rank, thread, READY if main else RUNNING, thread.daemon)
            rank.threads.append(added)
            if main:
                rank.main = added
            else:
                self.bell.set()
            return added

    def drop(self, thread: RankThread) -> None:
        """Forget a thread that could not be started."""
        with self._lock:
            thread.rank.threads.remove(thread)

    def join(self, number: int) -> RankThread:
        """The calling thread, which is no rank's, works for this rank from now on, once the rank has the turn."""
        with self._lock:
            rank = self.ranks[number]
            joined = RankThread(rank, threading.current_thread(), RESTING, daemon=False)
            joined.is_task = True
            rank.threads.append(joined)
        self._local.current = joined
        return joined

    def begin(self, thread: RankThread) -> None:
        """The calling thread is this one; a main thread waits for its first turn."""
        self._local.current = thread
        if thread.is_main:
            self._await_turn(thread)

    def leave(self, thread: RankThread) -> None:
        """The calling thread has ended."""
        with self._lock:
            self._local.current = None
            thread.status, thread.wait = DONE, None
            rank = thread.rank
            if not thread.is_main:
                rank.threads.remove(thread)
                if not thread.is_task:
                    self._ending.append(thread.thread)
                for other in rank.threads:
                    other.mark = None  # what waited for this thread is about to go on
                if rank.main is not None and isinstance(rank.main.wait, ThreadsWait):
                    self.wake(rank.main)
            self._settle(rank)

    def await_threads(self) -> None:
        """Wait until the threads that the calling rank started, daemons aside, have ended, and its tasks too."""
        rank = self.me().rank
        while rank.queued or len(_expected(rank)) > 0:
            self.block(ThreadsWait(), unless=lambda: not (rank.queued or _expected(rank)))

    def start(self) -> None:
        """Give the first rank the turn; all main threads wait in `begin`."""
        with self._lock:
            self._advance()

    # -- what a thread asks for

    def current(self) -> RankThread | None:
        """The calling thread's place, None for a thread that is no rank's.

        A thread that Python did not start works for the rank with the turn, which waits for it: autograd's own do.
        """
        place: RankThread | None = getattr(self._local, "current", None)
        if place is None and self.holder is not None and isinstance(threading.current_thread(), threading._DummyThread):
            return self.holder.main
        return place

    def me(self) -> RankThread:
        """The calling thread's place, once its rank has the turn.

        Raises:
            RuntimeError: the thread is no rank's.
            Unwind: the run has failed.
        """
        me = self.current()
        if me is None:
            raise RuntimeError(
                f"a simulated collective was called on thread {threading.current_thread().name!r}, which is no rank's: "
                "start threads inside fn, with threading.Thread or an executor made there"
            )
        if self.unwinding:
            raise Unwind
        if me.status != RUNNING:
            self._return_from_rest(me)
        return me

    def block(self, wait: Wait, timeout: float | None = None, unless: Callable[[], Any] | None = None) -> bool:
        """Wait until another thread calls `wake` on this one; False if `timeout` seconds of virtual time passed first.

        Returns at once where `unless` says that there is nothing to wait for. Raises Unwind if the run has failed.
        """
        me = self.me()
        with self._lock:
            if unless is not None and unless():
                return True
            me.status, me.wait, me.expired = BLOCKED, wait, False
            me.deadline = None if timeout is None else self.clock + timeout
            self._settle(me.rank)
        self._await_turn(me)
        return not me.expired

    def yield_turn(self) -> None:
        """Let every other rank that can run have its turn first."""
        me = self.me()
        with self._lock:
            me.status = READY
            self._settle(me.rank)
        self._await_turn(me)

    def poll(self, wait: Wait, progress: int) -> None:
        """A thread asks whether something has happened: let the other ranks run first.

        Many times in a row without a change of `progress`, and it blocks: polling that nothing can end is a deadlock.
        """
        self.yield_turn()
        me = self.me()
        me.polls = me.polls + 1 if me.progress == progress else 0
        me.progress = progress
        if me.polls > _POLLS_WITHOUT_PROGRESS:
            self.block(wait)

    def wake(self, thread: RankThread) -> None:
        """Let a blocked thread run again when its rank's turn comes."""
        with self._lock:
            if thread.status == BLOCKED:
                thread.status = READY
                if self.holder is None and not self.over:
                    self._advance()

    # -- what an observer asks for

    def threads(self) -> Iterator[RankThread]:
        """Every thread of every rank."""
        for rank in self.ranks:
            yield from rank.threads

    def somebody_ends(self) -> bool:
        """Whether a thread that has left is still on its way out, so that whoever joins it does not know yet."""
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        return bool(self._ending)

    def unwind(self) -> None:
        """Make every waiting thread ready to leave its stack by Unwind."""
        with self._lock:
            self._unwind()
            if self.holder is None and not self.over:
                self._advance()

    def abandon(self) -> None:
        """A thread cannot be taken off its stack: let all others leave theirs without waiting for their turn."""
        with self._lock:
            self.over = True
            for thread in self.threads():
                if thread.status == READY:
                    thread.status = RUNNING
                    thread.gate.release()

    def expire(self) -> bool:
        """Let the earliest deadline pass; False if there is none."""
        waiting = [t for t in self.threads() if t.status == BLOCKED and t.deadline is not None]
        if not waiting:
            return False
        first = min(waiting, key=lambda thread: (thread.deadline, thread.rank.number))
        self.clock = max(self.clock, first.deadline or 0.0)
        first.expired, first.status = True, READY
        return True

    def pass_time(self, seconds: float) -> None:
        """Seconds have passed in which no rank held the turn, because one may return from a native wait."""
        with self._lock:
            if self.holder is not None or self.over:
                return
            self.clock += seconds
            if any(t.status == BLOCKED and (t.deadline or self.clock + 1) <= self.clock for t in self.threads()):
                self.expire()
            self._advance()

    def unseen(self) -> list[RankThread]:
        """Threads of the rank with the turn that run or rest, where another of its threads waits for other ranks."""
        with self._lock:
            rank = self.holder
            if rank is None or self.over:
                return []
            running = [thread for thread in rank.threads if thread.status == RUNNING]
            return running if len(running) < len(rank.threads) else []

    def rest(self, marks: dict[RankThread, native_waits.Mark]) -> None:
        """These threads were seen resting, and are all that run of the rank with the turn: give the turn on."""
        with self._lock:
            if set(self.unseen()) != set(marks) or not marks:
                return
            for thread, mark in marks.items():
                thread.status, thread.mark = RESTING, mark
                number = thread.rank.number
            self.on_rest(number)
            self._advance()

    # -- inside; the lock is held

    def _await_turn(self, me: RankThread) -> None:
        me.gate.acquire()
        me.wait = None
        if self.unwinding:
            raise Unwind

    def _return_from_rest(self, me: RankThread) -> None:
        with self._lock:
            if self.holder is me.rank:
                me.status = RUNNING
                return
            me.status = READY
            if self.holder is None:
                self._advance()
        self._await_turn(me)

    def _settle(self, rank: Rank) -> None:
        """A thread of the rank has stopped running."""
        if self.holder is rank:
            if self._still_runs(rank):
                self.bell.set()
                return
            self._advance()
        elif self.holder is None and not self.over:
            self._advance()

    def _still_runs(self, rank: Rank) -> bool:
        for thread in rank.threads:
            if thread.status != RUNNING:
                continue
            at_rest = thread.mark is not None and native_waits.has_not_run_since(thread.mark, thread.thread)
            if not at_rest and not (rank.returned and thread.daemon):
                return True
        for thread in rank.threads:
            if thread.status == RUNNING:
                thread.status = RESTING
        return False

    def _advance(self) -> None:
        self.holder = None
        while (rank := self._pick()) is None:
            returned = all(rank.returned for rank in self.ranks)
            if returned and not any(thread.status == BLOCKED for thread in self.threads()):
                self.over = True
            if self.over or (self.unwinding and not returned):  # what rests has to return by itself
                self.bell.set()
                return
            woken = False if returned else self.on_stall()
            if woken is None:
                self.bell.set()
                return
            if not woken:
                self._unwind()
        self._give(rank)

    def _unwind(self) -> None:
        self.unwinding = True
        for thread in self.threads():
            if thread.status == BLOCKED:
                thread.status = READY

    def _pick(self) -> Rank | None:
        if self.shuffle is not None:
            able = [rank for rank in self.ranks if _can_run(rank)]
            return self.shuffle.choice(able) if able else None
        size = len(self.order)
        for step in range(1, size + 1):
            rank = self.ranks[self.order[(self._last + step) % size]]
            if _can_run(rank):
                return rank
        return None

    def _give(self, rank: Rank) -> None:
        self.holder, self._last = rank, self.place[rank.number]
        self.on_switch(rank.number)
        if len(rank.threads) > 1:
            self.bell.set()
        for thread in rank.threads:
            if thread.status == READY:
                thread.status = RUNNING
                thread.gate.release()
            elif thread.status == RESTING:
                thread.status = RUNNING


def _can_run(rank: Rank) -> bool:
    return any(thread.status == READY for thread in rank.threads)


def _expected(rank: Rank) -> list[RankThread]:
    """The threads that must end before the rank does."""
    return [thread for thread in rank.threads if not (thread.is_main or thread.daemon)]
