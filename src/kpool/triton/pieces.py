"""Rows in pieces, and the score kernel launched on one of them.

A piece is again a `RowBlocks`: blocks of consecutive global rows at a fixed stride. Pieces depend on shapes alone, not
on values, and where they are cut does not show in any score.

Shapes: ``S`` rows, ``B`` batch, ``H`` heads, ``D`` index head dim, ``N`` pools, ``T`` tokens, ``P`` pool size, ``M``
pool budget, ``Bv`` either 1 or ``B``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kpool.scoring import transform as transform_rows
from kpool.scoring import unmasked_pools
from kpool.sharding import RowBlocks
from kpool.triton import configs
from kpool.triton.score import EXCLUDED, GROUP, score_kernel

GROUP_SIZE = int(GROUP.value)
EXCLUDED_KEY = int(EXCLUDED.value)
_MASK_PIECE = 1 << 26  # mask values looked at together


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
class ScoreCall:
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
    ) -> ScoreCall:
        """Look up the tile and lay the windows out row by row.

        A mask over pools wider than ``MAX_MASKED_POOL`` is first read down to one value a pool, ``1 / P`` of its size.
        """
        if mask is not None and pool_size > configs.MAX_MASKED_POOL:
            mask, pool_size = _mask_of_pools(mask, pool_size, keys.shape[0]), 1
        tile = configs.score_config(configs.target(q.device), q.shape[2], q.shape[3], masked=mask is not None)
        ld = -(-keys.shape[0] // tile.items) * tile.items
        lo, hi = pool_lo.contiguous(), pool_hi.contiguous()
        keys = keys if keys.stride(2) == 1 else keys.contiguous()  # strided dimensions do not fit the registers
        return ScoreCall(q, keys, weights, lo, hi, mask, pool_size, use_relu, dot_scale, tile, ld)

    @property
    def groups_ld(self) -> int:
        """Groups of a row of keys."""
        return self.ld // GROUP_SIZE

    @property
    def window_stride(self) -> int:
        """Batch stride of ``pool_lo`` and ``pool_hi``; 0 where the batch shares them."""
        return 0 if self.pool_lo.shape[0] == 1 else self.pool_lo.shape[1]

    def copies(self, transform: str) -> bool:
        """Whether the kernel gets a copy of each piece of q: transformed, or its dimensions laid out one by one."""
        return transform != "none" or self.q.stride(3) != 1

    def chunk_rows(self, chunk_bytes: int, ordered_budget: int, transform: str) -> int:
        """Local rows whose buffers fit in ``chunk_bytes``: a multiple of the row tile, at least one tile.

        Counts rank keys, group maxima, group lists, ids still to be ordered (``ordered_budget`` a row), transformed q.
        """
        _, batch, heads, dim = self.q.shape
        words = self.ld + 2 * self.groups_ld + 1 + ordered_budget
        a_row = batch * (4 * words + (12 * heads * dim if self.copies(transform) else 0))
        return max(self.tile.rows, chunk_bytes // a_row // self.tile.rows * self.tile.rows)

    def rows_of_q(self, piece: RowBlocks, transform: str) -> Tensor:
        """The transformed q of a piece, ``[count, B, H, D]``; padding rows repeat the last real one."""
        if piece.count <= piece.block:
            part = self.q[piece.offset : piece.offset + piece.count]
        else:
            local = torch.arange(piece.count, device=self.q.device)
            row = local // piece.block * piece.stride + piece.offset + local % piece.block
            part = self.q.index_select(0, row.clamp_(max=self.q.shape[0] - 1))
        return transform_rows(part, transform).to(self.keys.dtype).contiguous()

    def score(self, ranks: Tensor, best: Tensor, piece: RowBlocks, *, skip: int, transform: str) -> None:
        """Write the rank keys ``[B, count, ld]`` and group maxima of a piece."""
        total, batch, heads, dim = self.q.shape
        tile = self.tile
        copied = self.copies(transform)
        q = self.rows_of_q(piece, transform) if copied else self.q
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
            *(
                (0, 0, 0)
                if mask is None
                else (0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(1), mask.stride(2))
            ),
            self.keys.shape[0],
            self.ld,
            self.dot_scale,
            piece.offset,
            piece.block,
            piece.stride,
            piece.count,
            total,
            row_tiles,
            int(copied),
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
            **tile.options(fusion=True),
        )


def _mask_of_pools(mask: Tensor, pool_size: int, pools: int) -> Tensor:
    """fp32 ``[Bv, S, N]``: 0 where every token of the pool is visible in ``mask [Bv, S, T]``, else -inf."""
    out = mask.new_zeros((*mask.shape[:2], pools))
    piece = max(1, _MASK_PIECE // max(1, mask.shape[0] * mask.shape[2]))
    for row in range(0, mask.shape[1], piece):
        part = slice(row, row + piece)
        out[:, part].masked_fill_(~unmasked_pools(mask[:, part], pool_size, pools), -torch.inf)
    return out
