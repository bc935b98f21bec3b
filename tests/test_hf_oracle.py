"""The indexer against `transformers` 5.24 `Glm5NextTextIndexer`, on the same weights.

On every row that rounding cannot decide (`tests/glm5.py` says which, and why) the selected sets are equal; on the
others the scores of both selections are equal up to the bound, and such rows are counted and few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kpool.indexer import IndexerCache
from tests import glm5

pytestmark = pytest.mark.hf

# Rows under the rounding bound, as a share of all rows. Seen in 266,721 rows of random cases:
#   one shot fp32  52 of 73,903     one shot bf16  80 of 80,266
#   decode   fp32  37 of 53,507     decode   bf16  44 of 59,045     54 of these 213 rows differed
MOST_UNDER = 0.01


@dataclass(frozen=True)
class Case:
    """One drawn comparison."""

    batch: int
    rows: int
    pads: tuple[int, ...]
    pool_size: int
    heads: int
    dim: int
    budget: int
    tail: bool
    bf16: bool
    steps: tuple[int, ...]
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32

    def config(self) -> Any:
        return glm5.text_config(
            index_kpool=self.pool_size,
            index_topk=self.pool_size * self.budget,
            index_n_heads=self.heads,
            index_head_dim=self.dim,
            index_kpool_always_select_tail=self.tail,
            layer_types=["indexed_attention"] * 4,
        )

    def mask(self) -> Tensor:
        return torch.arange(self.rows) >= torch.tensor(self.pads)[:, None]


@st.composite
def cases(draw: st.DrawFn, most_rows: int, decode: bool, bf16: bool) -> Case:
    batch = draw(st.integers(1, 3))
    rows = draw(st.integers(1, most_rows))
    pad = st.just(0) | st.integers(0, rows)
    steps: list[int] = []
    while decode and sum(steps) < rows:
        left = rows - sum(steps)
        steps.append(min(left, draw(st.integers(1, rows) if not steps else st.integers(1, 4))))
        if len(steps) == 12:
            steps.append(rows - sum(steps))
    return Case(
        batch,
        rows,
        tuple(draw(pad) for _ in range(batch)),
        draw(st.sampled_from([2, 4, 16])),
        draw(st.sampled_from([8, 12, 32])),
        draw(st.sampled_from([8, 16, 32])),
        draw(st.integers(1, 10)),
        draw(st.booleans()),
        bf16,
        tuple(s for s in steps if s),
        draw(st.integers(0, 2**20)),
    )


def check_one_shot(case: Case, count: glm5.Count) -> None:
    """One call over all rows, both sides."""
    theirs, ours, x, r, mask = _sides(case)
    states = glm5.packed_states(theirs, x, mask)
    _compare(case, theirs, ours, x, r, x, mask, states, theirs(x, r, mask, None), ours(x, r, mask), count)


def check_decode(case: Case, count: glm5.Count) -> None:
    """Prefill and decode, each side with a cache of its own."""
    from transformers import DynamicCache

    theirs, ours, x, r, mask = _sides(case)
    their_cache, our_cache = DynamicCache(config=theirs.config), IndexerCache()
    done = 0
    for step in case.steps:
        new = slice(done, done + step)
        done += step
        empty = torch.zeros(case.batch, 1, step, 1, dtype=case.dtype)
        their_cache.update(empty, empty, 0)  # the attention does this before it calls the indexer
        a = theirs(x[:, new], r[:, new], mask[:, new], their_cache)
        b = ours(x[:, new], r[:, new], mask[:, new], our_cache)
        states = their_cache.layers[0].indexer_keys
        _compare(case, theirs, ours, x[:, new], r[:, new], x[:, :done], mask[:, :done], states, a, b, count)


def _sides(case: Case) -> tuple[Any, Any, Tensor, Tensor, Tensor]:
    theirs = glm5.hf_indexer(case.config(), seed=case.seed, dtype=case.dtype)
    x, r = glm5.inputs(theirs.config, case.batch, case.rows, case.dtype, case.seed + 1)
    return theirs, glm5.kpool_indexer(theirs), x, r, case.mask()


def _compare(
    case: Case,
    theirs: Any,
    ours: Any,
    x: Tensor,
    r: Tensor,
    all_x: Tensor,
    all_mask: Tensor,
    states: Tensor,
    a: Tensor,
    b: Tensor,
    count: glm5.Count,
) -> None:
    assert a.dtype == b.dtype == torch.int32
    assert a.shape == b.shape
    size, rows, slots = case.pool_size, x.shape[1], all_x.shape[1]
    side = glm5.their_inputs(theirs, x, r, states)
    first = torch.where(all_mask.any(-1), all_mask.long().argmax(-1), slots)
    last = first[:, None] + (torch.arange(side.pooled.shape[1]) + 1) * size - 1
    mine = glm5.our_inputs(ours, x, r, all_x, all_mask)
    mine = glm5.check_inputs(side, mine, last < slots, case.dtype, theirs.hidden_size)
    at = torch.arange(slots - rows, slots)
    visible = (last[:, None, :] <= at[:, None]) & all_mask[:, -rows:, None]
    verdict = glm5.Verdict.of(side, mine, visible, case.budget)
    glm5.compare(a, b, verdict, first, pool_size=size, budget=case.budget, count=count)


def sweep(examples: int, most_rows: int, decode: bool, bf16: bool) -> glm5.Count:
    """Draw cases and check them; counts over all of them."""
    count = glm5.Count()
    check: Callable[[Case, glm5.Count], None] = check_decode if decode else check_one_shot

    @settings(max_examples=examples, suppress_health_check=[HealthCheck.too_slow], database=None)
    @given(cases(most_rows, decode, bf16))
    def run(case: Case) -> None:
        check(case, count)

    run()
    return count


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("decode", [False, True], ids=["one-shot", "decode"])
def test_sets_equal_wherever_rounding_cannot_decide(
    decode: bool, bf16: bool, record_property: Callable[[str, object], None]
) -> None:
    """Batch 1-3, left padding, S 1 to 260, P 2, 4, 16, H 8 to 32, with and without tail."""
    count = sweep(5 if decode else 10, 100 if decode else 260, decode, bf16)
    record_property("rows", count.rows)
    record_property("rows under the bound", count.under)
    record_property("rows that differ", count.differing)
    assert count.under <= max(5, MOST_UNDER * count.rows)


@pytest.mark.soak
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("decode", [False, True], ids=["one-shot", "decode"])
def test_sets_equal_in_a_long_sweep(decode: bool, bf16: bool, record_property: Callable[[str, object], None]) -> None:
    """The same with more and longer cases."""
    count = sweep(300, 300 if decode else 700, decode, bf16)
    for name in ("rows", "under", "differing"):
        record_property(name, getattr(count, name))
    assert count.under <= MOST_UNDER * count.rows


def test_released_shape() -> None:
    """H=32, D=128, P=4 as released, with a prompt that exceeds the selection several times over.

    The bound grows with D + H: 22 of 600 rows fall under it here, and none of them differs.
    """
    case = Case(1, 600, (7,), 4, 32, 128, 16, True, True, (), 5)
    count = glm5.Count()
    check_one_shot(case, count)
    assert count.under <= 30
    assert count.differing <= 1


def test_exact_ties_have_equal_scores() -> None:
    """Repeated tokens make repeated scores: the sets may differ, what they score may not."""
    case = Case(2, 96, (0, 5), 2, 8, 16, 4, True, False, (), 9)
    theirs, ours, x, r, mask = _sides(case)
    x = x[:, :8].repeat(1, 12, 1)
    r = r[:, :8].repeat(1, 12, 1)
    count = glm5.Count()
    states = glm5.packed_states(theirs, x, mask)
    _compare(case, theirs, ours, x, r, x, mask, states, theirs(x, r, mask, None), ours(x, r, mask), count)
    assert count.under > count.rows // 2
    assert count.differing > 0  # else the tie was no tie, and this test shows nothing


@pytest.mark.parametrize("pads", [(0, 0), (3, 9), (96, 50)])
def test_mask_forms(pads: tuple[int, int]) -> None:
    """No mask says the same as a mask of ones; an all-padding row selects nothing on both sides."""
    case = Case(2, 96, pads, 4, 8, 16, 4, True, False, (), 3)
    theirs, ours, x, r, mask = _sides(case)
    a, b = theirs(x, r, mask, None), ours(x, r, mask)
    assert torch.equal((a >= 0).any(-1), (b >= 0).any(-1))
    assert torch.equal((b >= 0).any(-1), mask)
    if pads == (0, 0):
        assert torch.equal(ours(x, r), b)


def test_right_padding_in_one_call() -> None:
    """Padding after a row's last token changes nothing for its tokens, on both sides."""
    case = Case(2, 80, (0, 0), 4, 8, 16, 4, True, False, (), 4)
    theirs, ours, x, r, _ = _sides(case)
    mask = torch.arange(80) < torch.tensor([80, 61])[:, None]
    a, b = theirs(x, r, mask, None), ours(x, r, mask)
    for row in range(2):
        for s in range(80):
            assert set(a[row, s].tolist()) == set(b[row, s].tolist()), (row, s)
