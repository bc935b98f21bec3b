"""What each query row may see: causal, packed, bounds, mask, left padding; all become one window per row.

An explicit mask can also punch holes: a pool with a masked token is not selectable, a masked head or tail token is not
returned. ``windows`` says what follows from a window.

Shapes: ``S`` rows, ``T`` keys, ``B`` batch, ``P`` pool size, ``N`` pools, ``Bv`` either 1 (shared by the batch) or
``B``. Values are checked on the CPU only: on a GPU reading them would stall the stream.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kpool.grid import PoolGrid
from kpool.windows import RowWindows, at

_FUSED_NAMES = {"starts": "varlen_starts", "ends": "varlen_ends", "cu_seqlens": "cu_seqlens_kv"}
_INDEX_DTYPES = (torch.int32, torch.int64)
_MASK_PIECE_BYTES = 32 << 20  # the mask is read in row pieces, so that no second [S, T] tensor exists


@dataclass(frozen=True, eq=False)
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
    of_fused_call: bool = False  # errors then use the argument names of the fused call

    @staticmethod
    def from_arguments(
        mask: Tensor | None,
        varlen_starts: Tensor | None,
        varlen_ends: Tensor | None,
        key_positions: Tensor | None,
        cu_seqlens_kv: Tensor | None,
    ) -> Visibility:
        """What the visibility arguments of ``fused_qk_topk_kpool`` say; errors use their names."""
        if mask is not None:
            return Visibility.from_mask(mask)
        if varlen_starts is not None and varlen_ends is not None:
            bounds = Visibility(
                "bounds",
                starts=varlen_starts,
                ends=varlen_ends,
                key_positions=key_positions,
                cu_seqlens=cu_seqlens_kv,
                of_fused_call=True,
            )
            return bounds._checked()
        if cu_seqlens_kv is not None:
            return Visibility("packed", cu_seqlens=cu_seqlens_kv, of_fused_call=True)._checked()
        return Visibility.unlimited()

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
        return Visibility("packed", cu_seqlens=cu_seqlens, positions=positions)._checked()

    @staticmethod
    def bounds(
        starts: Tensor, ends: Tensor, key_positions: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Visibility:
        """Row ``i`` sees the tokens ``[starts[i], ends[i])``.

        Args:
            starts: int32 or int64 ``[S]``; clipped to the keys that exist.
            ends: the same, not included.
            key_positions: int32 or int64 ``[T]``, position of each key slot, ascending within a document; bounds are
                then compared with positions. None means slot ``t`` is at position ``t``.
            cu_seqlens: int32 or int64 ``[docs + 1]``; the pool grid restarts at each document. Each window must lie
                inside one document. Slots past ``cu_seqlens[-1]`` are padding and never seen.

        Raises:
            TypeError, ValueError: dtype, shape, or (on CPU) values: ``starts <= ends``, positions ascending.
        """
        return Visibility(
            "bounds", starts=starts, ends=ends, key_positions=key_positions, cu_seqlens=cu_seqlens
        )._checked()

    @staticmethod
    def from_mask(mask: Tensor) -> Visibility:
        """An additive mask: fp32 ``[S, T]`` or ``[B, S, T]``, 0 where a token is visible, -inf where it is not.

        Raises:
            TypeError: not fp32 (a boolean mask is ambiguous: True means *keep* to some libraries, *drop* to others).
            ValueError: neither 2 nor 3 dimensions.
        """
        _check_tensor("mask", mask)
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
        _check_tensor("valid", valid)
        if valid.dtype is not torch.bool:
            raise TypeError(f"valid: expected torch.bool, got {valid.dtype}")
        if valid.dim() != 2:
            raise ValueError(f"valid: expected [B, T], got shape {tuple(valid.shape)}")
        if queries is not None and not 0 <= queries <= valid.shape[1]:
            raise ValueError(f"queries: expected 0 <= queries <= T = {valid.shape[1]}, got {queries}")
        if on_cpu(valid) and valid.numel():
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

    def grid(self, *, tokens: int, pool_size: int, device: torch.device) -> PoolGrid:
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
            rows: ``S`` of the call.
            tokens: ``T``.
            batch: ``B``.
            pool_size: ``P``.
            device: where the result lives; tensors of the visibility must be there already.

        Returns:
            RowWindows with ``[Bv, S]`` tensors, ``Bv = B`` for per-batch masks and left padding, else 1.

        Raises:
            ValueError: the visibility describes another number of rows, tokens or batch entries than the call has.
        """
        device = torch.device(device)
        self._check_call(rows, tokens, batch, device)
        grid = self.grid(tokens=tokens, pool_size=pool_size, device=device)
        if self.mask is not None:
            start, end = _mask_window(self.mask)
            return RowWindows.on_grid(grid, start, end, mask=self.mask)
        if self.valid is not None:
            return RowWindows.on_grid(grid, *self._left_padded_window(self.valid, rows), heads=False)
        if self.kind == "packed":
            return RowWindows.on_grid(grid, *self._packed_window(grid, rows, device), heads=False)
        if self.kind == "bounds":
            return RowWindows.on_grid(grid, *self._bounds_window(grid, tokens))
        end = (torch.arange(rows, device=device)[None] + (self.first + 1)).clamp_(max=tokens)
        windows = RowWindows.on_grid(grid, torch.zeros_like(end), end, heads=False)
        if self.kind == "causal":
            return windows
        none, all_pools = torch.zeros_like(windows.pool_lo), torch.full_like(windows.pool_hi, tokens // pool_size)
        return replace(windows, pool_lo=none, pool_hi=all_pools, tail_in_pools=True)

    def _name(self, field: str) -> str:
        return _FUSED_NAMES.get(field, field) if self.of_fused_call else field

    def _checked(self) -> Visibility:
        """Itself, if its tensors make sense together."""
        for field in ("starts", "ends", "key_positions", "positions"):
            tensor = getattr(self, field)
            if tensor is not None:
                _check_index(self._name(field), tensor)
        if self.cu_seqlens is not None:
            check_cu_seqlens(self.cu_seqlens, self._name("cu_seqlens"))
        if self.starts is not None and self.ends is not None:
            _check_bounds(self._name("starts"), self.starts, self._name("ends"), self.ends)
        if self.key_positions is not None:
            _check_positions(self.key_positions, self.cu_seqlens)
        return self

    def _check_call(self, rows: int, tokens: int, batch: int, device: torch.device) -> None:
        """Raise unless the tensors fit a call of these sizes on this device."""
        sizes = {"S": rows, "T": tokens, "B": batch}
        legends = {
            "starts": "S",
            "ends": "S",
            "key_positions": "T",
            "positions": "S",
            "cu_seqlens": "*",
            "mask": "BST",
            "valid": "BT",
        }
        for field, legend in legends.items():
            tensor = getattr(self, field)
            if tensor is None:
                continue
            name = self._name(field)
            if tensor.device.type != device.type:
                raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}; move it there")
            for letter, got in zip(legend, tensor.shape, strict=True):
                if letter in sizes and got != sizes[letter] and not (field == "mask" and letter == "B" and got == 1):
                    expected = ", ".join(str(sizes.get(x, "*")) for x in legend)
                    raise ValueError(
                        f"{name}: expected shape [{', '.join(legend)}] = [{expected}], got {list(tensor.shape)}"
                    )
        if self.cu_seqlens is not None:
            check_cu_seqlens(self.cu_seqlens, self._name("cu_seqlens"), tokens)
        if self.kind == "packed" and self.positions is None and rows != tokens:
            raise ValueError(
                f"{self._name('cu_seqlens')}: expected S == T when no bounds say where the rows are, got S = {rows}, "
                f"T = {tokens}; pass {self._name('starts')} and {self._name('ends')}"
            )
        queries = {"causal": self.rows, "left_padded": tokens if self.rows is None else self.rows}.get(self.kind, rows)
        if queries != rows:
            raise ValueError(
                f"visibility: expected the rows S = {rows} of the call, got a visibility of {queries} rows"
            )

    def _packed_window(self, grid: PoolGrid, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        position = torch.arange(rows, device=device) if self.positions is None else self.positions.to(torch.int64)
        position = position[None]
        inside = (position >= 0) & (position < grid.edges[:, -1:])
        start = at(grid.edges, grid.document_of(position))
        return start, (position + 1).masked_fill(~inside, 0)  # an end of 0 makes a window empty

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
        return first[:, None].expand_as(slot), (slot + 1).masked_fill(~real, 0)


def check_cu_seqlens(cu_seqlens: Tensor, name: str, tokens: int | None = None) -> None:
    """Raise unless ``cu_seqlens`` is an index vector, on CPU also unless it ascends from 0 to at most ``tokens``."""
    _check_index(name, cu_seqlens)
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name}: expected [docs + 1] cumulative lengths starting with 0, got an empty tensor")
    if not on_cpu(cu_seqlens):
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


def on_cpu(*tensors: Tensor) -> bool:
    """True if the values can be read without a stall: real CPU tensors (fakes are subclasses), no tracing."""
    plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "cpu" for t in tensors)
    return plain and not torch.compiler.is_compiling()


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")


def _check_index(name: str, tensor: Tensor) -> None:
    _check_tensor(name, tensor)
    if tensor.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: expected torch.int32 or torch.int64, got {tensor.dtype}")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {tuple(tensor.shape)}")


def _check_bounds(starts_name: str, starts: Tensor, ends_name: str, ends: Tensor) -> None:
    if starts.shape != ends.shape:
        raise ValueError(
            f"{ends_name}: expected the shape of {starts_name} {list(starts.shape)}, got {list(ends.shape)}"
        )
    if on_cpu(starts, ends) and bool((starts > ends).any()):
        row = int((starts > ends).nonzero()[0, 0])
        raise ValueError(
            f"{starts_name}: expected {starts_name} <= {ends_name}, got [{int(starts[row])}, {int(ends[row])}) in row "
            f"{row}; an empty window is written start == end"
        )


def _check_positions(key_positions: Tensor, cu_seqlens: Tensor | None) -> None:
    if not on_cpu(key_positions) or (cu_seqlens is not None and not on_cpu(cu_seqlens)):
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


def _slots_of_positions(positions: Tensor, start: Tensor, end: Tensor, limit: Tensor) -> tuple[Tensor, Tensor]:
    """Key slots whose position lies in ``[start, end)``; documents may be stored in any order of positions."""
    if positions.shape[0] == 0:
        return torch.zeros_like(start), torch.zeros_like(end)
    slot = torch.arange(positions.shape[0], device=positions.device)
    keyed = torch.where(slot < limit[0], positions.to(torch.int64), torch.iinfo(torch.int64).max)
    ordered, order = torch.sort(keyed, stable=True)
    begin = torch.searchsorted(ordered, start.contiguous())
    count = torch.searchsorted(ordered, end.contiguous()) - begin
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
