"""What each query row may see: causal, packed, bounds, mask, left padding; all become one window per row.

A row sees the key slots of its window ``[start, end)``. From the window and the pool grid follow

- the visible pools, ids ``[pool_lo, pool_hi)``: every token of the pool lies in the window;
- the *tail* ``[tail_start, end)``: the tokens after the last grid boundary at or before ``end``;
- the *head* ``[start, head_end)``: the tokens before the first boundary, disjoint from the tail.

An explicit mask can also punch holes: a pool with a masked token is not selectable, a masked head or tail token is
not returned.

Worked example, ``P = 4``, plain grid, window ``[1, 10)``: head ``[1, 4)``, one pool ``[4, 8)`` (id 1), tail ``[8,
10)``.

Shapes: ``S`` rows, ``T`` keys, ``B`` batch, ``P`` pool size, ``N`` pools, ``Bv`` either 1 (shared by the batch) or
``B``. Values are checked on the CPU only: on a GPU reading them would stall the stream.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kpool.grid import PoolGrid

_INDEX_DTYPES = (torch.int32, torch.int64)
_MASK_PIECE_BYTES = 32 << 20  # the mask is read in row pieces, so that no second [S, T] tensor exists


@dataclass(frozen=True)
class RowWindows:
    """The window of every row, and what follows from it. All tensors are int32 ``[Bv, S]`` in key slots or pool ids.

    Attributes:
        start, end: the window, half open; empty windows are ``[0, 0)``.
        pool_lo, pool_hi: visible pool ids, half open.
        tail_start: the tail is ``[tail_start, end)``, fewer than ``P`` tokens.
        head_end: the head is ``[start, head_end)``, fewer than ``P`` tokens.
        mask: fp32 ``[Bv, S, T]`` or None; only finiteness counts, and only inside the window.
        tail_in_pools: the tail may lie in a visible pool (no limit was given), so it must be compared with the
            selection.
    """

    start: Tensor
    end: Tensor
    pool_lo: Tensor
    pool_hi: Tensor
    tail_start: Tensor
    head_end: Tensor
    mask: Tensor | None = None
    tail_in_pools: bool = False

    @staticmethod
    def on_grid(grid: PoolGrid, start: Tensor, end: Tensor, mask: Tensor | None = None) -> RowWindows:
        """Derive pools, tail and head of the windows ``[start, end)``, int64 ``[Bv, S]``, on ``grid``."""
        pool_size = grid.pool_size
        empty = end <= start
        start, end = start.masked_fill(empty, 0), end.masked_fill(empty, 0)
        first_doc, last_doc = grid.document_of(start), grid.document_of((end - 1).clamp_min(0))
        first_edge, last_edge = _at(grid.edges, first_doc), _at(grid.edges, last_doc)

        before = (start - first_edge + pool_size - 1) // pool_size
        pool_lo = torch.minimum(_at(grid.offsets, first_doc) + before, _at(grid.offsets, first_doc + 1))
        complete = (end - last_edge) // pool_size
        pool_hi = torch.maximum(_at(grid.offsets, last_doc) + complete, pool_lo)

        tail_start = torch.maximum(start, last_edge + complete * pool_size)
        boundary = torch.minimum(first_edge + before * pool_size, _at(grid.edges, first_doc + 1))
        head_end = torch.maximum(start, torch.minimum(boundary, tail_start))
        pool_lo, tail_start = pool_lo.masked_fill(empty, 0), tail_start.masked_fill(empty, 0)
        pool_hi, head_end = pool_hi.masked_fill(empty, 0), head_end.masked_fill(empty, 0)
        start, end, pool_lo, pool_hi, tail_start, head_end = (
            part.to(torch.int32) for part in (start, end, pool_lo, pool_hi, tail_start, head_end)
        )
        return RowWindows(start, end, pool_lo, pool_hi, tail_start, head_end, mask)


@dataclass(frozen=True)
class Visibility:
    """What the rows of one call may see. Build it with one of the constructors; it has no default.

    Example:
        >>> windows = Visibility.causal(6).windows(rows=6, tokens=6, batch=1, pool_size=4)
        >>> windows.tail_start.tolist(), windows.end.tolist()
        ([[0, 0, 0, 4, 4, 4]], [[1, 2, 3, 4, 5, 6]])
    """

    kind: str
    rows: int | None = None
    first: int = 0
    starts: Tensor | None = None
    ends: Tensor | None = None
    key_positions: Tensor | None = None
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None
    valid: Tensor | None = None

    @staticmethod
    def causal(rows: int, first: int = 0) -> Visibility:
        """Row ``i`` sees the key slots ``[0, first + i + 1)``.

        Args:
            rows: ``S``.
            first: position of row 0; ``T - S`` for the last ``S`` tokens of a running sequence.

        Raises:
            ValueError: a negative argument.
        """
        if rows < 0 or first < 0:
            raise ValueError(f"rows, first: expected integers >= 0, got {rows}, {first}")
        return Visibility("causal", rows=rows, first=first)

    @staticmethod
    def packed(cu_seqlens: Tensor, positions: Tensor | None = None) -> Visibility:
        """Causal inside each document of a packed (THD) batch; the pool grid restarts at each document.

        Args:
            cu_seqlens: int32 or int64 ``[docs + 1]``, ascending from 0. Empty documents are legal.
            positions: int32 or int64 ``[S]``, the packed position of each row (context-parallel zigzag, strided rows);
                None means row ``i`` is at position ``i``, which needs ``S == T``. Rows outside every document see
                nothing.

        Raises:
            TypeError, ValueError: dtype, shape, or (on CPU) values of ``cu_seqlens``.
        """
        check_cu_seqlens(cu_seqlens, "cu_seqlens")
        if positions is not None:
            _check_index("positions", positions)
        return Visibility("packed", cu_seqlens=cu_seqlens, positions=positions)

    @staticmethod
    def bounds(
        starts: Tensor, ends: Tensor, key_positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Visibility:
        """Row ``i`` sees the tokens ``[starts[i], ends[i])``.

        Args:
            starts, ends: int32 or int64 ``[S]``; clipped to the keys that exist.
            key_positions: int32 or int64 ``[T]``, position of each key slot, ascending within a document; bounds are
                then compared with positions. None means slot ``t`` is at position ``t``.
            cu_seqlens: int32 or int64 ``[docs + 1]``; the pool grid restarts at each document. Each window must lie
                inside one document. Slots past ``cu_seqlens[-1]`` are padding and never seen.

        Raises:
            TypeError, ValueError: dtype, shape, or (on CPU) values: ``starts <= ends``, positions ascending.
        """
        _check_index("starts", starts)
        _check_index("ends", ends)
        if starts.shape != ends.shape:
            raise ValueError(f"ends: expected the shape of starts {tuple(starts.shape)}, got {tuple(ends.shape)}")
        if _on_cpu(starts, ends) and bool((starts > ends).any()):
            row = int((starts > ends).nonzero()[0, 0])
            raise ValueError(
                f"starts: expected starts <= ends, got [{int(starts[row])}, {int(ends[row])}) in row {row}; "
                "an empty window is written start == end"
            )
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, "cu_seqlens")
        if key_positions is not None:
            _check_index("key_positions", key_positions)
            _check_positions(key_positions, cu_seqlens)
        return Visibility("bounds", starts=starts, ends=ends, key_positions=key_positions, cu_seqlens=cu_seqlens)

    @staticmethod
    def from_mask(mask: Tensor) -> Visibility:
        """An additive mask: fp32 ``[S, T]`` or ``[B, S, T]``, 0 where a token is visible, -inf where it is not.

        Raises:
            TypeError: not fp32 (a boolean mask is ambiguous: True means *keep* to some libraries, *drop* to others).
            ValueError: neither 2 nor 3 dimensions.
        """
        if mask.dtype is not torch.float32:
            raise TypeError(
                f"mask: expected an additive float32 mask (0 visible, -inf hidden), got {mask.dtype}; convert a "
                "boolean mask with torch.zeros(shape).masked_fill(~visible, -inf)"
            )
        if mask.dim() not in (2, 3):
            raise ValueError(f"mask: expected [S, T] or [B, S, T], got shape {tuple(mask.shape)}")
        return Visibility("mask", mask=mask if mask.dim() == 3 else mask[None])

    @staticmethod
    def left_padded(valid: Tensor, queries: int | None = None) -> Visibility:
        """Causal over a padded batch; the pool grid of each batch row starts at its first valid token.

        Args:
            valid: bool ``[B, T]``, True for real tokens, which must be one contiguous span per batch row.
            queries: the rows are the last ``queries`` slots; None means all ``T``. Padded rows see nothing.

        Raises:
            TypeError, ValueError: dtype, shape, or (on CPU) a hole in a span.
        """
        if valid.dtype is not torch.bool:
            raise TypeError(f"valid: expected torch.bool, got {valid.dtype}")
        if valid.dim() != 2:
            raise ValueError(f"valid: expected [B, T], got shape {tuple(valid.shape)}")
        if queries is not None and not 0 <= queries <= valid.shape[1]:
            raise ValueError(f"queries: expected 0 <= queries <= T = {valid.shape[1]}, got {queries}")
        if _on_cpu(valid) and valid.numel():
            runs = valid[:, :1].sum(1) + (valid[:, 1:] & ~valid[:, :-1]).sum(1)
            if bool((runs > 1).any()):
                row = int((runs > 1).nonzero()[0, 0])
                raise ValueError(
                    f"valid: expected one contiguous span of valid tokens per batch row, got a hole in row {row}"
                )
        return Visibility("left_padded", valid=valid, rows=queries)

    @staticmethod
    def unlimited() -> Visibility:
        """No limit on pools; the tail of row ``i`` is that of the prefix ``i + 1``.

        This is what the fused call means when no visibility is given. It is *not* causal.
        """
        return Visibility("unlimited")

    def grid(self, *, tokens: int, batch: int, pool_size: int, device: torch.device) -> PoolGrid:
        """The pool grid this visibility implies for ``T = tokens`` keys."""
        if self.cu_seqlens is not None:
            return PoolGrid.packed(self.cu_seqlens, tokens, pool_size)
        if self.valid is not None:
            first, last = self._span(self.valid)
            return PoolGrid.left_padded(first, last, tokens, pool_size)
        return PoolGrid.plain(tokens, pool_size, device)

    def windows(
        self, *, rows: int, tokens: int, batch: int, pool_size: int, device: torch.device | str = "cpu"
    ) -> RowWindows:
        """Resolve to one window per row.

        Args:
            rows, tokens, batch, pool_size: ``S``, ``T``, ``B``, ``P`` of the call.
            device: where the result lives; tensors of the visibility must be there already.

        Returns:
            RowWindows with ``[Bv, S]`` tensors, ``Bv = B`` for per-batch masks and left padding, else 1.

        Raises:
            ValueError: the visibility describes another number of rows, tokens or batch entries than the call has.
        """
        device = torch.device(device)
        self._check_call(rows, tokens, batch, device)
        grid = self.grid(tokens=tokens, batch=batch, pool_size=pool_size, device=device)
        if self.mask is not None:
            start, end = _mask_window(self.mask)
            return RowWindows.on_grid(grid, start, end, mask=self.mask)
        if self.valid is not None:
            return RowWindows.on_grid(grid, *self._left_padded_window(self.valid, rows))
        if self.kind == "packed":
            return RowWindows.on_grid(grid, *self._packed_window(grid, rows, device))
        if self.kind == "bounds":
            return RowWindows.on_grid(grid, *self._bounds_window(grid, tokens))
        end = (torch.arange(rows, device=device)[None] + (self.first + 1)).clamp_(max=tokens)
        windows = RowWindows.on_grid(grid, torch.zeros_like(end), end)
        if self.kind == "causal":
            return windows
        everything: dict[str, Any] = {**vars(windows), "tail_in_pools": True}
        everything["pool_lo"] = torch.zeros_like(windows.pool_lo)
        everything["pool_hi"] = torch.full_like(windows.pool_hi, tokens // pool_size)
        return RowWindows(**everything)

    def _check_call(self, rows: int, tokens: int, batch: int, device: torch.device) -> None:
        def expect(name: str, what: str, expected: int, got: int) -> None:
            if expected != got:
                raise ValueError(f"{name}: expected {what} = {expected}, got {got}")

        for name in ("starts", "ends", "key_positions", "cu_seqlens", "positions", "mask", "valid"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device.type != device.type:
                raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}; move it there")
        if self.kind == "causal" and self.rows is not None:
            expect("visibility", "rows S", rows, self.rows)
        if self.starts is not None:
            expect("starts", "rows S", rows, self.starts.shape[0])
        if self.key_positions is not None:
            expect("key_positions", "keys T", tokens, self.key_positions.shape[0])
        if self.positions is not None:
            expect("positions", "rows S", rows, self.positions.shape[0])
        elif self.kind == "packed" and rows != tokens:
            raise ValueError(
                f"cu_seqlens without bounds: expected S == T, got S = {rows}, T = {tokens}; pass varlen_starts and "
                "varlen_ends (or positions) to say where each row is"
            )
        if self.cu_seqlens is not None:
            check_cu_seqlens(self.cu_seqlens, "cu_seqlens", tokens)
        if self.mask is not None:
            expect("mask", "rows S", rows, self.mask.shape[1])
            expect("mask", "keys T", tokens, self.mask.shape[2])
            if self.mask.shape[0] not in (1, batch):
                raise ValueError(f"mask: expected batch 1 or {batch}, got {self.mask.shape[0]}")
        if self.valid is not None:
            expect("valid", "batch B", batch, self.valid.shape[0])
            expect("valid", "keys T", tokens, self.valid.shape[1])
            expect("valid", "rows S", rows, tokens if self.rows is None else self.rows)

    def _packed_window(self, grid: PoolGrid, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        position = torch.arange(rows, device=device) if self.positions is None else self.positions.to(torch.int64)
        position = position[None]
        inside = (position >= 0) & (position < grid.edges[:, -1:])
        start = _at(grid.edges, grid.document_of(position))
        return start.masked_fill(~inside, 0), (position + 1).masked_fill(~inside, 0)

    def _bounds_window(self, grid: PoolGrid, tokens: int) -> tuple[Tensor, Tensor]:
        assert self.starts is not None and self.ends is not None
        start, end = self.starts.to(torch.int64)[None], self.ends.to(torch.int64)[None]
        # bounds + cu_seqlens: tokens past the last document are padding, no row sees them
        limit = grid.edges[:, -1:] if self.cu_seqlens is not None else torch.full_like(grid.edges[:, -1:], tokens)
        if self.key_positions is not None:
            start, end = _slots_of_positions(self.key_positions, start, end, limit)
        zero = torch.zeros_like(limit)
        return torch.clamp(start, zero, limit), torch.clamp(end, zero, limit)

    @staticmethod
    def _span(valid: Tensor) -> tuple[Tensor, Tensor]:
        """First valid slot and one past the last, int64 ``[B]`` each; ``(T, T)`` where nothing is valid."""
        slot = torch.arange(valid.shape[1], device=valid.device)
        if valid.shape[1] == 0:
            return (zero := valid.new_zeros(valid.shape[0], dtype=torch.int64)), zero.clone()
        first = torch.where(valid, slot, valid.shape[1]).amin(1)
        return first, first + valid.sum(1)

    def _left_padded_window(self, valid: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        first, _ = self._span(valid)
        slot = torch.arange(valid.shape[1] - rows, valid.shape[1], device=valid.device).expand(valid.shape[0], -1)
        real = valid[:, valid.shape[1] - rows :]
        return first[:, None].expand_as(slot).masked_fill(~real, 0), (slot + 1).masked_fill(~real, 0)


def check_cu_seqlens(cu_seqlens: Tensor, name: str, tokens: int | None = None) -> None:
    """Raise unless ``cu_seqlens`` is an index vector, on CPU also unless it ascends from 0 to at most ``tokens``."""
    _check_index(name, cu_seqlens)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name}: expected [docs + 1] cumulative lengths starting with 0, got an empty tensor")
    if not _on_cpu(cu_seqlens):
        return
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}: expected cumulative lengths ascending from 0, got a first value of {values[0]}")
    for doc, (left, right) in enumerate(itertools.pairwise(values)):
        if right < left:
            raise ValueError(
                f"{name}: expected ascending cumulative lengths, got {left} then {right} at document {doc}"
            )
    if tokens is not None and values[-1] > tokens:
        raise ValueError(f"{name}: expected a last value within T = {tokens} keys, got {values[-1]}")


def _on_cpu(*tensors: Tensor) -> bool:
    """True if the values can be read without a stall: real CPU tensors (fakes are subclasses), no tracing."""
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in tensors)
    return plain and not torch.compiler.is_compiling()


def _check_index(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: expected torch.int32 or torch.int64, got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {tuple(tensor.shape)}")


def _check_positions(key_positions: Tensor, cu_seqlens: Tensor | None) -> None:
    if not _on_cpu(key_positions) or (cu_seqlens is not None and not _on_cpu(cu_seqlens)):
        return
    falls = key_positions[1:] < key_positions[:-1]
    if cu_seqlens is not None:
        inner = cu_seqlens[(cu_seqlens > 0) & (cu_seqlens < key_positions.shape[0])].to(torch.int64)
        falls[inner - 1] = False
        falls[int(cu_seqlens[-1]) :] = False
    if bool(falls.any()):
        slot = int(falls.nonzero()[0, 0])
        raise ValueError(
            "key_positions: expected positions ascending within a document, got "
            f"{int(key_positions[slot])} then {int(key_positions[slot + 1])} at slot {slot}"
        )


def _at(table: Tensor, index: Tensor) -> Tensor:
    """``table [Bt, E]`` read at ``index [Bv, S]``, ``Bt`` and ``Bv`` equal or 1."""
    if table.shape[0] == 1:
        return table[0][index]
    return table.gather(1, index.expand(table.shape[0], -1))


def _slots_of_positions(positions: Tensor, start: Tensor, end: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Key slots whose position lies in ``[start, end)``; documents may be stored in any order of positions."""
    if positions.shape[0] == 0:
        return torch.zeros_like(start), torch.zeros_like(end)
    slot = torch.arange(positions.shape[0], device=positions.device)
    keyed = torch.where(slot < limit[0], positions.to(torch.int64), torch.iinfo(torch.int64).max)
    ordered, order = torch.sort(keyed, stable=True)
    begin = torch.searchsorted(ordered, start)
    count = torch.searchsorted(ordered, end) - begin
    first = order[begin.clamp(max=positions.shape[0] - 1)]
    return first, first + count


def _mask_window(mask: Tensor) -> tuple[Tensor, Tensor]:
    """First finite slot and one past the last of each row, int64 ``[Bv, S]``; ``(0, 0)`` for a row of -inf."""
    batch, rows, tokens = mask.shape
    start = torch.zeros(batch, rows, dtype=torch.int64, device=mask.device)
    end = torch.zeros_like(start)
    if tokens == 0:
        return start, end
    slot = torch.arange(tokens, device=mask.device, dtype=torch.int32)
    piece = max(1, _MASK_PIECE_BYTES // (8 * tokens * max(batch, 1)))
    for row in range(0, rows, piece):
        finite = torch.isfinite(mask[:, row : row + piece])
        start[:, row : row + piece] = torch.where(finite, slot, tokens).amin(-1)
        end[:, row : row + piece] = torch.where(finite, slot, -1).amax(-1) + 1
    return start, end
