"""Injected faults end in a named error or change nothing, and one seed reproduces them."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kpool_testing import CollectiveError, DeadlockError, LimitError, RankError, assert_matches_unsharded, simulate
from kpool_testing.faults import (
    Corrupt,
    Delay,
    Drop,
    Fault,
    InjectedError,
    Raise,
    Reorder,
    random_faults,
)
from tests.testing.torch_names import all_gather_single

CALLS = 6


def program(group: Any) -> torch.Tensor:
    """Six collectives whose result depends on every one of them; the same on any number of ranks."""
    size, rank = group.size(), group.rank()
    x = torch.arange(24.0, dtype=torch.float64)
    mine = x.chunk(size)[rank].clone()
    for step in range(3):
        gathered = torch.empty(24, dtype=torch.float64)
        all_gather_single(gathered, mine * (step + 2))
        part = gathered.sum().reshape(1) / size
        dist.all_reduce(part)
        mine = (gathered + part.round()).chunk(size)[rank].clone()
    return torch.cat([gathered, part.round()])


CLEAN = simulate(program, 1).results[0]


def ended(faults: list[Fault], **options: Any) -> BaseException | None:
    """How a run with these faults ends."""
    try:
        run = simulate(program, 4, faults=faults, limit=30, **options)
    except CollectiveError as error:
        return error
    return None if all(torch.equal(result, CLEAN) for result in run.results) else AssertionError("other results")


class TestEachKind:
    def test_raise(self) -> None:
        error = ended([Raise(rank=2, at=3)])
        assert isinstance(error, RankError)
        assert isinstance(error, InjectedError)
        assert "rank 2 raised InjectedError: injected fault on rank 2 in all_reduce#3 on group world" in str(error)
        assert "missing ranks [2]" in str(error)

    def test_drop(self) -> None:
        error = ended([Drop(rank=1, at=4)])
        assert isinstance(error, DeadlockError)
        assert "rank 1: dropped out (injected fault) before all_gather_single#4" in str(error)
        assert "rank 0: waits in all_gather_single#4 on group world" in str(error)

    def test_drop_that_nobody_waits_for(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                dist.isend(torch.ones(1), 1)

        with pytest.raises(RankError, match="rank 0 dropped out"):
            simulate(body, 2, faults=[Drop(rank=0)])

    @pytest.mark.parametrize("seconds", [0.5, 29.0])
    def test_legal_delay_changes_nothing(self, seconds: float) -> None:
        started = time.monotonic()
        assert ended([Delay(rank=3, at=2, seconds=seconds)]) is None
        assert time.monotonic() - started < 5

    def test_delay_past_the_limit(self) -> None:
        started = time.monotonic()
        error = ended([Delay(rank=3, at=2, seconds=31.0)])
        assert time.monotonic() - started < 5
        assert isinstance(error, LimitError)
        assert "rank 3 was 31 s late (injected fault) for all_gather_single#2" in str(error)

    def test_delays_add_up_where_ranks_wait_for_each_other(self) -> None:
        assert ended([Delay(rank=1, at=0, seconds=20), Delay(rank=1, at=1, seconds=5)]) is None
        assert isinstance(ended([Delay(rank=1, at=0, seconds=20), Delay(rank=1, at=1, seconds=11)]), LimitError)
        assert ended([Delay(rank=1, at=0, seconds=20), Delay(rank=2, at=0, seconds=20)]) is None

    def test_corrupt_is_caught_by_the_oracle(self) -> None:
        assert_matches_unsharded(program, sizes=(2, 3, 4))
        with pytest.raises(AssertionError):
            assert_matches_unsharded(program, sizes=(2, 3, 4), faults=[Corrupt(rank=1, at=2)])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    def test_corrupt_changes_what_is_sent_and_nothing_of_the_rank(self, dtype: torch.dtype) -> None:
        def body(group: Any) -> Any:
            x, out = torch.ones(3).to(dtype), torch.empty(6, dtype=dtype)
            all_gather_single(out, x)
            return x, out

        for x, out in simulate(body, 2, faults=[Corrupt(rank=1)]).results:
            assert torch.equal(x, torch.ones(3).to(dtype))
            assert torch.equal(out[:3], x)
            assert (out[3:] != x).sum() == 1

    def test_corrupt_message(self) -> None:
        def body(group: Any) -> Any:
            x = torch.ones(2)
            if group.rank() == 0:
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
            return x

        sent, received = simulate(body, 2, faults=[Corrupt(rank=0)]).results
        assert sent.tolist() == [1, 1]
        assert (received != sent).sum() == 1

    def test_reorder(self) -> None:
        assert all(ended([Reorder()], seed=seed) is None for seed in range(10))

    def test_rank_out_of_range(self) -> None:
        with pytest.raises(ValueError, match=r"not in \[0, 2\)"):
            simulate(program, 2, faults=[Raise(rank=2)])

    def test_random_faults_validates(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            random_faults(0, 0, 1)


@pytest.mark.parametrize("runs", [48, pytest.param(500, marks=pytest.mark.slow)])
def test_seeded_runs(runs: int) -> None:
    threads = threading.active_count()
    kinds: dict[str, int] = {}
    for seed in range(runs):
        faults = random_faults(seed, size=4, calls=CALLS)
        started = time.monotonic()
        error = ended(faults, seed=seed)
        assert time.monotonic() - started < 5
        fault = faults[-1]
        if isinstance(fault, Raise):
            assert isinstance(error, InjectedError), (seed, faults)
        elif isinstance(fault, Drop):
            assert isinstance(error, DeadlockError), (seed, faults)
        elif isinstance(fault, Delay) and fault.seconds > 30:
            assert isinstance(error, LimitError), (seed, faults)
        elif isinstance(fault, Delay):
            assert error is None, (seed, faults)
        elif isinstance(fault, Corrupt):
            assert isinstance(error, AssertionError), (seed, faults)
        if error is not None and not isinstance(fault, Corrupt):
            assert f"rank {fault.rank}" in str(error)
            if seed % 5 == 0:
                assert str(error) == str(ended(faults, seed=seed)), "the same seed gives the same report"
        kinds[type(fault).__name__] = kinds.get(type(fault).__name__, 0) + 1
        if seed % 25 == 0:
            assert ended([]) is None
    assert min(kinds.values()) > runs // 8
    assert set(kinds) == {"Raise", "Drop", "Delay", "Corrupt"}
    assert ended([]) is None
    assert threading.active_count() == threads
