"""What every part of a run may know: what was asked for, whose turn it is, the record, and the works under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kpool_testing.record.trace import Trace
from kpool_testing.simulation.turns import Turns


@dataclass(frozen=True)
class Settings:
    """What a run was asked for; see `simulate`."""

    size: int
    dialect: str
    backend: str
    seed: int
    limit: float | None
    allow_unwaited: bool


class Unwaited:
    """The works that the user's code has made and not waited for yet, by rank."""

    def __init__(self, size: int) -> None:
        self._works: list[dict[object, None]] = [{} for _ in range(size)]

    def add(self, rank: int, work: object) -> None:
        """A rank has made a work."""
        self._works[rank][work] = None

    def settle(self, rank: int, work: object) -> None:
        """The work has been waited for, or handed to who will."""
        self._works[rank].pop(work, None)

    def of(self, rank: int) -> Sequence[object]:
        """A rank's works that nobody has waited for, oldest first."""
        return list(self._works[rank])


@dataclass(frozen=True)
class Context:
    """The parts of a run that its calls share."""

    settings: Settings
    turns: Turns
    trace: Trace
    unwaited: Unwaited
