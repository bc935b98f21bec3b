"""Waits for a run to end, and ends it when it takes too long."""

from __future__ import annotations

import ctypes
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

from kpool_testing.baton import DONE, Unwind
from kpool_testing.checks import LimitError
from kpool_testing.report import failure_of, rank_lines

if TYPE_CHECKING:
    from kpool_testing.world import Simulation

_SLICE, _GRACE = 0.5, 1.0


def watch(simulation: Simulation, limit: float | None) -> None:
    """Start the first rank and return when all have ended or the limit is over.

    A rank that does not come back is interrupted at its next line of Python; one that is stuck in native code cannot
    be, and its thread is left behind, which the error says.
    """
    baton = simulation.baton
    spent = 0.0
    baton.start()
    try:
        while True:
            started = time.monotonic()
            remaining = _SLICE if limit is None else max(0.0, min(_SLICE, limit - spent))
            if baton.finished.acquire(timeout=remaining):
                break
            if not _in_debugger(simulation):
                spent += time.monotonic() - started
            if limit is not None and spent >= limit:
                _over(simulation, limit)
                break
    except BaseException:
        _interrupt(simulation)
        raise
    for seat in baton.seats:
        if seat.thread is not None and seat.status == DONE:
            seat.thread.join(_GRACE)


def _over(simulation: Simulation, limit: float) -> None:
    simulation.lines = rank_lines(simulation)
    simulation.failure = failure_of(simulation, LimitError, f"the run did not end within its limit of {limit:g} s:")
    left = _interrupt(simulation)
    if left:
        simulation.failure.add_note(f"the threads of ranks {left} are stuck in native code and were left behind")


def _interrupt(simulation: Simulation) -> list[int]:
    """Take every rank off its stack; returns the ranks that could not be."""
    baton = simulation.baton
    baton.unwind()
    deadline = time.monotonic() + _GRACE
    while time.monotonic() < deadline:
        running = baton.running
        if running is not None and running.thread is not None and running.status != DONE:
            ident = ctypes.c_ulong(running.thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Unwind))
        if baton.finished.acquire(timeout=0.05):
            return []
    simulation.abandoned = True
    stuck = baton.running
    for seat in baton.seats:
        if seat is not stuck and seat.status != DONE and seat.lock.locked():
            seat.lock.release()
    for seat in baton.seats:
        if seat is not stuck and seat.thread is not None:
            seat.thread.join(_GRACE)
    return [seat.rank for seat in (stuck,) if seat is not None]


def _in_debugger(simulation: Simulation) -> bool:
    frame = running_frame(simulation)
    while frame is not None:
        if frame.f_code.co_filename.endswith(("pdb.py", "bdb.py")):
            return True
        frame = frame.f_back
    return False


def running_frame(simulation: Simulation) -> FrameType | None:
    """The innermost frame of the rank that holds the baton."""
    seat = simulation.baton.running
    if seat is None or seat.thread is None or seat.thread.ident is None:
        return None
    return sys._current_frames().get(seat.thread.ident)
