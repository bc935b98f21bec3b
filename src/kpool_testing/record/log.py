"""The calls of one run in global order, and their totals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kpool_testing.record.call import Call, canonical_kind
from kpool_testing.record.interconnect import INTERCONNECTS, Interconnect, seconds


class CallLog:
    """The calls of one run in global order."""

    def __init__(self, calls: Iterable[Call] = (), size: int | None = None) -> None:
        """`size`: number of ranks; taken from the calls where it is not given."""
        self.calls: list[Call] = list(calls)
        self._size = size

    def append(self, call: Call) -> None:
        """Add the next call."""
        self.calls.append(call)

    def extend(self, other: CallLog) -> None:
        """Add another run's calls, in order."""
        self._size = max(self.size, other.size)
        self.calls.extend(other.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.calls)} calls, {self.size} ranks, {self.total_bytes()} bytes sent)"

    @property
    def size(self) -> int:
        """Number of ranks in the run."""
        seen = max((max(call.ranks, default=call.rank) for call in self.calls), default=-1) + 1
        return max(seen, self._size or 0)

    def of_rank(self, rank: int) -> list[Call]:
        """The calls of one rank, in its own order."""
        return [call for call in self.calls if call.rank == rank]

    def total_bytes(self, rank: int | None = None, kind: str | None = None) -> int:
        """Bytes handed to collectives: by all ranks or by one, of all kinds or of one."""
        wanted = canonical_kind(kind) if kind is not None else None
        return sum(
            call.bytes
            for call in self.calls
            if (rank is None or call.rank == rank) and (wanted is None or call.kind == wanted)
        )

    def estimate(self, interconnect: str | Interconnect) -> float:
        """Seconds the slowest rank would spend in its collectives under the alpha-beta model.

        Args:
            interconnect: a key of `INTERCONNECTS` or an `Interconnect`.

        Raises:
            ValueError: unknown name.
        """
        if isinstance(interconnect, str):
            if interconnect not in INTERCONNECTS:
                raise ValueError(f"unknown interconnect {interconnect!r}, expected one of {sorted(INTERCONNECTS)}")
            interconnect = INTERCONNECTS[interconnect]
        per_rank = [0.0] * max(1, self.size)
        for call in self.calls:
            per_rank[call.rank] += seconds(call.kind, call.bytes, len(call.ranks), interconnect)
        return max(per_rank)
