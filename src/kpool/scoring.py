"""The score of a pool, what is done to q and the pooled keys before it, and its gradient.

    score[b, s, n] = sum over h of  w[s, b, h] * f(dot_scale * (q[s, b, h] . key[n, b]))       f = ReLU or identity

Products of bf16 inputs are exact in fp32 and are accumulated in fp32. The two implementations (``tiled``, ``triton``)
compute this; this room holds what they share: the input transforms, and the autograd function around them.

Transforms act on the last dimension, on q and on the *pooled* key alike:

- ``"none"``;
- ``"hadamard"``: the Walsh-Hadamard matrix in Sylvester order, times ``D ** -0.5``, rounded to bf16;
- ``"fp8"``: the rotation, then one power-of-two scale per vector, E4M3 "fn", and back (exact in bf16).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kpool.linear import no_autocast

TRANSFORMS = ("none", "hadamard", "fp8")
FP8_MAX = 448.0  # largest finite E4M3 "fn" value
FP8_AMAX_FLOOR = 1e-4  # an all-zero vector gets a finite scale
_BACKWARD_ELEMENTS = 1 << 22  # fp32 dot products [rows, H, N] held at a time in backward


def transform(x: Tensor, name: str) -> Tensor:
    """Apply the named input transform to the last dimension of ``x [..., D]``; differentiable."""
    if name == "none":
        return x
    rotated = rotate(x)
    if name == "hadamard":
        return rotated
    rounded: Tensor = _Fp8RoundTrip.apply(rotated)  # type: ignore[no-untyped-call]
    return rounded


def rotate(x: Tensor) -> Tensor:
    """Hadamard rotation of ``x [..., D]``, Sylvester order, scaled by ``D ** -0.5``; returns bf16.

    The butterflies run in fp32 from the widest stage (distance ``D / 2``) to the narrowest, so the bits are defined.
    Example: ``[1, 2]`` becomes ``[3, -1] / sqrt(2)``.

    Raises:
        ValueError: ``D`` is not a power of two.
    """
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"index head dim D: expected a power of two for the Hadamard rotation, got {dim}")
    y = x.float()
    half = dim // 2
    while half >= 1:
        pairs = y.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        left, right = pairs.unbind(-2)
        y = torch.stack([left + right, left - right], dim=-2).flatten(-3)
        half //= 2
    rotated: Tensor = (y * dim**-0.5).to(torch.bfloat16)
    return rotated


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """One power-of-two scale per vector, then E4M3 "fn".

    Args:
        x: ``[..., D]``, any float dtype.

    Returns:
        quantised ``float8_e4m3fn [..., D]`` and fp32 ``scale [..., 1]``; ``x`` is about ``quantised * scale``. The
        scale is ``2 ** ceil(log2(max(amax, 1e-4) / 448))``. Example: ``amax = 449`` gives scale 2 and a largest value
        of 224 * 2 = 448.
    """
    x = x.float()
    ratio = x.abs().amax(-1, keepdim=True).clamp_min(FP8_AMAX_FLOOR) / FP8_MAX
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa * 2**exponent, mantissa in [0.5, 1)
    scale = torch.ldexp(torch.ones_like(ratio), exponent - (mantissa == 0.5).to(exponent.dtype))
    return (x / scale).to(torch.float8_e4m3fn), scale


class _Fp8RoundTrip(torch.autograd.Function):
    """Quantise and dequantise; the gradient passes straight through, as if nothing were rounded."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        quantised, scale = quantize_fp8(x)
        return (quantised.float() * scale).to(torch.bfloat16)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0]


@contextmanager
def full_fp32_products(device: torch.device) -> Iterator[None]:
    """fp32 matrix products stay fp32, whatever ``torch.set_float32_matmul_precision`` and its kin allow.

    A program may let fp32 products use TF32 or bf16 for its own speed; a head sum rounded so is not the score.
    The setting is global: it is changed only where it has to be, and put back.
    """
    backend: Any = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, general = backend.fp32_precision, torch.backends.fp32_precision  # type: ignore[attr-defined]
    if before == "ieee" or (before == "none" and general in ("none", "ieee")):
        yield
        return
    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before


ScoreFn = Callable[..., Tensor]


def differentiable_scores(
    scores: ScoreFn,
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    *,
    pool_size: int,
    use_relu: bool,
    dot_scale: float,
    transform_name: str,
) -> Tensor:
    """Scores fp32 ``[B, S, N]`` of an implementation, masked pools -inf, with gradients for q, keys and weights.

    Args:
        scores: the implementation's ``scores`` function; the forward bits are exactly its.
        q: ``[S, B, H, D]``; ``keys [N, B, D]`` already transformed; ``weights [S, B, H]``.
        pool_lo, pool_hi: int32 ``[Bv, S]`` visible pools; ``mask`` fp32 ``[Bv, S, T]`` or None.
        pool_size, use_relu, dot_scale: ``P``, whether f is ReLU, the factor of the dot product.
        transform_name: transform of q, see the module.
    """
    q = transform(q, transform_name)
    result: Tensor = _Scores.apply(  # type: ignore[no-untyped-call]
        scores, q, keys, weights, pool_lo, pool_hi, mask, pool_size, use_relu, dot_scale
    )
    return result


class _Scores(torch.autograd.Function):
    """Forward: the implementation's scores. Backward: the formula's derivative, a piece of rows at a time."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        scores: ScoreFn,
        q: Tensor,
        keys: Tensor,
        weights: Tensor,
        pool_lo: Tensor,
        pool_hi: Tensor,
        mask: Tensor | None,
        pool_size: int,
        use_relu: bool,
        dot_scale: float,
    ) -> Tensor:
        out = scores(
            q,
            keys,
            weights,
            pool_lo,
            pool_hi,
            mask,
            pool_size=pool_size,
            use_relu=use_relu,
            dot_scale=dot_scale,
            transform="none",
        )
        ctx.save_for_backward(q, keys, weights, pool_lo, pool_hi, mask)  # type: ignore[arg-type]
        ctx.formula = (pool_size, use_relu, dot_scale)  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, weights, pool_lo, pool_hi, mask = ctx.saved_tensors  # type: ignore[attr-defined]
        pool_size, use_relu, dot_scale = ctx.formula  # type: ignore[attr-defined]
        (grad,) = grads
        rows, batch, heads, _ = q.shape
        pools = keys.shape[0]
        grad_q = torch.zeros_like(q)
        grad_key = torch.zeros_like(keys, dtype=torch.float32)
        grad_w = torch.zeros_like(weights)
        piece = max(1, _BACKWARD_ELEMENTS // max(1, batch * heads * pools))
        with no_autocast(q.device):
            for row in range(0, rows, piece):
                part = slice(row, row + piece)
                window = None if mask is None else mask[:, part]
                seen = visible_pools(pool_lo[:, part], pool_hi[:, part], window, pool_size, pools)
                upstream = grad[:, part].float().masked_fill(~seen, 0).transpose(0, 1)[:, :, None]  # [r, B, 1, N]
                # rows that see nothing and pools that none sees may hold NaN, which times a gradient of 0 is NaN
                blind, unseen = ~seen.any(2).t()[..., None], ~seen.any(1).t()[..., None]  # [r, Bv, 1], [N, Bv, 1]
                rows_q, rows_w = q[part].float(), weights[part].float().masked_fill(blind, 0)
                rows_q, key = rows_q.masked_fill(blind[..., None], 0), keys.float().masked_fill(unseen, 0)
                dot = torch.einsum("sbhd,nbd->sbhn", rows_q, key) * dot_scale
                value = dot.relu() if use_relu else dot
                grad_w[part] = (upstream * value).sum(-1).to(weights.dtype)
                inner = upstream * rows_w[..., None] * dot_scale
                if use_relu:
                    inner = inner.masked_fill(dot <= 0, 0)
                grad_q[part] = torch.einsum("sbhn,nbd->sbhd", inner, key).to(q.dtype)
                grad_key += torch.einsum("sbhn,sbhd->nbd", inner, rows_q)
        return (None, grad_q, grad_key.to(keys.dtype), grad_w, None, None, None, None, None, None)


def visible_pools(pool_lo: Tensor, pool_hi: Tensor, mask: Tensor | None, pool_size: int, pools: int) -> Tensor:
    """Which pools each row may select, bool ``[Bv, S, N]``; a mask ``[Bv, S, T]`` removes pools with a hidden token."""
    ids = torch.arange(pools, device=pool_lo.device, dtype=torch.int32)
    seen = (ids >= pool_lo[..., None]) & (ids < pool_hi[..., None])
    if mask is not None:
        seen = seen & unmasked_pools(mask, pool_size, pools)
    return seen


def unmasked_pools(mask: Tensor, pool_size: int, pools: int) -> Tensor:
    """Pools of the plain grid whose ``P`` tokens are all finite in ``mask [..., T]``; bool ``[..., N]``."""
    return torch.isfinite(mask[..., : pools * pool_size]).view(*mask.shape[:-1], pools, pool_size).all(-1)
