"""Launching the kernels: pieces of rows under a byte budget, no host synchronisation, the same bits for any piece.

    for each piece of rows:   score -> prune -> select (-> order)        all on one stream, buffers reused

Pieces depend on shapes alone, so the sequence of launches can be captured in a CUDA graph. Everything allocated for a
piece (rank keys, group maxima, group lists, transformed q) counts against ``chunk_bytes``; one tile of rows is the least.

Shapes: ``S`` rows, ``B`` batch, ``H`` heads, ``D`` index head dim, ``N`` pools, ``P`` pool size, ``M`` pool budget,
``Bv`` either 1 or ``B``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kpool.scoring import transform as transform_rows
from kpool.sharding import RowBlocks
from kpool.triton import configs

configs.require_triton()  # before the kernels: its message says what to install

from kpool.triton.pool import pool_kernel  # noqa: E402
from kpool.triton.score import EXCLUDED, GROUP, score_kernel  # noqa: E402
from kpool.triton.select import order_kernel, prune_kernel, select_kernel  # noqa: E402

_GROUP = int(GROUP.value)
_EXCLUDED = int(EXCLUDED.value)
_SCORES_CHUNK_BYTES = 256 << 20


def select(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    *,
    pool_size: int,
    budget: int,
    rows: RowBlocks,
    use_relu: bool,
    dot_scale: float,
    transform: str,
    order: str,
    chunk_bytes: int,
) -> Tensor:
    """The best pools of this rank's rows.

    Args:
        q: bf16 ``[S, B, H, D]``, any strides.
        keys: bf16 ``[N, B, D]``, any strides, already transformed.
        weights: bf16 or fp32 ``[S, B, H]``.
        pool_lo, pool_hi: int32 ``[Bv, S]``, the visible pools of each row, half open.
        mask: fp32 ``[Bv, S, T]`` or None; a pool with a token that is not finite is not visible.
        pool_size, budget: ``P`` and ``M``.
        rows: which global rows are local; rows at or past ``S`` give -1.
        use_relu, dot_scale: ``f`` of the score formula, and the factor of the dot product inside it.
        transform: input transform of q.
        order: ``"score"`` or ``"position"``.
        chunk_bytes: bytes of the buffers of one piece of rows.

    Returns:
        int32 ``[B, rows.count, M]`` pool ids, -1 after the last.

    Raises:
        ValueError: a shape, dtype or device the kernels do not serve.
    """
    reason = configs.unsupported_reason(
        dtype=q.dtype, heads=q.shape[2], dim=q.shape[3], pool_size=pool_size, budget=budget
    )
    if reason is not None:
        raise ValueError(f"kpool.triton.select: expected a call the kernels serve, got one where {reason}")
    result: Tensor = torch.ops.kpool.select_triton(
        q.detach(),
        keys.detach(),
        weights.detach(),
        pool_lo,
        pool_hi,
        mask,
        pool_size,
        budget,
        [rows.offset, rows.block, rows.stride, rows.count],
        use_relu,
        dot_scale,
        transform,
        order,
        chunk_bytes,
    )
    return result


def scores(
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
    transform: str,
) -> Tensor:
    """Scores fp32 ``[B, S, N]``, the bits `select` ranks by; pools a row cannot see are -inf, -0.0 is returned as 0.0.

    Arguments as for `select`. Not differentiable by itself (`kpool.scoring.differentiable_scores` wraps it).
    """
    total, batch, heads, dim = q.shape
    pools = keys.shape[0]
    out = q.new_empty((batch, total, pools), dtype=torch.float32)
    if out.numel() == 0:
        return out
    call = _Call.of(q.detach(), keys.detach(), weights.detach(), pool_lo, pool_hi, mask, pool_size, use_relu, dot_scale)
    width = call.tile.rows
    chunk = max(width, _SCORES_CHUNK_BYTES // (8 * call.ld * batch) // width * width)
    buffer = q.new_empty(batch * min(chunk, total) * call.ld, dtype=torch.int32)
    best = q.new_empty(batch * min(chunk, total) * (call.ld // _GROUP), dtype=torch.int32)
    for first, piece in pieces(RowBlocks.all(total), chunk, width):
        ranks = buffer[: batch * piece.count * call.ld].fill_(_EXCLUDED)
        call.score(ranks, best, piece, skip=-1, transform=transform)
        ranks = ranks.view(batch, piece.count, call.ld)[..., :pools]
        values = torch.where(ranks < 0, ranks ^ 0x7FFFFFFF, ranks).view(torch.float32)
        out[:, first : first + piece.count] = values.masked_fill_(ranks == _EXCLUDED, float("-inf"))
    return out


def pool(
    k: Tensor, gate_score: Tensor | None, ape: Tensor | None, starts: Tensor, pool_size: int, numerics: str
) -> Tensor:
    """Pooled keys ``[N, B, D]``, zero where there is no pool; the formula of `kpool.pooling`.

    Args:
        k: ``[T, B, D]`` bf16, fp16 or fp32, any strides.
        gate_score: ``[T, B, D]``, any float dtype, or None.
        ape: ``[P, D]``, any float dtype, or None.
        starts: int32 ``[N]`` or ``[B, N]``, first key slot of each pool, -1 where there is none.
        pool_size: ``P``.
        numerics: ``"megatron"`` (returns bf16) or ``"hf"`` (returns the dtype of ``k``).

    The bits are those of the torch formula wherever both take the same ``exp``. On NVIDIA both call the device library's;
    elsewhere a pooled key may differ in its last bit, so one call must pool on one kind of device.
    """
    _, batch, dim = k.shape
    pools = starts.shape[-1]
    starts = starts if starts.dim() == 2 else starts[None]
    out = k.new_empty((pools, batch, dim), dtype=torch.bfloat16 if numerics == "megatron" else k.dtype)
    if out.numel() == 0:
        return out
    wide = configs.power_of_two(dim)
    bias = None if ape is None else torch.nn.functional.pad(ape.float(), (0, wide - dim)).contiguous()
    gate = k if gate_score is None else gate_score
    tile = configs.pool_config(pool_size)
    pool_kernel[(-(-pools // tile.items), batch)](
        k,
        gate,
        k if bias is None else bias,
        starts.contiguous(),
        out,
        *k.stride(),
        *gate.stride(),
        0 if starts.shape[0] == 1 else pools,
        pools,
        batch,
        P=pool_size,
        D=dim,
        BD=wide,
        BN=tile.items,
        HAS_GATE=gate_score is not None,
        HAS_APE=ape is not None,
        HF=numerics == "hf",
        INTERPRET=configs.interpreted(),
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return out


def pieces(rows: RowBlocks, chunk_rows: int, tile: int) -> Iterator[tuple[int, RowBlocks]]:
    """Cut ``rows`` into pieces of at most ``chunk_rows`` local rows; yields ``(first local row, piece)``.

    A piece is whole blocks where they fit; a larger block is cut on the global grid of row tiles.
    Example: block 4, chunk 8, 10 rows give local rows 0-7 (two blocks) and 8-9.
    """
    if rows.block <= chunk_rows:
        step = chunk_rows // rows.block * rows.block
        for local in range(0, rows.count, step):
            offset = rows.offset + local // rows.block * rows.stride
            yield local, RowBlocks(offset, rows.block, rows.stride, min(step, rows.count - local))
        return
    for block in range(0, rows.count, rows.block):
        offset = rows.offset + block // rows.block * rows.stride
        local, end = 0, min(rows.block, rows.count - block)
        while local < end:
            count = min(end - local, chunk_rows - (offset + local) % tile)
            yield block + local, RowBlocks(offset + local, count, count, count)
            local += count


@dataclass(frozen=True)
class _Call:
    """The tensors of one call and the launch of its score kernel on a piece of rows."""

    q: Tensor
    keys: Tensor
    weights: Tensor
    pool_lo: Tensor
    pool_hi: Tensor
    mask: Tensor | None
    pool_size: int
    use_relu: bool
    dot_scale: float
    tile: configs.Config
    ld: int  # N rounded up to the pool tile

    @staticmethod
    def of(
        q: Tensor,
        keys: Tensor,
        weights: Tensor,
        pool_lo: Tensor,
        pool_hi: Tensor,
        mask: Tensor | None,
        pool_size: int,
        use_relu: bool,
        dot_scale: float,
    ) -> _Call:
        """Look up the tile and lay the windows out row by row."""
        tile = configs.score_config(configs.target(q.device), q.shape[2], q.shape[3])
        ld = -(-keys.shape[0] // tile.items) * tile.items
        lo, hi = pool_lo.contiguous(), pool_hi.contiguous()
        return _Call(q, keys, weights, lo, hi, mask, pool_size, use_relu, dot_scale, tile, ld)

    @property
    def window_stride(self) -> int:
        """Batch stride of ``pool_lo`` and ``pool_hi``; 0 where the batch shares them."""
        return 0 if self.pool_lo.shape[0] == 1 else self.pool_lo.shape[1]

    def rows_of_q(self, piece: RowBlocks, transform: str) -> Tensor:
        """The transformed q of a piece, ``[count, B, H, D]``; padding rows repeat the last real one."""
        if piece.count <= piece.block:
            part = self.q[piece.offset : piece.offset + piece.count]
        else:
            local = torch.arange(piece.count, device=self.q.device)
            row = local // piece.block * piece.stride + piece.offset + local % piece.block
            part = self.q.index_select(0, row.clamp_(max=self.q.shape[0] - 1))
        return transform_rows(part, transform).to(self.keys.dtype)

    def score(self, ranks: Tensor, best: Tensor, piece: RowBlocks, *, skip: int, transform: str) -> None:
        """Write the rank keys ``[B, count, ld]`` and group maxima of a piece."""
        total, batch, heads, dim = self.q.shape
        tile = self.tile
        q = self.q if transform == "none" else self.rows_of_q(piece, transform)
        aligned = all(x % tile.rows == 0 for x in (piece.offset, piece.block, piece.stride))
        row_tiles = -(-piece.block // tile.rows) + (0 if aligned else 1)
        mask = self.mask
        grid = (
            -(-piece.count // piece.block) * row_tiles,
            -(-self.ld // (tile.items * configs.TILES)),
            batch,
        )
        score_kernel[grid](
            q,
            self.keys,
            self.weights,
            self.pool_lo,
            self.pool_hi,
            self.weights if mask is None else mask,
            ranks,
            best,
            *q.stride(),
            *self.keys.stride(),
            *self.weights.stride(),
            self.window_stride,
            *((0, 0, 0) if mask is None else (0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(1), mask.stride(2))),
            self.keys.shape[0],
            self.ld,
            self.dot_scale,
            piece.offset,
            piece.block,
            piece.stride,
            piece.count,
            total,
            row_tiles,
            int(transform != "none"),
            skip,
            H=heads,
            HP=configs.power_of_two(heads),
            D=dim,
            DP=max(16, configs.power_of_two(dim)),
            R=tile.rows,
            BN=tile.items,
            TILES=configs.TILES,
            P=1 if mask is None else self.pool_size,
            RELU=self.use_relu,
            SCALED=self.dot_scale != 1.0,
            MASKED=mask is not None,
            UPCAST=configs.interpreted(),
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=True,
        )


@torch.library.custom_op("kpool::select_triton", mutates_args=())
def _select(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    pool_size: int,
    budget: int,
    rows: list[int],
    use_relu: bool,
    dot_scale: float,
    transform: str,
    order: str,
    chunk_bytes: int,
) -> Tensor:
    total, batch, heads, dim = q.shape
    pools = keys.shape[0]
    mine = RowBlocks(*rows)
    out = q.new_empty((batch, mine.count, budget), dtype=torch.int32)
    if out.numel() == 0:
        return out
    if pools == 0 or total == 0:
        return out.fill_(-1)
    call = _Call.of(q, keys, weights, pool_lo, pool_hi, mask, pool_size, use_relu, dot_scale)
    groups_ld = call.ld // _GROUP
    sorted_by_score = order == "score"
    words = call.ld + 2 * groups_ld + 1 + (budget if sorted_by_score else 0)
    bytes_a_row = batch * (4 * words + (0 if transform == "none" else 12 * heads * dim))
    width = call.tile.rows
    chunk = max(width, chunk_bytes // bytes_a_row // width * width)
    held = batch * min(chunk, mine.count)
    ranks, best, groups, stay, ascending = (
        q.new_empty(held * n, dtype=torch.int32)
        for n in (call.ld, groups_ld, groups_ld, 1, budget if sorted_by_score else 0)
    )
    direct = budget if mask is None else -1  # with holes, a window says little about how many pools are visible
    windows = (call.pool_lo, call.pool_hi)
    prune, pick = configs.PRUNE, configs.SELECT
    for first, piece in pieces(mine, chunk, width):
        at = (piece.offset, piece.block, piece.stride, piece.count, total, direct)
        per_row = (piece.count, batch)
        call.score(ranks, best, piece, skip=-1 if sorted_by_score else direct, transform=transform)
        prune_kernel[per_row](
            best, *windows, groups, stay, call.window_stride, pools, groups_ld, budget, *at,
            BLOCK=prune.items, num_warps=prune.warps, enable_fp_fusion=False,
        )  # fmt: skip
        target, rows_there = (ascending, piece.count) if sorted_by_score else (out, mine.count)
        select_kernel[per_row](
            ranks, groups, stay, *windows, target, call.window_stride, pools, call.ld, budget, *at,
            0 if sorted_by_score else first, rows_there,
            WIDTH=configs.MAX_BUDGET, BLOCK=pick.items, num_warps=pick.warps, enable_fp_fusion=False,
        )  # fmt: skip
        if sorted_by_score:
            place = configs.order_config(budget)
            order_kernel[per_row](
                ranks, ascending, out, call.ld, budget, piece.count, first, mine.count,
                WIDTH=place.rows, PIECE=place.items, num_warps=place.warps, enable_fp_fusion=False,
            )  # fmt: skip
    return out


@_select.register_fake
def _(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    pool_size: int,
    budget: int,
    rows: list[int],
    use_relu: bool,
    dot_scale: float,
    transform: str,
    order: str,
    chunk_bytes: int,
) -> Tensor:
    return q.new_empty((q.shape[1], rows[3], budget), dtype=torch.int32)
