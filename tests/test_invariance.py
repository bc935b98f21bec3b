"""The promise, as properties: a row's selection depends on that row and the keys, on nothing else, bit for bit.

The properties are functions in `support.properties`; `tests/defects` shows that each goes red when the code is wrong.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kpool_testing import strategies as ragged
from tests.support.calls import LAYOUTS, Call, exact_call, noisy
from tests.support.properties import (
    poisoned_buffers,
    same_as_reference,
    same_in_any_layout,
    same_on_threads,
    same_rows,
    same_scores_wherever_pools_lie,
    same_when_chunked,
    same_when_future_changes,
    same_when_permuted,
    same_when_poisoned,
    same_when_sharded,
    same_when_split,
    sound,
)

CUTTABLE = [layout for layout in LAYOUTS if layout != "nothing"]
OPTIONS: list[dict[str, object]] = [
    {},
    {"order": "position"},
    {"numerics": "hf"},
    {"fp8_indexer": True},
    {"rotate_activation_enabled": True, "use_relu": False},
    {"always_select_tail": False, "width_multiple": 64},
]
few = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


def made(seed: int, layout: str, exact: bool) -> Call:
    """A call of the given layout whose sizes straddle the tiles of the implementations."""
    rng = random.Random(seed)
    rows = rng.choice([1, 7, 31, 32, 33, 64, 90])
    tokens = rows if layout == "packed" else rng.choice([rows, 130, 257, 300])
    call = exact_call(
        seed,
        layout,
        rows=rows,
        tokens=tokens,
        batch=rng.choice([1, 2]),
        heads=rng.choice([1, 3, 16]),
        dim=rng.choice([4, 16, 64]),
        pool_size=rng.choice([1, 2, 4]),
        budget=rng.choice([1, 3, 9]),
        **rng.choice(OPTIONS),
    )
    return call if exact else noisy(call, seed)


calls = st.builds(made, st.integers(0, 2**20), st.sampled_from(LAYOUTS), st.booleans())
cuttable_calls = st.builds(made, st.integers(0, 2**20), st.sampled_from(CUTTABLE), st.booleans())
exact_calls = st.builds(made, st.integers(0, 2**20), st.sampled_from(LAYOUTS), st.just(True))


@few
@given(call=calls, size=ragged.world_sizes(), plan=st.sampled_from(["contiguous", "block_cyclic"]))
def test_any_number_of_ranks(call: Call, size: int, plan: str, device: torch.device) -> None:
    call = call.to(device)
    if size == 1:
        whole = call.run()
        alone = call.run(query_shard_group=_Alone(), shard_plan=plan)  # no collective: none is available here
        same_rows(whole, alone, "a group of one")
    else:
        same_when_sharded(call, (size,), (plan,))


class _Alone:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@few
@given(call=calls, budget=st.integers(1, 200_000))
def test_any_chunk_budget(call: Call, budget: int, device: torch.device) -> None:
    same_when_chunked(call.to(device), [budget])


@few
@given(data=st.data(), call=cuttable_calls)
def test_any_split_of_the_rows(data: st.DataObject, call: Call, device: torch.device) -> None:
    counts = data.draw(ragged.row_splits(call.rows, data.draw(st.integers(1, 4))))
    same_when_split(call.to(device), counts)


@settings(few, max_examples=5)
@given(call=st.builds(made, st.integers(0, 50), st.sampled_from(CUTTABLE), st.booleans()))
def test_rows_one_at_a_time(call: Call, device: torch.device) -> None:
    rows = call.explicit().take(range(min(call.rows, 12)))
    same_when_split(rows.to(device), [1] * rows.rows)


@few
@given(data=st.data(), call=cuttable_calls)
def test_any_order_of_the_rows(data: st.DataObject, call: Call, device: torch.device) -> None:
    order = data.draw(st.permutations(range(call.rows)))
    repeated = data.draw(st.lists(st.integers(0, call.rows - 1), max_size=5))
    same_when_permuted(call.to(device), [*order, *repeated])


@settings(few, max_examples=6)
@given(call=st.builds(made, st.integers(0, 2**20), st.sampled_from(["causal", "window", "packed"]), st.booleans()))
def test_future_keys_do_not_matter(call: Call, device: torch.device) -> None:
    same_when_future_changes(call.to(device))


@settings(few, max_examples=6)
@given(call=calls)
def test_any_number_of_threads(call: Call, device: torch.device) -> None:
    same_on_threads(call.to(device))


@few
@given(call=calls)
def test_poisoned_buffers(call: Call, device: torch.device) -> None:
    same_when_poisoned(call.to(device))


@settings(few, max_examples=6)
@given(call=calls, size=st.sampled_from([2, 3]))
def test_poisoned_buffers_when_sharded(call: Call, size: int, device: torch.device) -> None:
    with poisoned_buffers():
        same_when_sharded(call.to(device), (size,), ("contiguous", "block_cyclic"))


@settings(few, max_examples=6)
@given(call=calls)
def test_ids_are_visible_slots_and_none_comes_twice(call: Call, device: torch.device) -> None:
    sound(call.to(device))


@few
@given(call=exact_calls)
def test_exact_calls_are_the_reference(call: Call, device: torch.device) -> None:
    same_as_reference(call.to(device))


@few
@given(cu=ragged.packed_cu_seqlens(), padding=st.integers(1, 9), seed=st.integers(0, 1000))
def test_padded_rows_of_a_packed_batch(cu: list[int], padding: int, seed: int, device: torch.device) -> None:
    """Rows and keys past `cu[-1]` return -1 throughout and change nothing before it."""
    documents = {"cu_seqlens_kv": torch.tensor(cu)}
    padded = replace(exact_call(seed, "nothing", rows=cu[-1] + padding, batch=2), visibility=documents)
    bare = _first(padded, cu[-1])
    rows = padded.to(device).run()
    assert bool((rows[:, cu[-1] :] == -1).all())
    same_rows(bare.to(device).run(), rows[:, : cu[-1]], "without the padding")
    changed = replace(padded, k=padded.k.clone())
    changed.k[cu[-1] :] = 77
    same_rows(rows, changed.to(device).run(), "other keys in the padding")


def _first(call: Call, count: int) -> Call:
    return replace(call, q=call.q[:count], k=call.k[:count], weights=call.weights[:count])


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "noisy"])
def test_thousands_of_rows(exact: bool, device: torch.device) -> None:
    """The properties once more, without hypothesis, counting: at least 5,000 rows each time, none differs."""
    compared, seed = 0, 0
    while compared < 5_000:
        call = made(seed, LAYOUTS[seed % len(LAYOUTS)], exact).to(device)
        rng = random.Random(seed)
        compared += same_when_chunked(call, [rng.randrange(1, 100_000)])
        compared += same_when_sharded(call, (rng.choice([2, 3, 4]),), (rng.choice(["contiguous", "block_cyclic"]),))
        compared += same_when_poisoned(call)
        if call.visibility:
            cut = rng.randrange(call.rows + 1)
            compared += same_when_split(call, [cut, call.rows - cut])
            compared += same_when_permuted(call, rng.sample(range(call.rows), call.rows))
        seed += 1
    assert compared >= 5_000 and seed >= 8, f"{compared} rows of {seed} calls"


@settings(few, max_examples=6)
@given(call=calls)
def test_any_layout_in_memory(call: Call, device: torch.device) -> None:
    same_in_any_layout(call.to(device))


@settings(few, max_examples=6)
@given(call=st.builds(made, st.integers(0, 2**20), st.just("causal"), st.booleans()))
def test_equal_pools_have_equal_scores(call: Call, device: torch.device) -> None:
    same_scores_wherever_pools_lie(call.to(device))


def test_at_the_released_geometry(device: torch.device) -> None:
    """32 heads of 128 dimensions: matrix products of the sizes that a model has."""
    call = exact_call(0, "causal", rows=101, tokens=1200, heads=32, dim=128, pool_size=4, budget=64)
    call = noisy(call).to(device)
    same_when_chunked(call, [1])
    same_when_sharded(call, (3,), ("contiguous", "block_cyclic"))
    same_when_split(call, [1, 60, 40])
    same_when_permuted(call, range(101)[::-1])
    same_scores_wherever_pools_lie(call)
    same_in_any_layout(call)
    if device.type == "cpu":
        same_on_threads(call)


def test_checkpointing_repeats_the_selection_and_its_collective(device: torch.device) -> None:
    """Activation checkpointing runs the forward again: same bits, same gather."""
    import kpool_testing

    call = noisy(exact_call(0, rows=20, batch=2)).to(device)

    def body(group: object) -> torch.Tensor:
        kept: list[torch.Tensor] = []

        def layer(x: torch.Tensor) -> torch.Tensor:
            kept.append(call.run(query_shard_group=group))
            return (x * kept[-1].float()).sum()

        x = torch.ones(1, device=device, requires_grad=True)
        loss = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        loss.backward()
        assert len(kept) == 2
        same_rows(kept[0], kept[1], "the rerun")
        return kept[0]

    run = kpool_testing.simulate(body, 3)
    kpool_testing.assert_replicated(run.results)
    kpool_testing.expect_collectives(run.trace, {"all_gather_single": 2})
