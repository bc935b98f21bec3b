"""Every scenario on every arm: each rank returns the unsharded rows bit for bit, and those are the reference's.

Arms: `replay` (a patched all-gather, no process group), `ranks` (simulated process group; real ones with
`--ranks-backend`), `gloo` (one process a rank, by marker), `nccl` (`--ranks-backend=nccl -m nccl`: `ranks` again, one
GPU a rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import kpool_testing
from kpool import ShardPlan, dispatch
from kpool.sharding import RowBlocks
from tests.conformance.scenarios import MORE, SCENARIOS, SEED, Scenario
from tests.support.properties import agrees_with_reference, same_as_reference, same_rows

MOST_PROCESSES = 4  # scenarios of more ranks run on this many real ones
by_name = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`where` the ranks have their tensors: each device there is; with real NCCL ranks each has its own GPU."""
    if "where" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--ranks-backend") == "nccl":
        metafunc.parametrize("where", [pytest.param(None, id="own-gpu", marks=pytest.mark.nccl)])
    else:
        metafunc.parametrize("where", [torch.device(name) for name in DEVICES], ids=str)


def real_size(backend: str, wanted: int) -> int:
    """How many ranks a scenario of `wanted` runs on; NCCL takes one GPU a rank, and one rank alone shows nothing."""
    if backend == "fake":
        return wanted
    if backend != "nccl":
        return min(wanted, MOST_PROCESSES)
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"needs 2 GPUs or more, torch sees {found}: {2 - found} short")
    return min(wanted, found)


def body_of(scenario: Scenario, device: torch.device | None) -> Callable[[Any], Tensor]:
    """What a rank does; `device=None` is the rank's own GPU."""
    call, plan, options = scenario.call(), scenario.plan, scenario.options

    def body(group: Any) -> Tensor:
        where = torch.device("cuda", group.rank()) if device is None else device
        with torch.cuda.device(where) if where.type == "cuda" else torch.no_grad():
            return call.to(where).run(query_shard_group=group, shard_plan=plan, **options).cpu()

    return body


def check_run(scenario: Scenario, run: kpool_testing.Run, size: int, whole: Tensor) -> None:
    """Same rows everywhere, one gather, of `ceil(S / G)` rows from every rank whether it has any or not."""
    assert len(run.results) == size
    for rank, tokens in enumerate(run.results):
        same_rows(whole, tokens, f"{scenario.name}, rank {rank} of {size}")
    call, plan = scenario.call(), ShardPlan.of(scenario.plan, scenario.call().rows, size)
    if scenario.plan == "contiguous":
        assert plan.rows_per_rank == -(-call.rows // size)
    gathers = [made for made in run.trace.calls if made.dtype == "int32"]
    assert [made.shape for made in gathers] == [(call.batch, plan.rows_per_rank, call.budget)] * size
    checked = size if scenario.options.get("check_replicated") else 0
    assert len(run.trace.calls) == size + checked
    assert sorted(made.rank for made in gathers) == list(range(size))


@cache
def whole_of(scenario: Scenario, device: torch.device) -> Tensor:
    """The unsharded rows, with nothing that only a sharded or chunked call has."""
    return scenario.call().to(device).run().cpu()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[RowBlocks]:
    """The rows the implementation is asked to score, one entry a call."""
    seen: list[RowBlocks] = []
    choose = dispatch.choose

    def spied(*arguments: Any) -> Any:
        return _Spy(choose(*arguments), seen)

    monkeypatch.setattr("kpool.ops.choose", spied)
    return seen


class _Spy:
    """An implementation that notes which rows it is asked for."""

    def __init__(self, implementation: Any, seen: list[RowBlocks]) -> None:
        self.implementation, self.seen, self.scores = implementation, seen, implementation.scores

    def select(self, *tensors: Any, rows: RowBlocks, **options: Any) -> Tensor:
        self.seen.append(rows)
        selected: Tensor = self.implementation.select(*tensors, rows=rows, **options)
        assert selected.shape[1] == rows.count
        return selected


def check_asked(scenario: Scenario, asked: list[RowBlocks]) -> None:
    """Ranks were asked for disjoint rows that are all rows, and none for more than its share."""
    plan = ShardPlan.of(scenario.plan, scenario.call().rows, scenario.size)
    assert {blocks.count for blocks in asked} == {plan.rows_per_rank}
    scored = [
        row for blocks in set(asked) for _, first, last in blocks.spans(plan.num_rows) for row in range(first, last)
    ]
    assert sorted(scored) == list(range(plan.num_rows))


class TestWhole:
    @pytest.mark.parametrize("scenario", SEED + MORE, ids=lambda scenario: scenario.name)
    def test_unsharded_is_the_reference(self, scenario: Scenario, device: torch.device) -> None:
        call = scenario.call().to(device).with_options(**scenario.options)
        same_rows(whole_of(scenario, device), call.run(), "chunked")
        if not scenario.exact:
            agrees_with_reference(scenario.call().to(device))
            return
        compared = same_as_reference(scenario.call().to(device))
        assert compared == 2 * call.rows * call.batch

    def test_the_seed_list_is_whole(self) -> None:
        assert len(SEED) == 40 and len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)

    def test_shard_edges_fall_inside_a_chunk(self) -> None:
        """A tile of rows, the smallest chunk, holds the edge of a shard in the 37-row scenarios."""
        from kpool.tiled import ROW_TILE

        assert any(37 // size and -(-37 // size) % ROW_TILE for size in (2, 3, 8)) and ROW_TILE < 37


class TestReplay:
    @by_name
    def test_replicated(self, scenario: Scenario, device: torch.device, asked: list[RowBlocks]) -> None:
        run = kpool_testing.replay(body_of(scenario, device), scenario.size)
        check_asked(scenario, asked)
        check_run(scenario, run, scenario.size, whole_of(scenario, device))


@pytest.mark.world_size(2)  # one run a scenario: each brings its own size
class TestRanks:
    @by_name
    def test_replicated(
        self,
        scenario: Scenario,
        ranks: Callable[..., kpool_testing.Run],
        where: torch.device | None,
        request: pytest.FixtureRequest,
    ) -> None:
        size = real_size(request.config.getoption("--ranks-backend"), scenario.size)
        run = ranks(body_of(scenario, where), size=size)
        check_run(scenario, run, size, whole_of(scenario, torch.device("cuda") if where is None else where))

    def test_scores_cannot_be_returned(
        self, ranks: Callable[..., kpool_testing.Run], where: torch.device | None, request: pytest.FixtureRequest
    ) -> None:
        size = real_size(request.config.getoption("--ranks-backend"), 2)
        call = SEED[0].call().to(torch.device("cpu") if where is None else where)
        with pytest.raises(ValueError, match="return_index_scores: expected False with query_shard_group, got True"):
            ranks(lambda group: call.run(query_shard_group=group, return_index_scores=True), size=size)


@pytest.fixture(scope="module")
def gloo() -> Iterator[Callable[[Callable[[Any], Any], int], kpool_testing.Run]]:
    """Run a body on real gloo processes; they end with this module."""
    yield lambda fn, size: kpool_testing.run_ranks(fn, size, backend="gloo")
    kpool_testing.close_pool()


@pytest.mark.gloo
class TestGloo:
    @by_name
    def test_replicated(
        self, scenario: Scenario, gloo: Callable[[Callable[[Any], Any], int], kpool_testing.Run]
    ) -> None:
        size, cpu = min(scenario.size, MOST_PROCESSES), torch.device("cpu")
        check_run(scenario, gloo(body_of(scenario, cpu), size), size, whole_of(scenario, cpu))

    def test_scores_cannot_be_returned(self, gloo: Callable[[Callable[[Any], Any], int], kpool_testing.Run]) -> None:
        call = SEED[0].call()
        with pytest.raises(ValueError, match="return_index_scores: expected False with query_shard_group, got True"):
            gloo(lambda group: call.run(query_shard_group=group, return_index_scores=True), 2)


@pytest.mark.parametrize("plan", ["contiguous", "block_cyclic"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_plans_cover_every_row_once(plan: str, size: int) -> None:
    for rows in (0, 1, 2, 5, 7, 8, 24, 37, 64, 129, 1000):
        dealt = ShardPlan.of(plan, rows, size)
        covered = torch.cat([dealt.rows(rank) for rank in range(size)])
        assert sorted(covered.tolist()) == list(range(rows))
        assert max(len(dealt.rows(rank)) for rank in range(size)) <= dealt.rows_per_rank
