"""The front door: validate once, then walk the rooms.

    pooling -> sharding (my rows) -> tiled or triton (score and pick) -> sharding (gather) -> selection (expand)

Shapes: ``S`` rows, ``T`` keys, ``B`` batch, ``H`` heads, ``D`` dimensions, ``P`` pool size, ``N`` pools, ``K`` tokens,
``M = K // P`` pool budget, ``G`` ranks.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kpool import replication, sharding, validation
from kpool.dispatch import choose, chunk_bytes
from kpool.pooling import PooledKeys, pool_on_grid
from kpool.scoring import differentiable_scores, transform, visible_pools
from kpool.selection import expand, top_pools
from kpool.sharding import Group, RowBlocks, ShardPlan
from kpool.visibility import Visibility
from kpool.windows import RowWindows


def fused_qk_topk_kpool(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    pool_size: int,
    gate_score: Tensor | None,
    ape: Tensor | None,
    mask: Tensor | None = None,
    varlen_starts: Tensor | None = None,
    varlen_ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    use_relu: bool = True,
    always_select_tail: bool = True,
    fp8_indexer: bool = False,
    rotate_activation_enabled: bool = False,
    return_index_scores: bool = True,
    query_shard_group: Group | None = None,
    *,
    order: str = "score",
    shard_plan: str = "contiguous",
    score_chunk_bytes: int | None = None,
    numerics: str = "megatron",
    width_multiple: int = 1,
    impl: str = "auto",
    check_replicated: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """Select the tokens each query row may attend to.

    The positional signature is that of the function of the same name in NVIDIA/Megatron-LM#7522. The selection of a row
    is a pure function of that row and the keys: the same bits whatever the chunk size, shard plan, rank, row order or
    number of threads.

    Args:
        q: ``[S, B, H, D]`` bf16, fp16 or fp32.
        k: ``[T, B, D]``, the dtype of q.
        weights: ``[S, B, H]`` bf16 or fp32, scaled already: ``H**-0.5 * D**-0.5`` (``numerics="megatron"``) or
            ``H**-0.5`` (``"hf"``).
        index_topk: ``K``, tokens to select, a multiple of ``P``.
        pool_size: ``P``.
        gate_score: ``[T, B, D]`` in the dtype of k or fp32; None means zeros.
        ape: ``[P, D]``, bias of each slot of a pool; None means zeros.
        mask: additive fp32 ``[S, T]`` or ``[B, S, T]``, 0 or -inf.
        varlen_starts: int32 or int64 ``[S]``; row ``i`` sees the tokens ``[start, end)``.
        varlen_ends: the ends; both or neither.
        key_positions: int32 or int64 ``[T]``; bounds are compared with these positions.
        cu_seqlens_kv: int32 or int64 ``[docs + 1]``; the pool grid restarts at each document. Alone: causal per
            document. With no visibility argument at all nothing limits the pools: that is *not* causal.
        use_relu: ReLU on the dot products, else identity.
        always_select_tail: append ``P - 1`` slots for the tokens after the last complete pool.
        fp8_indexer: round q and pooled keys through E4M3 (implies the rotation).
        rotate_activation_enabled: Hadamard rotation of q and pooled keys; ``D`` a power of two.
        return_index_scores: also return the scores; needs no group.
        query_shard_group: anything with ``size()`` and ``rank()``; each rank scores its share of the rows, one
            all-gather brings the selections together. All ranks must pass identical inputs.
        order: ``"score"`` or ``"position"``, the order of the pools in a row.
        shard_plan: ``"contiguous"`` or ``"block_cyclic"``.
        score_chunk_bytes: bytes of the fp32 score buffer ``B * rows * N * 4``, rounded up to one tile of rows; None
            means ``KPOOL_SCORE_CHUNK_BYTES``, else a default.
        numerics: ``"megatron"`` or ``"hf"``.
        width_multiple: round the width of the result up with -1.
        impl: ``"auto"``, ``"reference"``, ``"torch"`` or ``"triton"``.
        check_replicated: compare checksums of the inputs across the group first; reads values back to the host.

    Returns:
        ``(scores, tokens)``: scores fp32 ``[B, S, N]``, masked pools -inf, differentiable, or None; tokens int32
        ``[B, S, K + P - 1]`` (``[B, S, K]`` without tail), key slots or -1.

    Raises:
        TypeError: a dtype. ValueError: a shape, a value (on CPU), a combination. Each names argument, expected and got.
        RuntimeError: ``check_replicated`` found inputs that differ between ranks.
    """
    transform_name = "fp8" if fp8_indexer else "hadamard" if rotate_activation_enabled else "none"
    validation.check_pooling(k, gate_score, ape, pool_size, cu_seqlens_kv, numerics)
    validation.check_queries(q, k, weights, key_name="k", same_dtype=True)
    budget = validation.check_budget(index_topk, pool_size)
    validation.check_visibility_arguments(mask, varlen_starts, varlen_ends, key_positions, cu_seqlens_kv)
    validation.check_sharding(query_shard_group, return_index_scores, shard_plan)
    validation.check_options(
        order=order,
        numerics=numerics,
        impl=impl,
        width_multiple=width_multiple,
        score_chunk_bytes=score_chunk_bytes,
        transform=transform_name,
        dim=q.shape[3],
    )
    visibility = Visibility.from_arguments(mask, varlen_starts, varlen_ends, key_positions, cu_seqlens_kv)
    rows, batch, tokens = q.shape[0], q.shape[1], k.shape[0]
    windows = visibility.windows(rows=rows, tokens=tokens, batch=batch, pool_size=pool_size, device=q.device)
    shard = _Shard.enter(query_shard_group, shard_plan, rows)
    if check_replicated and shard.size > 1:
        inputs = {"q": q, "k": k, "weights": weights, "gate_score": gate_score, "ape": ape, "mask": mask}
        inputs |= {"varlen_starts": varlen_starts, "varlen_ends": varlen_ends}
        inputs |= {"key_positions": key_positions, "cu_seqlens_kv": cu_seqlens_kv}
        replication.check_replicated(inputs, shard.group_or_fail(), shard.rank, shard.size)

    grid = visibility.grid(tokens=tokens, pool_size=pool_size, device=q.device)
    keys = pool_on_grid(k, gate_score, ape, grid, plain=cu_seqlens_kv is None, numerics=numerics, impl=impl)
    dot_scale = float(q.shape[3]) ** -0.5 if numerics == "hf" else 1.0
    call = _Call(
        q,
        transform(keys, transform_name),
        weights,
        windows,
        choose(impl, q, keys, budget, pool_size),
        pool_size=pool_size,
        budget=budget,
        use_relu=use_relu,
        dot_scale=dot_scale,
        transform=transform_name,
        order=order,
        chunk_bytes=chunk_bytes(score_chunk_bytes, q.device),
    )
    scores = None
    if return_index_scores:
        scores = call.scores()
        ids = call.pick(scores.detach())
    else:
        ids = shard.gather(call.select(shard.rows), batch)
    chosen = expand(
        ids,
        grid.starts(),
        windows,
        pool_size=pool_size,
        always_select_tail=always_select_tail,
        width_multiple=width_multiple,
    )
    return scores, chosen


def select_pools(
    q: Tensor,
    pooled: PooledKeys,
    weights: Tensor,
    visibility: Visibility,
    budget: int,
    *,
    use_relu: bool = True,
    fp8_indexer: bool = False,
    rotate_activation_enabled: bool = False,
    query_shard_group: Group | None = None,
    order: str = "score",
    shard_plan: str = "contiguous",
    score_chunk_bytes: int | None = None,
    numerics: str = "megatron",
    impl: str = "auto",
    tokens: int | None = None,
) -> Tensor:
    """Select pools for callers who keep pooled keys themselves (inference caches, decode steps).

    Args:
        q: ``[S, B, H, D]``; ``weights [S, B, H]`` as for ``fused_qk_topk_kpool``.
        pooled: what ``pool_keys`` returned: keys ``[N, B, D]``, *not* transformed.
        visibility: what the rows may see; nothing is assumed.
        budget: ``M``, pools to select.
        tokens: ``T``, the number of key slots; None means ``N * P``. Needed where the visibility itself lists ``T``
            entries (mask, left padding, key positions) or rows (packed without positions).
        use_relu: as for ``fused_qk_topk_kpool``.
        fp8_indexer: as for ``fused_qk_topk_kpool``.
        rotate_activation_enabled: as for ``fused_qk_topk_kpool``.
        query_shard_group: as for ``fused_qk_topk_kpool``.
        order: as for ``fused_qk_topk_kpool``.
        shard_plan: as for ``fused_qk_topk_kpool``.
        score_chunk_bytes: as for ``fused_qk_topk_kpool``.
        numerics: as for ``fused_qk_topk_kpool``.
        impl: as for ``fused_qk_topk_kpool``.

    Returns:
        int32 pool ids ``[B, S, M]``, -1 in unused slots at the end.

    Raises:
        TypeError, ValueError: as for ``fused_qk_topk_kpool``.
    """
    transform_name = "fp8" if fp8_indexer else "hadamard" if rotate_activation_enabled else "none"
    validation.check_kind("pooled", pooled, PooledKeys)
    validation.check_kind("visibility", visibility, Visibility)
    validation.check_pool_size(pooled.pool_size)
    tokens = _token_count(visibility, pooled) if tokens is None else tokens
    validation.check_pooled(pooled.keys, tokens, pooled.pool_size)
    validation.check_queries(q, pooled.keys, weights, key_name="pooled.keys", same_dtype=False)
    validation.check_budget(budget, 1, name="budget")
    validation.check_sharding(query_shard_group, False, shard_plan)
    validation.check_options(
        order=order,
        numerics=numerics,
        impl=impl,
        width_multiple=1,
        score_chunk_bytes=score_chunk_bytes,
        transform=transform_name,
        dim=q.shape[3],
    )
    rows, batch = q.shape[0], q.shape[1]
    size = pooled.pool_size
    windows = visibility.windows(rows=rows, tokens=tokens, batch=batch, pool_size=size, device=q.device)
    shard = _Shard.enter(query_shard_group, shard_plan, rows)
    call = _Call(
        q,
        transform(pooled.keys, transform_name),
        weights,
        windows,
        choose(impl, q, pooled.keys, budget, size),
        pool_size=size,
        budget=budget,
        use_relu=use_relu,
        dot_scale=float(q.shape[3]) ** -0.5 if numerics == "hf" else 1.0,
        transform=transform_name,
        order=order,
        chunk_bytes=chunk_bytes(score_chunk_bytes, q.device),
    )
    return shard.gather(call.select(shard.rows), batch)


def _token_count(visibility: Visibility, pooled: PooledKeys) -> int:
    """``T`` as far as the visibility says it, else the tokens of the pools."""
    for tensor, dim in ((visibility.mask, 2), (visibility.valid, 1), (visibility.key_positions, 0)):
        if tensor is not None:
            return tensor.shape[dim]
    return pooled.keys.shape[0] * pooled.pool_size


class _Shard:
    """The caller's share of the rows, and the way back to all of them."""

    def __init__(self, group: Group | None, rank: int, size: int, plan: ShardPlan) -> None:
        self.group, self.rank, self.size, self.plan = group, rank, size, plan

    @staticmethod
    def enter(group: Group | None, kind: str, rows: int) -> _Shard:
        rank, size = (0, 1) if group is None else sharding.check_group(group)
        return _Shard(group, rank, size, ShardPlan.of(kind if size > 1 else "contiguous", rows, size))

    def group_or_fail(self) -> Group:
        assert self.group is not None, "a shard of more than one rank has a group"
        return self.group

    @property
    def rows(self) -> RowBlocks:
        return self.plan.blocks(self.rank)

    def gather(self, local: Tensor, batch: int) -> Tensor:
        """``[B, R, M]`` of this rank to ``[B, S, M]`` of all; no collective for a single rank."""
        if self.size == 1:
            return local
        return self.plan.ungather(sharding.all_gather(local, self.group_or_fail(), self.size))


class _Call:
    """One call's tensors and options, in the form both implementations take."""

    def __init__(
        self,
        q: Tensor,
        keys: Tensor,
        weights: Tensor,
        windows: RowWindows,
        impl: ModuleType,
        *,
        pool_size: int,
        budget: int,
        use_relu: bool,
        dot_scale: float,
        transform: str,
        order: str,
        chunk_bytes: int,
    ) -> None:
        self.q, self.keys, self.weights, self.windows, self.impl = q, keys, weights, windows, impl
        self.pool_size, self.budget, self.use_relu, self.dot_scale = pool_size, budget, use_relu, dot_scale
        self.transform, self.order, self.chunk_bytes = transform, order, chunk_bytes

    def select(self, rows: RowBlocks) -> Tensor:
        """Pool ids int32 ``[B, R, M]`` of the local rows; never differentiable."""
        view = self.windows
        with torch.no_grad():
            ids: Tensor = self.impl.select(
                self.q,
                self.keys,
                self.weights,
                view.pool_lo,
                view.pool_hi,
                view.mask,
                pool_size=self.pool_size,
                budget=self.budget,
                rows=rows,
                use_relu=self.use_relu,
                dot_scale=self.dot_scale,
                transform=self.transform,
                order=self.order,
                chunk_bytes=self.chunk_bytes,
            )
        return ids

    def scores(self) -> Tensor:
        """Scores fp32 ``[B, S, N]`` of all rows, the very bits the selection compares."""
        view = self.windows
        return differentiable_scores(
            self.impl.scores,
            self.q,
            self.keys,
            self.weights,
            view.pool_lo,
            view.pool_hi,
            view.mask,
            pool_size=self.pool_size,
            use_relu=self.use_relu,
            dot_scale=self.dot_scale,
            transform_name=self.transform,
        )

    def pick(self, scores: Tensor) -> Tensor:
        """Pool ids int32 ``[B, S, M]`` of scores that are there already, a piece of rows at a time."""
        view, pools = self.windows, scores.shape[2]
        batch, rows = scores.shape[:2]
        ids = torch.empty(batch, rows, self.budget, dtype=torch.int32, device=scores.device)
        piece = max(1, self.chunk_bytes // max(1, 4 * batch * pools))
        for row in range(0, rows, piece):
            part = slice(row, row + piece)
            mask = None if view.mask is None else view.mask[:, part]
            seen = visible_pools(view.pool_lo[:, part], view.pool_hi[:, part], mask, self.pool_size, pools)
            ids[:, part] = top_pools(scores[:, part], seen, self.budget, self.order)
        return ids
