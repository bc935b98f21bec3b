"""`KPoolDSAttention`: Megatron's DSAttention with the selection of `KPoolDSAIndexer`.

DSAttention has a branch for layers that reuse the selection of another layer. A computing layer takes that branch too:
it selects, then hands its own selection over where the other layer's would be read. Token-level top-k and the fused
indexer kernels are thus never entered; masks, gathers and (fused) sparse attention are Megatron's.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from torch import Tensor

from kpool.integrations.megatron.indexer import KPoolDSAIndexer, refuse_loss
from kpool.integrations.megatron.rows import Ranks

_STATE = ("skip_topk", "index_share", "source_layer", "layer_number", "indexer", "cp_comm_type", "pg_collection")


class KPoolDSAttention(DSAttention):  # type: ignore[misc]
    """Sparse attention over the tokens the k-pool indexer selects.

    Built from a `ModuleSpec` like DSAttention; `submodules.indexer` must build a `KPoolDSAIndexer`. Layers that share
    another layer's selection (`dsa_indexer_topk_freq`) have no indexer and work as in Megatron.

    Raises:
        RuntimeError: megatron-core's DSAttention lacks an attribute this class relies on.
        TypeError: the indexer is of another class.
        ValueError: the indexer loss is asked for, or context parallelism that is not "allgather".
    """

    skip_topk: bool
    index_share: bool

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        refuse_loss(config)
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        missing = [name for name in _STATE if not hasattr(self, name)]
        if missing:
            raise RuntimeError(f"KPoolDSAttention: megatron-core's DSAttention has no attribute {', '.join(missing)}")
        self._selects, self._shares = not bool(self.skip_topk), bool(self.index_share)
        self._selection: Tensor | None = None
        self._taken = False
        if self._selects:
            if not isinstance(self.indexer, KPoolDSAIndexer):
                raise TypeError(f"submodules.indexer: expected KPoolDSAIndexer, got {type(self.indexer).__name__}")
            self.skip_topk = self.index_share = True  # from here on: take the branch that reads a selection
        if Ranks.of(config, self.pg_collection).cp_size > 1 and self.cp_comm_type != "allgather":
            raise ValueError(f'cp_comm_type: expected "allgather" with context parallelism, got {self.cp_comm_type!r}')

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        attention_mask: Tensor | None,
        x: Tensor,
        qr: Tensor,
        position_ids: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        up_v_weight: Tensor | None = None,
    ) -> Tensor:
        """As `DSAttention.forward`.

        Args:
            query, key, value, up_v_weight: as Megatron's MLA modules pass them, plain or absorbed.
            attention_mask: bool `[B, 1, S, T]`, True hidden; counts with `attn_mask_type=None`.
            x: hidden states `[L, B, hidden]`; qr: low-rank queries `[L, B, q_lora]`. Neither gets a gradient from here.
            position_ids: positions of the query rows, where DSAttention reads them.
            attention_bias: refused.
            packed_seq_params: packed documents.

        Returns:
            The output of DSAttention, of as many dimensions as `x`.

        Raises:
            ValueError: an argument that cannot be honoured; see `rows.visibility`.
            RuntimeError: DSAttention did not read the selection it was handed.
        """
        refuse_loss(self.config)
        if attention_bias is not None:
            raise ValueError("attention_bias: expected None, DSAttention does not apply it")
        options = {
            "position_ids": position_ids,
            "attn_mask_type": attn_mask_type,
            "packed_seq_params": packed_seq_params,
        }
        if self._selects:
            selection = self.indexer.select(x, qr, query_rows=query.size(0), attention_mask=attention_mask, **options)
            if self._shares:
                holder = super()._get_index_share_topk_holder(packed_seq_params, attention_mask)
                holder[self.layer_number] = selection
            self._selection, self._taken = selection, False
        try:
            output: Tensor = super().forward(
                query, key, value, attention_mask, x, qr, up_v_weight=up_v_weight, **options
            )
        finally:
            self._selection = None
        if self._selects and not self._taken:
            raise RuntimeError("KPoolDSAttention: megatron-core's DSAttention did not read the selection handed to it")
        return output

    def _get_index_share_topk_holder(self, packed_seq_params: Any, attention_mask: Any = None) -> dict[int, Tensor]:
        """The selection of this layer in the place of a shared one; else what Megatron keeps for the forward pass."""
        if self._selection is None:
            holder: dict[int, Tensor] = super()._get_index_share_topk_holder(packed_seq_params, attention_mask)
            return holder
        self._taken = True
        return {self.source_layer: self._selection}

    def _get_index_share_topk_length_holder(
        self, packed_seq_params: Any, attention_mask: Any = None
    ) -> dict[int, Tensor]:
        """No lengths: unused slots may lie in the middle of a row."""
        if self._selection is not None:
            return {}
        holder: dict[int, Tensor] = super()._get_index_share_topk_length_holder(packed_seq_params, attention_mask)
        return holder
