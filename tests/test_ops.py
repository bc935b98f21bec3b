"""The front door: shapes at the edges, scores and tokens together, precision, and callers who keep pooled keys."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import kpool_testing
from kpool import Visibility, fused_qk_topk_kpool, pool_keys, select_pools
from kpool.selection import expand
from tests.support.calls import Call, exact_call, listed, noisy
from tests.support.properties import same_as_reference, same_rows

INF = torch.inf


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4])
@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("scores", [False, True])
def test_shapes_at_the_edges(rows: int, tokens: int, batch: int, scores: bool, device: torch.device) -> None:
    call = exact_call(0, "window", rows=rows, tokens=tokens, batch=batch, pool_size=4, budget=5).to(device)
    got, chosen = fused_qk_topk_kpool(*call.positional, **call.visibility, return_index_scores=scores)
    assert chosen.shape == (batch, rows, 23) and chosen.dtype == torch.int32 and chosen.device.type == device.type
    assert (got is not None) == scores
    if got is not None:
        assert got.shape == (batch, rows, tokens // 4) and got.dtype == torch.float32


@pytest.mark.parametrize(
    ("tail", "multiple", "width"), [(True, 1, 23), (False, 1, 20), (True, 64, 64), (False, 7, 21), (True, 23, 23)]
)
def test_width(tail: bool, multiple: int, width: int, device: torch.device) -> None:
    call = exact_call(0, pool_size=4, budget=5).to(device)
    plain = call.run(always_select_tail=tail)
    wide = call.run(always_select_tail=tail, width_multiple=multiple)
    assert wide.shape[2] == width and torch.equal(wide[..., : plain.shape[2]], plain)
    assert bool((wide[..., plain.shape[2] :] == -1).all())


def test_the_order_of_the_positional_arguments(device: torch.device) -> None:
    call = exact_call(0, rows=12).to(device)
    starts, ends = call.visibility["varlen_starts"], call.visibility["varlen_ends"]
    scores, chosen = fused_qk_topk_kpool(
        *call.positional, None, starts, ends, None, None, True, False, False, False, False, None
    )
    assert scores is None and torch.equal(chosen, call.run(always_select_tail=False))


def test_a_real_score_of_minus_1e30_beats_a_hidden_pool(device: torch.device) -> None:
    call = listed([1e30, 1e30, 1e30, 1e30, 1, 1, 1, 1], pool_size=2, topk=4, rows=1, ends=[4]).to(device)
    call = replace(call, weights=-call.weights)
    assert call.run().tolist() == [[[0, 1, 2, 3, -1]]]
    scores = call.scores()[0, 0].tolist()
    assert max(scores[:2]) < -9e29 and scores[2:] == [-INF, -INF]


@pytest.mark.parametrize("bad", [torch.nan, INF, -INF])
def test_special_values_spoil_their_own_pool_alone(bad: float, device: torch.device) -> None:
    """A NaN or an infinite key makes its pool NaN or infinite; the order of the others stays."""
    call = exact_call(4, "causal", rows=24, use_relu=False, heads=1)
    clean = call.to(device).scores()
    call.k[4] = bad
    spoilt = call.to(device).scores()
    others = [n for n in range(12) if n != 2]
    assert torch.equal(clean[..., others], spoilt[..., others])
    same_as_reference(call.to(device))


def test_nan_ranks_below_every_number(device: torch.device) -> None:
    call = listed([torch.nan, 1, -3, -3, -5, -5], pool_size=2, topk=6, rows=1, ends=[6], use_relu=False).to(device)
    assert call.run().tolist() == [[[2, 3, 4, 5, 0, 1, -1]]]
    assert call.run(order="position").tolist() == [[[0, 1, 2, 3, 4, 5, -1]]]


def test_a_mask_says_the_same_as_bounds(device: torch.device) -> None:
    bounds = noisy(exact_call(0, "window", rows=30, tokens=41, batch=2, pool_size=4))
    slot = torch.arange(41)
    starts, ends = (bounds.visibility[name][:, None] for name in ("varlen_starts", "varlen_ends"))
    mask = torch.zeros(30, 41).masked_fill((slot < starts) | (slot >= ends), -INF)
    expected = bounds.to(device).run()
    for one in (mask, mask[None], mask.expand(2, -1, -1)):
        same_rows(expected, replace(bounds, visibility={"mask": one}).to(device).run(), "the mask")


def test_positions_equal_to_slots_change_nothing(device: torch.device) -> None:
    call = noisy(exact_call(1, "window", rows=30, tokens=41))
    with_positions = replace(call, visibility={**call.visibility, "key_positions": torch.arange(41)})
    same_rows(call.to(device).run(), with_positions.to(device).run(), "slots as positions")


def test_documents_stored_out_of_order(device: torch.device) -> None:
    """Two documents whose positions fall from one to the next: the rows of each see its slots."""
    packed = listed([1, 2, 3, 4, 5, 6, 7, 8], pool_size=2, topk=4, cu=[0, 3, 8])
    positions = torch.tensor([50, 51, 52, 0, 1, 2, 3, 4])
    starts = torch.tensor([50] * 3 + [0] * 5)
    visibility = {"varlen_starts": starts, "varlen_ends": positions + 1, "key_positions": positions}
    other = replace(packed, visibility={**visibility, **packed.visibility})
    same_rows(packed.to(device).run(), other.to(device).run(), "positions out of order")


def test_scores_need_no_gradient_and_give_one_when_asked(device: torch.device) -> None:
    call = noisy(exact_call(0, rows=20, batch=2, dtype=torch.float32)).to(device)
    leaves = [call.q, call.k, call.weights, call.gate_score, call.ape]
    for leaf in leaves:
        assert leaf is not None
        leaf.requires_grad_()
    scores, chosen = fused_qk_topk_kpool(*call.positional, **call.visibility)
    assert scores is not None and scores.requires_grad and not chosen.requires_grad
    scores.masked_fill(scores == -INF, 0).square().sum().backward()
    assert all(leaf is not None and leaf.grad is not None and bool(leaf.grad.isfinite().all()) for leaf in leaves)
    assert not call.run().requires_grad


def gradients(call: Call, backward: AbstractContextManager[Any]) -> list[torch.Tensor | None]:
    leaves = [t.clone().requires_grad_() for t in (call.q, call.k, call.weights)]
    scores = replace(call, q=leaves[0], k=leaves[1], weights=leaves[2]).scores()
    loss = scores.masked_fill(scores == -INF, 0).square().sum()
    with backward:
        loss.backward()
    return [leaf.grad for leaf in leaves]


def test_autocast_changes_neither_scores_nor_gradients(device: torch.device) -> None:
    call = noisy(exact_call(0, rows=40, batch=2, heads=3, dim=16, dtype=torch.float32)).to(device)
    autocast = torch.autocast(device.type, torch.bfloat16)
    whole, scores = call.run(), call.scores()
    with autocast:
        same_rows(whole, call.run(), "autocast")
        assert torch.equal(scores, call.scores())
    for plain, cast in zip(gradients(call, nullcontext()), gradients(call, autocast), strict=True):
        assert plain is not None and cast is not None and torch.equal(plain, cast)


@pytest.mark.parametrize("impl", ["torch", "reference"])
@pytest.mark.parametrize("order", ["score", "position"])
def test_no_default_device_is_assumed(impl: str, order: str, device: torch.device) -> None:
    """Tensors made on the way lie where the inputs lie, also under `torch.set_default_device`."""
    rows = 40 if impl == "reference" else 300  # enough to sort rows as one flat tensor
    call = noisy(exact_call(0, rows=rows, batch=2, budget=70, pool_size=2)).with_options(impl=impl, order=order)
    call = call.to(device)
    whole = call.run()
    with torch.device("meta"):
        same_rows(whole, call.run(), "default device")
        same_rows(whole, call.run(return_index_scores=True), "default device, with scores")


class TestSelectPools:
    @staticmethod
    def pools(call: Call, visibility: Visibility, **options: Any) -> torch.Tensor:
        pooled = pool_keys(call.k, call.gate_score, call.ape, call.pool_size, call.visibility.get("cu_seqlens_kv"))
        return select_pools(call.q, pooled, call.weights, visibility, call.budget, tokens=call.tokens, **options)

    def test_pools_and_expansion_make_the_call(self, device: torch.device) -> None:
        call = noisy(exact_call(0, "causal", rows=21, batch=2, pool_size=4)).to(device)
        visibility = Visibility.causal(21)
        if int(call.visibility["varlen_ends"][0]) != 1:
            visibility = Visibility.bounds(call.visibility["varlen_starts"], call.visibility["varlen_ends"])
        ids = self.pools(call, visibility)
        sizes = {"rows": 21, "tokens": 21, "batch": 2, "pool_size": 4, "device": device}
        starts = visibility.grid(tokens=21, pool_size=4, device=device).starts()
        same_rows(call.run(), expand(ids, starts, visibility.windows(**sizes), pool_size=4), "pools expanded")

    def test_decoding_one_row_at_a_time(self, device: torch.device) -> None:
        call = noisy(exact_call(0, "nothing", rows=21, batch=2, pool_size=4)).to(device)
        whole = self.pools(call, Visibility.causal(21))
        for row in range(21):
            step = replace(call, q=call.q[row : row + 1], weights=call.weights[row : row + 1])
            step = replace(step, k=call.k[: row + 1], gate_score=call.gate_score[: row + 1])  # type: ignore[index]
            got = self.pools(step, Visibility.causal(1, first=row))
            same_rows(whole[:, row : row + 1], got, f"decode step {row}")

    def test_zigzag_rows_of_a_packed_batch(self, device: torch.device) -> None:
        call = noisy(exact_call(0, "nothing", rows=40, batch=2)).to(device)
        cu = torch.tensor([0, 3, 3, 20, 37], device=device)
        call = replace(call, visibility={"cu_seqlens_kv": cu})
        whole = self.pools(call, Visibility.packed(cu))
        for rank in range(4):
            mine = torch.tensor([*range(5 * rank, 5 * rank + 5), *range(35 - 5 * rank, 40 - 5 * rank)], device=device)
            local = replace(call, q=call.q[mine], weights=call.weights[mine])
            same_rows(whole[:, mine], self.pools(local, Visibility.packed(cu, mine)), f"rank {rank}")

    @pytest.mark.parametrize("order", ["score", "position"])
    def test_left_padding_shifts_and_changes_nothing(self, order: str, device: torch.device) -> None:
        """A padded batch row selects what the row alone, without padding, selects."""
        rng, tokens = random.Random(0), 23
        lengths = [23, 9, 1, 0, rng.randrange(2, 23)]
        padded = noisy(exact_call(0, "nothing", rows=tokens, batch=len(lengths), budget=4)).to(device)
        valid = torch.arange(tokens) >= tokens - torch.tensor(lengths)[:, None]
        visibility = Visibility.left_padded(valid.to(device))
        grid = visibility.grid(tokens=tokens, pool_size=2, device=device)
        from kpool.pooling import PooledKeys, pool_on_grid

        keys = pool_on_grid(padded.k, padded.gate_score, padded.ape, grid, plain=False, numerics="megatron")
        pooled = PooledKeys(keys, grid.starts(), 2)
        ids = select_pools(padded.q, pooled, padded.weights, visibility, 4, tokens=tokens, order=order)
        for entry, length in enumerate(lengths):
            first = tokens - length
            assert bool((ids[entry, :first] == -1).all())
            alone = {
                name: getattr(padded, name)[first:, entry : entry + 1] for name in ("q", "k", "weights", "gate_score")
            }
            got = self.pools(replace(padded, **alone), Visibility.causal(length), order=order)
            same_rows(got, ids[entry : entry + 1, first:], f"batch entry {entry}")

    @pytest.mark.world_size(2, 3)
    def test_sharded(self, fake_group: Any, world_size: int, device: torch.device) -> None:
        call = noisy(exact_call(0, "nothing", rows=21, batch=2)).to(device)
        whole = self.pools(call, Visibility.causal(21))
        run = fake_group(lambda group: self.pools(call, Visibility.causal(21), query_shard_group=group))
        for ids in run.results:
            same_rows(whole, ids, "sharded")
        kpool_testing.expect_collectives(run.trace, {"all_gather_single": 1})
