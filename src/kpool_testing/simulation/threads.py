"""Threads and executor tasks that a rank starts are the rank's: its groups, its turn, its end.

While a run lasts, `threading.Thread.start` and the tasks of `ThreadPoolExecutor` are wrapped. A thread that a rank
starts belongs to it, and so does an executor's thread as long as it carries out a task that a rank has submitted,
whoever made the executor. Timers, data loaders and checkpointing go through the same doors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as executors
from contextlib import contextmanager
from typing import Any

import torch

from kpool_testing.simulation.isolation.worlds import WorldsByRank, forget_groups, know_groups
from kpool_testing.simulation.turns import RankThread, Turns, Unwind

_Task: Any = executors._WorkItem


@contextmanager
def adopted(turns: Turns, worlds: WorldsByRank) -> Iterator[None]:
    """While active, what a rank starts belongs to that rank."""
    start, make, run = threading.Thread.start, _Task.__init__, _Task.run

    def start_of_rank(thread: threading.Thread) -> None:
        parent = turns.current()
        if parent is None or getattr(thread, "_target", None) is executors._worker:
            start(thread)
            return
        child, said = turns.add(parent.rank.number, thread), thread.daemon
        thread.run = _as_rank(turns, worlds, child, thread.run)  # type: ignore[method-assign]
        thread.daemon = True  # one that never ends must not keep the interpreter from ending
        try:
            start(thread)
        except BaseException:
            turns.drop(child)
            raise
        finally:
            thread._daemonic = said  # type: ignore[attr-defined]

    def make_for_rank(task: Any, *args: Any, **kwargs: Any) -> None:
        make(task, *args, **kwargs)
        parent = turns.current()
        if parent is not None:
            task._kpool_rank = parent.rank.number
            parent.rank.queued += 1

    def run_for_rank(task: Any, *args: Any, **kwargs: Any) -> None:
        number = getattr(task, "_kpool_rank", None)
        if number is None or turns.over:
            run(task, *args, **kwargs)
            return
        child = turns.join(number)
        turns.ranks[number].queued -= 1
        _as_rank(turns, worlds, child, lambda: run(task, *args, **kwargs))()

    threading.Thread.start = start_of_rank  # type: ignore[method-assign,assignment]
    _Task.__init__, _Task.run = make_for_rank, run_for_rank
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        _Task.__init__, _Task.run = make, run


def _as_rank(turns: Turns, worlds: WorldsByRank, child: RankThread, run: Callable[[], None]) -> Callable[[], None]:
    def body() -> None:
        turns.begin(child)
        try:
            turns.me()
            know_groups(worlds)
            with torch.autograd.set_multithreading_enabled(False):
                run()
        except Unwind:
            pass
        finally:
            forget_groups()
            turns.leave(child)

    return body
