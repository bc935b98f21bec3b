"""The reference itself: worked examples by hand, its windows, and its rounding bound."""

from __future__ import annotations

import math

import pytest
import torch

from kpool import reference
from kpool.ranking import Ranking
from kpool.reference import Window


@pytest.mark.parametrize(
    ("window", "head", "tail"),
    [
        (Window(1, 10, 0), [1, 2, 3], [8, 9]),
        (Window(5, 7, 0), [], [5, 6]),
        (Window(3, 4, 0), [3], []),
        (Window(5, 11, 5), [], [9, 10]),
        (Window(1, 10, 0, frozenset({2, 9})), [1, -1, 3], [8, -1]),
        (Window(0, 0, 0), [], []),
    ],
)
def test_head_and_tail(window: Window, head: list[int], tail: list[int]) -> None:
    assert window.head_and_tail(4) == (head, tail)


def test_pool_starts() -> None:
    assert reference.pool_starts(7, 3) == [0, 3]
    assert reference.pool_starts(8, 2, [0, 3, 8]) == [0, 3, 5, -1]
    assert reference.pool_starts(3, 4) == []


def test_a_row_by_hand() -> None:
    """Two heads, one dimension, P = 2: pooled keys 2, 5, -1; scores 3 relu(k) + relu(-k) = 6, 15, 1."""
    q = torch.tensor([1.0, -1.0])[None, None, :, None]
    k = torch.tensor([1.0, 3.0, 5.0, 5.0, -1.0, -1.0, 9.0])[:, None, None]
    weights = torch.tensor([[[3.0, 1.0]]])
    bounds = {"varlen_starts": torch.tensor([0]), "varlen_ends": torch.tensor([7])}
    scores, tokens = reference.fused_qk_topk_kpool(q, k, weights, 4, 2, None, None, **bounds)
    assert scores is not None and scores.tolist() == [[[6.0, 15.0, 1.0]]] and scores.dtype == torch.float64
    assert tokens.tolist() == [[[2, 3, 0, 1, 6]]]


def ranking(score: list[float], error: list[float], visible: list[bool] | None = None) -> Ranking:
    seen = [True] * len(score) if visible is None else visible
    return Ranking(torch.tensor([score]).double(), torch.tensor([error]).double(), torch.tensor([seen]))


@pytest.mark.parametrize(
    ("score", "error", "decided"),
    [
        ([3.0, 2.0, 1.0], [0.4, 0.4, 0.4], True),
        ([3.0, 2.0, 1.0], [0.4, 0.6, 0.6], False),
        ([3.0, 1.0, 1.0], [0.0, 0.0, 0.0], True),  # an exact tie: the tie rule decides
        ([3.0, 1.0, 1.0], [0.0, 0.0, 1e-9], False),
        ([1.0, 1.0], [9.0, 9.0], True),  # both fit
    ],
)
def test_decided_rows(score: list[float], error: list[float], decided: bool) -> None:
    assert ranking(score, error).decided(2).tolist() == [decided]


def test_hidden_pools_decide_nothing() -> None:
    one = ranking([3.0, 2.0, 1.9], [0.5, 0.5, 0.5], [True, True, False])
    assert one.decided(2).tolist() == [True] and one.best(3).tolist() == [[0, 1, -1]]


def test_order_of_nan_and_ties() -> None:
    assert ranking([math.nan, -math.inf, 0.0, -0.0], [0.0] * 4).order() == [[2, 3, 1, 0]]


@pytest.mark.parametrize("use_relu", [True, False])
def test_fp32_scores_lie_within_the_bound_which_is_not_idle(use_relu: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, keys, weights = (torch.randn(shape, generator=generator) for shape in ((200, 8, 32), (50, 32), (200, 8)))
    score, error = reference.score_rows(q, keys, weights, use_relu=use_relu)
    single, _ = reference.score_rows(q, keys, weights, use_relu=use_relu, dtype=torch.float32)
    off = (single.double() - score).abs()
    assert bool((off <= error).all())
    assert float((off / error.clamp_min(1e-30)).max()) > 0.1, "a bound ten times too wide decides nothing"


@pytest.mark.parametrize("name", ["hadamard", "fp8"])
@pytest.mark.parametrize("dim", [1, 2, 16])
def test_what_is_uncertain_before_a_transform_is_uncertain_after(name: str, dim: int) -> None:
    """Move every element within its error, and the transformed vector moves within its own; sizes from 1 to 1e-9."""
    generator = torch.Generator().manual_seed(dim)
    size = 10.0 ** -torch.randint(0, 10, (4000, 1), generator=generator)
    x = (torch.randn(4000, dim, generator=generator) * size).double()
    error = 10.0 ** -torch.randint(0, 10, (4000, dim), generator=generator).double()
    error[::3] = 0
    moved = x + error * (2 * torch.rand(4000, dim, generator=generator) - 1)
    bound = reference._transformed_error(x, error, name)
    change = (reference.transform(moved, name).double() - reference.transform(x, name).double()).abs()
    assert bool((change <= bound).all())
    assert float((change / bound.clamp_min(1e-30)).max()) > 0.3
    assert bool((bound[::3] == 0).all())
