"""The defects. Each function breaks one thing in `kpool` through a `pytest.MonkeyPatch`, the way somebody once did.

A defective implementation stands behind the seam that `ops` chooses implementations by, so it does not matter how the
real ones are written inside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kpool import selection, sharding, tiled
from kpool.sharding import RowBlocks, ShardPlan

Defect = Callable[[pytest.MonkeyPatch], None]


# -- sharding


def floor_split(patch: pytest.MonkeyPatch) -> None:
    """`S // G` rows a rank: the last `S mod G` rows are computed by nobody."""
    ungather = ShardPlan.ungather

    def contiguous(rows: int, size: int) -> ShardPlan:
        return ShardPlan("contiguous", rows, size, rows // size, rows // size)

    def padded(plan: ShardPlan, gathered: Tensor) -> Tensor:
        rows = ungather(plan, gathered)
        return torch.nn.functional.pad(rows, (0, 0, 0, plan.num_rows - rows.shape[1]), value=-1)

    patch.setattr(ShardPlan, "contiguous", staticmethod(contiguous))
    patch.setattr(ShardPlan, "ungather", padded)


def gather_skipped_when_empty(patch: pytest.MonkeyPatch) -> None:
    """A rank without a selected pool of its own returns early and never joins the collective."""
    gather = sharding.all_gather

    def skipping(local: Tensor, group: Any, size: int) -> Tensor:
        if bool((local == -1).all()):
            return local.new_full((size * local.shape[0], *local.shape[1:]), -1)
        return gather(local, group, size)

    patch.setattr(sharding, "all_gather", skipping)


def batch_and_rank_transposed(patch: pytest.MonkeyPatch) -> None:
    """The gathered rows are read as `[B, G, ...]`; they lie as `[G, B, ...]`."""

    def ungather(plan: ShardPlan, gathered: Tensor) -> Tensor:
        budget = gathered.shape[2]
        dealt = gathered.view(-1, plan.size, plan.rows_per_rank // max(plan.block, 1), plan.block, budget)
        return dealt.transpose(1, 2).reshape(dealt.shape[0], -1, budget)[:, : plan.num_rows]

    patch.setattr(ShardPlan, "ungather", ungather)


# -- a defective implementation


def _replace_select(patch: pytest.MonkeyPatch, select: Callable[..., Tensor]) -> None:
    patch.setattr("kpool.ops.choose", lambda *_: SimpleNamespace(select=select, scores=tiled.scores))


def _per_row(patch: pytest.MonkeyPatch, pick: Callable[..., Tensor]) -> None:
    """An implementation whose rows are picked by `pick(scores, visible, budget, order)` from all scores."""

    def select(
        q: Tensor,
        keys: Tensor,
        weights: Tensor,
        pool_lo: Tensor,
        pool_hi: Tensor,
        mask: Tensor | None,
        *,
        pool_size: int,
        budget: int,
        rows: RowBlocks,
        order: str,
        chunk_bytes: int,
        **formula: Any,
    ) -> Tensor:
        everything = torch.zeros_like(pool_lo), torch.full_like(pool_hi, keys.shape[0])
        scores = tiled.scores(q, keys, weights, *everything, None, pool_size=pool_size, **formula)
        seen = tiled.visible_pools(pool_lo, pool_hi, mask, pool_size, keys.shape[0]).expand_as(scores)
        ids = torch.full((q.shape[1], rows.count, budget), -1, dtype=torch.int32)
        for local, first, last in rows.spans(q.shape[0]):
            picked = pick(scores[:, first:last], seen[:, first:last], budget, order)
            ids[:, local : local + last - first] = picked
        return ids

    _replace_select(patch, select)


def chunk_local_causality(patch: pytest.MonkeyPatch) -> None:
    """A row's bounds are looked up by its place in the chunk instead of its place in the call."""

    def select(*tensors: Any, chunk_bytes: int, **options: Any) -> Tensor:
        q, keys, weights, pool_lo, pool_hi, mask = tensors
        rows = q.shape[0]
        chunk = max(1, chunk_bytes // max(1, 4 * q.shape[1] * keys.shape[0]))
        place = torch.arange(rows) % chunk
        bounds = pool_lo[:, place], pool_hi[:, place]
        return tiled.select(q, keys, weights, *bounds, mask, chunk_bytes=chunk_bytes, **options)

    _replace_select(patch, select)


def ties_of_topk(patch: pytest.MonkeyPatch) -> None:
    """`torch.topk` on the scores: among equal ones it takes any."""

    def pick(scores: Tensor, seen: Tensor, budget: int, order: str) -> Tensor:
        take = min(budget, scores.shape[-1])
        best = torch.topk(scores.masked_fill(~seen, -torch.inf), take, dim=-1)
        ids = best.indices.masked_fill(best.values == -torch.inf, -1).to(torch.int32)
        return torch.nn.functional.pad(ids, (0, budget - take), value=-1)

    _per_row(patch, pick)


def future_pools_eat_the_budget(patch: pytest.MonkeyPatch) -> None:
    """The best of all pools first, what the row may see afterwards."""

    def pick(scores: Tensor, seen: Tensor, budget: int, order: str) -> Tensor:
        ids = selection.top_pools(scores, None, budget, order)
        kept = seen.gather(-1, ids.clamp_min(0).to(torch.int64)) if scores.shape[-1] else ids >= 0
        ids = ids.masked_fill(~kept, -1)
        return ids.gather(-1, (ids < 0).to(torch.int8).sort(dim=-1, stable=True).indices)

    _per_row(patch, pick)


def hidden_is_very_negative(patch: pytest.MonkeyPatch) -> None:
    """Hidden pools score -1e30, which real scores may fall below."""

    def pick(scores: Tensor, seen: Tensor, budget: int, order: str) -> Tensor:
        ids = selection.top_pools(scores.masked_fill(~seen, -1e30), None, budget, order)
        count = seen.sum(-1, keepdim=True)
        return ids.masked_fill(torch.arange(budget) >= count, -1)

    _per_row(patch, pick)


def slots_left_uninitialised(patch: pytest.MonkeyPatch) -> None:
    """The output is allocated, and only the slots that hold a pool are written."""

    def select(*tensors: Any, **options: Any) -> Tensor:
        ids = tiled.select(*tensors, **options)
        written = ids >= 0
        out = torch.empty_like(ids)
        return torch.where(written, ids, out.clamp(-1, max(tensors[1].shape[0] - 1, -1)))

    _replace_select(patch, select)


def ties_by_thread(patch: pytest.MonkeyPatch) -> None:
    """With several threads the highest id wins a tie: the last thread to arrive."""

    def pick(scores: Tensor, seen: Tensor, budget: int, order: str) -> Tensor:
        if torch.get_num_threads() == 1:
            return selection.top_pools(scores, seen, budget, order)
        ids = selection.top_pools(scores.flip(-1), seen.flip(-1), budget, order)
        return torch.where(ids < 0, -1, scores.shape[-1] - 1 - ids)

    _per_row(patch, pick)


def row_number_is_the_position(patch: pytest.MonkeyPatch) -> None:
    """Row `i` is taken to sit at position `i`, whatever its bounds say."""

    def select(*tensors: Any, **options: Any) -> Tensor:
        q, keys, weights, pool_lo, pool_hi, mask = tensors
        prefix = (torch.arange(1, q.shape[0] + 1, dtype=torch.int32) // options["pool_size"])[None]
        return tiled.select(q, keys, weights, pool_lo, torch.minimum(pool_hi, prefix), mask, **options)

    _replace_select(patch, select)


# -- tokens


def tail_of_the_sample(patch: pytest.MonkeyPatch) -> None:
    """Every row gets the tail of the longest window."""

    def expand(ids: Tensor, starts: Tensor, windows: Any, **options: Any) -> Tensor:
        last = windows.end.argmax(-1, keepdim=True) if windows.end.shape[-1] else windows.end.to(torch.int64)
        end, tail = (t.gather(-1, last).expand_as(t) for t in (windows.end, windows.tail_start))
        return selection.expand(ids, starts, replace(windows, end=end, tail_start=tail), **options)

    patch.setattr("kpool.ops.expand", expand)


DEFECTS: dict[str, tuple[Defect, frozenset[str]]] = {
    "floor split": (floor_split, frozenset({"sharded"})),
    "gather skipped when empty": (gather_skipped_when_empty, frozenset({"sharded"})),
    "batch and rank transposed": (batch_and_rank_transposed, frozenset({"sharded"})),
    "chunk-local causality": (chunk_local_causality, frozenset({"chunked"})),
    "topk's own ties": (ties_of_topk, frozenset({"reference"})),
    "future pools eat the budget": (future_pools_eat_the_budget, frozenset({"reference", "future"})),
    "hidden is very negative": (hidden_is_very_negative, frozenset({"reference", "sound"})),
    "slots left uninitialised": (slots_left_uninitialised, frozenset({"poisoned"})),
    "ties by thread": (ties_by_thread, frozenset({"threads"})),
    "row number is the position": (row_number_is_the_position, frozenset({"reference", "split", "permuted"})),
    "tail of the sample": (tail_of_the_sample, frozenset({"reference", "split", "sound"})),
}
"""Each defect, and the properties that must notice it."""
