"""The properties hold for the code as it is, and notice every planted defect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kpool_testing import CollectiveError
from tests.defects.planted import DEFECTS, floor_split, gather_skipped_when_empty
from tests.support import properties
from tests.support.calls import Call, exact_call, listed


def catalogue() -> list[Call]:
    """Calls in which every defect shows: ties, ragged and empty shards, batches, windows, scores below -1e30."""
    ragged = listed([1, 1, 3, 3, 2], pool_size=2, topk=2)
    tied = listed([1] * 40, pool_size=1, topk=5, query=-1.0)
    batch = exact_call(0, "causal", rows=21, tokens=50, batch=2, budget=2)
    packed = exact_call(1, "packed_bounds", rows=33, tokens=60, heads=1)
    masked = exact_call(2, "mask", rows=12, tokens=24, budget=4)
    low = exact_call(3, "causal", rows=20, use_relu=False, budget=4)
    low = replace(low, weights=-torch.ones_like(low.weights) * 2.0**120, q=low.q.abs() + 1, k=low.k.abs() + 1)
    return [ragged, tied, batch, packed, masked, low]


def _halves(call: Call) -> int:
    return properties.same_when_split(call, [call.rows // 2, call.rows - call.rows // 2])


def _backwards(call: Call) -> int:
    return properties.same_when_permuted(call, range(call.rows)[::-1])


def _future(call: Call) -> int:
    return properties.same_when_future_changes(call) if "varlen_ends" in call.visibility else 0


PROPERTIES: dict[str, Callable[[Call], int]] = {
    "reference": properties.same_as_reference,
    "sharded": properties.same_when_sharded,
    "chunked": properties.same_when_chunked,
    "split": _halves,
    "permuted": _backwards,
    "future": _future,
    "threads": properties.same_on_threads,
    "poisoned": properties.same_when_poisoned,
    "sound": properties.sound,
}


def red(name: str) -> str | None:
    """How the property fails on the catalogue; None if it holds."""
    for number, call in enumerate(catalogue()):
        try:
            PROPERTIES[name](call)
        except (AssertionError, CollectiveError) as error:
            return f"call {number}: {error}"
    return None


@pytest.mark.parametrize("name", PROPERTIES)
def test_holds_without_a_defect(name: str) -> None:
    assert red(name) is None


@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_is_noticed(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, expected = DEFECTS[defect]
    plant(monkeypatch)
    noticed = {name for name in expected if red(name) is not None}
    assert noticed == expected, f"{defect}: {sorted(expected - noticed)} stayed green"


def test_every_property_notices_some_defect() -> None:
    noticing = frozenset().union(*(expected for _, expected in DEFECTS.values()))
    assert noticing == set(PROPERTIES)


def test_what_the_ranks_say_of_a_skipped_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    gather_skipped_when_empty(monkeypatch)
    call = listed([1, 1, 3, 3, 2], pool_size=2, topk=2)
    with pytest.raises(CollectiveError, match=r"rank 3: returned after 0 gathers"):
        properties.same_when_sharded(call, [4])


def test_what_a_floor_split_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    floor_split(monkeypatch)
    call = listed([1, 1, 3, 3, 2], pool_size=2, topk=2)
    with pytest.raises(AssertionError, match=r"1 rows differ, first batch 0, row 4"):
        properties.same_when_sharded(call, [2])
