"""`kpool.triton.select` and `.scores`: the reference bit for bit where fp32 is exact, within its bound elsewhere.

The same bits come out for every shard, chunk and buffer content.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kpool import naive, reference
from kpool.ranking import Ranking
from kpool.scoring import visible_pools
from kpool.selection import order_key, top_pools
from kpool.sharding import RowBlocks, ShardPlan
from kpool.triton import configs, launch
from kpool.triton.score import rank_key
from tests.triton.cases import LAYOUTS, VALUES, Built, Case, build

SMALL = Case("small", rows=10, tokens=56, budget=3, heads=2)


def gathered(built: Built, plan: ShardPlan, chunk_bytes: int = 1) -> Tensor:
    """Every rank's rows, put together as the all-gather would."""
    parts = [built.select(launch, plan.blocks(rank), chunk_bytes) for rank in range(plan.size)]
    return plan.ungather(torch.cat(parts))


def random_built(case: Case, device: torch.device) -> Built:
    """`case` with normal instead of whole numbers."""
    built = build(case, device)
    rng = torch.Generator().manual_seed(case.seed)
    q, keys, weights = (torch.randn(t.shape, generator=rng).to(t.dtype).to(device) for t in built.tensors[:3])
    return replace(built, tensors=(q, keys, weights, *built.tensors[3:]))


def visible(built: Built) -> Tensor:
    """Bool `[B, S, N]` on the CPU."""
    case, (*_, lo, hi) = built.case, built.tensors
    mask = None if built.mask is None else built.mask.cpu()
    pools = case.tokens // case.pool_size
    return visible_pools(lo.cpu(), hi.cpu(), mask, case.pool_size, pools).expand(case.batch, case.rows, pools)


def assert_own_scores_ranked(built: Built) -> None:
    """The selection is exactly the tie rule applied to the scores the same kernels report."""
    case = built.case
    expected = top_pools(built.scores(launch), visible(built), case.budget, case.order)
    assert torch.equal(built.select(launch), expected)


def assert_scores_within_bound(built: Built) -> None:
    """Scores lie within the reference's rounding bound, and hidden pools are -inf."""
    case = built.case
    q, keys, weights = (t.cpu() for t in built.tensors[:3])
    got, seen = built.scores(launch), visible(built)
    assert got[~seen].isneginf().all()
    for b in range(case.batch):
        score, error = reference.score_rows(
            reference.transform(q[:, b], case.transform), keys[:, b], weights[:, b],
            use_relu=case.use_relu, dot_scale=case.dot_scale,
        )  # fmt: skip
        assert ((got[b] - score).abs() <= error)[seen[b]].all()
        ranking = Ranking(score, error, seen[b])
        decided = ranking.decided(case.budget)
        mine = replace(built).select(launch)[b].sort(-1).values
        assert torch.equal(mine[decided], ranking.best(case.budget).int().sort(-1).values[decided])


@triton.jit
def keys_of(scores, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """`rank_key` of N scores."""
    at = tl.arange(0, N)
    tl.store(out + at, rank_key(tl.load(scores + at)))


def test_rank_keys_order_as_the_tie_rule_says(gpu: torch.device) -> None:
    """Both zeros are one key, denormals are not zero, NaN of either sign is below -inf."""
    least, largest, inf = 2.0**-149, 3.4e38, float("inf")
    scores = torch.tensor([-inf, -largest, -1.0, -least, -0.0, 0.0, least, 1.0, largest, inf], device=gpu)
    nan = torch.tensor([0x7FC00000, -1, 0x7F800001, -0x400000, 0x7FFFFFFF, -2], dtype=torch.int32, device=gpu)
    scores = torch.cat([nan.view(torch.float32), scores])
    keys = torch.empty(16, dtype=torch.int32, device=gpu)
    keys_of[(1,)](scores, keys, 16)
    assert torch.equal(keys, order_key(scores))
    assert keys[10] == keys[11] == 0 and (keys[:6] == keys[0]).all() and (keys[6:].diff() >= 0).all()


@pytest.mark.interpret
def test_the_longest_row(gpu: torch.device) -> None:
    """262,144 pools and 1,024 winners, the most that is promised, with a tie of thousands at the edge."""
    built = build(Case("longest", tokens=1 << 19, pool_size=2, rows=1, heads=1, dim=8, budget=1024), gpu)
    q, keys, weights = (t[:, 0].double().cpu() for t in built.tensors[:3])
    right = (weights[0] * (keys @ q[0, 0]).relu()).sort(descending=True, stable=True)
    assert right.values.shape == (1 << 18,)
    assert (right.values == right.values[1023]).sum() > 2000
    assert torch.equal(built.select(launch), right.indices[:1024].int()[None, None])


@pytest.mark.interpret
@pytest.mark.parametrize("order", ["score", "position"])
def test_sharded_is_whole(order: str, gpu: torch.device) -> None:
    built = random_built(replace(SMALL, order=order, batch=2, rows=7), gpu)
    whole = built.select(launch)
    assert torch.equal(gathered(built, ShardPlan.contiguous(7, 3)), whole)
    blocks = RowBlocks(2, 1, 3, 4)  # rows 2, 5, and two rows of padding
    assert torch.equal(built.select(launch, blocks)[:, :2], whole[:, 2::3])
    assert (built.select(launch, blocks)[:, 2:] == -1).all()


def clean_and_dirty(case: Case, gpu: torch.device, *dirty: Callable[[], AbstractContextManager[None]]) -> None:
    """Select and score in small pieces with fresh buffers, then the same with `dirty` ones; and both are right."""
    built = build(case, gpu)
    clean, scores = built.select(launch, chunk_bytes=1), built.scores(launch)
    assert torch.equal(clean, built.expected())
    for fill in dirty:
        with fill():
            again, scores_again = built.select(launch, chunk_bytes=1), built.scores(launch)
        assert torch.equal(again, clean), fill
        assert torch.equal(scores_again.view(torch.int32), scores.view(torch.int32)), fill


@contextmanager
def filled_by_torch() -> Iterator[None]:
    """Deterministic mode fills every fresh tensor: NaN, and the largest integer, which is the best rank key."""
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[assignment]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[assignment]


@contextmanager
def filled_with(value: int) -> Iterator[None]:
    """Every buffer of a selection holds `value` before the first kernel runs."""
    with pytest.MonkeyPatch.context() as patch:
        start = launch.Selection.__init__

        def started(self: launch.Selection, *arguments: Any, **options: Any) -> None:
            start(self, *arguments, **options)
            for buffer in (self.out, self.ranks, self.best, self.groups, self.stay, self.ascending):
                buffer.fill_(value)

        patch.setattr(launch.Selection, "__init__", started)
        yield


# the best rank key, no key at all, the key of score 1.0, the id of a pool or group
DIRTY = (filled_by_torch, *(partial(filled_with, value) for value in (2**31 - 1, -(2**31), 0x3F800000, 1)))


@pytest.mark.interpret
@pytest.mark.parametrize("layout", ["causal", "packed", "mask"])
@pytest.mark.parametrize("order", ["score", "position"])
def test_buffers_may_hold_anything(order: str, layout: str, gpu: torch.device) -> None:
    """Nothing of what a buffer holds at first may show, nor in a last piece of rows that is shorter than the buffers.

    Behind a mask rows see fewer pools than the budget.
    """
    budget = 9 if layout == "mask" else 3
    clean_and_dirty(Case("dirty", rows=18, tokens=56, budget=budget, layout=layout, order=order), gpu, *DIRTY)


@pytest.mark.interpret
@pytest.mark.parametrize("order", ["score", "position"])
@pytest.mark.parametrize("left_out", ["score", "last tile", "pick"])
def test_a_buffer_that_is_not_written_is_noticed(
    left_out: str, order: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant a leak, in dirty buffers alone: a piece that is not scored, keys that are not stored, rows not picked."""
    score, pick = launch.Selection.score, launch.Selection.pick
    leaking = False

    def scored(self: launch.Selection, piece: RowBlocks) -> None:
        if not (leaking and left_out == "score" and piece.offset):
            before = self.ranks.clone()
            score(self, piece)
            if leaking and left_out == "last tile":
                shape = (self.batch, piece.count, self.call.ld)
                held = self.batch * piece.count * self.call.ld
                self.ranks[:held].view(shape)[..., 8:] = before[:held].view(shape)[..., 8:]

    def picked(self: launch.Selection, first: int, piece: RowBlocks) -> None:
        if not (leaking and left_out == "pick" and first):
            pick(self, first, piece)

    @contextmanager
    def leak() -> Iterator[None]:
        nonlocal leaking
        leaking = True
        with filled_with(2**31 - 1):
            yield

    monkeypatch.setattr(launch.Selection, "score", scored)
    monkeypatch.setattr(launch.Selection, "pick", picked)
    case = replace(SMALL, order=order, rows=18)
    clean_and_dirty(case, gpu, nullcontext)
    with pytest.raises(AssertionError, match="leak"):
        clean_and_dirty(case, gpu, leak)


@pytest.mark.interpret
@pytest.mark.parametrize("layout", ["causal", "packed", "mask"])
@pytest.mark.parametrize("order", ["score", "position"])
def test_rows_of_others_do_not_leak(order: str, layout: str, gpu: torch.device) -> None:
    """A rank's rows stay the same when every other row of q, weights, windows and mask is poison."""
    built = build(replace(SMALL, rows=6, batch=2, layout=layout, order=order), gpu)
    mine = RowBlocks(2, 2, 6, 2)
    expected = built.select(launch, mine)
    assert torch.equal(expected, built.expected()[:, 2:4])
    q, keys, weights, lo, hi = (t.clone() for t in built.tensors)
    others = torch.tensor([0, 1, 4, 5], device=gpu)
    q[others], weights[others] = float("nan"), float("nan")
    lo[:, others], hi[:, others] = 0, keys.shape[0]
    mask = None if built.mask is None else built.mask.index_fill(1, others, float("nan"))
    assert torch.equal(replace(built, tensors=(q, keys, weights, lo, hi), mask=mask).select(launch, mine), expected)


def test_nothing_to_select_from(gpu: torch.device) -> None:
    for case in (replace(SMALL, rows=0), replace(SMALL, tokens=3, rows=3, layout="unlimited")):
        built = build(case, gpu)
        ids, scores = built.select(launch), built.scores(launch)
        assert ids.shape == (1, case.rows, 3) and (ids == -1).all()
        assert scores.shape == (1, case.rows, case.tokens // 4)
    assert build(SMALL, gpu).select(launch, RowBlocks(0, 1, 1, 0)).shape == (1, 0, 3)


@pytest.mark.interpret
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 32])
@pytest.mark.parametrize("dim", [8, 20, 64, 128])
@pytest.mark.parametrize("pool_size", [2, 4, 16])
def test_equals_the_reference_at_every_size(heads: int, dim: int, pool_size: int, gpu: torch.device) -> None:
    tokens = 37 * pool_size // 2
    case = Case("size", heads, dim, pool_size, tokens, rows=8, budget=5, layout="packed", seed=heads + dim)
    exact, rough = build(case, gpu), random_built(case, gpu)
    assert torch.equal(exact.select(launch), exact.expected())
    assert_scores_within_bound(rough)
    assert_own_scores_ranked(rough)


@pytest.mark.interpret
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("order", ["score", "position"])
def test_equals_the_reference_for_every_layout(layout: str, values: str, order: str, gpu: torch.device) -> None:
    case = Case("layout", heads=3, dim=8, rows=5, batch=2, layout=layout, values=values, order=order, strided=True)
    for seed, chunk in ((0, 1), (1, 1 << 20)):
        built = build(replace(case, seed=seed, chunk_bytes=chunk), gpu)
        assert torch.equal(built.select(launch), built.expected())
    assert torch.equal(built.scores(launch).nan_to_num(7.5), built.scores(naive).nan_to_num(7.5))


@pytest.mark.interpret
@pytest.mark.parametrize("budget", [1, 2, 11, 12, 13, 64, 65, 1024])
@pytest.mark.parametrize("values", ["ints", "equal", "zeros"])
def test_budget_below_at_and_above_what_is_visible(budget: int, values: str, gpu: torch.device) -> None:
    """Rows of a causal call see 10 to 13 pools; budgets stand on either side."""
    case = Case("budget", tokens=52, rows=14, budget=budget, values=values, pool_size=4)
    for order in ("score", "position"):
        built = build(replace(case, order=order), gpu)
        assert torch.equal(built.select(launch), built.expected())


@pytest.mark.interpret
@pytest.mark.parametrize("values", ["ints", "equal", "random"])
@pytest.mark.parametrize(("order", "budget"), [("score", 7), ("score", 512), ("position", 1024)])
def test_many_pools(values: str, order: str, budget: int, gpu: torch.device) -> None:
    """More pools than a block of candidates, more groups than a block of groups: every loop turns more than once."""
    case = Case("many", heads=1, dim=8, pool_size=1, tokens=20_000, rows=2, budget=budget, order=order)
    built = random_built(case, gpu) if values == "random" else build(replace(case, values=values), gpu)
    assert_own_scores_ranked(built)


@pytest.mark.interpret
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transform", ["none", "hadamard", "fp8"])
@pytest.mark.parametrize("use_relu", [True, False])
def test_options(weights: torch.dtype, transform: str, use_relu: bool, gpu: torch.device) -> None:
    case = Case(
        "options", heads=4, weights=weights, transform=transform, use_relu=use_relu, dot_scale=16**-0.5, batch=2, rows=6
    )
    built = random_built(case, gpu)
    assert_scores_within_bound(built)
    assert_own_scores_ranked(built)
    assert torch.equal(gathered(built, ShardPlan.block_cyclic(6, 2, block=2)), built.select(launch))


@pytest.mark.interpret
@pytest.mark.parametrize("heads", [1, 2, 3, 32])
@pytest.mark.parametrize("layout", ["causal", "packed", "mask"])
def test_no_bit_differs_over_random_splits(heads: int, layout: str, gpu: torch.device) -> None:
    """Both plans, random sizes, blocks, starts and chunk budgets; scores of single rows too."""
    rng = random.Random(heads)
    case = Case("splits", heads, 24, rows=12, tokens=72, budget=4, layout=layout, seed=heads)
    built = random_built(case, gpu)
    whole = built.select(launch)
    for _ in range(3):
        size = rng.randint(2, 9)
        for plan in (ShardPlan.contiguous(12, size), ShardPlan.block_cyclic(12, size, rng.choice([1, 3, 8]))):
            assert torch.equal(gathered(built, plan, rng.choice([1, 5_000, 20_000])), whole)
    scores = built.scores(launch)
    for row in range(0, 12, 5):
        q, keys, weights, lo, hi = built.tensors
        mask = None if built.mask is None else built.mask[:, : row + 1]
        upto = (q[: row + 1], keys, weights[: row + 1], lo[:, : row + 1], hi[:, : row + 1])
        part = replace(built, tensors=upto, mask=mask).scores(launch)
        assert torch.equal(part[:, row], scores[:, row])


def test_asks_for_what_it_can_serve(gpu: torch.device) -> None:
    with pytest.raises(ValueError, match="the kernels take bfloat16, q is float32"):
        built = build(SMALL, gpu)
        replace(built, tensors=(built.tensors[0].float(), *built.tensors[1:])).select(launch)
    assert configs.unsupported_reason(dtype=torch.bfloat16, heads=32, dim=128, pool_size=4, budget=512) is None
