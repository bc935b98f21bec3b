"""The strategies reach the shapes they promise and none that is not legal."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import kpool_testing
from kpool_testing import strategies

QUIET = settings(database=None, max_examples=2000)


@given(strategies.ragged_rows(max_rows=40))
def test_rows_and_sizes_are_in_range(case: tuple[int, int]) -> None:
    rows, size = case
    assert 0 <= rows <= 41 and size in strategies.SIZES


@pytest.mark.parametrize(
    "wanted",
    [
        lambda case: case[0] == 0,
        lambda case: 0 < case[0] < case[1],
        lambda case: case[0] > case[1] > 1 and case[0] % case[1] == 1,
        lambda case: case[0] > case[1] > 1 and case[0] % case[1] == case[1] - 1,
        lambda case: case[0] > case[1] > 1 and case[0] % case[1] == 0,
    ],
)
def test_ragged_rows_reach_every_kind(wanted: object) -> None:
    find(strategies.ragged_rows(), wanted, settings=QUIET)  # type: ignore[arg-type]


@given(st.data(), st.integers(0, 20), st.integers(1, 8))
def test_splits_sum_to_the_rows(data: st.DataObject, rows: int, size: int) -> None:
    split = data.draw(strategies.row_splits(rows, size))
    assert len(split) == size and sum(split) == rows and min(split) >= 0


def test_splits_reach_empty_shards_and_one_row() -> None:
    find(strategies.row_splits(9, 3), lambda split: 0 in split and 1 in split, settings=QUIET)
    find(strategies.row_splits(9, 3), lambda split: sorted(split) == [0, 0, 9], settings=QUIET)


@given(strategies.packed_cu_seqlens(max_documents=5, max_length=20, multiple_of=4))
def test_cumulative_lengths_ascend(cu: list[int]) -> None:
    assert cu[0] == 0 and cu == sorted(cu) and 2 <= len(cu) <= 6 and cu[-1] % 4 == 0


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9])
def test_documents_reach_empty_tiny_and_chunk_edges(length: int) -> None:
    find(
        strategies.packed_cu_seqlens(chunk=8),
        lambda cu: len(cu) > 3 and cu[2] - cu[1] == length and cu[-1] > cu[2],
        settings=QUIET,
    )


@given(strategies.chunk_edges(8, 33))
def test_edges_are_one_off_at_most(edge: int) -> None:
    assert 0 <= edge <= 33 and edge % 8 in (7, 0, 1)


@pytest.mark.parametrize(("call", "values"), [("chunk_edges", (0, 8)), ("row_splits", (-1, 2)), ("row_splits", (3, 0))])
def test_bad_arguments_are_refused(call: str, values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        getattr(strategies, call)(*values)


def test_nothing_else_needs_hypothesis_or_loads_the_rest_early() -> None:
    """At import, only `strategies` loads hypothesis, only `plugin` loads pytest, and most nothing at all."""
    home = Path(kpool_testing.__file__).parent
    owners: dict[str, set[str]] = {"hypothesis": set(), "pytest": set(), "cloudpickle": set(), "torch": set()}
    for path in home.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                owners.get(name.partition(".")[0], set()).add(path.stem)
    assert (owners["hypothesis"], owners["pytest"], owners["cloudpickle"]) == ({"strategies"}, {"plugin"}, set())
    assert not owners["torch"] & {"__init__", "plugin", "launch", "worker", "trace", "torchrun"}
