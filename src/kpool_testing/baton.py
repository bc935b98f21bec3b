"""One runs at a time: the scheduler behind `simulate`.

Every rank has a thread and a seat. A thread runs only while its seat holds the baton; it hands the baton on when it
must wait, and gets it back when it is its turn again. So execution is deterministic, state that belongs to a rank can
follow the baton, and "nobody can run" is a deadlock that needs no timeout to be seen.

A seat is ready (may run), blocked (waits for other ranks), asleep (wakes at a virtual time, when nobody else can run)
or done. Time is virtual: sleeping takes no real time.
"""

from __future__ import annotations

import _thread
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

READY, BLOCKED, ASLEEP, DONE = "ready", "blocked", "asleep", "done"


class Unwind(BaseException):
    """Takes a rank's thread off the stack after the run has failed; not for catching."""


class Wait(Protocol):
    """What a blocked seat waits for."""

    def describe(self) -> str:
        """One line: the call, where it was made, who is missing."""


class Seat:
    """A rank's place in the round."""

    __slots__ = ("calls", "error", "lock", "polls", "rank", "result", "status", "thread", "wait", "wake_at")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lock = _thread.allocate_lock()
        self.lock.acquire()
        self.status = READY
        self.wait: Wait | None = None
        self.wake_at = 0.0
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.calls = 0
        self.polls = 0


class Baton:
    """Decides which seat runs next.

    Args:
        size: number of seats.
        order: seats in the order of their turns; None is ascending.
        shuffle: if given, the next seat is drawn from this generator among those that can run.
        on_stall: called when seats are blocked and none can run; returns True if it has woken one,
            else the run unwinds.
        on_leave, on_enter: called in the running thread when a seat gives the baton away and gets it.
    """

    def __init__(
        self,
        size: int,
        order: Sequence[int] | None,
        shuffle: random.Random | None,
        on_stall: Callable[[], bool],
        on_leave: Callable[[Seat], None],
        on_enter: Callable[[Seat], None],
    ) -> None:
        self.seats = [Seat(rank) for rank in range(size)]
        self.turns = list(order) if order is not None else list(range(size))
        self.place = {rank: i for i, rank in enumerate(self.turns)}
        self.shuffle = shuffle
        self.on_stall, self.on_leave, self.on_enter = on_stall, on_leave, on_enter
        self.running: Seat | None = None
        self.clock = 0.0
        self.unwinding = False
        self.finished = _thread.allocate_lock()
        self.finished.acquire()

    def start(self) -> None:
        """Hand the baton to the first seat; all threads wait in `take`."""
        first = self._pick(self.seats[self.turns[-1]])
        if first is not None:
            first.lock.release()

    def take(self, seat: Seat) -> None:
        """Wait for the baton."""
        seat.lock.acquire()
        self.running = seat
        self.on_enter(seat)

    def leave(self, seat: Seat) -> None:
        """The seat is done: hand the baton on for good."""
        seat.status = DONE
        seat.wait = None
        self.on_leave(seat)
        following = self._next(seat)
        self.running = None
        if following is not None and following.lock.locked():
            following.lock.release()
        elif following is None and self.finished.locked():
            self.finished.release()

    def block(self, seat: Seat, wait: Wait) -> None:
        """Wait until another seat calls `wake` on this one; raises Unwind if the run has failed by then."""
        self.check(seat)
        seat.status, seat.wait = BLOCKED, wait
        self._switch(seat)
        seat.wait = None
        self.check(seat)

    def yield_turn(self, seat: Seat) -> None:
        """Let every other seat that can run have its turn first."""
        self.check(seat)
        self._switch(seat)
        self.check(seat)

    def sleep(self, seat: Seat, seconds: float, wait: Wait) -> None:
        """Wait `seconds` of virtual time: until nobody else can run and nobody else wakes earlier."""
        self.check(seat)
        seat.status, seat.wait, seat.wake_at = ASLEEP, wait, self.clock + seconds
        self._switch(seat)
        seat.wait = None
        self.check(seat)

    def wake(self, seat: Seat) -> None:
        """Let a blocked seat run again when its turn comes."""
        if seat.status == BLOCKED:
            seat.status = READY

    def check(self, seat: Seat) -> None:
        """Raise Unwind once the run has failed."""
        if self.unwinding:
            raise Unwind

    def unwind(self) -> None:
        """Make every waiting seat runnable, to leave its stack by Unwind."""
        self.unwinding = True
        for seat in self.seats:
            if seat.status in (BLOCKED, ASLEEP):
                seat.status = READY

    def _switch(self, seat: Seat) -> None:
        following = self._next(seat)
        if following is seat or following is None:
            return
        self.on_leave(seat)
        following.lock.release()
        seat.lock.acquire()
        self.running = seat
        self.on_enter(seat)

    def _next(self, seat: Seat) -> Seat | None:
        following = self._pick(seat)
        if following is None:
            following = self._wake_sleeper()
        if following is None and any(other.status == BLOCKED for other in self.seats):
            if self.unwinding or not self.on_stall():
                self.unwind()
            following = self._pick(seat)
        return following

    def _pick(self, seat: Seat) -> Seat | None:
        size = len(self.turns)
        first = self.place[seat.rank] + 1
        if self.shuffle is not None:
            ready = [other for other in self.seats if other.status == READY]
            return self.shuffle.choice(ready) if ready else None
        for step in range(size):
            other = self.seats[self.turns[(first + step) % size]]
            if other.status == READY:
                return other
        return None

    def _wake_sleeper(self) -> Seat | None:
        asleep = [other for other in self.seats if other.status == ASLEEP]
        if not asleep:
            return None
        earliest = min(asleep, key=lambda other: (other.wake_at, other.rank))
        self.clock = max(self.clock, earliest.wake_at)
        earliest.status = READY
        return earliest
