"""Hypothesis strategies for the shapes that break sharded code: ragged, empty, packed, one off a chunk edge.

from hypothesis import given
from kpool_testing import strategies

@given(strategies.ragged_rows(max_rows=40))
def test_rows(case):
    rows, size = case
    ...
"""

from __future__ import annotations

from hypothesis import strategies as st

SIZES = (1, 2, 3, 4, 8)


def world_sizes(sizes: tuple[int, ...] = SIZES) -> st.SearchStrategy[int]:
    """Group sizes, odd ones among them."""
    return st.sampled_from(sizes)


def ragged_rows(max_rows: int = 64, sizes: tuple[int, ...] = SIZES) -> st.SearchStrategy[tuple[int, int]]:
    """`(rows, size)`: even splits, ragged ones, rows < size so that ranks are empty, no row at all."""
    return world_sizes(sizes).flatmap(
        lambda size: st.one_of(
            st.integers(0, max_rows),
            st.integers(0, max_rows // size).map(lambda share: share * size),
            chunk_edges(size, max_rows),
            st.integers(0, min(max_rows, size)),
        ).map(lambda rows: (rows, size))
    )


def row_splits(rows: int, size: int) -> st.SearchStrategy[list[int]]:
    """`size` counts >= 0 that sum to `rows`, empty shards and shards of one row among them."""
    if rows < 0 or size < 1:
        raise ValueError(f"expected rows >= 0 and size >= 1, got rows={rows}, size={size}")
    cuts = st.lists(st.integers(0, rows), min_size=size - 1, max_size=size - 1).map(sorted)
    free = cuts.map(lambda inner: [b - a for a, b in zip([0, *inner], [*inner, rows], strict=True)])
    one_owner = st.integers(0, size - 1).map(lambda owner: [rows if rank == owner else 0 for rank in range(size)])
    return st.one_of(free, one_owner)


def packed_cu_seqlens(
    max_documents: int = 6, max_length: int = 24, *, multiple_of: int = 1, chunk: int = 8
) -> st.SearchStrategy[list[int]]:
    """Cumulative document lengths `[0, n1, n1 + n2, ...]` with empty documents, tiny ones, and ones at a chunk's edge.

    Args:
        max_documents: most documents; there is at least one.
        max_length: most tokens of one document.
        multiple_of: the total is a multiple of this, by a longer last document.
        chunk: the chunk size whose edges are favoured.
    """
    length = st.one_of(
        st.just(0), st.integers(1, min(3, max_length)), chunk_edges(chunk, max_length), st.integers(0, max_length)
    )

    def accumulate(lengths: list[int]) -> list[int]:
        total = [0]
        for one in lengths:
            total.append(total[-1] + one)
        total[-1] += -total[-1] % multiple_of
        return total

    return st.lists(length, min_size=1, max_size=max_documents).map(accumulate)


def chunk_edges(chunk: int, limit: int) -> st.SearchStrategy[int]:
    """Integers in [0, limit] that are a multiple of `chunk`, one less, or one more."""
    if chunk < 1 or limit < 0:
        raise ValueError(f"expected chunk >= 1 and limit >= 0, got chunk={chunk}, limit={limit}")
    edges = {k * chunk + off for k in range(limit // chunk + 2) for off in (-1, 0, 1)}
    return st.sampled_from(sorted(edge for edge in edges if 0 <= edge <= limit))
