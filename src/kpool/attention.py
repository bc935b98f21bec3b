"""`KPoolSparseAttention`: the sparse attention layer of GLM-5.3-Flash (multi-head latent attention without rotary part)
around its indexer, on one rank or many.

    q_resid = norm(q_a x)   latent = norm(kv_a x)        every rank, its own rows
    gather x, q_resid, latent over TP                     with sequence parallelism
    gather k, gate, latent over CP, restore packed order  with context parallelism
    tokens = indexer                                      rows sharded across TP if the flag says so
    out = o(attention of q_b q_resid over tokens)         heads split across TP, summed

The shard group is passed to the indexer only when the flag is on, TP has more than one rank, and the query rows are not
local to the rank: where they are local every rank asks about other rows, and sharding them again would be wrong.

Shapes: `S` rows of this rank's attention, `T` tokens, `B` batch, `W` selected slots; `A` heads, split across TP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kpool.config import KPoolConfig
from kpool.indexer import KPoolIndexer
from kpool.linear import ROW_TILE, row_linear
from kpool.parallel import enter, gather_rows, group_size, packed_order, scatter_sum, sum_over, zigzag_positions
from kpool.sharding import Group, all_gather
from kpool.sparse import LAYOUTS, sparse_attention
from kpool.visibility import Visibility

__all__ = ["AttentionShape", "KPoolSparseAttention"]

INDEXER_TYPES = ("full", "shared")


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of the attention itself; those of the indexer are in `KPoolConfig`. Defaults: GLM-5.3-Flash.

    Fields:
        num_heads `A`, kv_lora_rank `L`, qk_nope_head_dim `E`, v_head_dim `V`, rms_norm_eps, attention_bias: as in the
        Hugging Face configuration, where the first is `num_attention_heads`.
    """

    num_heads: int = 64
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 256
    v_head_dim: int = 256
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False

    @classmethod
    def from_hf(cls, config: Any) -> AttentionShape:
        """Read the sizes from a Hugging Face config object or dict, also from a nested `text_config`."""
        get = config.get if isinstance(config, Mapping) else lambda name, default=None: getattr(config, name, default)
        if get("text_config") is not None:
            return cls.from_hf(get("text_config"))
        found: dict[str, Any] = {name: get(name) for name in cls.__dataclass_fields__ if get(name) is not None}
        if get("num_attention_heads") is not None:
            found["num_heads"] = get("num_attention_heads")
        return cls(**found)


class KPoolSparseAttention(nn.Module):
    """Sparse attention with k-pool selection, forward and backward.

    Args:
        config: sizes of the indexer and the sharding flag.
        shape: sizes of the attention.
        layout: "absorbed" (work grows with the selected tokens) or "plain" (with all tokens, as Hugging Face).
        indexer_type: "full" selects itself, "shared" takes the selection of an earlier layer.
        numerics: as in `KPoolIndexer`.
        batch_first: as in `KPoolIndexer`.
        order: as in `KPoolIndexer`.
        impl: as in `KPoolIndexer`.
        shard_plan: as in `KPoolIndexer`.
        tp_group: tensor-parallel group; the heads are split across it.
        cp_group: context-parallel group; each rank holds the rows `kpool.parallel.zigzag_positions` says.
        sequence_parallel: the rows of `hidden_states` are also split across `tp_group`, in order.
        sequence_parallel_query_is_local: with sequence_parallel, each rank attends for its own rows with all heads.
        recompute: compute attention scores again in the backward pass.

    Parameters are named as in the checkpoint. Those split across TP are `q_b_proj`, `kv_b_proj` (rows) and `o_proj`
    (columns); `load_full_state_dict` cuts this rank's part out of a whole one.

    Raises:
        ValueError: heads that do not divide by TP, an unknown name, local queries without sequence parallelism.
    """

    def __init__(
        self,
        config: KPoolConfig,
        shape: AttentionShape,
        *,
        layout: str = "absorbed",
        indexer_type: str = "full",
        numerics: str = "megatron",
        batch_first: bool = True,
        order: str = "position",
        impl: str = "auto",
        shard_plan: str = "contiguous",
        tp_group: Group | None = None,
        cp_group: Group | None = None,
        sequence_parallel: bool = False,
        sequence_parallel_query_is_local: bool = False,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
        if indexer_type not in INDEXER_TYPES:
            raise ValueError(f"indexer_type: expected one of {INDEXER_TYPES}, got {indexer_type!r}")
        if sequence_parallel_query_is_local and not sequence_parallel:
            raise ValueError("sequence_parallel_query_is_local: expected sequence_parallel=True with it, got False")
        self.config, self.shape, self.layout, self.recompute = config, shape, layout, recompute
        self.batch_first = batch_first
        self.tp_group, self.cp_group = tp_group, cp_group
        self.sequence_parallel = sequence_parallel and group_size(tp_group) > 1
        self.query_is_local = sequence_parallel_query_is_local and self.sequence_parallel
        if shape.num_heads % self._head_ranks:
            raise ValueError(f"num_heads: expected a multiple of {self._head_ranks} ranks, got {shape.num_heads}")
        heads = shape.num_heads // self._head_ranks
        bias, eps = shape.attention_bias, shape.rms_norm_eps

        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=bias)
        self.q_a_layernorm = _RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * shape.qk_nope_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, shape.kv_lora_rank, bias=bias)
        self.kv_a_layernorm = _RMSNorm(shape.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, config.hidden_size, bias=bias)
        options: dict[str, Any] = {"order": order, "impl": impl, "shard_plan": shard_plan}
        self.indexer = KPoolIndexer(config, numerics, False, **options) if indexer_type == "full" else None

    @classmethod
    def from_hf(cls, config: Any, layer: int, **options: Any) -> KPoolSparseAttention:
        """The attention of one layer of a Hugging Face configuration, with fresh weights; options as the constructor.

        Raises:
            ValueError: as `KPoolConfig.from_hf`.
        """
        sizes = options.pop("config", None) or KPoolConfig.from_hf(config)
        text = getattr(config, "text_config", None) or config
        kinds = getattr(text, "indexer_types", None)
        options.setdefault("indexer_type", kinds[layer] if kinds else "full")
        return cls(sizes, AttentionShape.from_hf(config), **options)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        topk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            hidden_states: `[B, S_local, hidden]` (`[S_local, B, hidden]` unless batch_first), this rank's rows.
            attention_mask: bool `[B, S]` of all rows, left padding; not with CP, local queries or packed documents.
            cu_seqlens: int `[docs + 1]` of the whole packed sequence (of all CP ranks).
            topk_indices: int `[B, S, W]`, the selection of an earlier layer; a layer that selects itself ignores it.

        Returns:
            output, as hidden_states; and the selection, int32 `[B, S, W]` key slots in packed order. `S` is all rows of
            the CP rank, or the local ones when queries are local.

        Raises:
            ValueError: shapes, a mask where none can be honoured, a shared layer without a selection.
        """
        self._check(hidden_states, attention_mask, cu_seqlens, topk_indices)
        x = hidden_states.transpose(0, 1) if self.batch_first else hidden_states
        q_resid = self.q_a_layernorm(_linear(x, self.q_a_proj))
        latent = self.kv_a_layernorm(_linear(x, self.kv_a_proj_with_mqa))
        keys_x, query_x, query_r = self._row_views(x, q_resid)
        if self.sequence_parallel:
            latent = gather_rows(latent, self.tp_group)
        else:
            query_r, latent = enter(query_r, self.tp_group), enter(latent, self.tp_group)
        rows = latent.shape[0]
        if self._cp > 1:
            cu_seqlens = self._documents(rows, cu_seqlens, x.device)
            latent = gather_rows(latent, self.cp_group)[packed_order(rows, cu_seqlens, self._cp)]

        if self.indexer is not None:
            with torch.no_grad():
                topk_indices = self._select(keys_x, query_x, query_r, attention_mask, cu_seqlens)
        assert topk_indices is not None
        q = row_linear(query_r, self.q_b_proj.weight)
        attended = sparse_attention(
            q.view(*q.shape[:2], self.shape.num_heads // self._head_ranks, self.shape.qk_nope_head_dim),
            latent,
            self.kv_b_proj.weight,
            topk_indices,
            value_dim=self.shape.v_head_dim,
            layout=self.layout,
            recompute=self.recompute,
        )
        out = self._leave(row_linear(attended.flatten(2), self.o_proj.weight))
        if self.o_proj.bias is not None:
            out = out + self.o_proj.bias
        return (out.transpose(0, 1) if self.batch_first else out), topk_indices

    def shard_group(self) -> Group | None:
        """The group across which the indexer shards its rows, or None.

        The TP group when the flag is on, TP has more than one rank and the query rows are not local to the rank.
        """
        if not self.config.shard_queries_across_tp or group_size(self.tp_group) == 1 or self.query_is_local:
            return None
        return self.tp_group

    def load_full_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load the weights of the whole layer, keeping this rank's heads.

        Args:
            state: parameters by checkpoint name, such as `Glm5NextTextAttention.state_dict()`.
            strict: as in `load_state_dict`.
        """
        ranks = self._head_ranks
        rank = int(self.tp_group.rank()) if ranks > 1 and self.tp_group is not None else 0
        cut = dict(state)
        for name, dim in (("q_b_proj.weight", 0), ("kv_b_proj.weight", 0), ("o_proj.weight", 1)):
            if name in cut:
                cut[name] = cut[name].chunk(ranks, dim=dim)[rank]
        self.load_state_dict(cut, strict=strict)

    def sum_replicated_gradients(self) -> None:
        """Sum gradients that each rank holds a part of; call it after backward, before the optimizer.

        With sequence parallelism the parameters every TP rank holds whole saw only this rank's rows; with context
        parallelism all of them did. Frameworks do this themselves; a plain training loop calls this.
        """
        split = () if self.query_is_local else ("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight")
        for name, parameter in self.named_parameters():
            if parameter.grad is None:
                continue
            if self.sequence_parallel and name not in split:
                parameter.grad = sum_over(parameter.grad, self.tp_group)
            parameter.grad = sum_over(parameter.grad, self.cp_group)

    @property
    def _head_ranks(self) -> int:
        """Ranks the heads are split across."""
        return 1 if self.query_is_local else group_size(self.tp_group)

    @property
    def _cp(self) -> int:
        return group_size(self.cp_group)

    def _row_views(self, x: Tensor, q_resid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x for the index keys, x and q_resid for the query rows: gathered over TP where the rows are split."""
        if not self.sequence_parallel:
            return x, x, q_resid
        everything = all_gather(x.detach(), self._tp_group, group_size(self.tp_group)) if self.indexer else x
        if self.query_is_local:
            return everything, x, q_resid
        return everything, everything, gather_rows(q_resid, self.tp_group)

    @property
    def _tp_group(self) -> Group:
        assert self.tp_group is not None
        return self.tp_group

    def _leave(self, out: Tensor) -> Tensor:
        """Sum the partial outputs of the heads over TP and keep this rank's rows."""
        if self._head_ranks == 1:
            return out
        return scatter_sum(out, self.tp_group) if self.sequence_parallel else sum_over(out, self.tp_group)

    def _documents(self, rows: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
        """Documents of the whole sequence; one, if it is not packed. `rows` are those of this CP rank."""
        if cu_seqlens is not None:
            return cu_seqlens
        return torch.arange(2, device=device) * (rows * self._cp)

    def _select(
        self, keys_x: Tensor, query_x: Tensor, query_r: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """Selection of the query rows among the tokens of all ranks, int32 `[B, S, W]`."""
        assert self.indexer is not None
        group = self.shard_group()
        if self._cp == 1 and not self.query_is_local:
            chosen: Tensor = self.indexer(query_x, query_r, mask, cu_seqlens=cu_seqlens, query_shard_group=group)
            return chosen
        rows = keys_x.shape[0]
        documents = self._documents(rows, cu_seqlens, keys_x.device)
        k, gate = self.indexer.project_keys(keys_x)
        if self._cp > 1:
            assert self.cp_group is not None
            both = all_gather(torch.cat([k, gate], dim=-1), self.cp_group, self._cp)
            both = both[packed_order(rows, documents, self._cp)]
            k, gate = torch.split(both, k.shape[-1], dim=-1)
        q, weights = self.indexer.project_queries(query_x, query_r)
        seen = Visibility.packed(documents, self._positions(rows, q.shape[0], documents))
        pooled = self.indexer.pool(k, gate, documents)
        return self.indexer.select(q, weights, pooled, seen, tokens=k.shape[0], query_shard_group=group)

    def _positions(self, rows: int, queries: int, documents: Tensor) -> Tensor:
        """Packed position of each query row; `rows` are those of this CP rank, `queries` those of this rank."""
        if self._cp > 1:
            assert self.cp_group is not None
            at = zigzag_positions(rows, documents, self._cp, int(self.cp_group.rank()))
        else:
            at = torch.arange(rows, device=documents.device)
        if not self.query_is_local:
            return at
        first = int(self._tp_group.rank()) * queries
        return at[first : first + queries]

    def _check(self, hidden: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, given: Tensor | None) -> None:
        width = self.config.hidden_size
        if hidden.dim() != 3 or hidden.shape[2] != width:
            lead = "[B, S, {}]" if self.batch_first else "[S, B, {}]"
            raise ValueError(f"hidden_states: expected {lead.format(width)}, got shape {tuple(hidden.shape)}")
        if mask is not None and (self._cp > 1 or self.query_is_local or cu_seqlens is not None):
            raise ValueError(
                "attention_mask: expected None with context parallelism, local queries or packed documents, "
                "got a mask; pack the documents and pass cu_seqlens"
            )
        if self.indexer is None and given is None:
            raise ValueError("topk_indices: expected the selection of an earlier layer in a shared layer, got None")


class _RMSNorm(nn.Module):
    """Root mean square norm in fp32, scaled in the dtype of the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def _linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return row_linear(x, layer.weight, layer.bias, tile=ROW_TILE)
