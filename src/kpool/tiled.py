"""The torch path: fixed-shape tiles, exact selection, nothing of size ``S x N``.

Rows are taken in tiles of ``TR`` on the *global* row grid, pools in tiles of ``TP``; partial tiles are padded. So the
score of one (row, pool) always comes from a matrix product of the same shape at the same place, and its bits depend on
nothing but the row and the keys: not on the shard, the chunk or the neighbours. Per tile, the rows in two halves
because two products keep two cores busier than one product that is split:

    x [2, TR/2 * H, TP] = q [2, TR/2 * H, D] @ keys^T [D, TP],   relu,   s [TR, TP] = w [TR, 1, H] @ x [TR, H, TP]

Tiles no row needs are never scored. A group of rows is selected at once, when its score buffer is full; with
``order="position"`` a row that sees at most ``M`` pools gets them all and is never scored.

Where bounds cannot be read without a stall (a GPU), tiles are larger, all of them are scored, and nothing is read back.

Shapes: ``S`` rows, ``B`` batch, ``H`` heads, ``D`` dimensions, ``N`` pools, ``M`` pool budget, ``P`` pool size, ``T``
keys, ``Bv`` either 1 or ``B``, ``TR``, ``TP`` the tile sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kpool.operators import operator
from kpool.scoring import full_fp32_products, unmasked_pools, visible_pools
from kpool.scoring import transform as transform_input
from kpool.selection import HIDDEN, order_key, take_top
from kpool.sharding import RowBlocks

ROW_TILE = 32  # the smallest
POOL_TILE = 128
_CACHED_LINES = 2048  # TR * H whose products, 1 MiB a tile, stay in the second-level caches of two cores
_ROW_TILE_ELSEWHERE = 128
_POOL_TILE_ELSEWHERE = 2048
_GROUP_ROWS = 128
_GROUP_ROWS_ELSEWHERE = 4096
_GROUP_ELEMENTS = 1 << 19  # scores selected at once on the CPU: with their 8-byte keys, 6 MiB
_FILL_ROWS = 512
_SCORES_CHUNK = 1 << 26


@dataclass(frozen=True)
class Tile:
    """Tile sizes: a function of device and heads alone, so that every rank cuts the same tiles."""

    rows: int
    pools: int

    @staticmethod
    def of(heads: int, device: torch.device) -> Tile:
        """The tile for ``H`` heads on ``device``."""
        if device.type != "cpu":
            return Tile(_ROW_TILE_ELSEWHERE, _POOL_TILE_ELSEWHERE)
        tall = _CACHED_LINES // 2 <= 2 * ROW_TILE * heads <= _CACHED_LINES
        return Tile(2 * ROW_TILE if tall else ROW_TILE, POOL_TILE)


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
    if out.numel() == 0:
        return out
    with full_fp32_products(q.device):
        for entry in range(batch):
            view = min(entry, pool_lo.shape[0] - 1)
            scorer = Scorer(q[:, entry], keys[:, entry], weights[:, entry], use_relu, dot_scale, transform)
            need = Need.of(pool_lo[view], pool_hi[view], None, scorer, RowBlocks.all(rows))
            for first, last in _groups(0, rows, scorer.group_rows(_SCORES_CHUNK)):
                block, start = scorer.score(first, last, need)
                width = min(start + block.shape[1], pools) - start
                lo, hi = pool_lo[view, first:last], pool_hi[view, first:last]
                seen = visible_pools(lo, hi, None if mask is None else mask[view, first:last], pool_size, pools)
                part = out[entry, first:last, start : start + width]
                torch.where(seen[:, start : start + width], block[:, :width], part, out=part)
    return out


def _select_fake(
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


@operator("select_torch", _select_fake)
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
    rows, batch, pools = q.shape[0], q.shape[1], keys.shape[0]
    ids = torch.empty((batch, blocks.count, budget), dtype=torch.int32, device=q.device)
    free = budget if order == "position" and mask is None and _readable(q) else None
    spans = blocks.spans(rows) if pools else []
    if free is None or sum(last - first for _, first, last in spans) != blocks.count:
        ids.fill_(-1)
    with full_fp32_products(q.device):
        for entry in range(batch if spans else 0):
            view = min(entry, pool_lo.shape[0] - 1)
            lo, hi = pool_lo[view], pool_hi[view]
            scorer = Scorer(q[:, entry], keys[:, entry], weights[:, entry], use_relu, dot_scale, transform)
            need = Need.of(lo, hi, free, scorer, blocks)
            group_rows = scorer.group_rows(chunk_bytes)
            for local, begin, end in spans:
                span = ids[entry, local : local + end - begin]
                if free is not None:
                    _write_everything(span, lo[begin:end], hi[begin:end])
                for first, last in _groups(begin, end, group_rows):
                    if need.any(first, last):
                        window = None if mask is None else mask[view, first:last]
                        group = _Group(first, last, lo[first:last], hi[first:last], window, pool_size)
                        group.select(scorer, need, order, span[first - begin : last - begin])
    return ids


def _readable(tensor: Tensor) -> bool:
    """Whether bounds may be read without a stall."""
    return tensor.device.type == "cpu"


def _groups(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut ``[begin, end)`` at the multiples of ``size``."""
    first = begin
    while first < end:
        last = min((first // size + 1) * size, end)
        yield first, last
        first = last


def _write_everything(out: Tensor, lo: Tensor, hi: Tensor) -> None:
    """``out [r, M]`` gets the first ``M`` pools each row sees, ascending, -1 behind them."""
    column = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    for row in range(0, out.shape[0], _FILL_ROWS):
        part = slice(row, row + _FILL_ROWS)
        torch.add(lo[part, None], column, out=out[part])
        out[part].masked_fill_(out[part] >= hi[part, None], -1)


class Need:
    """Which rows must be scored, and the pool tiles that each row tile needs for them.

    Attributes:
        rows: bool ``[S]``, or None where bounds are not read: then every row is scored, against every tile.
        tiles: per row tile of the global grid the pool tiles ``[first, last)``.
    """

    def __init__(self, rows: Tensor | None, tiles: list[tuple[int, int]], tile: Tile) -> None:
        self.rows, self.tiles, self.tile = rows, tiles, tile

    @staticmethod
    def of(lo: Tensor, hi: Tensor, free: int | None, scorer: Scorer, blocks: RowBlocks) -> Need:
        """Rows of ``blocks`` that see more than ``free`` pools (None: at least one); ``lo``, ``hi`` int32 ``[S]``."""
        tile, count = scorer.tile, lo.shape[0]
        row_tiles = -(-count // tile.rows)
        if not _readable(lo):
            return Need(None, [(0, scorer.tiles)] * row_tiles, tile)
        mine = torch.zeros(count, dtype=torch.bool, device=lo.device)
        for _, first, last in blocks.spans(count):
            mine[first:last] = True
        mine &= (hi - lo) > (free or 0)
        grown = torch.nn.functional.pad(torch.stack([lo, hi]), (0, row_tiles * tile.rows - count))
        idle = ~torch.nn.functional.pad(mine, (0, row_tiles * tile.rows - count))
        least = grown[0].masked_fill(idle, torch.iinfo(torch.int32).max).view(row_tiles, -1).amin(1)
        most = grown[1].masked_fill(idle, 0).view(row_tiles, -1).amax(1)
        edges = zip(least.tolist(), most.tolist(), strict=True)
        tiles = [(a // tile.pools, -(-z // tile.pools)) if a < z else (0, 0) for a, z in edges]
        return Need(mine, tiles, tile)

    def any(self, first: int, last: int) -> bool:
        """Whether a row of ``[first, last)`` needs scores."""
        if self.rows is not None:  # a needed tile is not enough: its other rows may be the ones that need it
            return bool(self.rows[first:last].any())
        return any(a < z for a, z in self._touching(first, last))

    def span(self, first: int, last: int) -> tuple[int, int]:
        """The pool tiles needed by any row tile that touches ``[first, last)``."""
        touching = [t for t in self._touching(first, last) if t[0] < t[1]]
        return (min(a for a, _ in touching), max(z for _, z in touching)) if touching else (0, 0)

    def _touching(self, first: int, last: int) -> list[tuple[int, int]]:
        return self.tiles[first // self.tile.rows : -(-last // self.tile.rows)]


@dataclass(frozen=True)
class _Group:
    """Rows ``[first, last)`` selected together; ``lo``, ``hi`` int32 ``[r]``, ``mask [r, T]`` or None."""

    first: int
    last: int
    lo: Tensor
    hi: Tensor
    mask: Tensor | None
    pool_size: int

    def select(self, scorer: Scorer, need: Need, order: str, out: Tensor) -> None:
        """Write the pool ids of the rows that need scores into ``out [r, M]``."""
        block, start = scorer.score(self.first, self.last, need)
        lo, hi = self.lo, self.hi
        rows = None if need.rows is None else need.rows[self.first : self.last]
        if rows is not None and bool(rows.all()):
            rows = None
        if rows is not None:
            lo, hi, block = lo[rows], hi[rows], block[rows]
        key = order_key(block, clean=_readable(block) and bool(block.sum().isfinite()))
        self._hide(key, lo, hi, start, scorer.pools, rows)
        ids = take_top(key, out.shape[1], order, start)
        if rows is None:
            out.copy_(ids)
        else:
            out[rows] = ids

    def _hide(self, key: Tensor, lo: Tensor, hi: Tensor, start: int, pools: int, rows: Tensor | None) -> None:
        """Overwrite the keys ``[r, W]`` of pools that a row cannot see; column 0 is pool ``start``."""
        width = key.shape[1]
        left, right = width, 0
        if _readable(key):  # columns that all rows see need no work
            left, right = max(0, int(lo.max()) - start), max(0, int(hi.min()) - start)
        if left >= right:
            left, right = width, width
        for first, last in ((0, left), (right, width)):
            if first < last:
                ids = torch.arange(start + first, start + last, device=key.device, dtype=torch.int32)
                key[:, first:last].masked_fill_((ids < lo[:, None]) | (ids >= hi[:, None]), HIDDEN)
        if self.mask is not None:
            mask = self.mask if rows is None else self.mask[rows]
            known = unmasked_pools(mask, self.pool_size, pools)[:, start : start + width]
            key[:, : known.shape[1]].masked_fill_(~known, HIDDEN)


class Scorer:
    """The tiles of one batch entry: keys laid out once, buffers reused by every row tile."""

    def __init__(
        self, q: Tensor, keys: Tensor, weights: Tensor, use_relu: bool, dot_scale: float, transform: str
    ) -> None:
        self.q, self.source, self.weights = q, keys, weights  # [S, H, D], [N, D], [S, H]
        self.use_relu, self.dot_scale, self.transform = use_relu, dot_scale, transform
        self.heads, self.dim, self.pools = q.shape[1], q.shape[2], keys.shape[0]
        self.tile = Tile.of(self.heads, q.device)
        self.tiles = -(-self.pools // self.tile.pools)
        self.buffer = torch.zeros(0, dtype=torch.float32, device=q.device)
        self.ready = False

    def group_rows(self, chunk_bytes: int) -> int:
        """Rows scored into one buffer: a multiple of the row tile within ``chunk_bytes``, at least one tile."""
        width = max(1, self.tiles * self.tile.pools)
        fit, most = chunk_bytes // (4 * width), _GROUP_ROWS_ELSEWHERE
        if _readable(self.q):
            fit, most = min(fit, _GROUP_ELEMENTS // width), _GROUP_ROWS
        return max(self.tile.rows, min(most, fit) // self.tile.rows * self.tile.rows)

    def score(self, first: int, last: int, need: Need) -> tuple[Tensor, int]:
        """Scores of the rows ``[first, last)`` of one group, ``[r, W]``, -0.0 made 0.0, and the pool id of column 0.

        Only tiles that some row needs are computed; other columns hold anything.
        """
        if not self.ready:
            self.prepare()
        size, width = self.tile.rows, self.tile.pools
        begin, end = need.span(first, last)
        base = first // size * size
        height, columns = -(-(last - base) // size) * size, (end - begin) * width
        if self.buffer.numel() < height * columns:
            self.buffer = self.buffer.new_zeros(height * columns)
        block = self.buffer[: height * columns].view(height, columns)
        for row in range(base, last, size):
            tiles = range(*need.tiles[row // size])
            if tiles:
                self._load(row, max(row, first), min(row + size, last))
                lines = block[row - base : row - base + size].chunk(end - begin, dim=1)
                for tile in tiles:
                    self.multiply(self.keys[tile])
                    self._reduce()
                    torch.add(self.sums, 0.0, out=lines[tile - begin])
        return block[first - base : last - base], begin * width

    def prepare(self) -> None:
        """Lay out the keys, fp32 ``[tiles, D, TP]`` with zeros behind the last pool, and make the buffers."""
        size, width, heads, dim = self.tile.rows, self.tile.pools, self.heads, self.dim
        laid = torch.empty((self.tiles, dim, width), dtype=torch.float32, device=self.q.device)
        full = self.pools // width
        laid[:full].copy_(self.source[: full * width].reshape(full, width, dim).transpose(1, 2))
        if full < self.tiles:
            laid[full].zero_()
            laid[full, :, : self.pools - full * width].copy_(self.source[full * width :].t())
        self.keys = [key.expand(2, -1, -1) for key in laid.unbind(0)]
        self.row = laid.new_zeros((size, heads, dim))
        self.halves = self.row.view(2, size // 2 * heads, dim)
        self.weight = laid.new_zeros((size, 1, heads))
        self.dot = laid.new_empty((2, size // 2 * heads, width))
        self.by_row = self.dot.view(size, heads, width)
        self.sum = laid.new_empty((size, 1, width))
        self.sums = self.sum[:, 0]
        self.ready = True

    def _load(self, row: int, first: int, last: int) -> None:
        """Put the rows ``[first, last)`` at their place in the tile that starts at ``row``; the rest is zero."""
        if last - first < self.tile.rows:
            self.row.zero_()
            self.weight.zero_()
        self.row[first - row : last - row] = transform_input(self.q[first:last], self.transform)
        self.weight[first - row : last - row, 0] = self.weights[first:last]

    def multiply(self, key: Tensor) -> None:
        """Dot products of the loaded rows with one pool tile, into ``self.dot``."""
        if self.dot_scale == 1.0:
            torch.bmm(self.halves, key, out=self.dot)
        else:
            torch.baddbmm(self.dot, self.halves, key, beta=0, alpha=self.dot_scale, out=self.dot)

    def _reduce(self) -> None:
        """ReLU and the weighted sum over heads, into ``self.sum``."""
        if self.use_relu:
            self.dot.relu_()
        torch.bmm(self.weight, self.by_row, out=self.sum)
