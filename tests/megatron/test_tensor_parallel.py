"""The flag changes who scores which rows, and not one bit of output, gradients or selection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kpool.integrations.megatron import KPoolDSAIndexer
from kpool_testing import assert_replicated
from tests.megatron.support import (
    Case,
    IgnoresFlag,
    SharesLocalRows,
    compare,
    gathers,
    on_mesh,
    run,
    step,
    whole,
)

pytestmark = pytest.mark.megatron

LAYOUTS = {
    "plain": Case(batch=2),
    "bf16": Case(dtype=torch.bfloat16),
    "packed": Case(docs=(13, 0, 3, 32)),
    "packed, padded": Case(tokens=48, docs=(13, 3, 20), padded=(16, 4, 24)),
    "sp": Case(sp=True, batch=2),
    "sp, local keys": Case(sp=True, local_key=True),
    "sp, packed": Case(sp=True, docs=(5, 43)),
    "sp, local queries": Case(sp=True, local_query=True, local_key=True),
    "sp, local queries, packed": Case(sp=True, local_query=True, docs=(20, 28)),
    "mask": Case(mask=True, batch=2),
    "sp, mask": Case(sp=True, mask=True),
    "positions": Case(sp=True, local_query=True, positions=True),
    "no tail": Case(options={"index_kpool_always_select_tail": False}),
}
layouts = pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS.keys())


@layouts
@pytest.mark.parametrize("size", [2, 4, 8])
def test_simulated(case: Case, size: int) -> None:
    compare(on_mesh(case, size))


@pytest.mark.parametrize("tokens", [1, 3, 5, 50, 203])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_that_do_not_divide(tokens: int, size: int) -> None:
    compare(Case(tp=size, tokens=tokens))


@pytest.mark.parametrize("size", [2, 4])
def test_real_processes(size: int) -> None:
    for case in (LAYOUTS["plain"], LAYOUTS["packed, padded"], LAYOUTS["sp"], LAYOUTS["sp, local queries"]):
        compare(on_mesh(case, size), "gloo")
    compare(Case(tp=size, tokens=50), "gloo")


class Cyclic(KPoolDSAIndexer):
    """The indexer with another plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, shard_plan="block_cyclic", **kwargs)


def test_a_plan_can_be_chosen() -> None:
    case = Case(tp=2, tokens=50, flag=True)
    contiguous, cyclic = (run(lambda world, i=i: step(world, case, i), 2) for i in (None, Cyclic))
    for one, other in zip(contiguous.results, cyclic.results, strict=True):
        assert_replicated([one, other])
    # 50 rows are two shares of 25, or seven blocks of 8, four of them with the first rank
    assert [{call.shape[1] for call in gathers(found)} for found in (contiguous, cyclic)] == [{25}, {32}]


def test_a_forgotten_flag_is_noticed() -> None:
    with pytest.raises(AssertionError, match="expected 2 gathers of selections, got 0"):
        compare(Case(tp=2), indexer=IgnoresFlag)


def test_sharing_local_rows_is_noticed() -> None:
    case = on_mesh(LAYOUTS["sp, local queries"], 2)
    with pytest.raises(AssertionError, match="expected 0 gathers"):
        compare(case, indexer=SharesLocalRows)
    # and it would be wrong, not merely wasteful
    right, wrong = (run(lambda w, i=i: step(w, case.with_flag(True), i), 2) for i in (None, SharesLocalRows))
    assert not torch.equal(whole(right, case, "selection"), whole(wrong, case, "selection"))
    assert not torch.equal(whole(right, case, "output"), whole(wrong, case, "output"))
