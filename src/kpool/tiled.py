"""The torch path: fixed-shape tiles, exact selection, nothing of size ``S x N``.

Rows are taken in tiles of ``ROW_TILE`` on the *global* row grid, pools in tiles of ``POOL_TILE``; partial tiles are padded.
So the score of one (row, pool) always comes from a matrix product of the same shape at the same place, and its bits
depend on nothing but the row and the keys: not on the shard, the chunk or the neighbours. Per tile

    x [TR * H, TP] = q [TR * H, D] @ keys^T [D, TP],   relu,   s [TR, TP] = w [TR, 1, H] @ x [TR, H, TP]

Tiles no row can see are never scored. A group of rows is selected at once, when its score buffer is full.

Shapes: ``S`` rows, ``B`` batch, ``H`` heads, ``D`` dimensions, ``N`` pools, ``M`` pool budget, ``P`` pool size, ``T`` keys,
``Bv`` either 1 or ``B``, ``TR``, ``TP`` the tile sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kpool.scoring import transform as transform_input
from kpool.scoring import unmasked_pools, visible_pools
from kpool.selection import top_pools
from kpool.sharding import RowBlocks

ROW_TILE = 32
POOL_TILE = 256
_MAX_GROUP_ROWS = 128
_MAX_GROUP_ROWS_ELSEWHERE = 4096


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
    """Pool ids of the rows of one rank.

    Args:
        q: ``[S, B, H, D]``, not transformed; ``keys [N, B, D]`` transformed; ``weights [S, B, H]``.
        pool_lo, pool_hi: int32 ``[Bv, S]``; mask: fp32 ``[Bv, S, T]`` or None.
        pool_size, budget, rows: ``P``, ``M``, the local rows.
        use_relu, dot_scale, transform: the score formula, see ``scoring``.
        order: ``"score"`` or ``"position"``.
        chunk_bytes: bound of the score buffer, rounded up to one row tile.

    Returns:
        int32 ``[B, rows.count, M]``; padding rows are all -1.
    """
    ids: Tensor = torch.ops.kpool.select_torch(
        q,
        keys,
        weights,
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
    return ids


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
    """Scores fp32 ``[B, S, N]`` of all rows, -inf where a row cannot see the pool; the bits ``select`` compares."""
    rows, batch = q.shape[:2]
    pools = keys.shape[0]
    out = torch.full((batch, rows, pools), -torch.inf, dtype=torch.float32, device=q.device)
    for entry in range(batch):
        view = min(entry, pool_lo.shape[0] - 1)
        scorer = _Scorer(q[:, entry], keys[:, entry], weights[:, entry], use_relu, dot_scale, transform)
        for first, last in _groups(0, rows, scorer.group_rows(chunk_bytes=1 << 26)):
            lo, hi = pool_lo[view, first:last], pool_hi[view, first:last]
            block, start = scorer.score(first, last, lo, hi)
            width = min(start + block.shape[1], pools) - start
            seen = visible_pools(lo, hi, None if mask is None else mask[view, first:last], pool_size, pools)
            part = out[entry, first:last, start : start + width]
            torch.where(seen[:, start : start + width], block[:, :width], part, out=part)
    return out


@torch.library.custom_op("kpool::select_torch", mutates_args=())
def _select(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    pool_size: int,
    budget: int,
    row_blocks: list[int],
    use_relu: bool,
    dot_scale: float,
    transform: str,
    order: str,
    chunk_bytes: int,
) -> Tensor:
    blocks = RowBlocks(*row_blocks)
    rows, batch = q.shape[:2]
    ids = torch.full((batch, blocks.count, budget), -1, dtype=torch.int32, device=q.device)
    if keys.shape[0] == 0:
        return ids
    for entry in range(batch):
        view = min(entry, pool_lo.shape[0] - 1)
        scorer = _Scorer(q[:, entry], keys[:, entry], weights[:, entry], use_relu, dot_scale, transform)
        group_rows = scorer.group_rows(chunk_bytes)
        for local, begin, end in blocks.spans(rows):
            for first, last in _groups(begin, end, group_rows):
                out = ids[entry, local + first - begin : local + last - begin]
                window = None if mask is None else mask[view, first:last]
                lo, hi = pool_lo[view, first:last], pool_hi[view, first:last]
                _select_group(scorer, first, last, lo, hi, window, pool_size, order, out)
    return ids


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
    row_blocks: list[int],
    use_relu: bool,
    dot_scale: float,
    transform: str,
    order: str,
    chunk_bytes: int,
) -> Tensor:
    return q.new_empty((q.shape[1], row_blocks[3], budget), dtype=torch.int32)


def _groups(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut ``[begin, end)`` at the multiples of ``size``."""
    first = begin
    while first < end:
        last = min((first // size + 1) * size, end)
        yield first, last
        first = last


def _select_group(
    scorer: _Scorer,
    first: int,
    last: int,
    lo: Tensor,
    hi: Tensor,
    mask: Tensor | None,
    pool_size: int,
    order: str,
    out: Tensor,
) -> None:
    """Write the pool ids of the rows ``[first, last)`` into ``out [rows, M]``."""
    budget = out.shape[1]
    if order == "position" and mask is None and _readable(lo) and int((hi - lo).max()) <= budget:
        everything = lo[:, None] + torch.arange(budget, dtype=torch.int32)
        out.copy_(everything.masked_fill_(everything >= hi[:, None], -1))
        return
    block, start = scorer.score(first, last, lo, hi)
    if block.shape[1] == 0:
        return
    ids = torch.arange(start, start + block.shape[1], device=lo.device, dtype=torch.int32)
    seen = (ids >= lo[:, None]) & (ids < hi[:, None])
    if mask is not None:
        pools = scorer.pools
        open_pools = unmasked_pools(mask, pool_size, pools)[:, start : start + block.shape[1]]
        seen[:, : open_pools.shape[1]] &= open_pools
    out.copy_(top_pools(block, seen, budget, order, start))


def _readable(tensor: Tensor) -> bool:
    """Whether bounds may be read without a stall."""
    return tensor.device.type == "cpu"


class _Scorer:
    """The tiles of one batch entry: keys laid out once, buffers reused by every row tile."""

    def __init__(
        self, q: Tensor, keys: Tensor, weights: Tensor, use_relu: bool, dot_scale: float, transform: str
    ) -> None:
        self.q, self.weights = q, weights  # [S, H, D], [S, H]
        self.use_relu, self.dot_scale, self.transform = use_relu, dot_scale, transform
        self.heads, self.dim, self.pools = q.shape[1], q.shape[2], keys.shape[0]
        self.tiles = -(-self.pools // POOL_TILE)
        padded = keys.new_zeros((self.tiles * POOL_TILE, self.dim), dtype=torch.float32)
        padded[: self.pools] = keys
        self.keys = padded.view(self.tiles, POOL_TILE, self.dim).transpose(1, 2).contiguous()  # [tiles, D, TP]
        self.row = padded.new_zeros((ROW_TILE, self.heads, self.dim))
        self.weight = padded.new_zeros((ROW_TILE, 1, self.heads))
        self.dot = padded.new_empty((ROW_TILE * self.heads, POOL_TILE))
        self.sum = padded.new_empty((ROW_TILE, 1, POOL_TILE))
        self.buffer = padded.new_empty(0)

    def group_rows(self, chunk_bytes: int) -> int:
        """Rows scored into one buffer: a multiple of the row tile within ``chunk_bytes``, at least one tile."""
        most = _MAX_GROUP_ROWS if _readable(self.q) else _MAX_GROUP_ROWS_ELSEWHERE
        fit = chunk_bytes // max(1, 4 * self.tiles * POOL_TILE)
        return max(ROW_TILE, min(most, fit) // ROW_TILE * ROW_TILE)

    def score(self, first: int, last: int, lo: Tensor, hi: Tensor) -> tuple[Tensor, int]:
        """Scores of the rows ``[first, last)`` of one group, ``[rows, W]``, and the pool id of column 0.

        Only tiles that some row sees are computed; other columns hold anything.
        """
        begin, end = self._tile_range(lo, hi)
        width = (end - begin) * POOL_TILE
        base = first // ROW_TILE * ROW_TILE
        height = -(-(last - base) // ROW_TILE) * ROW_TILE
        if self.buffer.numel() < height * width:
            self.buffer = self.buffer.new_empty(height * width)
        block = self.buffer[: height * width].view(height, width)
        for row in range(base, last, ROW_TILE):
            top, bottom = max(row, first), min(row + ROW_TILE, last)
            tiles = self._tile_range(lo[top - first : bottom - first], hi[top - first : bottom - first])
            if tiles[0] == tiles[1]:
                continue
            self._load(row, top, bottom)
            for tile in range(*tiles):
                self._multiply(tile)
                column = (tile - begin) * POOL_TILE
                block[row - base : row - base + ROW_TILE, column : column + POOL_TILE] = self.sum[:, 0]
        return block[first - base : last - base], begin * POOL_TILE

    def _tile_range(self, lo: Tensor, hi: Tensor) -> tuple[int, int]:
        """Pool tiles some row sees, half open; on a GPU all of them, since reading the bounds would stall."""
        if not _readable(lo):
            return 0, self.tiles
        some = hi > lo
        if not bool(some.any()):
            return 0, 0
        return int(lo[some].min()) // POOL_TILE, -(-int(hi[some].max()) // POOL_TILE)

    def _load(self, row: int, first: int, last: int) -> None:
        """Put the rows ``[first, last)`` at their place in the tile that starts at ``row``; the rest is zero."""
        if last - first < ROW_TILE:
            self.row.zero_()
            self.weight.zero_()
        self.row[first - row : last - row] = transform_input(self.q[first:last], self.transform)
        self.weight[first - row : last - row, 0] = self.weights[first:last]

    def _multiply(self, tile: int) -> None:
        rows = self.row.view(ROW_TILE * self.heads, self.dim)
        if self.dot_scale == 1.0:
            torch.mm(rows, self.keys[tile], out=self.dot)
        else:
            torch.addmm(self.dot, rows, self.keys[tile], beta=0, alpha=self.dot_scale, out=self.dot)
        if self.use_relu:
            self.dot.relu_()
        torch.bmm(self.weight, self.dot.view(ROW_TILE, self.heads, POOL_TILE), out=self.sum)
