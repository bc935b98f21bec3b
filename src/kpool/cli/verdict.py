"""Held against the float64 reference: the pooled keys, then the rows.

Pooled keys are rounded to 16 bits, and a value next to the middle of two such numbers may go either way. So each
element is first shown to be one that correct arithmetic can give; the rows are then ranked in float64 from those keys.

A row is *decided* when no rounding within the bound of `kpool.ranking.Ranking` can change its selected set. It must
then be the reference's. A row that is not must still be one that rounding can explain: no chosen pool may score below
a rejected one by more than the errors of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from kpool import reference
from kpool.captures import CapturedCall
from kpool.pooling import pool_keys
from kpool.ranking import Ranking
from kpool.scoring import transform
from kpool.sharding import ShardPlan

_TILE = 32  # both implementations cut their chunks at multiples of this many rows
_PIECE = 64  # rows ranked at a time
_LISTED = 8  # tokens named per side of a difference


@dataclass(frozen=True)
class Difference:
    """One row that is not what it should be.

    Attributes:
        batch, row: where.
        margin: gap at the budget edge less the rounding errors beside it; infinite where the row has no choice.
        only_here, only_there: some tokens only this selection has, and only the other one.
        reason: what is wrong, in words, where it is not the set.
    """

    batch: int
    row: int
    margin: float
    only_here: list[int]
    only_there: list[int]
    reason: str = ""

    def __str__(self) -> str:
        parts = [f"batch {self.batch} row {self.row}: margin {self.margin:.3g}"]
        parts += [f"only here {self.only_here}"] if self.only_here else []
        parts += [f"only there {self.only_there}"] if self.only_there else []
        return ", ".join([*parts, self.reason] if self.reason else parts)


@dataclass(frozen=True)
class Judgement:
    """The comparison with the float64 reference.

    Attributes:
        wrong_keys: elements of pooled keys that correct arithmetic cannot give.
        checked: rows held against it, batch entries counted apart.
        undecided: of these, rows under the rounding bound; wrong: rows that rounding cannot explain.
        smallest_margin: of the decided rows that had a choice to make.
        differences: the first few wrong rows.
    """

    wrong_keys: int
    checked: int
    undecided: int
    wrong: int
    smallest_margin: float | None
    differences: list[Difference] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """The comparison with another system's selection.

    Attributes:
        rows: all rows, batch entries counted apart; same: rows with the same set of tokens.
        near_ties: rows that differ under the rounding bound; wrong: rows that differ above it.
        differences: every row that differs and is wrong, near ties after them.
    """

    rows: int
    same: int
    near_ties: int
    wrong: int
    differences: list[Difference] = field(default_factory=list)


def sample_rows(call: CapturedCall, plan: ShardPlan, wanted: int) -> list[int]:
    """Rows to check: the first and last of every shard, chunk and document, then others at random; all if few."""
    rows = call.q.shape[0]
    if rows <= wanted:
        return list(range(rows))
    edges = set(range(0, rows, _TILE)) | {rows}
    for rank in range(plan.size):
        for _, first, last in plan.blocks(rank).spans(rows):
            edges |= {first, last}
    if call.cu_seqlens_kv is not None:
        edges |= {edge for edge in call.cu_seqlens_kv.tolist() if edge <= rows}
    chosen = {edge for edge in edges if edge < rows} | {edge - 1 for edge in edges if edge > 0}
    others = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()
    for row in others:
        if len(chosen) >= wanted:
            break
        chosen.add(row)
    return sorted(chosen)


def prepare(call: CapturedCall, rows: Sequence[int]) -> reference.Reference:
    """The float64 reference of some rows of a call: a row's window says where it is, so any subset is a call too."""
    options = {name: value for name, value in call.arguments().items() if name != "always_select_tail"}
    if call.mask is None and call.varlen_starts is None and call.cu_seqlens_kv is None:
        return reference.prepare(**options)  # nothing says where a row is but its number
    if call.varlen_starts is None and call.cu_seqlens_kv is not None:
        options |= _document_bounds(call.cu_seqlens_kv.tolist(), call.q.shape[0])
    index = torch.tensor(list(rows), dtype=torch.int64)
    for name in ("q", "weights", "varlen_starts", "varlen_ends"):
        if options[name] is not None:
            options[name] = options[name].cpu()[index]
    if call.mask is not None:
        options["mask"] = call.mask.cpu().index_select(-2, index)
    return reference.prepare(**options)


def _document_bounds(edges: list[int], rows: int) -> dict[str, Tensor]:
    starts, ends = [0] * rows, [0] * rows
    for begin, end in pairwise(edges):
        for row in range(begin, min(end, rows)):
            starts[row], ends[row] = begin, row + 1
    return {"varlen_starts": torch.tensor(starts), "varlen_ends": torch.tensor(ends)}


def adopt_keys(call: CapturedCall, exact: reference.Reference) -> tuple[reference.Reference, int]:
    """The reference with kpool's pooled keys wherever rounding explains them, and how many elements it does not."""
    pooled = pool_keys(call.k, call.gate_score, call.ape, call.pool_size, call.cu_seqlens_kv, numerics=call.numerics)
    own = transform(pooled.keys, exact.transform_name).detach().cpu().double()
    correct = (own - exact.keys.double()).abs() <= exact.key_error
    keys = torch.where(correct, own, exact.keys.double())
    return replace(exact, keys=keys, key_error=torch.zeros_like(keys)), int((~correct).sum())


class _Judge:
    """Ranks rows of a call a piece at a time, and says what each row of tokens is worth."""

    def __init__(self, call: CapturedCall, rows: Sequence[int]) -> None:
        self.call, self.rows = call, list(rows)
        self.reference, self.wrong_keys = adopt_keys(call, prepare(call, self.rows))
        self.own_numbers = self.reference.q.shape[0] == len(self.rows)  # else rows keep the numbers of the whole call
        self.budget = call.index_topk // call.pool_size
        self.id_of = {start: n for n, start in enumerate(self.reference.starts) if start >= 0}

    def pieces(self, entry: int) -> Iterator[tuple[int, int, int, Ranking, list[int], float]]:
        """Row by row: its number in the call and in the reference, its place in the ranking, best pools, margin."""
        for first in range(0, len(self.rows), _PIECE):
            some = self.rows[first : first + _PIECE]
            numbers = list(range(first, first + len(some))) if self.own_numbers else some
            ranking = self.reference.rank(entry, numbers)
            best, margin = ranking.best(self.budget), ranking.margin(self.budget).tolist()
            for i, (row, number) in enumerate(zip(some, numbers, strict=True)):
                yield row, number, i, ranking, best[i].tolist(), margin[i]

    def wanted(self, entry: int, number: int, best: list[int], width: int) -> list[int]:
        """The reference's row of tokens."""
        return self.reference.tokens(entry, number, best, self.call.always_select_tail, width)

    def explained(self, got: list[int], want: list[int], ranking: Ranking, place: int) -> bool:
        """Whether rounding can turn the tokens `want` into `got`.

        The two must differ in whole visible pools alone, and no chosen pool may score below a rejected one by more than
        the errors of the two.
        """
        have = {token for token in got if token >= 0}
        ids, loose = self._pools_of(have)
        if len(have) != sum(token >= 0 for token in got) or len(ids) != self.budget:
            return False
        seen = ranking.visible[place]
        rejected = seen.clone()
        rejected[ids] = False
        if loose != self._pools_of({t for t in want if t >= 0})[1] or not bool(seen[ids].all()):
            return False
        high = (ranking.score[place] + ranking.error[place])[ids].amin()
        return bool(high >= (ranking.score[place] - ranking.error[place])[rejected].amax())

    def _pools_of(self, tokens: set[int]) -> tuple[list[int], set[int]]:
        """Pools that lie wholly in `tokens`, and the tokens in none of them."""
        size = self.call.pool_size
        starts = [t for t in tokens if t in self.id_of and all(t + slot in tokens for slot in range(1, size))]
        return [self.id_of[t] for t in starts], tokens - {t + slot for t in starts for slot in range(size)}


def judge(call: CapturedCall, tokens: Tensor, rows: list[int], done: Callable[[float], None]) -> Judgement:
    """Hold `rows` of `tokens` int32 `[B, S, W]` against the float64 reference; `done` hears the fraction."""
    judge = _Judge(call, rows)
    batch, width, topk = tokens.shape[0], tokens.shape[2], call.index_topk
    checked = undecided = wrong = 0
    smallest = math.inf
    differences: list[Difference] = []
    for entry in range(batch):
        for row, number, place, ranking, best, margin in judge.pieces(entry):
            checked += 1
            done(checked / max(1, batch * len(rows)))
            got = tokens[entry, row].tolist()
            want = judge.wanted(entry, number, best, width)
            good = sorted(got[:topk]) == sorted(want[:topk])
            if margin > 0:
                smallest = min(smallest, margin)
            else:
                undecided += 1
                good = good or judge.explained(got, want, ranking, place)
            if not (good and got[topk:] == want[topk:]):
                wrong += 1
                differences += [difference(entry, row, margin, got, want)] if len(differences) < 10 else []
    return Judgement(
        judge.wrong_keys, checked, undecided, wrong, None if math.isinf(smallest) else smallest, differences
    )


def compare_expected(call: CapturedCall, tokens: Tensor, given: Tensor) -> Expected:
    """Compare `tokens` int32 `[B, S, W]` with another system's `[B, S, W']`, as sets; rank the rows that differ."""
    batch, rows = tokens.shape[:2]
    width = max(tokens.shape[2], given.shape[2])
    ours, theirs = (_as_set(t, width) for t in (tokens, given))
    differs = (ours != theirs).any(-1).cpu()
    wrong: list[Difference] = []
    near: list[Difference] = []
    for entry in range(batch):
        some = differs[entry].nonzero()[:, 0].tolist()
        if not some:
            continue
        judge = _Judge(call, some)
        for row, number, place, ranking, best, margin in judge.pieces(entry):
            got, other = tokens[entry, row].tolist(), given[entry, row].tolist()
            tie = margin <= 0 and judge.explained(other, judge.wanted(entry, number, best, len(got)), ranking, place)
            (near if tie else wrong).append(difference(entry, row, margin, got, other))
    same = batch * rows - len(wrong) - len(near)
    return Expected(batch * rows, same, len(near), len(wrong), wrong + near)


def _as_set(tokens: Tensor, width: int) -> Tensor:
    """Sorted descending, every unused slot -1, padded to `width`."""
    padded = torch.nn.functional.pad(tokens.to(torch.int64).clamp_min(-1), (0, width - tokens.shape[2]), value=-1)
    return padded.sort(-1, descending=True).values


def difference(entry: int, row: int, margin: float, here: list[int], there: list[int]) -> Difference:
    """Describe how two rows of tokens differ."""
    ours, theirs = ({token for token in tokens if token >= 0} for tokens in (here, there))
    repeated = sorted({token for token in there if token >= 0 and there.count(token) > 1})
    reason = f"there repeats {repeated[:_LISTED]}" if repeated else ""
    if ours == theirs and not reason:
        reason = "the same tokens in other slots"
    return Difference(entry, row, margin, sorted(ours - theirs)[:_LISTED], sorted(theirs - ours)[:_LISTED], reason)
