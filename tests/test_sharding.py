"""Plans as arithmetic, groups that are none, and which gather is called."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st

import kpool_testing
from kpool import ShardPlan
from kpool.sharding import RowBlocks, all_gather, check_group
from kpool_testing import strategies as ragged

plans = st.tuples(
    ragged.ragged_rows(300), st.sampled_from(["contiguous", "block_cyclic"]), st.sampled_from([1, 5, 8, 128])
)


def dealt(case: tuple[tuple[int, int], str, int]) -> ShardPlan:
    (rows, size), kind, block = case
    return ShardPlan.contiguous(rows, size) if kind == "contiguous" else ShardPlan.block_cyclic(rows, size, block)


@given(plans)
def test_every_row_once_and_ascending(case: tuple[tuple[int, int], str, int]) -> None:
    plan = dealt(case)
    rows = [plan.rows(rank).tolist() for rank in range(plan.size)]
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(plan.num_rows))
    for mine in rows:
        assert mine == sorted(mine) and len(mine) <= plan.rows_per_rank
    if plan.kind == "contiguous":
        assert plan.rows_per_rank == -(-plan.num_rows // plan.size)
    else:  # whole blocks, and no rank pads more than one of them
        assert plan.rows_per_rank % plan.block == 0
        assert plan.rows_per_rank == 0 or (plan.rows_per_rank - plan.block) * plan.size < plan.num_rows


@given(plans)
def test_blocks_say_the_same_as_rows(case: tuple[tuple[int, int], str, int]) -> None:
    plan = dealt(case)
    for rank in range(plan.size):
        b = plan.blocks(rank)
        assert b.count == plan.rows_per_rank
        formula = [i // b.block * b.stride + b.offset + i % b.block for i in range(b.count)]
        assert plan.rows(rank).tolist() == [row for row in formula if row < plan.num_rows]
        spelled = [(local + i, first + i) for local, first, last in b.spans(plan.num_rows) for i in range(last - first)]
        assert spelled == [(i, row) for i, row in enumerate(formula) if row < plan.num_rows]


@given(plans, st.integers(0, 3))
def test_ungather_puts_every_row_of_every_batch_entry_back(case: tuple[tuple[int, int], str, int], batch: int) -> None:
    plan = dealt(case)
    whole = torch.arange(batch * plan.num_rows * 2).view(batch, plan.num_rows, 2)
    gathered = torch.full((plan.size, batch, plan.rows_per_rank, 2), -7)
    for rank in range(plan.size):
        for local, first, last in plan.blocks(rank).spans(plan.num_rows):
            gathered[rank, :, local : local + last - first] = whole[:, first:last]
    assert torch.equal(plan.ungather(gathered.flatten(0, 1)), whole)


def test_the_worked_examples() -> None:
    assert [ShardPlan.contiguous(5, 4).rows(r).tolist() for r in range(4)] == [[0, 1], [2, 3], [4], []]
    plan = ShardPlan.block_cyclic(64, 2)
    assert plan.block == 8
    assert plan.rows(0).tolist() == [*range(8), *range(16, 24), *range(32, 40), *range(48, 56)]


@pytest.mark.parametrize(
    ("rows", "size", "block"),
    [
        (128 * 4 * 8, 8, 128),
        (128 * 4 * 8 - 128, 8, 64),
        (4096, 8, 128),
        (1024, 8, 32),
        (256, 8, 8),
        (5, 8, 8),
        (0, 2, 8),
    ],
)
def test_blocks_are_halved_until_every_rank_has_four(rows: int, size: int, block: int) -> None:
    plan = ShardPlan.block_cyclic(rows, size)
    assert plan.block == block
    if block > 8:
        assert -(-rows // block) >= 4 * size


def test_a_small_block_stays_what_it_is() -> None:
    assert ShardPlan.block_cyclic(100, 2, block=3).block == 3


def test_block_cyclic_balances_causal_work() -> None:
    """Visible pools per rank, causal: the largest share over the mean."""
    rows, size = 65536, 8

    def imbalance(plan: ShardPlan) -> float:
        work = [float((plan.rows(rank) // 4).sum()) for rank in range(size)]
        return max(work) / (sum(work) / size)

    assert imbalance(ShardPlan.contiguous(rows, size)) == pytest.approx(1.875, abs=0.01)
    assert imbalance(ShardPlan.block_cyclic(rows, size)) < 1.02


@pytest.mark.parametrize(("rows", "size"), [(-1, 2), (3, 0)])
def test_impossible_plans(rows: int, size: int) -> None:
    for build in (ShardPlan.contiguous, ShardPlan.block_cyclic):
        with pytest.raises(
            ValueError, match=rf"rows, size: expected rows >= 0 and size >= 1, got rows = {rows}, size = {size}"
        ):
            build(rows, size)


def test_bad_arguments_of_a_plan() -> None:
    plan = ShardPlan.contiguous(5, 2)
    with pytest.raises(ValueError, match="rank: expected 0 <= rank < 2, got 2"):
        plan.blocks(2)
    with pytest.raises(ValueError, match="block: expected a positive number of rows, got 0"):
        ShardPlan.block_cyclic(5, 2, block=0)
    with pytest.raises(ValueError, match=r"shard_plan: expected one of .* got 'zigzag'"):
        ShardPlan.of("zigzag", 5, 2)
    for shape in [(2, 3), (3, 3, 1), (2, 2, 1)]:
        with pytest.raises(ValueError, match=r"gathered: expected \[G \* B, R, M\] with G = 2, R = 3"):
            plan.ungather(torch.zeros(shape))


def test_row_blocks_of_everything() -> None:
    assert RowBlocks.all(7).spans(7) == [(0, 0, 7)]
    assert RowBlocks.all(0).spans(0) == []
    assert [RowBlocks.all(rows) for rows in (0, 1, 5)] == [
        RowBlocks(0, 1, 1, 0),  # a block has a row even where there is none
        RowBlocks(0, 1, 1, 1),
        RowBlocks(0, 5, 5, 5),
    ]


def test_a_count_may_end_within_a_block() -> None:
    assert RowBlocks(offset=2, block=4, stride=10, count=6).spans(100) == [(0, 2, 6), (4, 12, 14)]
    assert RowBlocks(offset=2, block=4, stride=10, count=6).spans(13) == [(0, 2, 6), (4, 12, 13)]
    assert RowBlocks(offset=2, block=4, stride=10, count=6).spans(12) == [(0, 2, 6)]


# -- groups


def group(rank: Any, size: Any) -> SimpleNamespace:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def test_groups() -> None:
    assert check_group(group(1, 3)) == (1, 3)
    assert check_group(kpool_testing.FakeGroup(0, 1)) == (0, 1)


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        (-100, "the handle torch.distributed gives to non-members; only members may call"),
        (torch.distributed.GroupMember.NON_GROUP_MEMBER, "only members may call"),
        (object(), r"expected an object with rank\(\) and size\(\), such as a ProcessGroup, got object"),
        (SimpleNamespace(rank=0, size=1), "got SimpleNamespace"),
        (SimpleNamespace(rank=lambda: 0), "got SimpleNamespace"),
        (SimpleNamespace(size=lambda: 1), "got SimpleNamespace"),
        (torch.zeros(2), "got Tensor"),  # has a size(), and no rank()
        (group(-1, 2), "expected a member, 0 <= rank < size, got rank -1 of size 2"),
        (group(2, 2), "got rank 2 of size 2"),
    ],
)
def test_handles_that_are_no_group(handle: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"query_shard_group: .*{message}"):
        check_group(handle)


def test_newer_gather_is_preferred_and_looked_up_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def named(name: str) -> Any:
        def gather(output: torch.Tensor, given: torch.Tensor, group: Any = None) -> None:
            seen.append(name)
            assert output.shape == (6, 4) and output.is_contiguous() and given.is_contiguous()
            output.copy_(given.repeat(3, 1))

        return gather

    local = torch.arange(8).view(4, 2).t()  # not contiguous
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", named("old"))
    monkeypatch.setattr(torch.distributed, "all_gather_single", named("new"), raising=False)
    assert torch.equal(all_gather(local, group(0, 3), 3), local.repeat(3, 1))
    monkeypatch.delattr(torch.distributed, "all_gather_single")
    all_gather(local, group(0, 3), 3)
    assert seen == ["new", "old"]


@pytest.mark.parametrize("layout", ["causal", "lognormal documents", "one long document"])
def test_block_cyclic_balances_the_work(layout: str) -> None:
    """Scored pools of the busiest of 8 ranks over the mean, at most 1.01; contiguous shards leave one with far more."""
    rows, ranks, pool_size = 524_288, 8, 4
    lengths = torch.full((1,), rows)
    if layout == "lognormal documents":
        drawn = torch.exp(1.5 * torch.randn(16, generator=torch.Generator().manual_seed(0)))
        lengths = (drawn / drawn.sum() * rows).long()
    elif layout == "one long document":
        lengths = torch.tensor([262_144] + [4096] * 64)
    lengths[-1] += rows - lengths.sum()
    pools = torch.cat([(torch.arange(n) + 1) // pool_size for n in lengths.tolist()]).double()

    def balance(plan: ShardPlan) -> float:
        work = torch.stack([pools[plan.rows(rank)].sum() for rank in range(ranks)])
        return float(work.max() / work.mean())

    assert balance(ShardPlan.block_cyclic(rows, ranks)) <= 1.01
    assert balance(ShardPlan.contiguous(rows, ranks)) > 1.3
