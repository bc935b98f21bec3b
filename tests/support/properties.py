"""The promises as functions: each takes a call, compares rows bit for bit, and returns how many rows it compared.

A broken promise is an AssertionError (or the error of the ranks that hang or disagree). `tests/test_invariance.py` and
`tests/conformance` show that they hold, `tests/defects` that they notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

import kpool_testing
from tests.support.calls import Call

Property = Callable[[Call], int]
LAYOUTS_IN_MEMORY = ("transposed", "strided", "offset")


def same_rows(expected: Tensor, got: Tensor, what: str) -> int:
    """Assert that two results agree in shape, dtype and every bit; returns the number of rows compared."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    expected, got = expected.cpu(), got.cpu()
    wrong = (expected != got).any(-1).nonzero().tolist()
    if wrong:
        entry, row = wrong[0]
        raise AssertionError(
            f"{what}: {len(wrong)} rows differ, first batch {entry}, row {row}:\n"
            f"  expected {expected[entry, row].tolist()}\n  got      {got[entry, row].tolist()}"
        )
    return expected.shape[0] * expected.shape[1]


def same_as_reference(call: Call) -> int:
    """For exact calls: the very rows of the reference, order and ties included, with and without scores."""
    expected = call.by_definition()
    return same_rows(expected, call.run(), "reference") + same_rows(
        expected, call.run(return_index_scores=True), "reference, scores returned"
    )


def same_when_sharded(call: Call, sizes: Iterable[int] = (2, 3, 4), plans: Iterable[str] = ("contiguous",)) -> int:
    """Every rank returns the unsharded rows after exactly one gather of equal shape."""
    whole, compared = call.run(), 0
    for plan in plans:
        for size in sizes:
            run = kpool_testing.replay(lambda group, p=plan: call.run(query_shard_group=group, shard_plan=p), size)
            kpool_testing.assert_replicated(run.results, "tokens")
            kpool_testing.expect_collectives(run.trace, {"all_gather_single": 1})
            assert len({made.shape for made in run.trace.calls}) == 1, "ranks gather tensors of different shapes"
            for rank, got in enumerate(run.results):
                compared += same_rows(whole, got, f"{plan}, rank {rank} of {size}")
    return compared


def same_when_chunked(call: Call, budgets: Iterable[int] = (1, 4096, 40_000)) -> int:
    """The chunk budget changes nothing."""
    whole = call.run()
    return sum(same_rows(whole, call.run(score_chunk_bytes=b), f"{b} bytes a chunk") for b in budgets)


def same_when_split(call: Call, counts: Sequence[int]) -> int:
    """Consecutive pieces of `counts` rows, each a call of its own, give the rows of the whole."""
    assert sum(counts) == call.rows
    whole, first, compared = call.run(), 0, 0
    for count in counts:
        rows = range(first, first + count)
        compared += same_rows(whole[:, list(rows)], call.take(rows).run(), f"rows {rows.start} to {rows.stop}")
        first += count
    return compared


def same_when_permuted(call: Call, order: Sequence[int]) -> int:
    """Rows in another order, or some of them twice, or only some: each row stays what it was."""
    return same_rows(call.run()[:, list(order)], call.take(order).run(), "rows in another order")


def same_when_future_changes(call: Call) -> int:
    """Keys at or past a row's end change nothing for it."""
    call = call.explicit()
    assert "mask" not in call.visibility and "key_positions" not in call.visibility
    whole, ends = call.run(), call.visibility["varlen_ends"].tolist()
    compared = 0
    for cut in sorted({0, call.tokens // 3, call.tokens // 2, call.tokens - 1}):
        rows = [row for row, end in enumerate(ends) if end <= cut]
        changed = call.k.clone()
        changed[cut:] = 50 - changed[cut:]
        got = replace(call, k=changed).run()
        compared += same_rows(whole[:, rows], got[:, rows], f"keys from {cut} on changed")
    return compared


def same_on_threads(call: Call, counts: Iterable[int] = (1, 2)) -> int:
    """The number of threads changes nothing."""
    whole, before, compared = call.run(), torch.get_num_threads(), 0
    try:
        for count in counts:
            torch.set_num_threads(count)
            compared += same_rows(whole, call.run(), f"{count} threads")
    finally:
        torch.set_num_threads(before)
    return compared


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Fresh memory holds NaN and the largest integers instead of what happens to lie there."""
    fill, on = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(on)


def same_when_poisoned(call: Call) -> int:
    """Nothing that was never written is ever read."""
    whole = call.run()
    with poisoned_buffers():
        got = call.run()
        scored = call.run(return_index_scores=True)
    return same_rows(whole, got, "poisoned buffers") + same_rows(whole, scored, "poisoned buffers, scores returned")


def sound(call: Call) -> int:
    """Every id is -1 or a key the row may see, none twice in a row; unused slots are at the end of the pool slots."""
    tokens = call.run()
    windows = call.prepared().windows
    unlimited = not call.visibility
    for entry in range(call.batch):
        for row in range(call.rows):
            ids = [t for t in tokens[entry, row].tolist() if t != -1]
            assert len(ids) == len(set(ids)), f"batch {entry}, row {row}: an id twice in {ids}"
            window = windows[entry][row]
            allowed = range(call.tokens) if unlimited else range(window.start, window.end)
            outside = [t for t in ids if t not in allowed or t in window.hidden]
            assert not outside, f"batch {entry}, row {row}: ids {outside} outside of what the row sees, {window}"
            slots = tokens[entry, row, : call.topk].tolist()
            used = sum(t != -1 for t in slots)
            if "mask" not in call.visibility:  # a mask may punch a hole into the head
                assert slots[used:] == [-1] * (call.topk - used), f"batch {entry}, row {row}: a gap in {slots}"
    return call.batch * call.rows


def agrees_with_reference(call: Call) -> int:
    """For any data: where no rounding can change a row's selection, it is the reference's; scores lie within its bound.

    Also: the selection is the same with and without scores. Returns the number of rows whose selection was compared.
    """
    tokens, scores = call.run().cpu(), call.scores().cpu()
    same_rows(tokens, call.run(return_index_scores=True), "scores returned")
    expected, prepared = call.by_definition(), call.prepared()
    assert tokens.shape == expected.shape and tokens.dtype == torch.int32
    compared = 0
    for entry in range(call.batch):
        ranking = prepared.rank(entry, range(call.rows))
        decided = ranking.decided(call.budget)
        wrong = (tokens[entry].sort(-1).values != expected[entry].sort(-1).values).any(-1) & decided
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            raise AssertionError(
                f"batch {entry}, row {row} is decided and differs from the reference:\n"
                f"  expected {expected[entry, row].tolist()}\n  got      {tokens[entry, row].tolist()}"
            )
        hidden = scores[entry] == -torch.inf
        assert torch.equal(hidden, ~ranking.visible), f"batch {entry}: -inf and hidden are not the same pools"
        off = (scores[entry].double() - ranking.score).abs() > ranking.error + 1e-300
        assert not bool((off & ranking.visible).any()), f"batch {entry}: a score outside of its error bound"
        compared += int(decided.sum())
    return compared


def same_in_any_layout(call: Call) -> int:
    """Strides, offsets and gaps of the inputs in memory change nothing; neither do the scores' bits."""
    whole, scores, compared = call.run(), call.scores(), 0
    for layout in LAYOUTS_IN_MEMORY:
        laid = kpool_testing.with_layout(dict(vars(call)), layout)
        other = Call(**laid)
        compared += same_rows(whole, other.run(), f"{layout} inputs")
        assert torch.equal(scores, other.scores()), f"{layout} inputs: other scores"
    return compared


def same_scores_wherever_pools_lie(call: Call) -> int:
    """Pools in another order have their scores in that order, bit for bit; needs plain pools that every row sees."""
    call = replace(call, visibility={})
    pools = call.tokens // call.pool_size
    order = torch.randperm(pools, generator=torch.Generator().manual_seed(0)).to(call.q.device)
    slots = (order[:, None] * call.pool_size + torch.arange(call.pool_size, device=order.device)).flatten()
    gate = None if call.gate_score is None else call.gate_score[slots]
    moved = replace(call, k=call.k[slots], gate_score=gate)
    expected, got = call.scores()[..., order], moved.scores()
    assert torch.equal(expected, got), (
        f"{int((expected != got).sum())} of {got.numel()} scores depend on where pools lie"
    )
    return call.batch * call.rows
