"""`kpool.triton.select` and `.scores`: the reference bit for bit where fp32 is exact, within its bound elsewhere.

The same bits come out for every shard, chunk and buffer content.
"""

from __future__ import annotations

import random
from dataclasses import replace

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


@pytest.mark.interpret
def test_buffers_may_hold_anything(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic mode fills fresh buffers with NaN and the largest integers; nothing of them may show."""
    built = build(replace(SMALL, layout="mask", rows=6), gpu)
    plain = built.select(launch, chunk_bytes=1)
    before = torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(built.select(launch, chunk_bytes=1), plain)
        assert torch.equal(built.scores(launch).nan_to_num(), built.scores(launch).nan_to_num())
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(plain, built.expected())


@pytest.mark.interpret
def test_rows_of_others_do_not_leak(gpu: torch.device) -> None:
    """A rank's rows stay the same when every other row of q, weights and windows is poison."""
    built = build(replace(SMALL, rows=6, batch=2), gpu)
    mine = RowBlocks(2, 2, 6, 2)
    expected = built.select(launch, mine)
    q, keys, weights, lo, hi = (t.clone() for t in built.tensors)
    others = torch.tensor([0, 1, 4, 5], device=gpu)
    q[others], weights[others] = float("nan"), float("nan")
    lo[:, others], hi[:, others] = 0, keys.shape[0]
    assert torch.equal(replace(built, tensors=(q, keys, weights, lo, hi)).select(launch, mine), expected)


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
