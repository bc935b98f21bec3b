"""Pooled keys: worked values, the reference, the grid, gradients."""

from __future__ import annotations

import pytest
import torch

from kpool import pool_keys, reference
from kpool.pooling import gated_sum


def test_equal_gates_are_the_mean(device: torch.device) -> None:
    k = torch.tensor([1.0, 3.0, 10.0, 20.0, 7.0], device=device).to(torch.bfloat16)[:, None, None]
    pooled = pool_keys(k, None, None, 2)
    assert pooled.keys.flatten().tolist() == [2.0, 15.0]
    assert pooled.starts.tolist() == [0, 2] and pooled.pool_size == 2
    assert pooled.keys.dtype == torch.bfloat16 and pooled.starts.dtype == torch.int32


def test_gate_and_slot_bias_add_up(device: torch.device) -> None:
    k = torch.tensor([[1.0], [2.0]], device=device)[:, None]
    gate = torch.tensor([[[1.5]], [[0.0]]], device=device)
    ape = torch.tensor([[-1.5], [0.0]], device=device)
    assert pool_keys(k, gate, ape, 2).keys.item() == 1.5
    assert pool_keys(k, gate, ape, 2, numerics="hf").keys.item() == 1.5


def test_the_slot_index_is_the_position_inside_the_pool(device: torch.device) -> None:
    k = torch.arange(9.0, device=device)[:, None, None]
    ape = torch.tensor([[0.0], [60.0]], device=device)  # the second slot takes all
    assert pool_keys(k, None, ape, 2).keys.flatten().tolist() == [1, 3, 5, 7]
    cu = torch.tensor([0, 3, 9], device=device)
    assert pool_keys(k, None, ape, 2, cu).keys.flatten().tolist() == [1, 4, 6, 8]


@pytest.mark.parametrize("numerics", ["megatron", "hf"])
def test_missing_pools_are_zero(numerics: str, device: torch.device) -> None:
    k = torch.ones(8, 2, 3, device=device)
    pooled = pool_keys(k, None, None, 2, torch.tensor([0, 3, 5], device=device), numerics=numerics)
    assert pooled.starts.tolist() == [0, 3, -1, -1]
    assert pooled.keys[:, 0, 0].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("numerics", ["megatron", "hf"])
def test_no_pool_at_all(tokens: int, numerics: str, device: torch.device) -> None:
    pooled = pool_keys(torch.ones(tokens, 2, 3, device=device), None, None, 4, numerics=numerics)
    assert pooled.keys.shape == (0, 2, 3) and pooled.starts.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numerics", ["megatron", "hf"])
@pytest.mark.parametrize("packed", [False, True])
def test_within_the_bound_of_the_reference(
    dtype: torch.dtype, numerics: str, packed: bool, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    k, gate = (torch.randn(203, 2, 24, generator=generator).to(dtype) for _ in range(2))
    ape = torch.randn(4, 24, generator=generator)
    cu = torch.tensor([0, 1, 50, 50, 93, 190]) if packed else None
    pooled = pool_keys(
        k.to(device), gate.to(device), ape.to(device), 4, None if cu is None else cu.to(device), numerics=numerics
    )
    starts = reference.pool_starts(203, 4, None if cu is None else cu.tolist())
    value, error = reference.pool_keys(k, gate, ape, 4, starts, numerics)
    assert pooled.starts.tolist() == starts
    assert pooled.keys.dtype == (torch.bfloat16 if numerics == "megatron" else dtype)
    assert bool(((pooled.keys.cpu().double() - value).abs() <= error).all())
    assert float((error > 0).double().mean()) < (1.0 if dtype == torch.float32 else 0.05) or numerics == "hf"


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    k, gate, cu = torch.randn(61, 2, 8), torch.randn(61, 2, 8), torch.tensor([0, 20, 55])
    for documents in (None, cu.to(device)):
        whole = pool_keys(k.to(device), gate.to(device), None, 3, documents)
        with monkeypatch.context() as patch:
            patch.setattr("kpool.pooling._PIECE_ELEMENTS", 100)
            pieces = pool_keys(k.to(device), gate.to(device), None, 3, documents)
        assert torch.equal(whole.keys, pieces.keys) and torch.equal(whole.starts, pieces.starts)


def test_equal_pools_have_equal_bits_wherever_they_lie(device: torch.device) -> None:
    pool, gate = torch.randn(1, 3, 2, 40), torch.randn(1, 3, 2, 40)
    many = pool.expand(1000, -1, -1, -1).flatten(0, 1), gate.expand(1000, -1, -1, -1).flatten(0, 1)
    keys = pool_keys(many[0].to(device), many[1].to(device), None, 3).keys
    assert bool((keys == keys[0]).all())


@pytest.mark.parametrize("numerics", ["megatron", "hf"])
def test_gradients_are_those_of_the_formula(numerics: str) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, gate = (torch.randn(5, 3, 2, 4, generator=generator, requires_grad=True) for _ in range(2))
    ape = torch.randn(3, 4, generator=generator, requires_grad=True)
    upstream = torch.randn(5, 2, 4, generator=generator)
    got = torch.autograd.grad(
        gated_sum(keys, gate, ape, numerics),
        (keys, gate, ape),
        upstream.to(torch.bfloat16 if numerics == "megatron" else torch.float32),
    )
    exact = [t.detach().double().requires_grad_() for t in (keys, gate, ape)]
    pooled = (torch.softmax(exact[1] + exact[2][:, None], 1) * exact[0]).sum(1)
    expected = torch.autograd.grad(pooled, exact, upstream.double())
    # bf16 rounds the upstream gradient once: half an ulp of 8 bits of each term, and sums of a few terms
    tolerance = 2**-7 if numerics == "megatron" else 1e-5
    for one, other in zip(got, expected, strict=True):
        assert torch.allclose(one.double(), other, rtol=tolerance, atol=tolerance)
