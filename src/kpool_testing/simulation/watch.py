"""Waits for a run to end, gives the turn on where a rank waits unseen, and ends a run that takes too long."""

from __future__ import annotations

import ctypes
import sys
import time
from types import FrameType

from kpool_testing.errors import LimitError
from kpool_testing.simulation import native_waits
from kpool_testing.simulation.report import Outcome
from kpool_testing.simulation.turns import DONE, RUNNING, RankThread, Turns, Unwind

_SLICE, _IDLE, _GRACE = 0.5, 0.05, 1.0  # seconds


class Watcher:
    """Watches one run from the thread that called `simulate`."""

    def __init__(self, turns: Turns, outcome: Outcome, limit: float | None) -> None:
        self.turns, self.outcome, self.limit = turns, outcome, limit
        self.abandoned = False  # a thread was left behind: what still runs must not touch the process's state
        self._spent, self._idle = 0.0, 0

    def watch(self) -> None:
        """Start the first rank and return when all have ended or the limit is over.

        A rank that does not come back is interrupted at its next line of Python; one that is stuck in native code
        cannot be, and its thread is left behind, which the error says.
        """
        turns = self.turns
        turns.start()
        try:
            while not turns.over:
                started = time.monotonic()
                self._look()
                if not self._in_debugger():
                    self._spent += time.monotonic() - started
                if self.limit is not None and self._spent >= self.limit and not turns.over:
                    self._end(self.limit)
                    break
        except BaseException:
            self._interrupt()
            raise
        for rank in turns.ranks:
            if rank.main is not None and rank.main.status == DONE:
                rank.main.thread.join(_GRACE)

    def _look(self) -> None:
        """Wait for something to happen; give the turn on if all that runs is seen waiting."""
        turns = self.turns
        slice_ = _SLICE if self.limit is None else max(0.0, min(_SLICE, self.limit - self._spent))
        unseen = turns.unseen()
        if unseen:
            before = {thread: native_waits.mark(thread.thread) for thread in unseen}
            turns.bell.clear()
            if turns.over or turns.bell.wait(min(slice_, native_waits.settle_time())):
                return
            marks = {t: m for t, m in before.items() if m is not None and native_waits.mark(t.thread) == m}
            if len(marks) == len(before):
                turns.rest(marks)
            return
        turns.bell.clear()
        if turns.over or turns.unseen():
            return
        idle = turns.holder is None
        if turns.bell.wait(min(slice_, _IDLE) if idle else slice_) or not idle:
            return
        if not turns.unwinding:
            turns.pass_time(_IDLE)
            return
        self._idle += 1
        if self._idle * _IDLE > _GRACE:  # the run has failed, and some thread does not come back from a native wait
            self._interrupt()

    def _end(self, limit: float) -> None:
        failure = self.outcome.fail(LimitError, f"the run did not end within its limit of {limit:g} s:")
        left = self._interrupt()
        if left:
            failure.add_note(f"the threads of ranks {left} are stuck in native code and were left behind")

    def _interrupt(self) -> list[int]:
        """Take every rank off its stack; returns the ranks that could not be."""
        turns = self.turns
        turns.unwind()
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline:
            for thread in self._running():
                ident = ctypes.c_ulong(thread.thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Unwind))
            time.sleep(0.01)
            if turns.over:
                return []
        self.abandoned = True
        stuck = {thread.rank.number for thread in self._running()}
        turns.abandon()
        for rank in turns.ranks:
            if rank.number not in stuck and rank.main is not None:
                rank.main.thread.join(_GRACE)
        return sorted(stuck)

    def _running(self) -> list[RankThread]:
        return [thread for thread in self.turns.threads() if thread.status == RUNNING]

    def _in_debugger(self) -> bool:
        for thread in self._running():
            frame: FrameType | None = sys._current_frames().get(thread.thread.ident or 0)
            while frame is not None:
                if frame.f_code.co_filename.endswith(("pdb.py", "bdb.py")):
                    return True
                frame = frame.f_back
        return False
