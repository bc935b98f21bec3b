"""A token-level sparse-attention indexer whose query rows are split over ranks, and its multi-rank test.

The test needs no GPU, no process group and no launcher: `replay` runs every rank in this process and answers the
gather with what all ranks really sent. Run it with `pytest examples/test_token_indexer.py`.

S query rows, T keys, H heads, D dim, K tokens to pick, R rows of one rank, G ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from kpool_testing import FakeGroup, assert_matches_unsharded, assert_replicated, expect_collectives, replay

# -- the code under test: what a production file would hold


def pick_tokens(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, first: int, budget: int) -> torch.Tensor:
    """Best `budget` visible tokens of each row: int32 [R, budget], -1 where a row sees fewer.

    q [R, H, D], k [T, D], weights [R, H]; row i is row `first + i` of the sequence and sees the keys up to itself.
    Equal scores go to the earlier token.
    """
    rows = first + torch.arange(q.shape[0])
    scores = (torch.relu(q @ k.T) * weights[:, :, None]).sum(dim=1)
    hidden = torch.arange(k.shape[0])[None, :] > rows[:, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    order = torch.argsort(scores, dim=1, descending=True, stable=True)[:, :budget]
    return order.masked_fill(scores.gather(1, order).isinf(), -1).int()


def pick_tokens_sharded(
    q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, budget: int, group: Any
) -> torch.Tensor:
    """The same for all S rows, each rank scoring ceil(S / G) of them: int32 [S, budget], equal on every rank."""
    size, rank, total = group.size(), group.rank(), q.shape[0]
    share = -(-total // size)
    low, high = min(total, rank * share), min(total, (rank + 1) * share)
    mine = torch.full((share, budget), -1, dtype=torch.int32)  # the last ranks may have few rows, or none
    mine[: high - low] = pick_tokens(q[low:high], k, weights[low:high], low, budget)
    if size == 1:
        return mine
    gathered = mine.new_empty(size * share, budget)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(gathered, mine, group=group)
    return gathered[:total]


# -- the test

BUDGET = 4


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Small whole numbers: every sum is exact, so any split must give the same bits, and ties are common."""
    draw = torch.Generator().manual_seed(rows)
    q, k, weights = (
        torch.randint(-2, 3, shape, generator=draw).float() for shape in ((rows, 2, 8), (rows, 8), (rows, 2))
    )
    return q, k, weights


def body(group: FakeGroup, rows: int) -> torch.Tensor:
    return pick_tokens_sharded(*inputs(rows), budget=min(BUDGET, rows), group=group)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("rows", [1, 5, 24, 37])
def test_every_rank_has_the_same_tokens(rows: int, size: int) -> None:
    run = replay(lambda group: body(group, rows), size)
    assert_replicated(run, "tokens")
    share = -(-rows // size)
    expect_collectives(run, {"all_gather_single": 1}, max_bytes=share * min(BUDGET, rows) * 4)


def test_sharded_is_unsharded() -> None:
    assert_matches_unsharded(body, sizes=(2, 3, 8), cases=range(1, 40), runner=replay)


def test_the_unsharded_answer_is_right() -> None:
    q, k, weights = inputs(12)
    tokens = pick_tokens_sharded(q, k, weights, BUDGET, FakeGroup(0, 1))
    for row in range(12):
        scores = [
            sum(float(weights[row, h]) * max(0.0, float(q[row, h] @ k[t])) for h in range(2)) for t in range(row + 1)
        ]
        best = sorted(range(row + 1), key=lambda t: (-scores[t], t))[:BUDGET]
        assert tokens[row].tolist() == best + [-1] * (BUDGET - len(best))
