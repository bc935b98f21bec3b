"""One step of Megatron's sparse attention on every rank of a TP x CP mesh, from one set of global inputs.

Shapes: `T` tokens, `B` batch, `F = T / C` rows of a context-parallel rank, `S` query rows of a rank.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa_layout import (
    build_packed_allgather_cp_local_positions,
    build_zigzag_cp_local_positions,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

from kpool.integrations.megatron import KPoolDSAIndexer, kpool_config, kpool_dsa_module_spec
from kpool_testing import Run, assert_replicated, run_ranks

HIDDEN, LORA, TOPK, POOL, INDEX_HEADS, INDEX_DIM = 32, 24, 16, 4, 8, 16
HEADS, HEAD_DIM, VALUE_DIM = 2, 12, 8


@dataclass(frozen=True)
class Case:
    """What one step looks like.

    Attributes:
        tp, cp: sizes of the mesh.
        tokens, batch: `T` and `B`.
        sp: sequence parallelism; local_query, local_key: queries and keys are the rank's own rows only.
        docs: lengths of packed documents; padded: their padded lengths. Tokens after the last are padding rows.
        mask: an explicit mask (causal, with holes); positions: `position_ids` are passed.
        flag: share the rows out.
        options: fields of `KPoolConfig`; config: fields of the model's config.
    """

    tp: int = 1
    cp: int = 1
    tokens: int = 48
    batch: int = 1
    sp: bool = False
    local_query: bool = False
    local_key: bool = False
    docs: tuple[int, ...] = ()
    padded: tuple[int, ...] = ()
    mask: bool = False
    positions: bool = False
    flag: bool = False
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def shares(self) -> bool:
        """Whether the rows must be shared out."""
        return self.flag and self.tp > 1 and not self.local_query

    def with_flag(self, flag: bool) -> Case:
        """The same with the flag as given."""
        return replace(self, flag=flag)


def model_config(case: Case, **fields: Any) -> MLATransformerConfig:
    """A small model."""
    sizes: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": 24,
        "q_lora_rank": LORA,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "v_head_dim": 8,
        "qk_pos_emb_head_dim": 0,
        "rope_type": "rope",
        "apply_rope_fusion": False,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": INDEX_HEADS,
        "dsa_indexer_head_dim": INDEX_DIM,
        "dsa_indexer_topk": TOPK,
        "dsa_indexer_rotate_activation": False,
        "tensor_model_parallel_size": case.tp,
        "context_parallel_size": case.cp,
        "cp_comm_type": "allgather",
        "sequence_parallel": case.sp,
        "params_dtype": case.dtype,
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # of its own default
        return MLATransformerConfig(**{**sizes, **case.config, **fields})


def kpool_options(case: Case, config: MLATransformerConfig) -> Any:
    """The case's `KPoolConfig`; no environment."""
    flag = {"dsa_indexer_kpool_shard_queries_across_tp": case.flag}
    return kpool_config(config, environ={}, **{"index_kpool": POOL, **flag, **case.options})


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Megatron's gathers and rotary embeddings allocate on `torch.cuda.current_device()`; let that be the CPU."""
    with mock.patch("torch.cuda.current_device", lambda: "cpu"):
        yield


def run(fn: Callable[[Any], Any], size: int, backend: str = "fake", **options: Any) -> Run:
    """`fn(group)` on simulated or real ranks, with Megatron's allocations on the CPU; options for `simulate`."""
    if backend == "fake":
        with on_cpu():
            return run_ranks(fn, size, backend, **options)

    def body(group: Any) -> Any:
        with on_cpu():
            return fn(group)

    return run_ranks(body, size, backend, timeout=60)  # every process imports megatron-core first


@dataclass
class Mesh:
    """A rank's place and groups: world rank `c * tp + t`."""

    tp: Any
    cp: Any
    t: int
    c: int

    @staticmethod
    def of(world: Any, case: Case) -> Mesh:
        """Make the groups; every rank makes all of them, in one order."""
        tps = [dist.new_group([c * case.tp + t for t in range(case.tp)]) for c in range(case.cp)]
        cps = [dist.new_group([c * case.tp + t for c in range(case.cp)]) for t in range(case.tp)]
        c, t = divmod(world.rank(), case.tp)
        return Mesh(tps[c], cps[t], t, c)


def build_attention(
    case: Case, tp: Any = None, cp: Any = None, indexer: type | None = None, layer_number: int = 1
) -> Any:
    """A `KPoolDSAttention` with weights drawn from one seed; `indexer` replaces `KPoolDSAIndexer`."""
    config = model_config(case)
    core = kpool_dsa_module_spec(config, kpool=kpool_options(case, config)).submodules.core_attention
    if indexer is not None:
        core.submodules.indexer.module = indexer
    torch.manual_seed(11)
    attention = build_module(
        core,
        config=config,
        layer_number=layer_number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        cp_comm_type="allgather",
        k_channels=HEAD_DIM,
        v_channels=VALUE_DIM,
        pg_collection=SimpleNamespace(tp=tp, cp=cp),
    )
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention


def inputs(case: Case) -> dict[str, torch.Tensor]:
    """Global inputs `[T, B, ...]`, the same on every rank."""
    make = torch.Generator().manual_seed(case.tokens * 31 + case.batch)
    lead = (case.tokens, case.batch)
    shapes = {
        "query": (HEADS, HEAD_DIM),
        "key": (HEADS, HEAD_DIM),
        "value": (HEADS, VALUE_DIM),
        "x": (HIDDEN,),
        "qr": (LORA,),
    }
    return {name: torch.randn(*lead, *shape, generator=make).to(case.dtype) for name, shape in shapes.items()}


def packed_params(case: Case) -> PackedSeqParams | None:
    """The documents of the case."""
    if not case.docs:
        return None
    cu = torch.tensor((0, *case.docs)).cumsum(0).to(torch.int32)
    padded = torch.tensor((0, *case.padded)).cumsum(0).to(torch.int32) if case.padded else None
    longest = max(case.padded or case.docs)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def hidden_tokens(case: Case) -> torch.Tensor:
    """A mask of Megatron's kind, bool `[B, 1, T, T]`: causal, and one token in five hidden from later rows."""
    holes = torch.rand(case.batch, 1, 1, case.tokens, generator=torch.Generator().manual_seed(2)) < 0.2
    itself = torch.eye(case.tokens, dtype=torch.bool)
    return torch.ones(case.tokens, case.tokens, dtype=torch.bool).triu(1) | (holes & ~itself)


def cp_rows(case: Case, c: int) -> torch.Tensor:
    """Global rows of context-parallel rank `c`, int64 `[F]`: a zigzag per document, then its share of the padding."""
    params, size, device = packed_params(case), case.tokens // case.cp, torch.device("cpu")
    if params is None or case.cp == 1:
        return build_zigzag_cp_local_positions(case.tokens, case.cp, c, device)
    cu = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    ranks = range(case.cp)
    # Megatron numbers padding rows past the end with gaps; only their order counts
    numbers = [build_packed_allgather_cp_local_positions(cu, case.cp, r, device, output_size=size) for r in ranks]
    return torch.argsort(torch.argsort(torch.cat(numbers)))[c * size : (c + 1) * size]


def step(world: Any, case: Case, indexer: type | None = None, wrap: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Forward and backward on one rank.

    Returns:
        output `[S, B, ...]`, the gradients of query, key and value, selection `[B, S, W]`, rows: their positions `[S]`.
    """
    mesh = Mesh.of(world, case)
    attention = build_attention(case, mesh.tp, mesh.cp, indexer)
    seen: list[torch.Tensor] = []
    select = attention.indexer.select
    attention.indexer.select = lambda *args, **kwargs: seen.append(select(*args, **kwargs)) or seen[-1]

    rows = cp_rows(case, mesh.c)
    share = rows.numel() // case.tp
    mine = rows[mesh.t * share : (mesh.t + 1) * share]
    own = {
        "query": mine if case.local_query else rows,
        "key": mine if case.local_key else rows,
        "value": mine if case.local_key else rows,
        "x": mine if case.sp else rows,
        "qr": mine if case.sp else rows,
    }
    tensors = {name: tensor[own[name]].clone() for name, tensor in inputs(case).items()}
    leaves = [tensors[name].requires_grad_() for name in ("query", "key", "value")]
    options: dict[str, Any] = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal}
    options["packed_seq_params"] = packed_params(case)
    if case.mask:
        hidden = hidden_tokens(case)[:, :, own["query"]]
        options.update(attention_mask=hidden, attn_mask_type=None)
    if case.positions:
        options["position_ids"] = own["query"].expand(case.batch, -1)
    call = attention if wrap is None else wrap(attention)
    output = call(**tensors, **options)
    weight = torch.randn(case.tokens, *output.shape[1:], generator=torch.Generator().manual_seed(5))[own["query"]]
    (output * weight.to(output.dtype)).sum().backward()
    grads = [leaf.grad for leaf in leaves]
    return {"output": output.detach(), "grads": grads, "selection": seen[0], "selections": seen, "rows": own["query"]}


def gathers(run: Run) -> list[Any]:
    """The collectives of the selection itself: the only ones that carry int32."""
    return [call for call in run.trace if call.dtype == "int32" and call.kind == "all_gather_single"]


def check_gathers(run: Run, case: Case, calls: int = 1) -> None:
    """One gather per call and rank, on the TP group, of a rank's share of the rows; none where rows are not shared."""
    found = gathers(run)
    expected = case.tp * case.cp * calls if case.shares else 0
    assert len(found) == expected, f"expected {expected} gathers of selections, got {len(found)}: {found}"
    share = -(-(case.tokens // case.cp) // case.tp)
    for call in found:
        assert call.shape == (case.batch, share, TOPK // POOL), call
        assert len(call.ranks) == case.tp and call.ranks[0] % case.tp == 0, call


def whole(run: Run, case: Case, name: str) -> torch.Tensor:
    """Put rows of all ranks in global order: `output` `[T, B, ...]` or `selection` `[B, T, W]`."""
    dim = 1 if name == "selection" else 0
    parts = run.results if case.local_query else run.results[:: case.tp]
    rows = torch.cat([part["rows"] for part in parts])
    together = torch.cat([part[name] for part in parts], dim=dim)
    return together.index_select(dim, torch.argsort(rows))


def on_mesh(case: Case, tp: int, cp: int = 1) -> Case:
    """The same case on a mesh."""
    return replace(case, tp=tp, cp=cp)


def compare(case: Case, backend: str = "fake", indexer: type | None = None) -> None:
    """Flag on against off, bit for bit on every rank; the gather iff it should be there; and against one rank."""
    cases = case.with_flag(False), case.with_flag(True)
    off, on = (run(lambda world, c=c: step(world, c, indexer), case.tp * case.cp, backend) for c in cases)
    check_gathers(off, cases[0])
    check_gathers(on, cases[1])
    for before, after in zip(off.results, on.results, strict=True):
        assert_replicated([before, after], "flag off and on")
    alone = replace(case, tp=1, cp=1, sp=False, local_query=False, local_key=False)
    one = run(lambda world: step(world, alone, indexer), 1)
    for name in ("selection", "output"):
        assert_replicated([whole(one, alone, name), whole(on, case, name)], f"{name} on one rank and on the mesh")


class IgnoresFlag(KPoolDSAIndexer):
    """Defect: the line that reads the flag is gone."""

    def query_shard_group(self, query_is_local: bool) -> Any:
        return None


class SharesLocalRows(KPoolDSAIndexer):
    """Defect: the group is passed although the query rows are sequence-local."""

    def query_shard_group(self, query_is_local: bool) -> Any:
        return super().query_shard_group(False)
