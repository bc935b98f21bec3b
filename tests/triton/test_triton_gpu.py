"""What only a GPU can show: `tox -e gpu` runs this file, and all others of the suite, on the device."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kpool import fused_qk_topk_kpool, tiled
from kpool.grid import PoolGrid
from kpool.pooling import pool_on_grid
from kpool.reference import score_rows
from kpool.sharding import RowBlocks, ShardPlan
from kpool.triton import launch
from kpool.visibility import Visibility

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
ROWS, POOLS, HEADS, DIM, BUDGET = 3000, 2048, 32, 128, 512


@pytest.fixture(scope="module")
def inputs() -> tuple[Tensor, ...]:
    """Causal prefill: the last 3000 rows of 8192 tokens, in GLM-5.3-Flash's geometry."""
    rng = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(ROWS, 1, HEADS, DIM, generator=rng, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(POOLS, 1, DIM, generator=rng, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(ROWS, 1, HEADS, generator=rng, device="cuda")
    windows = Visibility.causal(ROWS, first=4 * POOLS - ROWS).windows(
        rows=ROWS, tokens=4 * POOLS, batch=1, pool_size=4, device="cuda"
    )
    return q, keys, weights, windows.pool_lo, windows.pool_hi


def select(inputs: tuple[Tensor, ...], rows: RowBlocks, chunk_bytes: int = 1 << 28, order: str = "score") -> Tensor:
    ids: Tensor = launch.select(
        *inputs, None, pool_size=4, budget=BUDGET, rows=rows, use_relu=True, dot_scale=1.0, transform="none",
        order=order, chunk_bytes=chunk_bytes,
    )  # fmt: skip
    return ids


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Any call that waits for the device is an error."""
    with warnings.catch_warnings():
        # torch says once that it does not know every call that waits; as an error it would leave the mode switched on
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype feature")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("order", ["score", "position"])
def test_no_bit_differs_over_200_splits_and_launches(inputs: tuple[Tensor, ...], order: str) -> None:
    rng = random.Random(1)
    whole = select(inputs, RowBlocks.all(ROWS), order=order)
    for _ in range(200):
        size = rng.randint(1, 32)
        plan = rng.choice([ShardPlan.contiguous, ShardPlan.block_cyclic])(ROWS, size)
        chunk = rng.choice([1 << 17, 1 << 20, 1 << 24, 1 << 28])
        parts = [select(inputs, plan.blocks(rank), chunk, order) for rank in range(size)]
        assert torch.equal(plan.ungather(torch.cat(parts)), whole)


def test_sets_equal_the_torch_path_where_rounding_cannot_decide(inputs: tuple[Tensor, ...]) -> None:
    q, keys, weights, _, hi = inputs
    triton = select(inputs, RowBlocks.all(ROWS))[0].sort(-1).values.cpu()
    torch_ids = tiled.select(
        *inputs, None, pool_size=4, budget=BUDGET, rows=RowBlocks.all(ROWS), use_relu=True, dot_scale=1.0,
        transform="none", order="score", chunk_bytes=1 << 28,
    )[0].sort(-1).values.cpu()  # fmt: skip
    differ = (triton != torch_ids).any(-1).nonzero()[:, 0].tolist()
    assert len(differ) < ROWS // 50
    for row in differ:
        score, error = score_rows(q[row : row + 1, 0].cpu(), keys[:, 0].cpu(), weights[row : row + 1, 0].cpu())
        ordered = score[0, : int(hi[0, row])].sort(descending=True).values
        assert ordered[BUDGET - 1] - ordered[BUDGET] <= 2 * error.max(), row


def test_scores_lie_within_the_bound(inputs: tuple[Tensor, ...]) -> None:
    q, keys, weights, lo, hi = (t[:, -64:] if t.dtype == torch.int32 else t for t in inputs)
    part = (q[-64:], keys, weights[-64:], lo.contiguous(), hi.contiguous())
    got = launch.scores(*part, None, pool_size=4, use_relu=True, dot_scale=1.0, transform="none")[0].cpu()
    score, error = score_rows(q[-64:, 0].cpu(), keys[:, 0].cpu(), weights[-64:, 0].cpu())
    seen = torch.arange(POOLS) < hi[0, :, None].cpu()
    assert ((got - score).abs() <= error)[seen].all() and got[~seen].isneginf().all()


def test_waiting_for_the_device_is_noticed() -> None:
    """What the tests below rely on: reading a value back is an error, and afterwards it is allowed again."""
    one = torch.ones(1, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        one.item()
    assert torch.cuda.get_sync_debug_mode() == 0 and one.item() == 1


def test_nothing_waits_for_the_device(inputs: tuple[Tensor, ...]) -> None:
    rows = ShardPlan.block_cyclic(ROWS, 4).blocks(1)
    expected = select(inputs, rows, 1 << 20)
    with no_synchronisation():
        ids = select(inputs, rows, 1 << 20)
    assert torch.equal(ids, expected)


def test_a_captured_graph_replays_on_new_inputs(inputs: tuple[Tensor, ...]) -> None:
    static = tuple(t.clone() for t in inputs)
    rows = ShardPlan.block_cyclic(ROWS, 4).blocks(2)
    select(static, rows, 1 << 22)  # compiles outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = select(static, rows, 1 << 22)
    static[0].copy_(inputs[0].flip(0))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(ids, select(static, rows))


TOKENS = 2048
FUSED = {  # name: (visibility, options)
    "causal": ("bounds", {}),
    "position": ("bounds", {"order": "position"}),
    "fp8": ("bounds", {"fp8_indexer": True}),
    "hadamard": ("bounds", {"rotate_activation_enabled": True, "numerics": "hf"}),
    "packed": ("packed", {}),
    "packed bounds": ("packed bounds", {}),
    "packed fp8": ("packed", {"fp8_indexer": True}),
    "positions": ("positions", {}),
    "mask": ("mask", {}),
    "mask of wide pools": ("mask", {"pool_size": 16}),
    "no tail": ("bounds", {"always_select_tail": False, "width_multiple": 64, "score_chunk_bytes": 1 << 20}),
}
fused = pytest.mark.parametrize("name", FUSED)


def fused_tensors(kind: str, seed: int, pool_size: int = 4) -> dict[str, Tensor]:
    """The tensor arguments of a fused call of 2048 tokens, every one on the device; `seed` decides all values."""
    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16)

    row = torch.arange(TOKENS, device="cuda", dtype=torch.int32)
    edges = torch.tensor([0, 301 + seed, 302 + seed, 1500 - seed, TOKENS - 5], device="cuda", dtype=torch.int32)
    document = torch.searchsorted(edges, row, right=True).clamp(max=4) - 1
    within = {"varlen_starts": edges[document], "varlen_ends": torch.minimum(row + 1, edges[document + 1])}
    causal = {"varlen_starts": torch.zeros_like(row), "varlen_ends": (row + 1 + seed).clamp(max=TOKENS)}
    hidden = torch.rand(TOKENS, TOKENS, generator=rng, device="cuda") < 0.01
    hidden |= torch.ones_like(hidden).triu(1 + seed)
    visibility = {
        "bounds": causal,
        "packed": {"cu_seqlens_kv": edges},
        "packed bounds": {"cu_seqlens_kv": edges, **within},
        "positions": {"key_positions": 2 * row, **{name: 2 * bound for name, bound in causal.items()}},
        "mask": {"mask": torch.zeros(hidden.shape, device="cuda").masked_fill(hidden, -torch.inf)},
    }[kind]
    return {
        "q": normal(TOKENS, 1, HEADS, DIM),
        "k": normal(TOKENS, 1, DIM),
        "weights": normal(TOKENS, 1, HEADS).float(),
        "gate_score": normal(TOKENS, 1, DIM),
        "ape": normal(pool_size, DIM).float(),
        **visibility,
    }


def fused_call(tensors: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    settings = {"index_topk": 256, "pool_size": 4, "return_index_scores": False, **options}
    return fused_qk_topk_kpool(**tensors, **settings)[1]


@fused
def test_the_fused_call_never_waits_for_the_device(name: str) -> None:
    kind, options = FUSED[name]
    tensors = fused_tensors(kind, 0, options.get("pool_size", 4))
    expected = fused_call(tensors, options)  # compiles
    with no_synchronisation():
        tokens = fused_call(tensors, options)
    assert torch.equal(tokens, expected)
    assert torch.equal(tokens, fused_call(tensors, {**options, "score_chunk_bytes": 1 << 18}))


@fused
def test_the_fused_call_can_be_captured_in_a_graph(name: str) -> None:
    """Captured once, replayed on other values of every tensor: queries, keys, gates, bounds and document edges."""
    kind, options = FUSED[name]
    static, others = (fused_tensors(kind, seed, options.get("pool_size", 4)) for seed in (0, 1))
    before, expected = fused_call(static, options), fused_call(others, options)
    assert not torch.equal(before, expected)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = fused_call(static, options)
    graph.replay()
    assert torch.equal(tokens, before)
    for argument, tensor in static.items():
        tensor.copy_(others[argument])
    graph.replay()
    assert torch.equal(tokens, expected)


def test_memory_stays_under_the_chunk_budget(inputs: tuple[Tensor, ...]) -> None:
    """Bytes asked for, since those allocated also count what the allocator rounds up and splits off."""
    budget = 4 << 20
    select(inputs, RowBlocks.all(ROWS), budget)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    ids = select(inputs, RowBlocks.all(ROWS), budget)
    torch.cuda.synchronize()
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - ids.numel() * ids.element_size()
    assert budget // 2 < asked <= budget


def test_offsets_pass_2_to_the_31() -> None:
    """The last rows of a q of more than 2**31 elements select as they do alone."""
    rows, tail = (1 << 19) + 64, 64
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.fail("this test needs 6 GiB of free device memory")
    q = torch.empty(rows, 1, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    q[-tail:].normal_()
    keys = torch.randn(POOLS, 1, DIM, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(rows, 1, HEADS, device="cuda")
    lo = torch.zeros(1, rows, device="cuda", dtype=torch.int32)
    hi = torch.full_like(lo, POOLS)
    last = RowBlocks(rows - tail, tail, tail, tail)
    alone = (q[-tail:].clone(), keys, weights[-tail:].clone(), lo[:, :tail].contiguous(), hi[:, :tail].contiguous())
    assert torch.equal(select((q, keys, weights, lo, hi), last), select(alone, RowBlocks.all(tail)))


def test_pooled_keys_have_the_bits_of_torch() -> None:
    k, gate = (torch.randn(4096, 2, DIM, device="cuda").bfloat16() for _ in range(2))
    ape = torch.randn(4, DIM, device="cuda")
    grid = PoolGrid.plain(4096, 4, k.device)
    for numerics in ("megatron", "hf"):
        expected = pool_on_grid(k, gate, ape, grid, plain=True, numerics=numerics, impl="torch")
        assert torch.equal(launch.pool(k, gate, ape, grid.starts(), 4, numerics), expected)


@pytest.mark.timeout(1200)
def test_compute_sanitizer_finds_nothing() -> None:
    """Accesses out of bounds, by the vendor's tool where it is installed; without torch's cache each tensor ends."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not installed")
    test = "tests/triton/test_triton_select.py::test_sharded_is_whole"
    inner = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--timeout", "0"]
    inner += ["-m", "interpret or gpu", test]
    done = subprocess.run(
        [tool, "--error-exitcode", "9", "--target-processes", "application-only", *inner],
        capture_output=True, text=True, check=False, timeout=1100, cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
