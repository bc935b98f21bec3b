"""Faults that users of other systems met, as the smallest input that shows each, with the right value.

Shorthand as in `support.calls.listed`: one head, one dimension, q and weights 1, causal bounds, keys listed by slot.
A row is `K` pool slots, then `P - 1` tail slots; -1 is unused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import kpool_testing
from kpool.scoring import quantize_fp8
from kpool.sharding import RowBlocks
from tests.support.calls import Call, exact_call, listed
from tests.support.properties import poisoned_buffers

NO = -1
RAGGED = listed([1, 1, 3, 3, 2], pool_size=2, topk=2)
RAGGED_ROWS = [[NO, NO, 0], [0, 1, NO], [0, 1, 2], [2, 3, NO], [2, 3, 4]]
SIX_ONES = listed([1] * 6, pool_size=4, topk=4)
DOCUMENTS = [
    [NO, NO, NO, NO, 0],
    [0, 1, NO, NO, NO],
    [0, 1, NO, NO, 2],
    [NO, NO, NO, NO, 3],
    [3, 4, NO, NO, NO],
    [3, 4, NO, NO, 5],
    [5, 6, 3, 4, NO],
    [5, 6, 3, 4, 7],
]
GATED = {"keys": [0, 5, 3, 3, 0], "pool_size": 2, "topk": 2}
ONE = 1.0


def every_row(call: Call, device: torch.device, impl: str) -> list[list[list[int]]]:
    """The rows of each batch entry, from the call and the same from the reference."""
    rows = call.to(device).run(impl=impl)
    assert rows.dtype == torch.int32
    assert rows.tolist() == call.by_definition().tolist(), "the reference disagrees"
    return [list(entry) for entry in rows.tolist()]


impls = pytest.mark.parametrize("impl", ["torch", "reference"])


class TestSelection:
    @pytest.mark.parametrize(
        ("call", "right"),
        [
            pytest.param(SIX_ONES, {2: [NO] * 4 + [0, 1, 2], 5: [0, 1, 2, 3, 4, 5, NO]}, id="tail-of-own-prefix"),
            pytest.param(
                listed([1, 1, 9, 9], pool_size=2, topk=2),
                dict(enumerate([[NO, NO, 0], [0, 1, NO], [0, 1, 2], [2, 3, NO]])),
                id="future-pools-eat-no-budget",
            ),
            pytest.param(
                listed([1, 2, 3, 4, 5, 6, 7, 8], pool_size=2, topk=4, cu=[0, 3, 8]),
                dict(enumerate(DOCUMENTS)),
                id="pools-restart-per-document",
            ),
            pytest.param(
                listed([1, 2, 3, 4, 5, 6, 7, 8], pool_size=2, topk=4, cu=[0, 0, 3, 8]),
                dict(enumerate(DOCUMENTS)),
                id="empty-document",
            ),
            pytest.param(
                listed([1] * 3, pool_size=4, topk=8),
                {0: [NO] * 8 + [0, NO, NO], 1: [NO] * 8 + [0, 1, NO], 2: [NO] * 8 + [0, 1, 2]},
                id="fewer-keys-than-a-pool",
            ),
            pytest.param(
                listed([1] * 8, pool_size=4, topk=8),
                {3: [0, 1, 2, 3] + [NO] * 7, 7: [*range(8), NO, NO, NO]},
                id="as-many-keys-as-the-budget",
            ),
            pytest.param(
                listed([9, 9, 9, 1, 1, 2, 2, 0], pool_size=2, topk=2, cu=[0, 3, 8]),
                {7: [5, 6, 7]},
                id="global-slots",
            ),
            pytest.param(listed(**GATED, gate=[0.0, 20, 0, 0, 0]), {4: [0, 1, 4]}, id="gate"),
            pytest.param(listed(**GATED, ape=[0.0, 20]), {4: [0, 1, 4]}, id="slot-bias"),
            pytest.param(
                listed([1, *GATED["keys"]], pool_size=2, topk=2, cu=[0, 1, 6], ape=[0.0, 20]),
                {5: [1, 2, 5]},
                id="slot-bias-behind-a-document",
            ),
            pytest.param(listed(**GATED), {4: [2, 3, 4]}, id="plain-mean-would-be-this"),
            pytest.param(
                listed([1] * 8, pool_size=2, topk=2, rows=4, ends=[8] * 4, query=-ONE),
                dict(enumerate([[0, 1, NO]] * 4)),
                id="ties-go-to-the-lowest-pool",
            ),
        ],
    )
    @impls
    def test_rows(self, call: Call, right: dict[int, list[int]], impl: str, device: torch.device) -> None:
        (rows,) = every_row(call, device, impl)
        assert {row: rows[row] for row in right} == right

    def test_uninitialised_output_is_filled(self, device: torch.device) -> None:
        call = listed([1] * 5, pool_size=4, topk=8).to(device)
        with poisoned_buffers():
            rows = call.run()[0].tolist()
        assert rows[0] == [NO] * 8 + [0, NO, NO]
        assert rows[3] == [0, 1, 2, 3] + [NO] * 7
        assert rows[4] == [0, 1, 2, 3, NO, NO, NO, NO, 4, NO, NO]
        assert all(t == NO or 0 <= t < 5 for row in rows for t in row)

    @pytest.mark.parametrize(("keys", "rows", "shape"), [(3, 3, (1, 3, 11)), (8, 8, (1, 8, 11)), (8, 0, (1, 0, 11))])
    def test_width_never_depends_on_the_number_of_keys(
        self, keys: int, rows: int, shape: tuple[int, ...], device: torch.device
    ) -> None:
        tokens = listed([1] * keys, pool_size=4, topk=8, rows=rows).to(device).run()
        assert tokens.shape == shape and tokens.dtype == torch.int32

    @impls
    def test_scores_are_not_rounded_to_the_input_dtype(self, impl: str, device: torch.device) -> None:
        call = exact_call(0, rows=1, tokens=4, heads=1, dim=2, budget=1)
        call = replace(
            call,
            q=torch.ones_like(call.q),
            k=torch.tensor([[256.0, 0], [256, 0], [256, 1], [256, 1]], dtype=torch.bfloat16)[:, None],
            weights=torch.ones_like(call.weights),
            visibility={"varlen_starts": torch.tensor([0]), "varlen_ends": torch.tensor([4])},
        )
        assert every_row(call, device, impl) == [[[2, 3, NO]]]

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    def test_ties_on_every_number_of_ranks(self, size: int, device: torch.device) -> None:
        call = listed([1] * 8, pool_size=2, topk=2, rows=4, ends=[8] * 4, query=-ONE).to(device)
        run = kpool_testing.replay(lambda group: call.run(query_shard_group=group), size)
        for tokens in run.results:
            assert tokens.tolist() == [[[0, 1, NO]] * 4]


class TestFp8:
    @pytest.mark.parametrize(
        ("values", "scale", "dequantised"),
        [
            ((448.0, 1, 0.5, 0), 1.0, (448.0, 1, 0.5, 0)),
            ((449.0, 1, 0.5, 0), 2.0, (448.0, 1, 0.5, 0)),
            ((0.0, 0, 0, 0), None, (0.0, 0, 0, 0)),
            ((300.0, 448, 0, 0), 1.0, (288.0, 448, 0, 0)),
        ],
    )
    def test_quantise_step(
        self, values: tuple[float, ...], scale: float | None, dequantised: tuple[float, ...], device: torch.device
    ) -> None:
        quantised, factor = quantize_fp8(torch.tensor([values], device=device))
        assert quantised.dtype == torch.float8_e4m3fn
        assert scale is None or factor.item() == scale
        assert bool(torch.isfinite(factor).all()) and factor.item() > 0
        assert (quantised.float() * factor)[0].tolist() == list(dequantised)

    def test_the_other_variant_would_read_half(self) -> None:
        quantised, _ = quantize_fp8(torch.tensor([[300.0, 448]]))
        assert quantised.view(torch.float8_e4m3fnuz).float()[0, 0].item() == 144

    @impls
    def test_zero_vectors_select_by_the_tie_rule(self, impl: str, device: torch.device) -> None:
        call = exact_call(0, rows=6, heads=1, budget=1, fp8_indexer=True)
        call = replace(call, q=torch.zeros_like(call.q), k=torch.zeros_like(call.k))
        assert every_row(call, device, impl)[0][5] == [0, 1, NO]
        assert not bool(call.to(device).scores().isnan().any())


BATCH = listed([[1, 1, 3, 3], [3, 3, 1, 1]], pool_size=2, topk=2)


@pytest.mark.world_size(2, 3, 4)
class TestSharding:
    """Each on the plain floor and on `ranks`, against rows written down and against the unsharded call."""

    @pytest.fixture(params=["fake_group", "ranks"])
    def run(self, request: pytest.FixtureRequest, world_size: int) -> Callable[..., kpool_testing.Run]:
        chosen: Callable[..., kpool_testing.Run] = request.getfixturevalue(request.param)
        return chosen

    @pytest.mark.parametrize("plan", ["contiguous", "block_cyclic"])
    @pytest.mark.parametrize("rows", [5, 2])
    def test_ragged_and_empty_shards(
        self, run: Callable[..., kpool_testing.Run], rows: int, plan: str, world_size: int
    ) -> None:
        """5 rows: the last rank holds one, or (W=4) none. 2 rows: ranks without any."""
        call = RAGGED.take(range(rows))
        result = run(lambda group: call.run(query_shard_group=group, shard_plan=plan))
        for tokens in result.results:
            assert tokens.tolist() == [RAGGED_ROWS[:rows]]
        kpool_testing.expect_collectives(result.trace, {"all_gather_single": 1})
        assert len({made.shape for made in result.trace.calls}) == 1

    def test_no_padding_row_between_batch_entries(self, run: Callable[..., kpool_testing.Run], world_size: int) -> None:
        call = BATCH.take(range(3))
        for tokens in run(lambda group: call.run(query_shard_group=group)).results:
            assert tokens.tolist() == [
                [[NO, NO, 0], [0, 1, NO], [0, 1, 2]],
                [[NO, NO, 0], [0, 1, NO], [0, 1, 2]],
            ]
            assert torch.equal(tokens, call.run())

    def test_batch_entries_are_not_exchanged(self, run: Callable[..., kpool_testing.Run], world_size: int) -> None:
        for tokens in run(lambda group: BATCH.run(query_shard_group=group)).results:
            assert tokens[:, 3].tolist() == [[2, 3, NO], [0, 1, NO]]

    def test_keys_are_pooled_whole_on_every_rank(self, run: Callable[..., kpool_testing.Run], world_size: int) -> None:
        call = listed([5, 5, 1, 1], pool_size=2, topk=4)
        for tokens in run(lambda group: call.run(query_shard_group=group)).results:
            assert sorted(tokens[0, 3, :4].tolist()) == [0, 1, 2, 3]


def test_padding_rows_of_a_rank_are_unused(device: torch.device) -> None:
    from kpool import tiled

    q, keys, weights = (torch.ones(3, 1, 1, 1), torch.ones(2, 1, 1), torch.ones(3, 1, 1))
    window = torch.zeros(1, 3, dtype=torch.int32)
    ids = tiled.select(
        *(t.to(device) for t in (q, keys, weights, window, window + 2)),
        None,
        pool_size=2,
        budget=3,
        rows=RowBlocks(2, 2, 4, 2),
        use_relu=True,
        dot_scale=1.0,
        transform="none",
        order="score",
        chunk_bytes=1,
    )
    assert ids.tolist() == [[[0, 1, NO], [NO, NO, NO]]]
