"""Launching the kernels: pieces of rows under a byte budget, no host synchronisation, the same bits for any piece.

    for each piece of rows:   score -> prune -> select (-> order)        all on one stream, buffers reused

Pieces depend on shapes alone, so the sequence of launches can be captured in a CUDA graph. Everything allocated for a
piece (rank keys, group maxima, group lists, transformed q) counts against ``chunk_bytes``; one tile is the least.

Shapes: ``S`` rows, ``B`` batch, ``H`` heads, ``D`` index head dim, ``N`` pools, ``P`` pool size, ``M`` pool budget,
``Bv`` either 1 or ``B``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kpool.operators import operator
from kpool.sharding import RowBlocks
from kpool.triton import configs

configs.require_triton()  # before the kernels: its message says what to install

from kpool.triton.pieces import EXCLUDED_KEY, ScoreCall, pieces  # noqa: E402
from kpool.triton.pool import pool_kernel  # noqa: E402
from kpool.triton.select import order_kernel, prune_kernel, select_kernel  # noqa: E402

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
        dtype=q.dtype, heads=q.shape[2], dim=q.shape[3], pool_size=pool_size, budget=budget, device=q.device
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
    tensors = (q.detach(), keys.detach(), weights.detach(), pool_lo, pool_hi, mask)
    result: Tensor = torch.ops.kpool.scores_triton(*tensors, pool_size, use_relu, dot_scale, transform)
    return result


def _scores_fake(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    pool_size: int,
    use_relu: bool,
    dot_scale: float,
    transform: str,
) -> Tensor:
    return q.new_empty((q.shape[1], q.shape[0], keys.shape[0]), dtype=torch.float32)


@operator("scores_triton", _scores_fake)
def _scores(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    pool_lo: Tensor,
    pool_hi: Tensor,
    mask: Tensor | None,
    pool_size: int,
    use_relu: bool,
    dot_scale: float,
    transform: str,
) -> Tensor:
    total, batch = q.shape[:2]
    pools = keys.shape[0]
    out = q.new_empty((batch, total, pools), dtype=torch.float32)
    if out.numel() == 0:
        return out
    call = ScoreCall.of(q, keys, weights, pool_lo, pool_hi, mask, pool_size, use_relu, dot_scale)
    width = call.tile.rows
    chunk = max(width, _SCORES_CHUNK_BYTES // (8 * call.ld * batch) // width * width)
    buffer = q.new_empty(batch * min(chunk, total) * call.ld, dtype=torch.int32)
    best = q.new_empty(batch * min(chunk, total) * call.groups_ld, dtype=torch.int32)
    for first, piece in pieces(RowBlocks.all(total), chunk, width):
        ranks = buffer[: batch * piece.count * call.ld].fill_(EXCLUDED_KEY)
        call.score(ranks, best, piece, skip=-1, transform=transform)
        ranks = ranks.view(batch, piece.count, call.ld)[..., :pools]
        values = torch.where(ranks < 0, ranks ^ 0x7FFFFFFF, ranks).view(torch.float32)
        out[:, first : first + piece.count] = values.masked_fill_(ranks == EXCLUDED_KEY, float("-inf"))
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

    The bits are those of the torch formula wherever both take the same ``exp``. On NVIDIA both call that of libdevice,
    elsewhere a pooled key may differ in its last bit, so one call must pool on one kind of device.
    """
    tensors = (None if t is None else t.detach() for t in (k, gate_score, ape))
    result: Tensor = torch.ops.kpool.pool_triton(*tensors, starts, pool_size, numerics)
    return result


def _pool_fake(
    k: Tensor, gate_score: Tensor | None, ape: Tensor | None, starts: Tensor, pool_size: int, numerics: str
) -> Tensor:
    dtype = torch.bfloat16 if numerics == "megatron" else k.dtype
    return k.new_empty((starts.shape[-1], *k.shape[1:]), dtype=dtype)


@operator("pool_triton", _pool_fake)
def _pool(
    k: Tensor, gate_score: Tensor | None, ape: Tensor | None, starts: Tensor, pool_size: int, numerics: str
) -> Tensor:
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
        **tile.options(fusion=False),
    )
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
    rows: list[int],
    use_relu: bool,
    dot_scale: float,
    transform: str,
    order: str,
    chunk_bytes: int,
) -> Tensor:
    return q.new_empty((q.shape[1], rows[3], budget), dtype=torch.int32)


@operator("select_triton", _select_fake)
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
    mine = RowBlocks(*rows)
    if mine.count == 0 or q.shape[0] == 0 or keys.shape[0] == 0 or q.shape[1] == 0:
        return q.new_full((q.shape[1], mine.count, budget), -1, dtype=torch.int32)
    call = ScoreCall.of(q, keys, weights, pool_lo, pool_hi, mask, pool_size, use_relu, dot_scale)
    work = Selection(call, budget, mine, order=order, transform=transform, chunk_bytes=chunk_bytes)
    for first, piece in work.pieces():
        work.score(piece)
        work.pick(first, piece)
    return work.out


class Selection:
    """The launches of one selection, over buffers that every piece of rows reuses.

    ``score`` leaves the rank keys of a piece in the buffers; ``pick`` turns them into pool ids in ``out``, int32
    ``[B, R, M]``.
    """

    def __init__(
        self, call: ScoreCall, budget: int, rows: RowBlocks, *, order: str, transform: str, chunk_bytes: int
    ) -> None:
        self.call, self.budget, self.rows, self.transform = call, budget, rows, transform
        self.by_score = order == "score"
        # rows that see at most so many pools get them all; with holes, a window says little about how many those are
        self.direct = budget if call.mask is None else -1
        self.total, self.batch = call.q.shape[:2]
        self.chunk = call.chunk_rows(chunk_bytes, budget if self.by_score else 0, transform)
        self.out = call.q.new_empty((self.batch, rows.count, budget), dtype=torch.int32)
        held = self.batch * min(self.chunk, rows.count)
        self.ranks, self.best, self.groups, self.stay, self.ascending = (
            call.q.new_empty(held * words, dtype=torch.int32)
            for words in (call.ld, call.groups_ld, call.groups_ld, 1, budget if self.by_score else 0)
        )

    def pieces(self) -> Iterator[tuple[int, RowBlocks]]:
        """``(first local row, piece)`` of the local rows."""
        return pieces(self.rows, self.chunk, self.call.tile.rows)

    def score(self, piece: RowBlocks) -> None:
        """Rank keys and group maxima of a piece; in score order every row needs them, else those not ``direct``."""
        skip = -1 if self.by_score else self.direct
        self.call.score(self.ranks, self.best, piece, skip=skip, transform=self.transform)

    def pick(self, first: int, piece: RowBlocks) -> None:
        """The pool ids of a piece whose first local row is ``first``."""
        call, budget = self.call, self.budget
        windows, pools = (call.pool_lo, call.pool_hi), call.keys.shape[0]
        at = (piece.offset, piece.block, piece.stride, piece.count, self.total, self.direct)
        grid, prune, pick = (piece.count, self.batch), configs.PRUNE, configs.SELECT
        prune_kernel[grid](
            self.best, *windows, self.groups, self.stay, call.window_stride, pools, call.groups_ld, budget, *at,
            BLOCK=prune.items, **prune.options(fusion=False),
        )  # fmt: skip
        target, place = (self.ascending, (0, piece.count)) if self.by_score else (self.out, (first, self.rows.count))
        select_kernel[grid](
            self.ranks, self.groups, self.stay, *windows, target, call.window_stride, pools, call.ld, budget, *at,
            *place, WIDTH=configs.MAX_BUDGET, BLOCK=pick.items, **pick.options(fusion=False),
        )  # fmt: skip
        if self.by_score:
            tile = configs.order_config(budget)
            order_kernel[grid](
                self.ranks, self.ascending, self.out, call.ld, budget, piece.count, first, self.rows.count,
                WIDTH=tile.rows, PIECE=tile.items, **tile.options(fusion=False),
            )  # fmt: skip
