"""`KPoolIndexer`: the indexer layer of GLM-5.3-Flash, from hidden states to selected tokens.

    q = wq_b(q_resid)                    [S, B, H, D]
    k = k_norm(wk(x))                    [T, B, D]      LayerNorm with bias, no rotary part
    g = x @ index_kpool_compress_gate.T  [T, B, D]
    w = weights_proj(x) * H**-0.5        [S, B, H]      times D**-0.5 for numerics="megatron"
    keys = pools of (k, g, ape);   tokens = top pools of sum_h w * relu(q . keys), expanded, with tail

Parameters are named as in the checkpoint, so a Hugging Face state dict loads strictly. The layer is frozen: it runs
without autograd, and its parameters do not require grad.

Shapes: `S` rows, `T` keys, `B` batch, `H` heads, `D` dim, `P` pool size, `K` selected tokens, `W` result width.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from kpool.cache import IndexerCache
from kpool.config import KPoolConfig
from kpool.linear import ROW_TILE, no_autocast, row_linear
from kpool.ops import select_pools
from kpool.pooling import PooledKeys, pool_keys
from kpool.replication import check_replicated
from kpool.selection import ORDERS, expand
from kpool.sharding import PLANS, Group, check_group
from kpool.validation import IMPLS, NUMERICS, check_choice, check_width_multiple
from kpool.visibility import Visibility

__all__ = ["IndexerCache", "KPoolIndexer"]


class KPoolIndexer(nn.Module):
    """The k-pool indexer as a module.

    Args:
        config: sizes and switches.
        numerics: "megatron" or "hf", which implementation's rounding to follow.
        batch_first: inputs are `[B, S, ...]`; False means `[S, B, ...]`. The result is `[B, S, W]` either way.
        order: order of the selected pools in a row, "score" or "position" (cheaper: rows that see no more pools
            than they may select are not scored).
        impl: as in `kpool.fused_qk_topk_kpool`.
        shard_plan: the same.
        width_multiple: round the result width up to a multiple, filled with -1.
        row_tile: rows of each projection on CPU (see `kpool.linear`), so that a token projected alone has the bits
            it has in a prompt. None projects all rows in one call.

    Example:
        >>> config = KPoolConfig(hidden_size=32, q_lora_rank=16, index_n_heads=2, index_head_dim=8, index_topk=8)
        >>> KPoolIndexer(config)(torch.randn(1, 5, 32), torch.randn(1, 5, 16)).shape
        torch.Size([1, 5, 11])
    """

    def __init__(
        self,
        config: KPoolConfig,
        numerics: str = "megatron",
        batch_first: bool = True,
        *,
        order: str = "score",
        impl: str = "auto",
        shard_plan: str = "contiguous",
        width_multiple: int = 1,
        row_tile: int | None = ROW_TILE,
    ) -> None:
        super().__init__()
        if not isinstance(config, KPoolConfig):
            raise TypeError(
                f"config: expected a KPoolConfig (KPoolConfig.from_hf reads a Hugging Face one), "
                f"got {type(config).__name__}"
            )
        options = (("numerics", numerics, NUMERICS), ("order", order, ORDERS), ("impl", impl, IMPLS))
        for name, value, known in (*options, ("shard_plan", shard_plan, PLANS)):
            check_choice(name, value, known)
        check_width_multiple(width_multiple)
        self.config, self.numerics, self.batch_first = config, numerics, batch_first
        self.order, self.impl, self.shard_plan = order, impl, shard_plan
        self.width_multiple, self.row_tile = width_multiple, row_tile
        self._calls = 0

        heads, dim = config.index_n_heads, config.index_head_dim
        self.wq_b = nn.Linear(config.q_lora_rank, heads * dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, dim, bias=False)
        self.k_norm = nn.LayerNorm(dim, eps=1e-6)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.index_kpool_compress_ape = nn.Parameter(torch.zeros(config.index_kpool, dim))
        self.index_kpool_compress_gate = nn.Parameter(torch.randn(dim, config.hidden_size) * 0.02)
        self.requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls,
        path: str | PathLike[str],
        layer: int,
        *,
        config: KPoolConfig | None = None,
        numerics: str = "megatron",
        **options: Any,
    ) -> KPoolIndexer:
        """The indexer of one layer of a checkpoint directory; only that layer's tensors are read.

        Args:
            path: directory with `*.safetensors` (with or without an index file) and a `config.json`.
            layer: layer number; it must have an indexer of its own.
            config: instead of the directory's `config.json`.
            numerics: as the constructor.
            **options: the same.

        Returns:
            The indexer in eval mode, on the CPU, in the checkpoint's dtype.

        Raises:
            FileNotFoundError: no directory, no safetensors file, no `config.json`, or a file the index names is gone.
            ValueError: the layer has no indexer, or its tensors are not exactly the indexer's.
        """
        from kpool.checkpoint import read_config, read_indexer

        tensors = read_indexer(path, layer)
        module = cls(config if config is not None else read_config(path), numerics, **options)
        module.to(tensors["wq_b.weight"].dtype)
        try:
            module.load_state_dict(tensors)
        except RuntimeError as error:
            raise ValueError(f"{path}: the indexer of layer {layer} does not fit the configuration: {error}") from error
        return module.eval()

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        attention_mask: Tensor | None = None,
        cache: IndexerCache | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        query_shard_group: Group | None = None,
    ) -> Tensor:
        """Select the tokens each row attends to.

        Args:
            hidden_states: `[B, S, hidden]` (`[S, B, hidden]` unless batch_first), the new tokens.
            q_resid: `[B, S, q_lora_rank]`, normalised low-rank queries of the same tokens.
            attention_mask: bool `[B, S]` over the new tokens, also with a cache; False is padding, before a row's
                first token or after its last. A padded row selects nothing. None: no padding.
            cache: tokens of earlier calls; the new ones are added to it.
            cu_seqlens: int32 or int64 `[docs + 1]`, packed documents along S. Not with a mask or a cache.
            query_shard_group: each rank scores its share of the rows; inputs must be equal on all ranks.

        Returns:
            int32 `[B, S, W]`, key slots (counted from the first call with a cache), -1 unused.

        Raises:
            TypeError: a mask that is not bool, inputs of another dtype than the weights.
            ValueError: shapes, a combination that means nothing, or (on CPU) a hole in the mask.
        """
        self._check(hidden_states, q_resid, attention_mask, cache, cu_seqlens)
        if self.batch_first:
            hidden_states, q_resid = hidden_states.transpose(0, 1), q_resid.transpose(0, 1)
        q, weights = self.project_queries(hidden_states, q_resid)
        k, gate = self.project_keys(hidden_states)
        if cache is None and attention_mask is not None:
            cache = IndexerCache()
        if cache is None:
            pooled = self.pool(k, gate, cu_seqlens)
            seen = Visibility.causal(k.shape[0]) if cu_seqlens is None else Visibility.packed(cu_seqlens)
            return self.select(q, weights, pooled, seen, tokens=k.shape[0], query_shard_group=query_shard_group)
        ape = self.index_kpool_compress_ape
        options: dict[str, Any] = {"pool_size": self.config.index_kpool, "numerics": self.numerics}
        pooled = cache.append(k, gate, ape, attention_mask, **options)
        rows = k.shape[0]
        if cache.padded:
            seen = Visibility.left_padded(cache.valid(), queries=rows)
        else:
            seen = Visibility.causal(rows, first=cache.length - rows)
        return self.select(q, weights, pooled, seen, tokens=cache.length, query_shard_group=query_shard_group)

    def project_queries(self, hidden_states: Tensor, q_resid: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries and head weights of some rows.

        Args:
            hidden_states: `[S, B, hidden]`; q_resid: `[S, B, q_lora_rank]`.

        Returns:
            q `[S, B, H, D]` in the dtype of the weights; head weights fp32 `[S, B, H]`.
        """
        heads, dim = self.config.index_n_heads, self.config.index_head_dim
        weight = self.weights_proj.weight
        with no_autocast(q_resid.device):
            q = self._linear(q_resid, self.wq_b.weight).view(*q_resid.shape[:-1], heads, dim)
            if self.numerics == "hf":
                return q, self._linear(hidden_states.to(weight.dtype), weight).float() * heads**-0.5
            return q, self._linear(hidden_states.float(), weight.float()) * (heads**-0.5 * dim**-0.5)

    def project_keys(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Index keys and gate scores of some tokens.

        Args:
            hidden_states: `[T, B, hidden]`.

        Returns:
            k and gate, `[T, B, D]` each.
        """
        with no_autocast(hidden_states.device):
            k = self.k_norm(self._linear(hidden_states, self.wk.weight))
            return k, self._linear(hidden_states, self.index_kpool_compress_gate)

    def pool(self, k: Tensor, gate: Tensor, cu_seqlens: Tensor | None = None) -> PooledKeys:
        """Pool `k` and `gate`, `[T, B, D]` each, on the plain grid or per packed document."""
        size = self.config.index_kpool
        return pool_keys(k, gate, self.index_kpool_compress_ape, size, cu_seqlens, numerics=self.numerics)

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        pooled: PooledKeys,
        visibility: Visibility,
        *,
        tokens: int,
        query_shard_group: Group | None = None,
    ) -> Tensor:
        """Score, pick and expand; the part after the projections.

        Args:
            q: `[S, B, H, D]`; weights: `[S, B, H]`.
            pooled: pooled keys of `tokens` key slots.
            visibility: what each row may see.
            tokens: `T`.
            query_shard_group: as in `forward`.

        Returns:
            int32 `[B, S, W]`.
        """
        config = self.config
        windows = visibility.windows(
            rows=q.shape[0], tokens=tokens, batch=q.shape[1], pool_size=config.index_kpool, device=q.device
        )
        if query_shard_group is not None and self._check_due():
            rank, size = check_group(query_shard_group)
            inputs = {"q": q, "weights": weights, "pooled keys": pooled.keys, "pool starts": pooled.starts}
            # attention_mask and cu_seqlens, as far as they matter: rows along dim 0
            inputs |= {"first visible slot": windows.start.t(), "end of visible slots": windows.end.t()}
            check_replicated(inputs, query_shard_group, rank, size)
        ids = select_pools(
            q,
            pooled,
            weights,
            visibility,
            config.pool_budget,
            tokens=tokens,
            order=self.order,
            impl=self.impl,
            numerics=self.numerics,
            shard_plan=self.shard_plan,
            query_shard_group=query_shard_group,
        )
        return expand(
            ids,
            pooled.starts,
            windows,
            pool_size=config.index_kpool,
            always_select_tail=config.index_kpool_always_select_tail,
            width_multiple=self.width_multiple,
        )

    def extra_repr(self) -> str:
        """Sizes and switches, for `print(module)`."""
        c = self.config
        return f"topk={c.index_topk}, pool={c.index_kpool}, numerics={self.numerics!r}, order={self.order!r}"

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return row_linear(x, weight, tile=self.row_tile)

    def _check_due(self) -> bool:
        """Whether this sharded call compares the inputs across the group; counted alike on every rank."""
        if not self.config.check_replicated:
            return False
        self._calls += 1
        return (self._calls - 1) % self.config.check_replicated == 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KPoolIndexer:
        """Keep the slot bias in fp32 when the module is cast; numerics="hf" casts it, as Hugging Face does."""
        kept = self.index_kpool_compress_ape.detach()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        ape = self.index_kpool_compress_ape
        if self.numerics == "megatron" and ape.dtype.itemsize < kept.dtype.itemsize:
            ape.data = kept.to(ape.device)
        return self

    def _check(
        self,
        hidden: Tensor,
        q_resid: Tensor,
        mask: Tensor | None,
        cache: IndexerCache | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        lead = "[B, S, {}]" if self.batch_first else "[S, B, {}]"
        expected = (("hidden_states", hidden, self.config.hidden_size), ("q_resid", q_resid, self.config.q_lora_rank))
        for name, tensor, width in expected:
            if tensor.dim() != 3 or tensor.shape[2] != width:
                raise ValueError(f"{name}: expected {lead.format(width)}, got shape {tuple(tensor.shape)}")
            if tensor.dtype != self.wk.weight.dtype:
                raise TypeError(f"{name}: expected {self.wk.weight.dtype} as the weights, got {tensor.dtype}")
        if hidden.shape[:2] != q_resid.shape[:2]:
            raise ValueError(
                f"q_resid: expected leading shape {tuple(hidden.shape[:2])} as hidden_states, "
                f"got {tuple(q_resid.shape[:2])}"
            )
        batch_rows = tuple(hidden.shape[:2]) if self.batch_first else (hidden.shape[1], hidden.shape[0])
        if mask is not None:
            if mask.dtype is not torch.bool:
                raise TypeError(f"attention_mask: expected torch.bool, got {mask.dtype}")
            if tuple(mask.shape) != batch_rows:
                raise ValueError(
                    f"attention_mask: expected [B, S] = {list(batch_rows)}, the new tokens only, "
                    f"got shape {tuple(mask.shape)}"
                )
        if cu_seqlens is not None and (mask is not None or cache is not None):
            raise ValueError("cu_seqlens: expected no attention_mask and no cache with packed documents, got one")
