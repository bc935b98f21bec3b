"""`IndexerCache`: what an indexer keeps between the calls of one generation: pooled keys, and the open pool's tokens.

A pool never changes once its last token has arrived, so a cache of pooled keys is exact: it holds the bits that one
call over the whole sequence would compute. Raw keys and gates are kept only for the pool that is still open, at most
``P - 1`` tokens a batch row. Per token that is ``D / P`` elements instead of ``2 D``.

The rows of a left-padded batch have grids of their own, so their open pools need not be equally full. Everything is
kept in coordinates that start at a row's first valid token, and nothing is read back to the host.

Shapes: ``B`` batch, ``S`` new tokens, ``T`` tokens so far, ``D`` dim, ``P`` pool size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kpool.pooling import PooledKeys, gated_sum

__all__ = ["IndexerCache"]


class IndexerCache:
    """State of one indexer layer. Create it empty, hand it to every call, call `reset` to start over.

    Attributes:
        length: key slots so far, padding included.
        first: int64 ``[B]``, padded slots before the first valid token; None before the first call.
        count: int64 ``[B]``, valid tokens so far.

    Example:
        >>> cache = IndexerCache()
        >>> cache.length
        0
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.length = 0
        self.first: Tensor | None = None
        self.count: Tensor | None = None
        self._padded = False
        self._pooled: Tensor | None = None  # [capacity, B, D]
        self._open_k: Tensor | None = None  # [P - 1, B, D], the open pool's tokens first
        self._open_g: Tensor | None = None

    @property
    def padded(self) -> bool:
        """Whether a mask was ever given, so that some slots may be padding."""
        return self._padded

    def valid(self) -> Tensor:
        """Which key slots hold a token, bool ``[B, T]``.

        Raises:
            ValueError: nothing was appended yet.
        """
        if self.first is None or self.count is None:
            raise ValueError("cache: expected at least one append before asking for its slots, got an empty cache")
        slot = torch.arange(self.length, device=self.first.device)
        return (slot >= self.first[:, None]) & (slot < (self.first + self.count)[:, None])

    def reorder(self, rows: Tensor) -> None:
        """Replace batch row ``b`` by ``rows[b]`` (int64 ``[B']``), as beam search does."""
        if self.first is None or self.count is None:
            return
        self.first, self.count = self.first.index_select(0, rows), self.count.index_select(0, rows)
        for name in ("_pooled", "_open_k", "_open_g"):
            setattr(self, name, getattr(self, name).index_select(1, rows))

    def append(
        self,
        k: Tensor,
        gate: Tensor,
        ape: Tensor,
        attention_mask: Tensor | None = None,
        *,
        pool_size: int,
        numerics: str,
    ) -> PooledKeys:
        """Take in new tokens and return the pooled keys of all tokens so far.

        Args:
            k, gate: ``[S, B, D]``, keys and gate scores of the new tokens.
            ape: ``[P, D]``, slot bias.
            attention_mask: bool ``[B, S]`` over the new tokens, None if all are valid. Padding may come before a
                row's first token or after its last one, not between.
            pool_size: ``P``.
            numerics: as in `kpool.pool_keys`.

        Returns:
            PooledKeys with ``N = T // P`` slots: pool ``j`` of batch row ``b`` starts at key slot
            ``first[b] + j P``. Slots past a row's complete pools hold numbers that mean nothing and start at -1.

        Raises:
            ValueError: another batch, head dim, pool size or dtype than in earlier calls, as when two layers share a
                cache; or (on CPU) a hole between valid tokens.
        """
        new, batch, dim = k.shape
        self._prepare(k, gate, pool_size, numerics)
        assert self.first is not None and self.count is not None
        assert self._open_k is not None and self._open_g is not None
        lead, valid = self._arrivals(attention_mask, new, batch)

        open_tokens = self.count % pool_size
        groups = (pool_size - 1 + new) // pool_size
        keys = torch.cat([self._open_k, k])
        gates = torch.cat([self._open_g, gate])

        def take(source: Tensor, index: Tensor) -> Tensor:
            """Tokens ``index [n, B]`` of the open pool followed by the new valid tokens; ``[n, B, D]``."""
            at = torch.where(index < open_tokens, index, index - open_tokens + lead + (pool_size - 1))
            return source.gather(0, at.clamp_(max=source.shape[0] - 1)[..., None].expand(-1, -1, dim))

        index = torch.arange(groups * pool_size, device=k.device)[:, None].expand(-1, batch)
        shape = (groups, pool_size, batch, dim)
        if groups:
            fresh = gated_sum(take(keys, index).view(shape), take(gates, index).view(shape), ape, numerics)
            self._store(fresh, self.count // pool_size, self.length // pool_size)

        complete = (open_tokens + valid) // pool_size * pool_size
        rest = torch.arange(pool_size - 1, device=k.device)[:, None] + complete
        self._open_k, self._open_g = take(keys, rest), take(gates, rest)
        self.first = self.first + lead
        self.count = self.count + valid
        self.length += new
        return self._pooled_keys(pool_size)

    def _prepare(self, k: Tensor, gate: Tensor, pool_size: int, numerics: str) -> None:
        _, batch, dim = k.shape
        dtype = torch.bfloat16 if numerics == "megatron" else k.dtype
        if self.first is None:
            self.first = torch.zeros(batch, dtype=torch.int64, device=k.device)
            self.count = torch.zeros_like(self.first)
            self._pooled = k.new_zeros(0, batch, dim, dtype=dtype)
            self._open_k = k.new_zeros(pool_size - 1, batch, dim)
            self._open_g = gate.new_zeros(pool_size - 1, batch, dim)
            return
        assert self._pooled is not None and self._open_k is not None
        kept = self._open_k
        for name, before, now in (
            ("batch", kept.shape[1], batch),
            ("index_head_dim", kept.shape[2], dim),
            ("pool size", kept.shape[0] + 1, pool_size),
            ("keys of", kept.dtype, k.dtype),
            ("pooled keys of", self._pooled.dtype, dtype),
        ):
            if before != now:
                raise ValueError(
                    f"cache: expected {name} {before} as in earlier calls, got {now}; each layer needs its own cache"
                )

    def _arrivals(self, mask: Tensor | None, new: int, batch: int) -> tuple[Tensor, Tensor]:
        """Padded slots before a row's first token in this call, and its valid tokens; int64 ``[B]`` each."""
        assert self.first is not None and self.count is not None
        if mask is None:
            if self._padded:
                mask = torch.ones(batch, new, dtype=torch.bool, device=self.first.device)
            else:
                return torch.zeros_like(self.first), torch.full_like(self.first, new)
        self._padded = True
        valid = mask.sum(1)
        slot = torch.arange(new, device=mask.device)
        begin = torch.where(mask, slot, new).amin(1) if new else torch.zeros_like(self.first)
        lead = begin.masked_fill(self.count > 0, 0)
        if mask.device.type == "cpu" and type(mask) is Tensor and not torch.compiler.is_compiling():
            self._check_spans(mask, lead, valid)
        return lead, valid

    def _check_spans(self, mask: Tensor, lead: Tensor, valid: Tensor) -> None:
        assert self.first is not None and self.count is not None
        slot = torch.arange(mask.shape[1], device=mask.device)
        span = (slot >= lead[:, None]) & (slot < (lead + valid)[:, None])
        ended = (self.count > 0) & (self.first + self.count < self.length) & (valid > 0)
        broken = (span != mask).any(1) | ended
        if bool(broken.any()):
            row = int(broken.nonzero()[0, 0])
            raise ValueError(
                "attention_mask: expected one contiguous span of valid tokens per batch row (padding before or "
                f"after it), got a hole in row {row}"
            )

    def _store(self, fresh: Tensor, at: Tensor, most: int) -> None:
        """Write ``fresh [n, B, D]`` at pool ids ``at[b] + 0..n-1``, where no ``at[b]`` exceeds ``most``.

        Ids past a row's complete pools hold leftovers; a later call overwrites them with the real pools.
        """
        assert self._pooled is not None
        need = most + fresh.shape[0]
        if need > self._pooled.shape[0]:
            grown = self._pooled.new_zeros(max(need, 2 * self._pooled.shape[0]), *self._pooled.shape[1:])
            grown[: self._pooled.shape[0]] = self._pooled
            self._pooled = grown
        ids = torch.arange(fresh.shape[0], device=at.device)[:, None] + at
        self._pooled.scatter_(0, ids[..., None].expand(-1, -1, fresh.shape[2]), fresh)

    def _pooled_keys(self, pool_size: int) -> PooledKeys:
        assert self._pooled is not None and self.first is not None and self.count is not None
        number = self.length // pool_size
        ids = torch.arange(number, device=self.first.device)
        if not self._padded:
            return PooledKeys(self._pooled[:number], (ids * pool_size).to(torch.int32), pool_size)
        starts = self.first[:, None] + ids * pool_size
        starts = starts.masked_fill(ids >= (self.count // pool_size)[:, None], -1)
        return PooledKeys(self._pooled[:number], starts.to(torch.int32), pool_size)
