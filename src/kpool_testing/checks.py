"""What a real backend would refuse, and the errors that say so."""

from __future__ import annotations

from typing import Any


class CollectiveError(RuntimeError):
    """Base of every error a simulated or real group reports; `trace` holds the calls made until then, if known."""

    trace: Any = None


class RankError(CollectiveError):
    """A rank raised an exception of its own: the first line names it, `__cause__` is the exception."""


class MismatchError(CollectiveError):
    """Ranks met in one call and disagree: kind, shape, dtype, reduce op, root or split sizes."""


class DeadlockError(CollectiveError):
    """Ranks wait in a call that others will never join: one line a rank says where each one is."""
