"""What a failed run says: one line a rank, and the exception that stands for all."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from kpool_testing.baton import DONE, Seat, Unwind
from kpool_testing.checks import CollectiveError, RankError, rank_error
from kpool_testing.faults import DropOut
from kpool_testing.trace import is_user_file

if TYPE_CHECKING:
    from kpool_testing.world import Simulation

_E = TypeVar("_E", bound=CollectiveError)


def rank_lines(simulation: Simulation) -> list[str]:
    """Where every rank is now."""
    return [f"  rank {seat.rank}: {_where(simulation, seat)}" for seat in simulation.baton.seats]


def _where(simulation: Simulation, seat: Seat) -> str:
    if isinstance(seat.error, DropOut):
        return str(seat.error)
    if seat.error is not None:
        site = _raised_at(seat.error)
        return f"raised {_headline(seat.error)}" + (f" at {site}" if site is not None else "")
    if seat.status == DONE:
        return "returned; will never join another call"
    if seat.wait is not None:
        return seat.wait.describe()
    frame = sys._current_frames().get(seat.thread.ident or 0) if seat.thread is not None else None
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"runs at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "has not started"


def _headline(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _raised_at(error: BaseException) -> str | None:
    site = None
    for frame in traceback.extract_tb(error.__traceback__):
        if is_user_file(frame.filename):
            site = f"{Path(frame.filename).as_posix()}:{frame.lineno}"
    return site


def _to_user(trace: TracebackType | None) -> TracebackType | None:
    """Cut a traceback behind its last line of the user's: what torch and this package did there explains nothing."""
    last, at = None, trace
    while at is not None:
        last = at if is_user_file(at.tb_frame.f_code.co_filename) else last
        at = at.tb_next
    if last is not None:
        last.tb_next = None
    return trace


def failure_of(simulation: Simulation, kind: type[_E], headline: str) -> _E:
    """An error with the headline and the lines of all ranks."""
    lines = simulation.lines if simulation.lines is not None else rank_lines(simulation)
    error = kind("\n".join([headline, *lines]))
    error.trace = simulation.trace
    return error


def raise_outcome(simulation: Simulation) -> None:
    """Raise what went wrong, if anything did: a rank's own exception before anything that follows from it."""
    __tracebackhide__ = True
    own = [seat for seat in simulation.failures if not isinstance(seat.error, DropOut)]
    if own:
        _raise_rank(simulation, own[0])
    if simulation.failure is not None:
        _annotate(simulation, simulation.failure)
        raise simulation.failure
    for seat in simulation.dropped():
        raise failure_of(simulation, RankError, f"rank {seat.rank} {seat.error}")


def _raise_rank(simulation: Simulation, seat: Seat) -> None:
    __tracebackhide__ = True
    error = seat.error
    lines = simulation.lines if simulation.lines is not None else rank_lines(simulation)
    if isinstance(error, CollectiveError):
        error.trace = simulation.trace
        same = {_headline(other.error) for other in simulation.baton.seats if other.error is not None}
        if len(same) > 1 or any(other.error is None for other in simulation.baton.seats):
            error.add_note("\n".join(["where every rank was:", *lines]))
        _annotate(simulation, error)
        raise error.with_traceback(_to_user(error.__traceback__))
    if isinstance(error, Exception):
        headline = f"rank {seat.rank} raised {type(error).__name__}: {error}"
        whole = rank_error("\n".join([headline, *lines]), error)
        whole.trace = simulation.trace
        _annotate(simulation, whole)
        raise whole from error
    if error is not None and not isinstance(error, Unwind):
        raise error


def _annotate(simulation: Simulation, error: BaseException) -> None:
    error.add_note(
        f"simulated with size={simulation.size}, dialect={simulation.dialect!r}, seed={simulation.seed}"
        f"{simulation.faults.note()}"
    )


@contextmanager
def diagnosed_once() -> Iterator[None]:
    """Keep torch from logging what this package raises, which pytest would show again for every rank."""
    logger = logging.getLogger("c10d-NullHandler-default")

    def foreign(_: logging.LogRecord) -> bool:
        return not isinstance(sys.exception(), CollectiveError)

    logger.addFilter(foreign)
    try:
        yield
    finally:
        logger.removeFilter(foreign)
