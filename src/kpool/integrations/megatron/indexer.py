"""`KPoolDSAIndexer`: the k-pool indexer with Megatron's parameter names, gathers and layouts.

    x, qr   local rows            -> gathered over TP where sequence parallelism split them
    k, gate of this CP rank       -> one gather over CP, restored to packed order
    keys    pools of (k, gate, ape), per document
    tokens  top pools of each row; with the flag, each TP rank scores its share of the rows

The layer is frozen and has no rotary part. Selection runs without autograd.

Shapes: `S` query rows, `L` local rows, `F` rows of this CP rank, `T` keys, `B` batch, `H` heads, `D` dim, `P` pool
size, `W` result width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from kpool.config import KPoolConfig
from kpool.integrations.megatron.rows import QueryRows, Ranks, key_order, visibility
from kpool.integrations.megatron.settings import resolve
from kpool.linear import no_autocast, row_linear
from kpool.ops import fused_qk_topk_kpool
from kpool.sharding import Group, all_gather

_K_NORM_EPS = 1e-6
_TILELANG_WIDTH = 64  # a width of another multiple makes the TileLang kernels decline


class KPoolDSAIndexer(DSAIndexer):  # type: ignore[misc]
    """Selects the tokens each query row attends to.

    Parameters: `linear_wq_b`, `linear_wk`, `k_norm`, `linear_weights_proj` as in `DSAIndexer`, and
    `index_kpool_compress_gate [D, hidden]`, `index_kpool_compress_ape [P, D]` (always fp32).

    Args:
        config: a TransformerConfig.
        submodules: `DSAIndexerSubmodules`, the classes of the four submodules.
        pg_collection: process groups `tp` and `cp`; None takes Megatron's global ones.
        kpool: k-pool options; None reads them from `config` and the environment (see `kpool_config`).
        order, impl, shard_plan: as in `kpool.fused_qk_topk_kpool`.
        width_multiple: round the result width up with -1; None is 64 for the TileLang backend, else 1.

    Raises:
        ValueError: the indexer loss is asked for (`dsa_indexer_loss_coeff`), the model rotates queries and keys
            (`qk_pos_emb_head_dim`), or `kpool` and `config` disagree.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        pg_collection: Any = None,
        *,
        kpool: KPoolConfig | None = None,
        order: str = "score",
        impl: str = "auto",
        shard_plan: str = "contiguous",
        width_multiple: int | None = None,
    ) -> None:
        # DSAIndexer's constructor only adds a rotary embedding to what follows, and allocates it on a GPU.
        MegatronModule.__init__(self, config=config)
        refuse_loss(config)
        if config.qk_pos_emb_head_dim:
            raise ValueError(
                f"qk_pos_emb_head_dim: expected 0 (the k-pool indexer has no rotary part), "
                f"got {config.qk_pos_emb_head_dim}"
            )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.pg_collection = pg_collection
        self.kpool = resolve(config, kpool)
        self.index_topk = self.kpool.index_topk  # DSAIndexer's names, for code that reads them
        self.index_n_heads, self.index_head_dim = self.kpool.index_n_heads, self.kpool.index_head_dim
        self.softmax_scale = self.index_head_dim**-0.5
        self.order, self.impl, self.shard_plan = order, impl, shard_plan
        tiles = config.dsa_kernel_backend == "tilelang"
        self.width_multiple = width_multiple if width_multiple is not None else _TILELANG_WIDTH if tiles else 1
        self._calls = 0
        self._build(submodules)
        for parameter in self.parameters():
            # duplicated across tensor-parallel ranks; the mark matters if someone unfreezes them
            parameter.average_gradients_across_tp_domain = True
            parameter.requires_grad_(False)

    def _build(self, submodules: Any) -> None:
        kpool, config = self.kpool, self.config
        shapes = {
            "linear_wq_b": (kpool.q_lora_rank, kpool.index_n_heads * kpool.index_head_dim),
            "linear_wk": (kpool.hidden_size, kpool.index_head_dim),
            "linear_weights_proj": (kpool.hidden_size, kpool.index_n_heads),
        }
        for name, (width, out) in shapes.items():
            linear = build_module(
                getattr(submodules, name),
                width,
                out,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_bias_add=False,
                skip_weight_param_allocation=False,
                parallel_mode="duplicated",
            )
            setattr(self, name, linear)
        norm_config = copy.copy(config)
        norm_config.normalization = "LayerNorm"
        eps = config.dsa_indexer_k_norm_epsilon if config.dsa_indexer_k_norm_epsilon is not None else _K_NORM_EPS
        self.k_norm = build_module(submodules.k_norm, config=norm_config, hidden_size=kpool.index_head_dim, eps=eps)

        device = self.linear_wk.weight.device
        ape = torch.zeros(kpool.index_kpool, kpool.index_head_dim, dtype=torch.float32, device=device)
        gate = torch.empty(kpool.index_head_dim, kpool.hidden_size, dtype=config.params_dtype, device=device)
        if config.perform_initialization:
            config.init_method(gate)
        self.index_kpool_compress_ape = torch.nn.Parameter(ape)
        self.index_kpool_compress_gate = torch.nn.Parameter(gate)

    def query_shard_group(self, query_is_local: bool) -> Group | None:
        """The group whose ranks share out the rows, or None where every rank scores all its rows.

        Rows are shared out when the flag is on and there are several tensor-parallel ranks, which then hold the same
        rows. Sequence-local rows differ between the ranks: sharing them out would mix up sequences without an error.
        """
        if not self.kpool.shard_queries_across_tp:
            return None
        if query_is_local or self.pg_collection.tp is None or self.pg_collection.tp.size() == 1:
            return None
        group: Group = self.pg_collection.tp
        return group

    def project_queries(self, x: Tensor, qr: Tensor) -> tuple[Tensor, Tensor]:
        """Index queries `[S, B, H, D]` and fp32 head weights `[S, B, H]` of `x [S, B, hidden]`, `qr [S, B, q_lora]`."""
        q, _ = self.linear_wq_b(qr)
        q = q.unflatten(-1, (self.index_n_heads, self.index_head_dim))
        with no_autocast(x.device):
            weights = row_linear(x.float(), self.linear_weights_proj.weight.float())
        return q, weights * (self.index_n_heads**-0.5 * self.softmax_scale)

    def project_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Index keys and gate scores, `[F, B, D]` each, of `x [F, B, hidden]`."""
        k, _ = self.linear_wk(x)
        k = self.k_norm(k.float()).to(k.dtype) if self.config.dsa_indexer_k_norm_fp32 else self.k_norm(k)
        return k, row_linear(x, self.index_kpool_compress_gate)

    @torch.no_grad()
    def select(
        self,
        x: Tensor,
        qr: Tensor,
        *,
        query_rows: int | None = None,
        attn_mask_type: Any = AttnMaskType.causal,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Select tokens for the query rows of this rank.

        Args:
            x: hidden states `[L, B, hidden]` (packed: `[L, 1, hidden]` or `[L, hidden]`).
            qr: low-rank queries of the same rows, `[L, B, q_lora]` or `[L, q_lora]`.
            query_rows: `S`, rows of the attention's query; None means all rows of this CP rank.
            attn_mask_type: causal, or None: then `attention_mask` (bool `[B, 1, S, T]`, True hidden) decides.
            position_ids: `[B, S]` or `[S]`, as DSAttention reads them (context parallelism, sequence-local rows).
            packed_seq_params: packed documents; padded lengths win over real ones.
            mask: additive fp32 `[S, T]` or `[B, S, T]` instead of all these.

        Returns:
            int32 `[B, S, W]`, key slots in sequence order, -1 unused.

        Raises:
            ValueError: shapes that do not fit, or see `rows.visibility`.
        """
        x, qr = _with_batch(x.detach()), _with_batch(qr.detach())
        if x.shape[:2] != qr.shape[:2]:
            raise ValueError(f"qr: expected leading shape {tuple(x.shape[:2])} as x, got {tuple(qr.shape[:2])}")
        ranks = Ranks.of(self.config, self.pg_collection)
        rows = QueryRows.of(query_rows, x.shape[0], ranks)
        whole = all_gather(x, ranks.tp, ranks.tp_size) if ranks.sequence_parallel else x
        if ranks.sequence_parallel and not rows.is_local:
            x, qr = whole, all_gather(qr, ranks.tp, ranks.tp_size)
        q, weights = self.project_queries(x, qr)
        k, gate = self._keys_in_order(*self.project_keys(whole), key_order(packed_seq_params, rows, ranks, x.device))
        seen: Mapping[str, Tensor | None] = {"mask": mask}
        if mask is None:
            seen = visibility(
                rows,
                ranks,
                x.shape[1],
                x.device,
                attn_mask_type=attn_mask_type,
                attention_mask=attention_mask,
                position_ids=position_ids,
                packed_seq_params=packed_seq_params,
            )
        return self._tokens(q, k, weights, gate, seen, self.query_shard_group(rows.is_local))

    def _keys_in_order(self, k: Tensor, gate: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys and gates `[F, B, D]` of this CP rank to those of all, `[T, B, D]`, in sequence order."""
        if order is None:
            return k, gate
        cp = self.pg_collection.cp
        both = all_gather(torch.cat([k, gate], dim=-1), cp, cp.size()).index_select(0, order)
        dim = self.index_head_dim
        return both[..., :dim].to(k.dtype).contiguous(), both[..., dim:].to(gate.dtype).contiguous()

    def _tokens(
        self, q: Tensor, k: Tensor, weights: Tensor, gate: Tensor, seen: Mapping[str, Any], group: Group | None
    ) -> Tensor:
        _, tokens = fused_qk_topk_kpool(
            q,
            k,
            weights,
            self.kpool.index_topk,
            self.kpool.index_kpool,
            gate,
            self.index_kpool_compress_ape,
            **seen,
            use_relu=self.config.dsa_indexer_scoring_relu,
            always_select_tail=self.kpool.index_kpool_always_select_tail,
            rotate_activation_enabled=self.config.dsa_indexer_rotate_activation,
            return_index_scores=False,
            query_shard_group=group,
            order=self.order,
            shard_plan=self.shard_plan,
            width_multiple=self.width_multiple,
            impl=self.impl,
            check_replicated=group is not None and self._check_due(),
        )
        return tokens

    def forward(self, x: Tensor, qr: Tensor, mask: Tensor | None = None, packed_seq_params: Any = None) -> Tensor:
        """Select tokens outside of an attention: all rows, causal (in packed documents: inside each) unless `mask`.

        Args:
            x, qr, packed_seq_params: as for `select`.
            mask: additive fp32 `[S, T]` or `[B, S, T]`; not with packed documents.

        Returns:
            int32 `[B, S, W]`.
        """
        if mask is not None and packed_seq_params is not None:
            raise ValueError("mask: expected none with packed_seq_params, whose bounds say what a row may see")
        return self.select(x, qr, mask=mask, packed_seq_params=packed_seq_params)

    def forward_with_scores(
        self, x: Tensor, qr: Tensor, mask: Tensor | None = None, packed_seq_params: Any = None
    ) -> tuple[None, Tensor]:
        """`(None, tokens)`: scores serve the indexer loss alone, which is refused."""
        return None, self.forward(x, qr, mask, packed_seq_params)

    def forward_before_topk(self, x: Tensor, qr: Tensor, packed_seq_params: Any = None) -> NoReturn:
        """Refused: keys without their gates would be selected token by token.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "KPoolDSAIndexer: expected KPoolDSAttention around it, got a DSAttention that selects single tokens; "
            "build the spec with kpool_dsa_module_spec or with_kpool"
        )

    def _check_due(self) -> bool:
        """Whether this call compares the inputs across the group; counted alike on every rank, recomputation too."""
        if not self.kpool.check_replicated:
            return False
        self._calls += 1
        return (self._calls - 1) % self.kpool.check_replicated == 0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KPoolDSAIndexer:
        """Keep the slot bias in fp32 when the model is cast (`Float16Module`): half of its bits decide pools."""
        kept = self.index_kpool_compress_ape.detach()
        super()._apply(fn, recurse)
        ape = self.index_kpool_compress_ape
        if ape.dtype.itemsize < kept.dtype.itemsize:
            ape.data = kept.to(ape.device)
        return self


def refuse_loss(config: Any) -> None:
    """Raise ValueError if the config asks for the indexer loss."""
    if config.dsa_indexer_loss_coeff:
        raise ValueError(
            f"dsa_indexer_loss_coeff: expected 0 or None (the k-pool indexer is frozen), "
            f"got {config.dsa_indexer_loss_coeff}"
        )


def _with_batch(tensor: Tensor) -> Tensor:
    return tensor.unsqueeze(1) if tensor.dim() == 2 else tensor
