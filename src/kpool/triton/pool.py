"""Pool kernel: keys ``[T, B, D]`` to pooled keys ``[N, B, D]``, the formula of `kpool.pooling` slot by slot.

    m = max over slots of x        x = gate + ape, fp32
    total = sum of exp(x - m)      slot 0 first
    pooled = sum of (exp(x - m) / total) * k, slot 0 first, rounded once (nearest, ties to even)

Products and sums stay separate roundings (the launcher pins ``enable_fp_fusion=False``), division is IEEE, and ``exp``
is the device library's own, the one torch's kernels call.

Worked example, ``P = 2``, one dimension, gates ``[0, 0]``, keys ``[1, 3]``: ``m = 0``, ``total = 2``,
``0.5 * 1 + 0.5 * 3 = 2``.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,misc"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _exp(x, INTERPRET: tl.constexpr):
    """``exp``; the interpreter has no device library and takes numpy's."""
    if INTERPRET:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def _to_bf16(x, INTERPRET: tl.constexpr):
    """fp32 to bf16, nearest even: ``1.00390625`` lies midway and becomes ``1.0``. The interpreter would truncate."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x != x, 0x7FC0, bits)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def _round(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 rounded to ``dtype`` and back: what a tensor of that dtype would hold."""
    if dtype == tl.bfloat16:
        return _to_bf16(x, INTERPRET).to(tl.float32)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def _logits(gate, gate_at, ape, ape_at, inside, HAS_GATE: tl.constexpr, HAS_APE: tl.constexpr, zero):
    """``gate + ape`` of one slot in fp32; what is absent counts as zero."""
    x = zero
    if HAS_GATE:
        x = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    if HAS_APE:
        x = x + tl.load(ape + ape_at).to(tl.float32)[None, :]
    return x


@triton.jit
def pool_kernel(
    keys,  # [T, B, D], strides k_*
    gate,  # [T, B, D], strides g_*; unread without HAS_GATE
    ape,  # fp32 [P, BD] contiguous, columns past D are zero; unread without HAS_APE
    starts,  # int32 [N] or [B, N] (stride start_batch, 0 if shared); -1 = no such pool
    out,  # [N, B, D] contiguous
    k_token,
    k_batch,
    k_dim,
    g_token,
    g_batch,
    g_dim,
    start_batch,
    pools,  # N
    batch,  # B
    P: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,  # D rounded up to a power of two
    BN: tl.constexpr,  # pools a program
    HAS_GATE: tl.constexpr,
    HAS_APE: tl.constexpr,
    HF: tl.constexpr,  # numerics="hf"
    INTERPRET: tl.constexpr,
):
    """One program: ``BN`` pools of one batch entry, all dimensions."""
    pool = tl.program_id(0) * BN + tl.arange(0, BN)
    b = tl.program_id(1).to(tl.int64)
    dim = tl.arange(0, BD)
    start = tl.load(starts + b * start_batch + pool, mask=pool < pools, other=-1).to(tl.int64)
    inside = (start >= 0)[:, None] & (dim < D)[None, :]
    key_at = start[:, None] * k_token + b * k_batch + dim[None, :] * k_dim
    gate_at = start[:, None] * g_token + b * g_batch + dim[None, :] * g_dim
    zero = tl.zeros((BN, BD), tl.float32)

    top = tl.full((BN, BD), float("-inf"), tl.float32)
    for p in tl.static_range(P):
        x = _logits(gate, gate_at + p * g_token, ape, p * BD + dim, inside, HAS_GATE, HAS_APE, zero)
        top = tl.maximum(top, x, propagate_nan=tl.PropagateNan.ALL)
    total = zero
    for p in tl.static_range(P):
        x = _logits(gate, gate_at + p * g_token, ape, p * BD + dim, inside, HAS_GATE, HAS_APE, zero)
        total += _exp(x - top, INTERPRET)
    pooled = zero
    for p in tl.static_range(P):
        x = _logits(gate, gate_at + p * g_token, ape, p * BD + dim, inside, HAS_GATE, HAS_APE, zero)
        share = tl.div_rn(_exp(x - top, INTERPRET), total)
        key = tl.load(keys + key_at + p * k_token, mask=inside, other=0.0).to(tl.float32)
        if HF:
            share = _round(share, keys.dtype.element_ty, INTERPRET)
            pooled += _round(share * key, keys.dtype.element_ty, INTERPRET)
        else:
            pooled += share * key

    at = (pool.to(tl.int64)[:, None] * batch + b) * D + dim[None, :]
    real = (pool < pools)[:, None] & (dim < D)[None, :]
    pooled = tl.where(inside, pooled, 0.0)
    if out.dtype.element_ty == tl.bfloat16:
        tl.store(out + at, _to_bf16(pooled, INTERPRET), mask=real)
    else:
        tl.store(out + at, pooled.to(out.dtype.element_ty), mask=real)
