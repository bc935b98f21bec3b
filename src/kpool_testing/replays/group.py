"""FakeGroup: what a plain test hands to code that asks a process group only for its rank and its size."""

from __future__ import annotations


class FakeGroup:
    """A group handle that knows its rank and its size and nothing else.

    Example:
        group = FakeGroup(rank=1, size=3)
        assert (group.rank(), group.size()) == (1, 3)
    """

    def __init__(self, rank: int, size: int) -> None:
        """A member of a group of `size` ranks; raises ValueError unless 0 <= rank < size."""
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in [0, size), got rank={rank}, size={size}")
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """This member's number in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks in the group."""
        return self._size

    def __repr__(self) -> str:
        return f"FakeGroup(rank={self._rank}, size={self._size})"
