"""The pool kernel against the torch formula of `kpool.pooling`: plain and packed grids, both numerics, every dtype."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kpool.grid import PoolGrid
from kpool.pooling import pool_on_grid
from kpool.triton import configs, launch


@dataclass(frozen=True)
class PoolCase:
    """What to pool, in words."""

    numerics: str = "megatron"
    pool_size: int = 4
    dim: int = 16
    tokens: int = 60
    batch: int = 2
    gate: torch.dtype | None = torch.bfloat16
    ape: bool = True
    dtype: torch.dtype = torch.bfloat16
    cuts: tuple[int, ...] | None = None
    scale: float = 1.0


POOL_CASES = (
    PoolCase(),
    PoolCase("hf", pool_size=2, dim=8, tokens=21, gate=None),
    PoolCase("hf", dtype=torch.float16, gate=torch.float32, ape=False),
    PoolCase(pool_size=2, cuts=(0, 0, 5, 6, 41, 57), scale=30.0),
)


def same_as_torch(case: PoolCase, device: torch.device) -> None:
    """Pool both ways: at most one unit in the last place apart, and 16-bit results all but always equal."""
    rng = torch.Generator().manual_seed(7)
    shape = (case.tokens, case.batch, case.dim)
    k = torch.randn(shape, generator=rng).to(case.dtype).to(device)
    gate = None if case.gate is None else (torch.randn(shape, generator=rng) * case.scale).to(case.gate).to(device)
    ape = torch.randn(case.pool_size, case.dim, generator=rng).to(device) if case.ape else None
    if case.cuts is None:
        grid = PoolGrid.plain(case.tokens, case.pool_size, device)
    else:
        grid = PoolGrid.packed(torch.tensor(case.cuts, device=device), case.tokens, case.pool_size)
    expected = pool_on_grid(k, gate, ape, grid, plain=case.cuts is None, numerics=case.numerics, impl="torch")
    got = launch.pool(k, gate, ape, grid.starts(), case.pool_size, case.numerics)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    # numpy's exp and torch's differ in the last fp32 bit, which moves a rounding boundary now and then; "hf" rounds
    # each of P shares and products, so one step may come from any of them
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}[got.dtype]
    off = (got.float() - expected.float()).abs()
    largest = k.float().abs().amax()
    assert (off <= step * (expected.float().abs() if case.numerics == "megatron" else largest)).all()
    if got.dtype != torch.float32:  # an fp32 result shows every last bit of exp, a 16-bit one almost none
        assert (off == 0).float().mean() > 0.98
    assert (got[(grid.starts() < 0)] == 0).all()


@pytest.mark.parametrize("case", POOL_CASES, ids=str)
def test_pools_as_torch_does(case: PoolCase, gpu: torch.device) -> None:
    same_as_torch(case, gpu)


@pytest.mark.interpret
@pytest.mark.parametrize("numerics", ["megatron", "hf"])
@pytest.mark.parametrize("pool_size", [1, 2, 3, 4, 16, 64])
@pytest.mark.parametrize("dim", [8, 24, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pools_as_torch_does_at_every_size(
    numerics: str, pool_size: int, dim: int, dtype: torch.dtype, gpu: torch.device
) -> None:
    same_as_torch(PoolCase(numerics, pool_size, dim, tokens=150, dtype=dtype, gate=dtype), gpu)


def test_rounds_to_nearest_even(gpu: torch.device) -> None:
    """One token a pool returns the key itself, rounded; halfway values go to even, and NaN stays NaN."""
    k = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.0e38, float("nan"), float("inf")], device=gpu)
    got = launch.pool(k[None, None], None, None, torch.zeros(1, dtype=torch.int32, device=gpu), 1, "megatron")
    assert torch.equal(got[0, 0], k.bfloat16()) or torch.equal(got[0, 0].nan_to_num(), k.bfloat16().nan_to_num())
    assert got[0, 0].isnan().tolist() == k.isnan().tolist()


def test_left_padded_starts_differ_by_batch(gpu: torch.device) -> None:
    k = torch.randint(-8, 8, (12, 2, 4), device=gpu).bfloat16()
    starts = torch.tensor([[1, 5, -1], [0, 4, 8]], dtype=torch.int32, device=gpu)
    got = launch.pool(k, None, None, starts, 4, "megatron")
    for b, row in enumerate(starts.tolist()):
        for n, start in enumerate(row):
            expected = k[start : start + 4, b].float().mean(0) if start >= 0 else torch.zeros(4, device=gpu)
            assert torch.equal(got[n, b].float(), expected)


def test_pools_strided_keys_and_nothing_at_all(gpu: torch.device) -> None:
    k = torch.randint(-8, 8, (4, 8, 2), device=gpu).bfloat16().permute(1, 2, 0)  # [T 8, B 2, D 4], D strided
    starts = torch.tensor([0, 4], dtype=torch.int32, device=gpu)
    got = launch.pool(k, k, None, starts, 4, "megatron")
    assert torch.equal(got, launch.pool(k.contiguous(), k.contiguous(), None, starts, 4, "megatron"))
    assert launch.pool(k, None, None, starts[:0], 4, "hf").shape == (0, 2, 4)
    assert configs.pool_config(4).items == 16
