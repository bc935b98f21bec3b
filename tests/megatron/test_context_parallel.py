"""Rows and keys dealt over context-parallel ranks in zigzag: what one rank selects, every mesh selects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from kpool.integrations.megatron import KPoolDSAIndexer, KPoolDSAttention, kpool_dsa_module_spec
from kpool_testing import FakeGroup, assert_replicated
from tests.megatron.support import (
    Case,
    Mesh,
    build_attention,
    compare,
    cp_rows,
    inputs,
    model_config,
    on_mesh,
    packed_params,
    run,
    step,
    whole,
)

pytestmark = pytest.mark.megatron

LAYOUTS = {
    "plain": Case(batch=2),
    "positions": Case(positions=True, batch=2),
    "bf16": Case(dtype=torch.bfloat16),
    "mask": Case(mask=True, batch=2),
    "packed": Case(docs=(16, 0, 8, 24)),
    "packed, padded": Case(docs=(13, 8, 18), padded=(16, 8, 24)),
    "packed, rows past the last document": Case(docs=(16, 8)),
    "sp": Case(sp=True, batch=2),
    "sp, local keys, packed": Case(sp=True, local_key=True, docs=(16, 24)),
    "sp, packed": Case(sp=True, docs=(16, 32)),
    "sp, local queries": Case(sp=True, local_query=True, local_key=True),
    "sp, local queries, positions": Case(sp=True, local_query=True, local_key=True, positions=True),
    "sp, local queries, packed": Case(sp=True, local_query=True, docs=(24, 24)),
    "sp, packed, rows past the last document": Case(sp=True, docs=(8, 16, 8)),
}


@pytest.mark.parametrize(
    ("tp", "cp", "name"),
    [(tp, cp, name) for tp, cp in [(1, 2), (2, 2), (1, 4)] for name in LAYOUTS]
    + [(2, 3, name) for name, case in LAYOUTS.items() if not case.docs],  # documents divide by 2 * cp
)
def test_simulated(tp: int, cp: int, name: str) -> None:
    case = LAYOUTS[name]
    if tp == 1:
        case = Case(**{**vars(case), "sp": False, "local_query": False, "local_key": False})
    compare(on_mesh(case, tp, cp))


def test_real_processes() -> None:
    for name in ("plain", "packed, padded", "sp, packed", "sp, local queries"):
        compare(on_mesh(LAYOUTS[name], 2, 2), "gloo")


def test_uneven_share_of_a_context_parallel_rank() -> None:
    compare(Case(tp=4, cp=2, tokens=20))  # 10 rows a CP rank, 3 a TP rank


@pytest.mark.parametrize("name", ["plain", "packed", "sp, packed"])
def test_one_gather_brings_keys_and_gates(name: str) -> None:
    case = on_mesh(LAYOUTS[name], 2, 2).with_flag(True)
    found = run(lambda world: step(world, case), 4).trace
    rows, dim = case.tokens // case.cp, 16
    both = [c for c in found if c.shape == (rows, case.batch, 2 * dim)]
    assert len(both) == 4 and all(len(call.ranks) == case.cp for call in both)


def test_indexer_alone_on_a_mesh() -> None:
    case = Case(tp=2, cp=2, docs=(16, 32), flag=True)

    def select(world: Any, case: Case = case) -> dict[str, Any]:
        mesh = Mesh.of(world, case)
        indexer = build_attention(case, mesh.tp, mesh.cp).indexer
        rows = cp_rows(case, mesh.c)
        given = inputs(case)
        selection = indexer(given["x"][rows], given["qr"][rows], None, packed_params(case))
        return {"rows": rows, "selection": selection}

    alone = Case(docs=case.docs)
    one = run(lambda world: select(world, alone), 1)
    assert_replicated([whole(one, alone, "selection"), whole(run(select, 4), case, "selection")])


def test_order_of_keys_matters() -> None:
    """The comparison with one rank sees keys that are not put back in order."""

    class Unordered(KPoolDSAIndexer):
        def _keys_in_order(self, k: torch.Tensor, gate: torch.Tensor, order: Any) -> Any:
            order = order if order is None else torch.arange(order.numel())
            return super()._keys_in_order(k, gate, order)

    with pytest.raises(AssertionError, match="on one rank and on the mesh"):
        compare(Case(cp=2), indexer=Unordered)


def test_another_exchange_of_keys_is_refused() -> None:
    config = model_config(Case())
    submodules = kpool_dsa_module_spec(config).submodules.core_attention.submodules
    groups = SimpleNamespace(tp=None, cp=FakeGroup(0, 2))
    with pytest.raises(ValueError, match='cp_comm_type: expected "allgather"'):
        KPoolDSAttention(config, submodules, 1, AttnMaskType.causal, "self", cp_comm_type="p2p", pg_collection=groups)
