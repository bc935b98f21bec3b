"""Keys to pooled keys: a gated softmax over the ``P`` tokens of each pool, per dimension.

    p = softmax over the slots of (gate + ape)        pooled key = sum over the slots of (p * k)

``numerics="megatron"`` computes in fp32 and rounds once to bf16, as NVIDIA/Megatron-LM#7522 does.
``numerics="hf"`` follows ``transformers`` ``glm5_next``: probabilities are cast to the dtype of the keys, multiplied
in it and summed by one ``torch.sum``; the pooled key keeps the dtype of the keys.

Worked example, ``P = 2``, one dimension, equal gates: keys ``[1, 3]`` pool to ``0.5 * 1 + 0.5 * 3 = 2``.

Shapes: ``T`` keys, ``B`` batch, ``D`` dimensions, ``P`` pool size, ``N = T // P`` pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kpool.dispatch import triton_pools
from kpool.grid import PoolGrid
from kpool.validation import IMPLS, check_choice, check_pooling

_PIECE_ELEMENTS = 1 << 22  # fp32 elements of keys worked on at a time: 16 MiB


@dataclass(frozen=True, eq=False)
class PooledKeys:
    """Pooled keys and the key slots they stand for.

    Attributes:
        keys: ``[N, B, D]``, bf16 (``numerics="megatron"``) or the dtype of the keys (``"hf"``). Zero where there is no
            pool.
        starts: int32 ``[N]``, first key slot of each pool; ``[B, N]`` for a left-padded batch. -1 means *no such pool*.
        pool_size: ``P``.
    """

    keys: Tensor
    starts: Tensor
    pool_size: int


def pool_keys(
    k: Tensor,
    gate_score: Tensor | None,
    ape: Tensor | None,
    pool_size: int,
    cu_seqlens_kv: Tensor | None = None,
    *,
    numerics: str = "megatron",
    impl: str = "auto",
) -> PooledKeys:
    """Pool the keys of a call.

    Args:
        k: ``[T, B, D]`` bf16, fp16 or fp32.
        gate_score: ``[T, B, D]`` in the dtype of ``k`` or fp32; None means zeros.
        ape: ``[P, D]``, any float dtype, the bias of each slot *inside a pool*; None means zeros.
        pool_size: ``P``.
        cu_seqlens_kv: int32 or int64 ``[docs + 1]``; the grid restarts at each document.
        numerics: ``"megatron"`` or ``"hf"``.
        impl: as for ``fused_qk_topk_kpool``: ``"auto"`` and ``"triton"`` pool with the Triton kernel where it can.

    Returns:
        PooledKeys with ``N = T // P`` pool slots. Differentiable in ``k``, ``gate_score`` and ``ape``.

    Raises:
        TypeError, ValueError: dtypes, shapes, ``numerics`` or (on CPU) values of ``cu_seqlens_kv``.
    """
    check_pooling(k, gate_score, ape, pool_size, cu_seqlens_kv, numerics)
    check_choice("impl", impl, IMPLS)
    if cu_seqlens_kv is None:
        grid = PoolGrid.plain(k.shape[0], pool_size, k.device)
    else:
        grid = PoolGrid.packed(cu_seqlens_kv, k.shape[0], pool_size)
    plain = cu_seqlens_kv is None
    keys = pool_on_grid(k, gate_score, ape, grid, plain=plain, numerics=numerics, impl=impl)
    return PooledKeys(keys, grid.starts(), pool_size)


def pool_on_grid(
    k: Tensor,
    gate_score: Tensor | None,
    ape: Tensor | None,
    grid: PoolGrid,
    *,
    plain: bool,
    numerics: str,
    impl: str = "auto",
) -> Tensor:
    """Pooled keys ``[N, B, D]`` of ``k [T, B, D]`` on ``grid``; ``plain`` grids need no gather."""
    if grid.num_pools and triton_pools(impl, k, grid.pool_size):
        pooled: Tensor = _TritonPool.apply(k, gate_score, ape, grid, plain, numerics)  # type: ignore[no-untyped-call]
        return pooled
    return _pool_with_torch(k, gate_score, ape, grid, plain, numerics)


class _TritonPool(torch.autograd.Function):
    """Forward: the Triton kernel, so that the bits do not depend on whether a gradient is wanted. Backward: torch's."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        k: Tensor,
        gate_score: Tensor | None,
        ape: Tensor | None,
        grid: PoolGrid,
        plain: bool,
        numerics: str,
    ) -> Tensor:
        from kpool.triton import launch

        ctx.save_for_backward(k, gate_score, ape)  # type: ignore[arg-type]
        ctx.call = (grid, plain, numerics)  # type: ignore[attr-defined]
        return launch.pool(k, gate_score, ape, grid.starts(), grid.pool_size, numerics)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor | None, ...] = ctx.saved_tensors  # type: ignore[attr-defined]
        inputs = [None if t is None else t.detach().requires_grad_() for t in saved]
        grid, plain, numerics = ctx.call  # type: ignore[attr-defined]
        with torch.enable_grad():
            pooled = _pool_with_torch(inputs[0], inputs[1], inputs[2], grid, plain, numerics)  # type: ignore[arg-type]
        given = [t for t in inputs if t is not None]
        flowing = iter(torch.autograd.grad(pooled, given, grads[0]))
        return (*(None if t is None else next(flowing) for t in inputs), None, None, None)


def _pool_with_torch(
    k: Tensor, gate_score: Tensor | None, ape: Tensor | None, grid: PoolGrid, plain: bool, numerics: str
) -> Tensor:
    _, batch, dim = k.shape
    starts = None if plain else grid.starts()
    size = grid.pool_size
    piece = max(1, _PIECE_ELEMENTS // max(1, size * batch * dim))
    dtype = torch.bfloat16 if numerics == "megatron" else k.dtype
    pooled = [k.new_zeros(0, batch, dim, dtype=dtype)]
    for first in range(0, grid.num_pools, piece):
        last = min(first + piece, grid.num_pools)
        slots: slice | Tensor = slice(first * size, last * size)
        real = None
        if starts is not None:
            slots, real = _slots(starts[..., first:last], size)
        keys = _take(k, slots, size)
        gate = None if gate_score is None else _take(gate_score, slots, size)
        out = gated_sum(keys, gate, ape, numerics)
        pooled.append(out if real is None else out.masked_fill(~real, 0))
    return torch.cat(pooled) if len(pooled) != 2 else pooled[1]


def gated_sum(keys: Tensor, gate: Tensor | None, ape: Tensor | None, numerics: str) -> Tensor:
    """Pool ``keys [n, P, B, D]`` with ``gate`` of the same shape and ``ape [P, D]``; returns ``[n, B, D]``.

    The sums run slot by slot in a fixed order, so that equal pools give equal bits wherever they lie.
    """
    logits = torch.zeros_like(keys, dtype=torch.float32) if gate is None else gate.float()
    if ape is not None:
        logits = logits + ape.float()[:, None, :]
    slots = torch.exp(logits - logits.amax(1, keepdim=True)).unbind(1)
    total = slots[0]
    for slot in slots[1:]:
        total = total + slot
    probabilities = [slot / total for slot in slots]
    if numerics == "hf":
        # torch.sum over the slots, written out: its own order of addition depends on the layout around them
        terms = [(key * p.to(key.dtype)).float() for key, p in zip(keys.unbind(1), probabilities, strict=True)]
    else:
        terms = [p * key.float() for key, p in zip(keys.unbind(1), probabilities, strict=True)]
    pooled = terms[0]
    for term in terms[1:]:
        pooled = pooled + term
    return pooled.to(keys.dtype if numerics == "hf" else torch.bfloat16)


def _slots(starts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Key slots ``[n * P]`` or ``[B, n * P]`` of the pools at ``starts``, and which pools exist, ``[n, 1 or B, 1]``."""
    slots = starts.clamp_min(0).to(torch.int64)[..., None] + torch.arange(size, device=starts.device)
    real = starts >= 0
    return slots.flatten(-2), (real[:, None] if real.dim() == 1 else real.t())[..., None]


def _take(tensor: Tensor, slots: slice | Tensor, size: int) -> Tensor:
    """Tokens of ``tensor [T, B, D]`` as ``[n, P, B, D]``."""
    if isinstance(slots, slice) or slots.dim() == 1:
        taken = tensor[slots]
    else:
        taken = tensor.gather(0, slots.t()[..., None].expand(-1, -1, tensor.shape[2]))
    return taken.view(taken.shape[0] // size, size, *tensor.shape[1:])
