"""What a failed run says: one line a rank, and the exception that stands for all."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from kpool_testing.errors import CollectiveError, RankError, rank_error
from kpool_testing.record.call import is_user_file
from kpool_testing.record.trace import Trace
from kpool_testing.simulation.futures import CompleterWait
from kpool_testing.simulation.injection import DropOut
from kpool_testing.simulation.turns import RESTING, Rank, RankThread, Unwind

_E = TypeVar("_E", bound=CollectiveError)


@dataclass
class Outcome:
    """How a run ends: which ranks raised, in that order, and what is wrong with the run as a whole.

    Attributes:
        lines: where every rank was when the run was found to have failed.
        note: the settings that repeat the run.
    """

    ranks: Sequence[Rank]
    trace: Trace
    note: str
    raised: list[Rank]
    failure: CollectiveError | None = None
    lines: list[str] | None = None

    def fail(self, kind: type[_E], headline: str) -> _E:
        """The run has failed as a whole: keep where every rank is now, and the error that says so."""
        self.lines = rank_lines(self.ranks)
        error = self._error(kind, headline)
        self.failure = error
        return error

    def raise_it(self) -> None:
        """Raise what went wrong, if anything did: a rank's own exception before anything that follows from it."""
        __tracebackhide__ = True
        own = [rank for rank in self.raised if not isinstance(rank.error, DropOut)]
        if own:
            self._raise_rank(own[0])
        if self.failure is not None:
            self.failure.add_note(self.note)
            raise self.failure
        for rank in self.raised:
            raise self._error(RankError, f"rank {rank.number} {rank.error}")

    def _error(self, kind: type[_E], headline: str) -> _E:
        lines = self.lines if self.lines is not None else rank_lines(self.ranks)
        error = kind("\n".join([headline, *lines]))
        error.trace = self.trace
        return error

    def _raise_rank(self, rank: Rank) -> None:
        __tracebackhide__ = True
        error = rank.error
        lines = self.lines if self.lines is not None else rank_lines(self.ranks)
        if isinstance(error, CollectiveError):
            error.trace = self.trace
            same = {_headline(other.error) for other in self.ranks if other.error is not None}
            if len(same) > 1 or any(other.error is None for other in self.ranks):
                error.add_note("\n".join(["where every rank was:", *lines]))
            error.add_note(self.note)
            raise error.with_traceback(_to_user(error.__traceback__))
        if isinstance(error, Exception):
            headline = f"rank {rank.number} raised {type(error).__name__}: {error}"
            whole = rank_error("\n".join([headline, *lines]), error)
            whole.trace = self.trace
            whole.add_note(self.note)
            raise whole from error
        if error is not None and not isinstance(error, Unwind):
            raise error


def rank_lines(ranks: Sequence[Rank]) -> list[str]:
    """Where every rank is now, and every thread that it has started and that waits."""
    lines = []
    for rank in ranks:
        lines.append(f"  rank {rank.number}: {_where(rank)}")
        for thread in rank.threads:
            if not thread.is_main and thread.wait is not None and not isinstance(thread.wait, CompleterWait):
                lines.append(f"  rank {rank.number}, thread {thread.thread.name}: {thread.wait.describe()}")
    return lines


def _where(rank: Rank) -> str:
    if isinstance(rank.error, DropOut):
        return str(rank.error)
    if rank.error is not None:
        site = _raised_at(rank.error)
        return f"raised {_headline(rank.error)}" + (f" at {site}" if site is not None else "")
    if rank.returned:
        return "returned; will never join another call"
    main = rank.main
    if main is None:
        return "has not started"
    if main.wait is not None:
        return main.wait.describe()
    site = _runs_at(main)
    if site is None:
        return "has not started"
    return f"waits at {site}, outside of any call" if main.status == RESTING else f"runs at {site}"


def _runs_at(thread: RankThread) -> str | None:
    frame: Any = sys._current_frames().get(thread.thread.ident or 0)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


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
