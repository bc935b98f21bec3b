"""The errors that simulated and real groups report."""

from __future__ import annotations

from typing import Any

__all__ = [
    "AsyncError",
    "BrokenGroupError",
    "CollectiveError",
    "DeadlockError",
    "LimitError",
    "MismatchError",
    "RankError",
    "RefusedError",
    "TimedOutError",
]


class CollectiveError(RuntimeError):
    """Base of every error a simulated or real group reports; `trace` holds the calls made until then, if known."""

    trace: Any = None


class RankError(CollectiveError):
    """A rank raised an exception of its own: the first line names it, `__cause__` is the exception.

    Wherever Python's object layout allows, the error is also an instance of the exception's own type, so both
    `pytest.raises(RankError)` and `pytest.raises(ValueError)` catch a rank's ValueError.
    """


class MismatchError(CollectiveError):
    """Ranks met in one call and disagree: kind, shape, dtype, reduce op, root or split sizes."""


class DeadlockError(CollectiveError):
    """Ranks wait in a call that others will never join: one line a rank says where each one is."""


class TimedOutError(CollectiveError):
    """A wait that the program limited has run out on this rank; gloo raises a RuntimeError there too.

    Raised by `Work.wait(timeout)`, `monitored_barrier`, a group made with a time-out of its own, and `Store.wait`, once
    no rank can make progress before it.
    """


class BrokenGroupError(CollectiveError):
    """A call on a group that an earlier time-out has broken: real backends close their connections then."""


class RefusedError(CollectiveError, ValueError):
    """One rank's own arguments are such that gloo or NCCL would refuse, or corrupt, the call (dialect "portable")."""


class LimitError(CollectiveError):
    """The run took longer than its limit: one line a rank says where each one is."""


class AsyncError(CollectiveError):
    """A tensor in flight was changed before `wait()`, or a Work was never waited for."""


def rank_error(message: str, cause: Exception) -> RankError:
    """A RankError with this message that is, where Python allows it, also an instance of the cause's type."""
    kind = type(cause)
    if isinstance(cause, CollectiveError) or kind is RuntimeError:
        return RankError(message)
    try:
        both = type("RankError", (RankError, kind), {"__init__": _plain_init, "__str__": _first_argument})
        error: RankError = both(message)
        error.__dict__.update(cause.__dict__)
        error.__dict__.pop("__notes__", None)
    except Exception:
        return RankError(message)
    return error


def _plain_init(self: Exception, message: str) -> None:
    self.args = (message,)


def _first_argument(self: Exception) -> str:
    return str(self.args[0])
