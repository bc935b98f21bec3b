"""Input transforms by exact values, and the gradients of the scores against float64 autograd of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kpool import fused_qk_topk_kpool, reference, scoring, tiled
from kpool.scoring import differentiable_scores, quantize_fp8, rotate, transform, unmasked_pools, visible_pools


def sylvester(dim: int) -> Tensor:
    """The Hadamard matrix, entry `(i, j) = (-1) ** popcount(i & j)`, float64."""
    return torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)], dtype=torch.float64)


@pytest.mark.parametrize("dim", [1, 2, 4, 8, 64, 128])
def test_rotation_is_the_matrix(dim: int, device: torch.device) -> None:
    x = torch.randint(-8, 9, (5, 3, dim), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    got = rotate(x.to(device))
    assert got.dtype == torch.bfloat16 and got.shape == x.shape
    # whole numbers: the butterflies are exact, then one product in fp32 and one rounding to bf16
    expected = ((x.double() @ sylvester(dim)).float() * dim**-0.5).to(torch.bfloat16)
    assert torch.equal(got.cpu(), expected)


def test_rotation_of_a_worked_example(device: torch.device) -> None:
    assert rotate(torch.tensor([1.0, 2, 3, 4], device=device)).tolist() == [5, -1, -2, 0]


def test_rotation_keeps_lengths_and_undoes_itself() -> None:
    x = torch.randn(50, 128)
    turned = rotate(x)
    assert torch.allclose(turned.float().norm(dim=-1), x.norm(dim=-1), rtol=2**-8)
    assert torch.allclose(rotate(turned).float(), x, atol=4 * 2**-8)


@pytest.mark.parametrize("dim", [0, 3, 12, 127])
def test_rotation_needs_a_power_of_two(dim: int) -> None:
    with pytest.raises(ValueError, match=f"D: expected a power of two for the Hadamard rotation, got {dim}"):
        rotate(torch.zeros(2, dim))


@pytest.mark.parametrize("amax", [448.0, 449.0, 447.9, 896.0, 897.0, 1.0, 2.0**-13, 1e-5, 0.0, 3e38])
def test_fp8_scale_is_the_smallest_power_of_two(amax: float, device: torch.device) -> None:
    quantised, scale = quantize_fp8(torch.tensor([amax, -amax / 3], device=device))
    value = scale.item()
    assert scale.dtype == torch.float32 and scale.shape == (1,)
    assert torch.frexp(scale.cpu())[0].item() == 0.5, "not a power of two"
    clamped = torch.tensor(max(amax, 1e-4)).item()
    assert clamped / value <= 448 < 2 * clamped / value
    assert bool(torch.isfinite(quantised.float()).all())


def test_fp8_rounds_to_the_nearest_e4m3_value(device: torch.device) -> None:
    x = torch.tensor([448.0, 300, 17, 18, 19, 0.0009, 2**-9, -300], device=device)
    quantised, scale = quantize_fp8(x)
    assert scale.item() == 1 and quantised.float().tolist() == [448, 288, 16, 18, 20, 0, 2**-9, -288]


@pytest.mark.parametrize("name", ["none", "hadamard", "fp8"])
def test_transforms_are_the_reference(name: str, device: torch.device) -> None:
    for scale in (1e-6, 1e-3, 1.0, 1e3, 1e6):
        x = (scale * torch.randn(40, 2, 64, generator=torch.Generator().manual_seed(1))).to(torch.bfloat16)
        assert torch.equal(transform(x.to(device), name).cpu().double(), reference.transform(x, name).double())


def test_fp8_lets_the_gradient_through(device: torch.device) -> None:
    """The rounding counts as the identity; the rotation before it is orthogonal."""
    x = torch.randn(4, 8, device=device, requires_grad=True)
    upstream = torch.ones(4, 8, device=device)
    (fp8,) = torch.autograd.grad(transform(x, "fp8"), x, upstream.to(torch.bfloat16))
    (plain,) = torch.autograd.grad(transform(x, "hadamard"), x, upstream.to(torch.bfloat16))
    assert torch.equal(fp8, plain) and bool((fp8 != 0).any())


def test_visible_pools() -> None:
    lo, hi = torch.tensor([[0, 1, 3]], dtype=torch.int32), torch.tensor([[2, 4, 3]], dtype=torch.int32)
    expected = [[1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]
    assert visible_pools(lo, hi, None, 2, 4)[0].int().tolist() == expected
    mask = torch.zeros(1, 3, 9)
    mask[0, 1, 5] = -torch.inf
    mask[0, 0, 8] = -torch.inf  # in no pool
    assert visible_pools(lo, hi, mask, 2, 4)[0].int().tolist() == [[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]
    assert unmasked_pools(mask, 2, 0).shape == (1, 3, 0)


def _inputs(device: torch.device, batch: int, view: int, masked: bool) -> tuple[list[Tensor], list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    q, keys, weights = (
        torch.randn(shape, generator=generator).to(device).requires_grad_()
        for shape in ((13, batch, 3, 8), (6, batch, 8), (13, batch, 3))
    )
    lo = torch.randint(0, 3, (view, 13), generator=generator).to(device, torch.int32)
    hi = lo + torch.randint(0, 4, (view, 13), generator=generator).to(device, torch.int32)
    mask = torch.zeros(view, 13, 14).masked_fill(torch.rand(view, 13, 14, generator=generator) < 0.2, -torch.inf)
    return [q, keys, weights], [lo, hi, mask.to(device) if masked else None]


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize(("batch", "view", "masked"), [(1, 1, False), (2, 1, True), (2, 2, True)])
def test_gradients_are_those_of_the_formula(
    use_relu: bool, batch: int, view: int, masked: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "_BACKWARD_ELEMENTS", 100)  # several pieces of rows
    tensors, windows = _inputs(device, batch, view, masked)
    q, keys, weights = tensors
    options: dict[str, Any] = {"pool_size": 2, "use_relu": use_relu, "dot_scale": 0.5}
    scores = differentiable_scores(tiled.scores, q, keys, weights, *windows, transform_name="none", **options)
    seen = scores > -torch.inf
    upstream = torch.randn(scores.shape, generator=torch.Generator().manual_seed(3)).to(device)
    got = torch.autograd.grad(scores, tensors, upstream)

    exact = [t.detach().double().requires_grad_() for t in tensors]
    dot = 0.5 * torch.einsum("sbhd,nbd->bshn", exact[0], exact[1])
    formula = torch.einsum("sbh,bshn->bsn", exact[2], dot.relu() if use_relu else dot)
    assert torch.allclose(scores.detach()[seen].double(), formula.detach()[seen], rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(formula, exact, upstream.double().masked_fill(~seen, 0))
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == torch.float32 and torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4)


def test_hidden_pools_send_no_gradient(device: torch.device) -> None:
    (q, keys, weights), windows = _inputs(device, 1, 1, False)
    assert windows[0] is not None and windows[1] is not None
    windows[0].fill_(1)
    windows[1].fill_(3)
    scores = differentiable_scores(
        tiled.scores, q, keys, weights, *windows, pool_size=2, use_relu=True, dot_scale=1.0, transform_name="none"
    )
    (gradient,) = torch.autograd.grad(
        scores, keys, torch.full_like(scores, torch.nan).masked_fill_(scores > -torch.inf, 1)
    )
    assert bool((gradient[[0, 3, 4, 5]] == 0).all()) and bool(gradient[[1, 2]].isfinite().all())
    assert bool((gradient[[1, 2]] != 0).any())


@pytest.mark.parametrize("view", [1, 2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_padding_that_nobody_sees_spoils_no_gradient(bad: float, view: int, device: torch.device) -> None:
    """Padded keys and padded rows may hold anything: the gradients are those with zeros in their place."""
    tensors, windows = _inputs(device, 2, view, False)
    assert windows[0] is not None and windows[1] is not None
    windows[0].clamp_(max=2)
    windows[1].clamp_(max=4)
    windows[1][:, 5:7] = 0  # rows 5 and 6 see nothing, pools 4 and 5 are seen by none
    gradients = []
    for filling in (0.0, bad):
        q, keys, weights = (t.detach().clone() for t in tensors)
        q[5], weights[6], keys[4:] = filling, filling, filling
        leaves = [t.requires_grad_() for t in (q, keys, weights)]
        scores = differentiable_scores(
            tiled.scores, *leaves, *windows, pool_size=2, use_relu=True, dot_scale=1.0, transform_name="none"
        )
        gradients.append(torch.autograd.grad(scores, leaves, torch.ones_like(scores)))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("setting", ["mkldnn", "everywhere"])
def test_a_program_that_allows_rounded_products_changes_no_score(setting: str) -> None:
    """`torch.set_float32_matmul_precision("medium")` lets fp32 products be rounded to bf16; a score's may not."""
    torch.manual_seed(0)
    rows, heads, dim = 64, 32, 64
    q, k = torch.randn(rows, 1, heads, dim), torch.randn(512, 1, dim)
    weights = torch.randn(rows, 1, heads)
    expected, _ = fused_qk_topk_kpool(q, k, weights, 64, 4, None, None)
    holder = torch.backends.mkldnn.matmul if setting == "mkldnn" else torch.backends
    before = holder.fp32_precision
    holder.fp32_precision = "bf16"
    try:
        got, _ = fused_qk_topk_kpool(q, k, weights, 64, 4, None, None)
        assert holder.fp32_precision == "bf16"
    finally:
        holder.fp32_precision = before
    assert torch.equal(got, expected)
