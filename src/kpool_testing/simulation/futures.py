"""Futures of simulated works: asking for one does not wait, and one that nobody waits for leaves its work unwaited.

A work's future completes when its rank waits for it, reads it, or runs a callback that was attached to it. Whoever
waits in C++ (a DDP communication hook, `torch.futures.collect_all`) blocks the rank's thread without the scheduler
seeing it; each rank that has taken a future therefore has one more thread, the completer, which finishes futures on
its rank's turn, as the backend's own threads do in a real process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from kpool_testing.simulation.context import Context
from kpool_testing.simulation.turns import RankThread
from kpool_testing.simulation.works import SimWork

_in_backward: Callable[[], int] = torch._C._current_graph_task_id


class SimFuture(Future):  # type: ignore[type-arg]
    """The future of a work, or of a callback attached to another such future."""

    def __init__(self, finish: Callable[[], Any], ready: Callable[[], bool]) -> None:
        super().__init__()
        self._finish, self._ready = finish, ready
        self._lock = threading.Lock()
        self._started = False
        self._callbacks: list[Callable[[], None]] = []
        self.wanted: Callable[[], None] = lambda: None  # tells the completer that a callback waits

    def complete(self) -> None:
        """Wait for the value on the calling thread's turn, then run the callbacks."""
        with self._lock:
            started, self._started = self._started, True
        if started:
            return
        try:
            value = self._finish()
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(value)
        for callback in self._callbacks:
            callback()

    def wait(self) -> Any:
        """Block until the value is there and return it, or raise the call's error."""
        self.complete()
        return super().wait()

    def value(self) -> Any:
        """The value of a future that is done."""
        if self._ready():
            self.complete()
        return super().value()

    def done(self) -> bool:
        """Whether the value is there; lets other ranks run first if it is not."""
        return super().done() or self._ready()

    def then(self, callback: Callable[[Any], Any]) -> SimFuture:
        """The future of `callback(self)`, which runs once this one is done."""
        chained = SimFuture(lambda: self._done_for(callback), self.done)
        chained.wanted = self.wanted
        self._attach(chained.complete)
        return chained

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Run `callback(self)` once this one is done."""
        self._attach(lambda: callback(self))

    def _done_for(self, callback: Callable[[Any], Any]) -> Any:
        self.complete()
        return callback(self)

    def _attach(self, callback: Callable[[], None]) -> None:
        if super().done():
            callback()
        else:
            self._callbacks.append(callback)
            self.wanted()


class Completer:
    """Finishes the futures of one rank that a callback or a thread in C++ waits for."""

    def __init__(self, context: Context, rank: int) -> None:
        self._turns, self._rank = context.turns, rank
        self._pending: dict[SimFuture, SimWork] = {}
        self._wanted: set[SimFuture] = set()
        self._started = False
        self._place: RankThread | None = None

    def future(self, work: SimWork) -> SimFuture:
        """The future of a work."""
        future = SimFuture(work.value, lambda: work.ready)
        future.wanted = lambda: self._want([future])
        if _in_backward() != -1:
            work.settle()  # what a hook of autograd returns, torch waits for
        self._pending[future] = work
        work.listen(self._notify)
        if not self._started:
            self._started = True
            threading.Thread(target=self._run, name=f"rank {self._rank} completer", daemon=True).start()
        return future

    @property
    def pending(self) -> bool:
        """Whether a future has not been completed."""
        return bool(self._pending)

    def rested(self) -> None:
        """The rank's threads wait outside of the scheduler: any pending future may be what they wait for."""
        self._want(list(self._pending))

    def _want(self, futures: list[SimFuture]) -> None:
        for future in futures:
            self._pending[future].settle()
            self._wanted.add(future)
        self._notify()

    def _notify(self) -> None:
        if self._place is not None and self._due():
            self._turns.wake(self._place)

    def _due(self) -> list[SimFuture]:
        return [future for future, work in list(self._pending.items()) if future in self._wanted and work.ready]

    def _run(self) -> None:
        self._place = self._turns.me()
        while True:
            for future in self._due():
                del self._pending[future]
                self._wanted.discard(future)
                future.complete()
            self._turns.block(CompleterWait(), unless=self._due)


class CompleterWait:
    """A rank's completer has nothing to do."""

    def describe(self) -> str:
        """Not shown in reports."""
        return "waits for the rank's works"
