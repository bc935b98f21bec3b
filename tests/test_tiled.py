"""The tiled path: score bits under every split, work that is not done, memory that is not used, and no syncs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kpool import naive, tiled
from kpool.sharding import PLANS, RowBlocks, ShardPlan

HEADS = (1, 2, 3, 32)
DIMS = (8, 16, 64, 128)
OPTIONS: dict[str, Any] = {"pool_size": 4, "use_relu": True, "dot_scale": 1.0, "transform": "none"}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Leave torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def inputs(rows: int, pools: int, heads: int, dim: int, seed: int, batch: int = 1) -> list[Tensor]:
    """q, keys, weights, pool_lo, pool_hi: bf16 numbers, repeated keys (ties), windows of every width."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, batch, heads, dim, generator=g).bfloat16()
    keys = torch.randn(pools, batch, dim, generator=g).bfloat16()
    keys[torch.randint(pools, (pools // 4,), generator=g)] = keys[0].clone()
    weights = torch.randn(rows, batch, heads, generator=g)
    edges = torch.randint(pools + 1, (2, 1, rows), generator=g, dtype=torch.int32).sort(0).values
    return [q, keys, weights, edges[0], edges[1]]


def of_rows(call: list[Tensor], rows: Tensor | slice) -> list[Tensor]:
    """The same call with these rows alone."""
    q, keys, weights, lo, hi = call
    return [q[rows], keys, weights[rows], lo[:, rows], hi[:, rows]]


def select(call: list[Tensor], rows: RowBlocks, **changes: Any) -> Tensor:
    options = {**OPTIONS, "budget": 24, "order": "score", "chunk_bytes": 1 << 22, "rows": rows, **changes}
    return tiled.select(*call, None, **options)


def scores(call: list[Tensor], **changes: Any) -> Tensor:
    return tiled.scores(*call, None, **{**OPTIONS, **changes})


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def differing(got: Tensor, want: Tensor) -> int:
    """Rows `[B, r, *]` that differ in any bit."""
    return int((bits(got) != bits(want)).any(-1).sum())


def splits(heads: int, dim: int, seed: int, most: tuple[int, int] = (160, 360)) -> tuple[int, int]:
    """Rows compared and rows differing under one random drawing of everything a row must not depend on."""
    draw = random.Random(seed)
    rows, pools = draw.randint(*most), draw.randint(40, 400)
    call = inputs(rows, pools, heads, dim, seed)
    torch.set_num_threads(1)
    want_scores, order = scores(call), draw.choice(["score", "position"])
    want_ids = select(call, RowBlocks.all(rows), order=order)
    seen = compared = 0
    for threads in (1, 2):
        torch.set_num_threads(threads)
        perm = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        few = torch.tensor([draw.randrange(rows)])
        first = draw.randrange(rows)
        for part in (perm, few, slice(first, draw.randint(first + 1, rows))):
            mine = of_rows(call, part)
            seen += differing(scores(mine), want_scores[:, part])
            compared += mine[0].shape[0]
        ids = select(of_rows(call, perm), RowBlocks.all(rows), order=order)
        seen += differing(ids, want_ids[:, perm])
        plan = ShardPlan.of(draw.choice(PLANS), rows, draw.choice([1, 2, 3, 5, 8, 16, rows]))
        chunk = draw.choice([1, 1 << 12, 1 << 16, 1 << 22])
        gathered = torch.cat([select(call, plan.blocks(r), order=order, chunk_bytes=chunk) for r in range(plan.size)])
        seen += differing(plan.ungather(gathered), want_ids)
        compared += 2 * rows
        # pools moved to other columns: the same bits, and a window that follows
        shift = draw.randint(1, 150)
        moved = [
            call[0],
            torch.cat([call[1][:1].expand(shift, -1, -1), call[1]]),
            call[2],
            call[3] + shift,
            call[4] + shift,
        ]
        seen += differing(scores(moved)[..., shift:], want_scores)
        seen += differing(
            select(moved, RowBlocks.all(rows), order=order), torch.where(want_ids < 0, -1, want_ids + shift)
        )
        compared += 2 * rows
    return compared, seen


class TestInvariance:
    @pytest.mark.parametrize("heads", HEADS)
    def test_splits(self, heads: int) -> None:
        """No bit of a row depends on plan, chunk, shard, neighbours, place of row or pool, or threads."""
        found = [splits(heads, dim, heads, (40, 80)) for dim in (DIMS[:2] if heads % 2 else DIMS[2:])]
        assert sum(compared for compared, _ in found) > 500
        assert sum(wrong for _, wrong in found) == 0

    @pytest.mark.soak
    @pytest.mark.parametrize("heads", HEADS)
    def test_many_splits(self, heads: int) -> None:
        compared = 0
        for seed in range(100, 116):
            for dim in DIMS:
                rows, wrong = splits(heads, dim, seed)
                compared += rows
                assert wrong == 0, (heads, dim, seed)
        assert compared > 50_000

    def test_equal_pools_score_alike(self) -> None:
        """One key in every column: one score per row, whatever the tile and the place in it."""
        for heads in HEADS:
            q, keys, weights, lo, hi = inputs(70, 300, heads, 16, 1)
            call = [q, keys[:1].expand(300, -1, -1), weights, lo * 0, hi * 0 + 300]
            got = scores(call)
            assert differing(got, got[..., :1].expand_as(got)) == 0


class TestAnswers:
    @pytest.mark.parametrize("order", ["score", "position"])
    @pytest.mark.parametrize("case", ["plain", "nan", "infinite", "zero", "scaled"])
    def test_against_the_reference(self, case: str, order: str) -> None:
        """Whole numbers, so that every summation order gives the same score."""
        call = inputs(150, 300, 3, 8, 5, batch=2)
        call[0], call[1], call[2] = (t.mul(2).round() for t in call[:3])
        changes: dict[str, Any] = {"budget": 40, "order": order, "chunk_bytes": 1 << 16}
        if case in ("nan", "infinite"):
            call[1][7::50] = float("nan" if case == "nan" else "inf")
        if case == "zero":
            call[2] *= -0.0
        if case == "scaled":
            changes |= {"dot_scale": 0.25, "use_relu": False}
        got = select(call, RowBlocks.all(150), **changes)
        want = naive.select(*call, None, **{**OPTIONS, **changes}, rows=RowBlocks.all(150))
        assert torch.equal(got, want)

    def test_no_negative_zero(self) -> None:
        call = inputs(40, 60, 2, 8, 5)
        call[2] = call[2].abs().neg()
        call[0] = call[0] * 0
        seen = scores(call)
        assert int((bits(seen) == -(2**31)).sum()) == 0

    @pytest.mark.parametrize("rows, pools", [(0, 5), (5, 0), (1, 1), (33, 129)])
    def test_edges(self, rows: int, pools: int) -> None:
        call = [torch.ones(rows, 1, 2, 8), torch.ones(pools, 1, 8), torch.ones(rows, 1, 2)]
        call += [torch.zeros(1, rows, dtype=torch.int32), torch.full((1, rows), pools, dtype=torch.int32)]
        got = select(call, RowBlocks(0, 8, 8, rows + 3))
        assert got.shape == (1, rows + 3, 24) and bool((got[:, rows:] == -1).all())
        assert torch.equal(
            got[:, :rows, :pools].unique(), torch.arange(min(pools, 24) if rows else 0, dtype=torch.int32)
        )
        assert scores(call).shape == (1, rows, pools)


class Counter:
    """Counts tile products."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        real = tiled.Scorer.multiply

        def counted(scorer: tiled.Scorer, key: Tensor) -> None:
            self.calls += 1
            real(scorer, key)

        monkeypatch.setattr(tiled.Scorer, "multiply", counted)


class TestWork:
    def causal(self, rows: int, pools: int, heads: int = 2) -> list[Tensor]:
        call = inputs(rows, pools, heads, 8, 0)
        ends = ((torch.arange(rows, dtype=torch.int32) + 1) // 4).clamp(max=pools)[None]
        return [*call[:3], torch.zeros_like(ends), ends]

    def test_rows_with_no_choice_cost_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counter, call = Counter(monkeypatch), self.causal(400, 100)
        got = select(call, RowBlocks.all(400), budget=100, order="position")
        assert counter.calls == 0
        assert got[0, 399].tolist() == list(range(100)) and got[0, 0].tolist() == [-1] * 100

    def test_a_mixed_group_scores_only_what_it_must(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counter, call = Counter(monkeypatch), self.causal(128, 1000)
        wide = call[4].clone()
        wide[0, 70] = 1000  # one row of one tile sees 8 tiles of pools, 40 is the budget
        call[4] = wide
        got = select(call, RowBlocks.all(128), budget=40, order="position")
        assert counter.calls == -(-1000 // tiled.POOL_TILE)
        want = scores(call)[0, 70].topk(40).indices.sort().values
        assert got[0, 70].tolist() == want.tolist() and got[0, 127].tolist() == list(range(32)) + [-1] * 8

    def test_unseen_tiles_are_not_scored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counter, call = Counter(monkeypatch), self.causal(4096, 1024)
        select(call, RowBlocks.all(4096))
        row_tiles, tiles = 4096 // tiled.ROW_TILE, 1024 // tiled.POOL_TILE
        assert counter.calls == sum(-(-((i + 1) * tiled.ROW_TILE // 4) // tiled.POOL_TILE) for i in range(row_tiles))
        assert counter.calls < 0.6 * row_tiles * tiles

    def test_no_tensor_of_all_rows_and_pools(self) -> None:
        largest = 0

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                if isinstance(out, Tensor):
                    largest = max(largest, out.numel())
                return out

        call = self.causal(4096, 1024)
        with Watch():
            tiled._select(*call, None, 4, 24, [0, 4096, 4096, 4096], True, 1.0, "none", "score", 1 << 20)
        assert 0 < largest <= 1 << 18 < 4096 * 1024  # the score buffer's share


class TestElsewhere:
    """Devices whose values cannot be read without a stall, run on the CPU with their large tiles."""

    @pytest.fixture(autouse=True)
    def elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiled, "_readable", lambda tensor: False)
        monkeypatch.setattr(tiled.Tile, "of", staticmethod(lambda heads, device: tiled.Tile(128, 2048)))

    @pytest.mark.parametrize("order", ["score", pytest.param("position", marks=pytest.mark.slow)])
    def test_body_never_reads_values(self, order: str) -> None:
        """Fake tensors have no values: whatever reads one, or has a shape that depends on one, raises."""
        with FakeTensorMode():
            call = [torch.empty(300, 2, 3, 8, dtype=torch.bfloat16), torch.empty(70, 2, 8, dtype=torch.bfloat16)]
            call += [torch.empty(300, 2, 3), *(torch.empty(1, 300, dtype=torch.int32) for _ in range(2))]
            rest: tuple[Any, ...] = (4, 16, [0, 8, 16, 152], True, 0.5, "hadamard", order, 1 << 20)
            for mask in (None, torch.empty(1, 300, 280)):
                assert tiled._select(*call, mask, *rest).shape == (2, 152, 16)
            assert scores(call).shape == (2, 300, 70)
            with pytest.raises(RuntimeError):  # the guard itself works
                call[3].max().item()

    def test_the_same_selection(self) -> None:
        call = inputs(300, 700, 2, 8, 9)
        call[0], call[1], call[2] = (t.mul(2).round() for t in call[:3])
        want = naive.select(
            *call, None, **OPTIONS, budget=24, rows=RowBlocks.all(300), order="score", chunk_bytes=1 << 20
        )
        assert torch.equal(select(call, RowBlocks.all(300)), want)


class TestFakeCuda:
    def test_fake_implementation(self) -> None:
        with FakeTensorMode():
            call = [torch.empty(300, 2, 3, 8, device="cuda", dtype=torch.bfloat16)]
            call += [torch.empty(70, 2, 8, device="cuda", dtype=torch.bfloat16), torch.empty(300, 2, 3, device="cuda")]
            call += [torch.empty(1, 300, device="cuda", dtype=torch.int32) for _ in range(2)]
            out = select(call, RowBlocks(0, 8, 16, 152), budget=16)
        assert out.shape == (2, 152, 16) and out.device.type == "cuda" and out.dtype is torch.int32


def test_the_operation_is_well_registered() -> None:
    call = inputs(40, 60, 2, 8, 5)
    arguments = (*call, None, 4, 8, [0, 40, 40, 40], True, 1.0, "none", "score", 1 << 20)
    torch.library.opcheck(torch.ops.kpool.select_torch, arguments)
