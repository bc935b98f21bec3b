"""Where pools lie: worked examples, and the grid against one written token by token."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kpool.grid import PoolGrid
from kpool_testing import strategies as ragged


def by_hand(edges: list[int], tokens: int, pool_size: int) -> list[int]:
    starts = [
        first
        for begin, end in itertools.pairwise(edges)
        for first in range(begin, end, pool_size)
        if first + pool_size <= end
    ]
    return (starts + [-1] * tokens)[: tokens // pool_size]


@pytest.mark.parametrize(
    ("tokens", "pool_size", "starts"), [(8, 2, [0, 2, 4, 6]), (7, 3, [0, 3]), (3, 4, []), (0, 1, [])]
)
def test_plain(tokens: int, pool_size: int, starts: list[int], device: torch.device) -> None:
    grid = PoolGrid.plain(tokens, pool_size, device)
    assert grid.starts().tolist() == starts and grid.num_pools == tokens // pool_size
    assert grid.starts().dtype == torch.int32 and grid.starts().device.type == device.type


@pytest.mark.parametrize(
    ("edges", "starts"),
    [
        ([0, 3, 8], [0, 3, 5, -1]),
        ([0, 0, 3, 8], [0, 3, 5, -1]),
        ([0, 3, 3, 3, 8], [0, 3, 5, -1]),
        ([0, 1, 2, 3, 8], [3, 5, -1, -1]),
        ([0, 4], [0, 2, -1, -1]),
        ([0], [-1, -1, -1, -1]),
        ([0, 0], [-1, -1, -1, -1]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed(edges: list[int], starts: list[int], dtype: torch.dtype, device: torch.device) -> None:
    grid = PoolGrid.packed(torch.tensor(edges, dtype=dtype, device=device), 8, 2)
    assert grid.starts().tolist() == starts


@given(cu=ragged.packed_cu_seqlens(), pool_size=st.integers(1, 5), padding=st.integers(0, 7))
def test_packed_grids_against_one_made_by_hand(cu: list[int], pool_size: int, padding: int) -> None:
    tokens = cu[-1] + padding
    grid = PoolGrid.packed(torch.tensor(cu), tokens, pool_size)
    assert grid.starts().tolist() == by_hand(cu, tokens, pool_size)


@given(cu=ragged.packed_cu_seqlens())
def test_document_of_every_slot(cu: list[int]) -> None:
    grid = PoolGrid.packed(torch.tensor(cu), cu[-1], 2)
    found = grid.document_of(torch.arange(cu[-1])[None])[0].tolist()
    assert found == [doc for doc, (begin, end) in enumerate(itertools.pairwise(cu)) for _ in range(begin, end)]


def test_document_of_slots_in_none() -> None:
    grid = PoolGrid.packed(torch.tensor([0, 2, 5]), 9, 2)
    assert grid.document_of(torch.tensor([[5, 8]])).tolist() == [[1, 1]]


def test_left_padded_grids_start_at_the_first_valid_token(device: torch.device) -> None:
    first, last = (torch.tensor(values, device=device) for values in ([0, 3, 7, 7], [7, 7, 7, 7]))
    grid = PoolGrid.left_padded(first, last, 7, 2)
    assert grid.starts().tolist() == [[0, 2, 4], [3, 5, -1], [-1, -1, -1], [-1, -1, -1]]
    assert grid.document_of(torch.tensor([[4], [4], [4], [4]], device=device)).tolist() == [[0]] * 4
