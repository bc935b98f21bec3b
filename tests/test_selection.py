"""The tie rule, the order of special values, and expansion to tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kpool import selection
from kpool.grid import PoolGrid
from kpool.selection import _sort_rows, expand, order_key, top_pools
from kpool.visibility import RowWindows, Visibility

NAN, INF = torch.nan, torch.inf
CPU = torch.device("cpu")


def pick(scores: list[float], budget: int, order: str = "score", visible: list[bool] | None = None) -> list[int]:
    seen = None if visible is None else torch.tensor(visible, dtype=torch.bool)
    picked: list[int] = top_pools(torch.tensor(scores), seen, budget, order).tolist()
    return picked


@pytest.mark.parametrize(
    ("scores", "budget", "right"),
    [
        ([1.0, 5.0, 5.0], 2, [1, 2]),
        ([0.0] * 5, 3, [0, 1, 2]),
        ([-0.0, 0.0, -0.0], 2, [0, 1]),  # -0.0 equals 0.0
        ([0.0, -0.0, 1.0], 3, [2, 0, 1]),
        ([NAN, 1.0, -INF], 3, [1, 2, 0]),  # NaN below -inf
        ([NAN, NAN], 1, [0]),
        ([NAN, -NAN, -INF], 3, [2, 0, 1]),
        ([INF, 3e38, INF], 2, [0, 2]),
        ([-1e30, -3e38, -INF], 2, [0, 1]),
        ([1e-45, 0.0, -1e-45], 3, [0, 1, 2]),  # subnormals order too
        ([-1e-45, -0.0, 1e-45], 3, [2, 1, 0]),
        ([1.0, 2.0], 4, [1, 0, -1, -1]),
        ([], 2, [-1, -1]),
    ],
)
def test_order_of_scores(scores: list[float], budget: int, right: list[int]) -> None:
    assert pick(scores, budget) == right
    assert pick(scores, budget, "position") == sorted(i for i in right if i >= 0) + [i for i in right if i < 0]


@pytest.mark.parametrize(
    ("scores", "visible", "right"),
    [
        ([-INF, 7.0, NAN], [True, False, True], [0, 2, -1]),  # a visible -inf beats NaN, and both beat hidden
        ([-1e30, 0.0, -INF], [True, False, False], [0, -1, -1]),
        ([NAN, NAN, NAN], [False, True, False], [1, -1, -1]),
        ([1.0, 1.0, 1.0], [False, False, False], [-1, -1, -1]),
    ],
)
def test_hidden_is_below_everything(scores: list[float], visible: list[bool], right: list[int]) -> None:
    assert pick(scores, 3, visible=visible) == right


TINY, HUGE = 2.0**-149, torch.finfo(torch.float32).max  # exact in fp32: the oracle compares these very numbers
values = st.one_of(
    st.sampled_from([0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, TINY, -TINY, HUGE, -HUGE]),
    st.floats(width=32),
)


@given(
    scores=st.lists(st.tuples(values, st.booleans()), max_size=24),
    budget=st.integers(1, 26),
    order=st.sampled_from(["score", "position"]),
)
def test_any_scores_against_sorting(scores: list[tuple[float, bool]], budget: int, order: str) -> None:
    def rank(i: int) -> tuple[bool, float, int]:
        value = scores[i][0]
        return (value != value, 0.0 if value != value else -value, i)

    best = sorted((i for i, (_, seen) in enumerate(scores) if seen), key=rank)[:budget]
    right = best if order == "score" else sorted(best)
    got = pick([value for value, _ in scores], budget, order, [seen for _, seen in scores])
    assert got == right + [-1] * (budget - len(right))


@given(values, values)
def test_keys_compare_as_numbers_do(left: float, right: float) -> None:
    a, b = order_key(torch.tensor([left, right])).tolist()
    if left == left and right == right:
        assert (a < b, a == b) == (left < right, left == right)
    assert a > -(2**31), "a visible score has the key of a hidden pool"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bits", [3, 16, 17, 30, 47, 50, 62])
def test_rows_are_sorted_flat_only_where_they_fit(dtype: torch.dtype, bits: int) -> None:
    """2**16 rows of values below a bound: lifted above each other, the larger bounds pass the largest integer."""
    bound = min(1 << bits, torch.iinfo(dtype).max)
    values = torch.randint(0, bound, (1 << 13, 8, 3), dtype=dtype, generator=torch.Generator().manual_seed(bits))
    values[0, 0] = torch.tensor([bound - 1, 0, bound - 1])
    assert torch.equal(_sort_rows(values, bound), values.sort(-1).values)


def test_first_id_and_batches(device: torch.device) -> None:
    scores = torch.tensor([[[3.0, 9.0], [9.0, 3.0]], [[1.0, 1.0], [2.0, 3.0]]], device=device)
    assert top_pools(scores, None, 1, "score", 10).tolist() == [[[11], [10]], [[10], [11]]]
    ids = top_pools(scores, None, 3, "score", torch.tensor([[0], [5]], device=device))
    assert ids.tolist() == [[[1, 0, -1], [5, 6, -1]], [[0, 1, -1], [6, 5, -1]]] and ids.dtype == torch.int32


@pytest.mark.parametrize("order", ["score", "position"])
@pytest.mark.parametrize(("rows", "width", "budget"), [(300, 400, 200), (128, 1030, 512), (40, 3, 2)])
def test_many_rows_at_once_are_many_rows(order: str, rows: int, width: int, budget: int, device: torch.device) -> None:
    """Large blocks are sorted in another way than single rows; ties, NaN, infinities and hidden pools included."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, rows, width, generator=generator).mul(4).round().div(4)
    special = torch.tensor([NAN, INF, -INF, -0.0])[torch.randint(0, 4, scores.shape, generator=generator)]
    scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.1, special, scores).to(device)
    seen = (torch.rand(scores.shape, generator=generator) < 0.6).to(device)
    seen[:, ::7] = False
    block = top_pools(scores, seen, budget, order)
    for row in range(0, rows, 3):
        assert torch.equal(block[1, row], top_pools(scores[1, row], seen[1, row], budget, order))


def test_ties_do_not_depend_on_the_width_as_those_of_topk_do() -> None:
    """Four of equally many equal scores: here the first four, from `torch.topk` others at other widths."""
    rows = [torch.zeros(width) for width in (8, 16, 40, 64, 100, 300, 1000)]
    ours = {tuple(selection.top_pools(row[None], None, 4, "score")[0].tolist()) for row in rows}
    theirs = {tuple(sorted(torch.topk(row, 4).indices.tolist())) for row in rows}
    assert ours == {(0, 1, 2, 3)} and len(theirs) > 1


def test_scores_are_not_changed() -> None:
    scores = torch.tensor([NAN, -0.0, 1.0])
    before = scores.clone()
    top_pools(scores, torch.tensor([True, False, True]), 2, "score")
    assert torch.equal(scores.view(torch.int32), before.view(torch.int32))


# -- expansion


def windows_of(*windows: tuple[int, int], tokens: int, pool_size: int) -> RowWindows:
    starts, ends = (torch.tensor(list(side)) for side in zip(*windows, strict=True))
    return Visibility.bounds(starts, ends).windows(rows=len(windows), tokens=tokens, batch=1, pool_size=pool_size)


def expanded(ids: list[list[int]], windows: RowWindows, tokens: int, pool_size: int, **options: int) -> list[list[int]]:
    starts = PoolGrid.plain(tokens, pool_size, CPU).starts()
    out = expand(torch.tensor([ids], dtype=torch.int32), starts, windows, pool_size=pool_size, **options)  # type: ignore[arg-type]
    assert out.dtype == torch.int32
    return [list(row) for row in out[0].tolist()]


def test_pools_head_and_tail() -> None:
    windows = windows_of((1, 11), (1, 11), (1, 11), (4, 8), tokens=12, pool_size=4)
    ids = [[1, -1, -1], [-1, -1, -1], [1, 0, 2], [1, -1, -1]]
    assert expanded(ids, windows, 12, 4) == [
        [4, 5, 6, 7, 1, 2, 3, -1, -1, -1, -1, -1, 8, 9, 10],
        [1, 2, 3, -1, -1, -1, -1, -1, -1, -1, -1, -1, 8, 9, 10],
        [4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 8, 9, 10],  # no free slot: no head
        [4, 5, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
    ]


def test_head_without_tail_and_width() -> None:
    windows = windows_of((1, 11), tokens=12, pool_size=4)
    assert expanded([[1, -1]], windows, 12, 4, always_select_tail=False) == [[4, 5, 6, 7, 1, 2, 3, -1]]
    wide = expanded([[1, -1]], windows, 12, 4, width_multiple=16)
    assert wide == [[4, 5, 6, 7, 1, 2, 3, -1, 8, 9, 10, -1, -1, -1, -1, -1]]
    assert len(expanded([[1, -1]], windows, 12, 4, width_multiple=11)[0]) == 11


def test_pools_of_one_token_have_neither() -> None:
    windows = windows_of((2, 5), tokens=6, pool_size=1)
    assert expanded([[3, 2]], windows, 6, 1) == [[3, 2]]


def test_mask_holes_stay_in_their_place() -> None:
    """Head and tail keep one place a token; a hidden one is -1 there."""
    mask = torch.full((1, 12), -INF)
    mask[0, [1, 3, 4, 5, 6, 7, 8, 10]] = 0
    windows = Visibility.from_mask(mask).windows(rows=1, tokens=12, batch=1, pool_size=4)
    assert expanded([[1, -1]], windows, 12, 4) == [[4, 5, 6, 7, 1, -1, 3, -1, 8, -1, 10]]


def test_starts_per_batch_entry(device: torch.device) -> None:
    valid = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], device=device).bool()
    visibility = Visibility.left_padded(valid, queries=1)
    windows = visibility.windows(rows=1, tokens=6, batch=2, pool_size=2, device=device)
    starts = visibility.grid(tokens=6, pool_size=2, device=torch.device(device)).starts()
    ids = torch.tensor([[[1, 0]], [[2, 0]]], dtype=torch.int32, device=device)
    assert expand(ids, starts, windows, pool_size=2).tolist() == [[[3, 4, 1, 2, 5]], [[4, 5, 0, 1, -1]]]


def test_tail_inside_a_selected_pool_is_not_repeated() -> None:
    windows = Visibility.unlimited().windows(rows=2, tokens=4, batch=1, pool_size=2)
    assert expanded([[0], [1]], windows, 4, 2) == [[0, 1, -1], [2, 3, -1]]
    assert expanded([[1], [1]], windows, 4, 2) == [[2, 3, 0], [2, 3, -1]]


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = windows_of(*itertools.product(range(6), range(6, 12)), tokens=12, pool_size=3)
    ids = torch.tensor([[[1, -1], [2, 0], [-1, -1]] * 12], dtype=torch.int32)
    starts = PoolGrid.plain(12, 3, CPU).starts()
    whole = expand(ids, starts, windows, pool_size=3)
    monkeypatch.setattr(selection, "_EXPAND_ELEMENTS", 1)
    assert torch.equal(whole, expand(ids, starts, windows, pool_size=3))


def test_no_pools_and_no_rows() -> None:
    none: Tensor = torch.empty(0, dtype=torch.int32)
    windows = windows_of((0, 3), tokens=3, pool_size=4)
    ids = torch.full((2, 1, 2), -1, dtype=torch.int32)
    assert expand(ids, none, windows, pool_size=4).tolist() == [[[-1] * 8 + [0, 1, 2]]] * 2
    empty = Visibility.bounds(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))
    rowless = empty.windows(rows=0, tokens=3, batch=1, pool_size=4)
    assert expand(ids[:, :0], none, rowless, pool_size=4).shape == (2, 0, 11)
