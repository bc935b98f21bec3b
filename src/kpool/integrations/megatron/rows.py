"""Which query rows a rank holds, where they are in the sequence, and what they may see.

DSAttention derives the same for its own mask; these rules follow it, so that selection and attention look at the same
rows. With sequence parallelism the queries of a rank are either all rows (absorbed MLA) or its own slice. With
context parallelism a rank holds a zigzag: a front and a back piece of every document.

Shapes: `S` query rows of this rank, `L` rows of the local hidden states, `F` rows of this context-parallel rank
(`F = L`, or `L * G` with sequence parallelism over `G` ranks), `T = F * C` keys over `C` context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa_layout, dsa_masking
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """Sizes and ranks of the two groups that matter, and whether sequence parallelism is on.

    Attributes:
        tp, cp: process groups; None stands for a single rank.
    """

    tp: Any
    cp: Any
    sequence_parallel: bool

    @staticmethod
    def of(config: Any, pg_collection: Any) -> Ranks:
        """Read the groups of a `ProcessGroupCollection`."""
        tp, cp = getattr(pg_collection, "tp", None), getattr(pg_collection, "cp", None)
        return Ranks(tp, cp, bool(config.sequence_parallel) and tp is not None and tp.size() > 1)

    @property
    def tp_size(self) -> int:
        """Ranks of the tensor-parallel group."""
        return 1 if self.tp is None else int(self.tp.size())

    @property
    def cp_size(self) -> int:
        """Ranks of the context-parallel group."""
        return 1 if self.cp is None else int(self.cp.size())

    @property
    def cp_rank(self) -> int:
        """Rank in the context-parallel group."""
        return 0 if self.cp is None else int(self.cp.rank())


@dataclass(frozen=True)
class QueryRows:
    """The query rows of this rank: rows `[first, first + count)` of the `full` rows of its context-parallel rank.

    Attributes:
        is_local: sequence parallelism left this rank with its own rows only; other ranks have others.
    """

    count: int
    first: int
    full: int
    is_local: bool

    @staticmethod
    def of(query_rows: int | None, local_rows: int, ranks: Ranks) -> QueryRows:
        """Decide from row counts: `query_rows` `S` (None: all `F`) and `local_rows` `L`.

        Raises:
            ValueError: `S` is neither `F` nor, with sequence parallelism, `L`.
        """
        full = local_rows * ranks.tp_size if ranks.sequence_parallel else local_rows
        if ranks.sequence_parallel and query_rows == local_rows:
            return QueryRows(local_rows, ranks.tp.rank() * local_rows, full, True)
        if query_rows in (None, full):
            return QueryRows(full, 0, full, False)
        raise ValueError(
            f"query: expected {full} rows{f', or {local_rows} local ones' if ranks.sequence_parallel else ''} "
            f"for hidden states of {local_rows} rows, got {query_rows}"
        )

    def take(self, positions: Tensor) -> Tensor:
        """These rows of `positions [F]`."""
        return positions[self.first : self.first + self.count]


def is_packed(packed_seq_params: Any) -> bool:
    """Whether the batch is packed documents (THD)."""
    return packed_seq_params is not None and packed_seq_params.qkv_format == "thd"


def key_order(packed_seq_params: Any, rows: QueryRows, ranks: Ranks, device: torch.device) -> Tensor | None:
    """Where each of the `T` keys lies in the gathered ones, int64 `[T]`; None without context parallelism."""
    size = ranks.cp_size
    if size == 1:
        return None
    if not is_packed(packed_seq_params):
        order: Tensor = dsa_layout.build_zigzag_allgather_cp_key_reorder(sq=rows.full, cp_size=size, device=device)
        return order
    cu_q, cu_kv = dsa_layout.get_packed_qk_cu_seqlens(packed_seq_params)
    _, order = dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder(
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        cp_size=size,
        cp_rank=ranks.cp_rank,
        device=device,
        local_output_size=rows.full,
        key_local_output_size=rows.full,
        global_output_size=rows.full * size,
    )
    return order


def visibility(
    rows: QueryRows,
    ranks: Ranks,
    batch: int,
    device: torch.device,
    *,
    attn_mask_type: Any,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    packed_seq_params: Any,
) -> dict[str, Tensor]:
    """What the rows may see, as arguments of `kpool.fused_qk_topk_kpool`.

    With `attn_mask_type` None the boolean `attention_mask` (True is hidden) counts, else the rows are causal, in
    packed documents causal inside each. Bounds come from positions, never from the number of a row.

    Raises:
        ValueError: a mask type that is not causal, a mask that is missing, of another shape or together with packed
            documents; on the CPU also a mask or `position_ids` that DSAttention ignores and that say something else.
    """
    keys = rows.full * ranks.cp_size
    if attn_mask_type is None:
        return {"mask": _explicit(attention_mask, (batch, 1, rows.count, keys), packed_seq_params)}
    if attn_mask_type != AttnMaskType.causal:
        raise ValueError(f"attn_mask_type: expected causal, or None with an attention_mask, got {attn_mask_type}")
    if is_packed(packed_seq_params):
        cu_q, cu_kv = dsa_layout.get_packed_qk_cu_seqlens(packed_seq_params)
        starts, ends = dsa_masking.generate_varlen_mask_params_for_positions(
            cu_q, _packed_positions(cu_q, rows, ranks, device)
        )
        return {"varlen_starts": starts, "varlen_ends": ends, "cu_seqlens_kv": cu_kv.to(device)}
    _refuse_ignored(attention_mask, position_ids, rows, ranks)
    ends = _plain_positions(position_ids, rows, ranks, device) + 1
    return {"varlen_starts": torch.zeros_like(ends), "varlen_ends": ends}


def _packed_positions(cu_seqlens: Tensor, rows: QueryRows, ranks: Ranks, device: torch.device) -> Tensor:
    if ranks.cp_size == 1:
        return torch.arange(rows.first, rows.first + rows.count, device=device)
    return rows.take(
        dsa_layout.build_packed_allgather_cp_local_positions(
            cu_seqlens, ranks.cp_size, ranks.cp_rank, device, output_size=rows.full
        )
    )


def _plain_positions(position_ids: Tensor | None, rows: QueryRows, ranks: Ranks, device: torch.device) -> Tensor:
    if rows.is_local or ranks.cp_size > 1:  # elsewhere DSAttention does not look at position_ids
        given: Tensor | None = dsa_layout.extract_query_positions_from_position_ids(position_ids, rows.count, device)
        if given is not None:
            return given
    keys = rows.full * ranks.cp_size
    return rows.take(dsa_layout.build_zigzag_cp_local_positions(keys, ranks.cp_size, ranks.cp_rank, device))


def _explicit(mask: Tensor | None, shape: tuple[int, ...], packed_seq_params: Any) -> Tensor:
    if mask is None:
        raise ValueError("attention_mask: expected one, because attn_mask_type is None")
    if is_packed(packed_seq_params):
        raise ValueError(
            "attention_mask: expected none with packed documents, whose bounds say what a row may see; "
            "pass attn_mask_type=causal"
        )
    if tuple(mask.shape) != shape:
        raise ValueError(f"attention_mask: expected [B, 1, S, T] = {list(shape)}, got {list(mask.shape)}")
    hidden = mask[:, 0].bool()
    return torch.zeros(hidden.shape, device=mask.device).masked_fill(hidden, float("-inf"))


def _refuse_ignored(mask: Tensor | None, position_ids: Tensor | None, rows: QueryRows, ranks: Ranks) -> None:
    """On the CPU, refuse what DSAttention would ignore in silence; on a GPU looking at it would stall the stream."""
    if rows.is_local or ranks.cp_size > 1:
        return
    count = rows.count
    if position_ids is not None and position_ids.shape[-1] == count and _readable(position_ids):
        plain = bool((position_ids == torch.arange(count)).all())
        if not plain:
            raise ValueError(
                f"position_ids: expected 0 ... {count - 1}: a causal row of this layout sees every row before it, "
                "wherever its position restarts; pass packed documents as packed_seq_params"
            )
    if mask is not None and tuple(mask.shape[-2:]) == (count, count) and _readable(mask):
        causal = bool((mask.bool() == torch.ones(count, count, dtype=torch.bool).triu(1)).all())
        if not causal:
            raise ValueError(
                "attention_mask: expected the causal one or None with attn_mask_type=causal; another mask counts only "
                "with attn_mask_type=None"
            )


def _readable(tensor: Tensor) -> bool:
    """A real CPU tensor, not a fake one and not while compiling."""
    return type(tensor) is Tensor and tensor.device.type == "cpu" and not torch.compiler.is_compiling()
