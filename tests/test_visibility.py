"""Windows, heads, tails and visible pools: worked examples, and every layout against the reference's windows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kpool import Visibility, pool_keys, reference
from kpool.visibility import RowWindows, on_cpu
from tests.support.calls import LAYOUTS, visibility_of

CPU = torch.device("cpu")
INF = torch.inf


def windows(visibility: Visibility, rows: int, tokens: int, pool_size: int, batch: int = 1) -> RowWindows:
    made = visibility.windows(rows=rows, tokens=tokens, batch=batch, pool_size=pool_size)
    for name in ("start", "end", "pool_lo", "pool_hi", "tail_start", "head_end"):
        tensor = getattr(made, name)
        assert tensor.dtype == torch.int32 and tensor.shape[1] == rows, name
    return made


def head_pools_tail(view: RowWindows, row: int, entry: int = 0) -> tuple[list[int], list[int], list[int]]:
    def between(first: torch.Tensor, last: torch.Tensor) -> list[int]:
        return list(range(int(first[entry, row]), int(last[entry, row])))

    return between(view.start, view.head_end), between(view.pool_lo, view.pool_hi), between(view.tail_start, view.end)


def bounds(start: int, end: int, **more: Any) -> Visibility:
    return Visibility.bounds(torch.tensor([start]), torch.tensor([end]), **more)


@pytest.mark.parametrize(
    ("start", "end", "head", "pools", "tail"),
    [
        (0, 10, [], [0, 1], [8, 9]),
        (1, 10, [1, 2, 3], [1], [8, 9]),
        (4, 8, [], [1], []),
        (5, 7, [], [], [5, 6]),  # no boundary inside: all of it is tail
        (3, 5, [3], [], [4]),
        (3, 4, [3], [], []),  # the boundary at the end: head, not tail
        (2, 8, [2, 3], [1], []),
        (7, 7, [], [], []),
        (-5, 30, [], [0, 1, 2], []),
        (12, 40, [], [], []),
        (-9, -3, [], [], []),
    ],
)
def test_bounds_on_the_plain_grid(start: int, end: int, head: list[int], pools: list[int], tail: list[int]) -> None:
    assert head_pools_tail(windows(bounds(start, end), 1, 12, 4), 0) == (head, pools, tail)


def test_last_tokens_past_the_last_complete_pool_are_tail() -> None:
    assert head_pools_tail(windows(bounds(0, 100), 1, 11, 4), 0) == ([], [0, 1], [8, 9, 10])


@pytest.mark.parametrize(
    ("start", "end", "head", "pools", "tail"),
    [
        (3, 8, [], [1, 2], [7]),
        (4, 8, [4], [2], [7]),
        (0, 3, [], [0], [2]),
        (2, 3, [], [], [2]),
        (1, 3, [1], [], [2]),
        (8, 9, [], [], []),  # past the last document
        (3, 9, [], [1, 2], [7]),
    ],
)
def test_bounds_on_a_packed_grid(start: int, end: int, head: list[int], pools: list[int], tail: list[int]) -> None:
    view = windows(bounds(start, end, cu_seqlens=torch.tensor([0, 3, 8])), 1, 10, 2)
    assert head_pools_tail(view, 0) == (head, pools, tail)


def test_causal_with_first() -> None:
    view = windows(Visibility.causal(2, first=5), 2, 7, 2)
    assert [head_pools_tail(view, row) for row in range(2)] == [([], [0, 1, 2], []), ([], [0, 1, 2], [6])]


def test_causal_rows_past_the_keys_see_all_of_them() -> None:
    assert head_pools_tail(windows(Visibility.causal(6), 6, 3, 2), 5) == ([], [0], [2])


def test_packed_positions_say_where_the_rows_are() -> None:
    cu = torch.tensor([0, 3, 8])
    every = windows(Visibility.packed(cu), 10, 10, 2)
    order = [7, 2, 2, 9, 0, -1, 100]
    some = windows(Visibility.packed(cu, torch.tensor(order)), len(order), 10, 2)
    for row, position in enumerate(order):
        expected = head_pools_tail(every, position) if 0 <= position < 10 else ([], [], [])
        assert head_pools_tail(some, row) == expected


def test_left_padded() -> None:
    valid = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0]]).bool()
    view = windows(Visibility.left_padded(valid), 6, 6, 2, batch=4)
    assert head_pools_tail(view, 5, 0) == ([], [0], [5])
    assert head_pools_tail(view, 4, 0) == ([], [0], [])
    assert head_pools_tail(view, 2, 0) == ([], [], [])
    assert head_pools_tail(view, 4, 1) == ([], [0, 1], [4])
    assert head_pools_tail(view, 5, 2) == ([], [], [])
    assert head_pools_tail(view, 4, 3) == ([], [0, 1], [])
    assert head_pools_tail(view, 5, 3) == ([], [], [])  # a padded row after the text


def test_left_padded_last_rows_only() -> None:
    valid = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool()
    view = windows(Visibility.left_padded(valid, queries=1), 1, 4, 2, batch=2)
    assert head_pools_tail(view, 0, 0) == ([], [0], [3])
    assert head_pools_tail(view, 0, 1) == ([], [0, 1], [])


def test_key_positions_with_gaps() -> None:
    positions = torch.tensor([0, 5, 5, 9, 20, 21])
    for start, end, slots in [
        (0, 6, range(3)),
        (5, 10, range(1, 4)),
        (6, 9, range(0)),
        (1, 21, range(1, 5)),
        (-3, 99, range(6)),
    ]:
        view = windows(bounds(start, end, key_positions=positions), 1, 6, 2)
        assert list(range(int(view.start), int(view.end))) == list(slots), (start, end)


def test_documents_stored_out_of_order() -> None:
    """Slots 0-2 hold positions 100-102, slots 3-7 hold positions 0-4: windows are slots, wherever the document lies."""
    positions, cu = torch.tensor([100, 101, 102, 0, 1, 2, 3, 4]), torch.tensor([0, 3, 8])
    first = windows(bounds(100, 103, key_positions=positions, cu_seqlens=cu), 1, 8, 2)
    assert head_pools_tail(first, 0) == ([], [0], [2])
    second = windows(bounds(0, 4, key_positions=positions, cu_seqlens=cu), 1, 8, 2)
    assert head_pools_tail(second, 0) == ([], [1, 2], [])


def test_positions_of_the_padding_are_nobodys() -> None:
    """Slots past `cu[-1]` may hold any position, also one of a document."""
    positions, cu = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]), torch.tensor([0, 4])
    view = windows(bounds(0, 3, key_positions=positions, cu_seqlens=cu), 1, 8, 2)
    assert head_pools_tail(view, 0) == ([], [0], [2])
    early = torch.tensor([5, 6, 7, 8, 0, 0, 0, 0])
    view = windows(bounds(0, 7, key_positions=early, cu_seqlens=cu), 1, 8, 2)
    assert head_pools_tail(view, 0) == ([], [0], [])


def test_bounds_with_gaps_in_memory() -> None:
    starts, ends = torch.tensor([0, 9, 2, 9])[::2], torch.tensor([5, 9, 7, 9])[::2]
    view = windows(Visibility.bounds(starts, ends, torch.arange(8)), 2, 8, 2)
    assert head_pools_tail(view, 0) == ([], [0, 1], [4])
    assert head_pools_tail(view, 1) == ([], [1, 2], [6])


def test_left_padded_grid_ends_with_the_last_valid_token() -> None:
    valid = torch.tensor([[False, True, True, True, False, False]])
    grid = Visibility.left_padded(valid).grid(tokens=6, pool_size=2, device=CPU)
    assert grid.starts().tolist() == [1, -1, -1]


def test_mask_window_head_tail_and_holes() -> None:
    mask = torch.full((3, 10), -INF)
    mask[0, 1:9] = 0
    mask[1, [1, 4, 5, 6, 9]] = 0
    view = windows(Visibility.from_mask(mask), 3, 10, 4)
    assert head_pools_tail(view, 0) == ([1, 2, 3], [1], [8])
    assert head_pools_tail(view, 1) == ([1, 2, 3], [1], [8, 9])  # the holes stay inside; they are taken out later
    assert head_pools_tail(view, 2) == ([], [], [])
    assert view.mask is not None and view.mask.shape == (1, 3, 10)


def test_any_finite_value_is_visible_and_nan_is_not() -> None:
    view = windows(Visibility.from_mask(torch.tensor([[-1e30, 5.0, torch.nan, INF]])), 1, 4, 2)
    assert (int(view.start), int(view.end)) == (0, 2)


def test_masks_of_many_rows_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.zeros(2, 50, 30).masked_fill(torch.rand(2, 50, 30) < 0.5, -INF)
    whole = windows(Visibility.from_mask(mask), 50, 30, 4, batch=2)
    monkeypatch.setattr("kpool.visibility._MASK_PIECE_BYTES", 1)
    pieces = windows(Visibility.from_mask(mask), 50, 30, 4, batch=2)
    assert torch.equal(whole.start, pieces.start) and torch.equal(whole.end, pieces.end)


def test_rows_that_see_nothing_have_the_empty_window_0_0() -> None:
    outside = Visibility.packed(torch.tensor([0, 2, 5]), torch.tensor([-1, 3, 5]))
    padded = Visibility.left_padded(torch.tensor([[False, True, True]]))
    for visibility, tokens, right in ((outside, 6, [[0, 0], [2, 4], [0, 0]]), (padded, 3, [[0, 0], [1, 2], [1, 3]])):
        window = visibility.windows(rows=3, tokens=tokens, batch=1, pool_size=2)
        assert torch.stack([window.start[0], window.end[0]], -1).tolist() == right


def test_left_padding_of_no_tokens_and_of_no_rows() -> None:
    nothing = Visibility.left_padded(torch.zeros(2, 0, dtype=torch.bool))
    assert nothing.windows(rows=0, tokens=0, batch=2, pool_size=2).start.shape == (2, 0)
    assert nothing.grid(tokens=0, pool_size=2, device=CPU).starts().shape == (2, 0)
    no_rows = Visibility.left_padded(torch.ones(2, 3, dtype=torch.bool), queries=0)
    assert no_rows.windows(rows=0, tokens=3, batch=2, pool_size=2).end.shape == (2, 0)


def test_values_are_read_on_the_cpu_alone() -> None:
    there = torch.ones(2, 3, dtype=torch.bool, device="meta")
    assert on_cpu(torch.ones(1)) and not on_cpu(there) and not on_cpu(torch.ones(1), there)
    assert Visibility.left_padded(there).kind == "left_padded"
    index, real = torch.zeros(3, dtype=torch.int64, device="meta"), torch.tensor([0, 3])
    for positions, cu_seqlens in ((index, None), (torch.tensor([2, 1, 0]), index), (index, real)):
        assert Visibility.bounds(index, index, positions, cu_seqlens).kind == "bounds"


def test_errors_name_the_first_wrong_place() -> None:
    def bounds(*tensors: list[int] | None) -> Visibility:
        return Visibility.bounds(*(None if t is None else torch.tensor(t) for t in tensors))

    with pytest.raises(ValueError, match=r"got \[5, 3\) in row 1"):
        bounds([2, 5, 9], [2, 3, 1])
    with pytest.raises(ValueError, match="got 1 then 0 at slot 1"):
        bounds([0], [1], [0, 1, 0, 3, 2])
    with pytest.raises(ValueError, match="got 3 then 2 at slot 3"):
        bounds([0], [1], [0, 1, 0, 3, 2], [0, 2, 5])
    with pytest.raises(ValueError, match="got 2 then 1 at slot 2"):
        bounds([0], [1], [0, 1, 2, 1], [0, 4])
    assert bounds([0], [1], [5, 0, 1], [0, 1, 3]).kind == "bounds"
    assert bounds([0], [1], [0, 1, 0, 3, 2], [0, 2, 4]).kind == "bounds"  # slot 4 is padding
    assert bounds([0], [1], [1, 1, 0, 0, 7], [0, 0, 2, 5]).kind == "bounds"


def test_where_heads_are_ruled_out_there_are_none() -> None:
    """`expand` then never looks for one, which on a GPU it could not find out by reading."""
    for seed in range(60):
        rng = random.Random(seed)
        tokens, pool_size = rng.randrange(1, 40), rng.choice([1, 2, 3, 5])
        edges = sorted(rng.choices(range(tokens + 1), k=3))
        valid = torch.zeros(2, tokens, dtype=torch.bool)
        for row in valid:
            row[rng.randrange(tokens) : rng.randrange(tokens + 1)] = True
        starts = [
            Visibility.causal(7, first=rng.randrange(9)),
            Visibility.packed(torch.tensor([0, *edges]), torch.randint(-2, tokens + 3, (7,))),
            Visibility.unlimited(),
            Visibility.left_padded(valid),
        ]
        for visibility in starts:
            view = windows(visibility, tokens if visibility.kind == "left_padded" else 7, tokens, pool_size, 2)
            assert not view.heads and torch.equal(view.start, view.head_end), (seed, visibility.kind)
    assert windows(Visibility.bounds(torch.tensor([1]), torch.tensor([3])), 1, 4, 2).heads
    assert windows(Visibility.from_mask(torch.zeros(1, 4)), 1, 4, 2).heads


def test_what_holds_tensors_compares_by_identity() -> None:
    """Tensors compared element by element give no truth value; in a dict or a cache the object itself counts."""
    one, other = Visibility.causal(3), Visibility.causal(3)
    assert one == one and one != other and len({one, other, one}) == 2
    pooled = pool_keys(torch.zeros(4, 1, 2), torch.zeros(4, 1, 2), None, 2)
    assert pooled == pooled and len({pooled, pooled}) == 1


def test_no_limit() -> None:
    view = windows(Visibility.unlimited(), 4, 7, 2)
    assert view.tail_in_pools
    assert [head_pools_tail(view, row)[1] for row in range(4)] == [[0, 1, 2]] * 4
    assert [head_pools_tail(view, row)[2] for row in range(4)] == [[0], [], [2], []]


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "nothing"])
def test_every_layout_against_the_reference(layout: str) -> None:
    for seed in range(40):
        rng = random.Random(f"{layout} {seed}")
        tokens, pool_size, batch = rng.randrange(40), rng.choice([1, 2, 3, 5]), rng.choice([1, 2])
        rows = tokens if layout == "packed" else rng.randrange(20)
        given = visibility_of(layout, rng, rows, tokens, batch)
        cu = given.get("cu_seqlens_kv")
        if "mask" in given:
            visibility = Visibility.from_mask(given["mask"])
        elif "varlen_starts" in given:
            visibility = Visibility.bounds(given["varlen_starts"], given["varlen_ends"], given.get("key_positions"), cu)
        else:
            assert cu is not None
            visibility = Visibility.packed(cu)
        view = windows(visibility, rows, tokens, pool_size, batch)
        lists = {
            "starts": "varlen_starts",
            "ends": "varlen_ends",
            "key_positions": "key_positions",
            "cu_seqlens": "cu_seqlens_kv",
        }
        plain: dict[str, Any] = {name: given[key].tolist() for name, key in lists.items() if key in given}
        pool_starts = reference.pool_starts(tokens, pool_size, plain.get("cu_seqlens"))
        for entry in range(view.start.shape[0]):
            if "mask" in given:
                plain["mask"] = given["mask"] if given["mask"].dim() == 2 else given["mask"][entry]
            for row, window in enumerate(reference.row_windows(rows, tokens, **plain)):
                head, tail = window.head_and_tail(pool_size)
                got_head, got_pools, got_tail = head_pools_tail(view, row, entry)
                assert [-1 if t in window.hidden else t for t in got_head] == head
                assert [-1 if t in window.hidden else t for t in got_tail] == tail
                whole = reference.Window(window.start, window.end, window.origin)
                seen = [n for n, first in enumerate(pool_starts) if first >= 0 and whole.sees(first, pool_size)]
                assert got_pools == seen, (seed, row, window)
