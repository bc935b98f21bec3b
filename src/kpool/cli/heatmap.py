"""The map of a selection, rows x tokens, coarse: an SVG of a few paths, without matplotlib.

A cell covers some rows and some tokens. Its level is the share of the tokens its rows have in their windows that they
selected: 0 none, 1 up to 20 %, ... 5 above 80 %. Cells outside every window stay empty.
"""

from __future__ import annotations

import html
from itertools import groupby, pairwise

import torch
from torch import Tensor

from kpool.cli.measure import windows_of
from kpool.cli.outcome import Outcome
from kpool.cli.plot import RANKS
from kpool.sharding import ShardPlan

CELLS = 96  # a side at most
_SIDE, _LEFT, _TOP = 576, 92, 8  # of the map, in user units of the SVG
_STRIPS = 512  # more runs of rows than this are not drawn
LEVELS = ("none", "up to 20 %", "20-40 %", "40-60 %", "60-80 %", "above 80 %")


def rank_colour(rank: int) -> str:
    """A rank's colour; grey instead of black, which would vanish on a dark page."""
    return (*RANKS[:-1], "#888888")[rank % len(RANKS)]


def levels(tokens: Tensor, start: Tensor, end: Tensor, keys: int) -> Tensor:
    """How densely each cell is selected.

    Args:
        tokens: int32 `[S, W]`, the selection, -1 unused.
        start, end: int32 `[S]`, the rows' windows.
        keys: `T`.

    Returns:
        int64 `[rows, columns]`, both at most `CELLS`: the level, -1 outside every window.
    """
    down, across = min(CELLS, len(tokens)), min(CELLS, keys)
    row_edges = (torch.arange(down + 1) * len(tokens) // max(down, 1)).tolist()
    column_edges = torch.arange(across + 1) * keys // max(across, 1)
    low, high = column_edges[:-1], column_edges[1:]
    out = torch.full((down, across), -1, dtype=torch.int64)
    for cell, (first, last) in enumerate(pairwise(row_edges)):
        some = tokens[first:last].reshape(-1).to(torch.int64)
        column = torch.bucketize(some[some >= 0], column_edges, right=True) - 1
        chosen = torch.bincount(column, minlength=across).double()
        begin, stop = start[first:last, None].to(torch.int64), end[first:last, None].to(torch.int64)
        seen = (torch.minimum(stop, high) - torch.maximum(begin, low)).clamp_min(0).sum(0)
        share = chosen / seen.clamp_min(1)
        out[cell] = torch.where(seen > 0, (share * 5).ceil().clamp_max(5).to(torch.int64), -1)
    return out


def heat_map(outcome: Outcome) -> str:
    """The map of one batch entry, the first that differs if one does, with the ranks beside the rows, and its key."""
    call, tokens = outcome.call, outcome.tokens
    if not tokens.shape[1] or not call.k.shape[0]:
        return "<p>There is nothing to select from.</p>"
    marks = sorted(_marks(outcome))
    entry = marks[0][0] if marks else 0
    windows = windows_of(call)
    side = min(entry, windows.start.shape[0] - 1)
    start, end = windows.start[side].cpu(), windows.end[side].cpu()
    found = levels(tokens[entry].cpu(), start, end, call.k.shape[0])
    rows, keys = tokens.shape[1], call.k.shape[0]
    strip, turns = _strip(outcome, rows)
    flags = "".join(_flag(row, rows, words) for at, row, words in marks if at == entry)
    alone = "" if call.q.shape[1] == 1 else f"Batch entry {entry} of {call.q.shape[1]}. "
    return (
        f"<figure><figcaption>{alone}Each cell: how many of the tokens that its rows could see they selected. "
        f"Left of it, who scores the rows{turns}.{' Triangles mark rows that differ.' if flags else ''}</figcaption>"
        f'<svg class="map" viewBox="0 0 {_LEFT + _SIDE + 140} {_TOP + _SIDE + 44}" role="img" '
        f'aria-label="selection, rows by tokens">{_cells(found)}{strip}{flags}{_axes(rows, keys)}{_key()}</svg>'
        f"</figure>"
    )


def _marks(outcome: Outcome) -> set[tuple[int, int, str]]:
    """`(batch, row, words)` of the rows that differ, as far as they are named."""
    expected = outcome.expected.differences[: outcome.expected.wrong] if outcome.expected else []
    found = {(d.batch, d.row, f"row {d.row}: not the reference's") for d in outcome.reference.differences}
    found |= {(d.batch, d.row, f"row {d.row}: not the expected one") for d in expected[:20]}
    for r in outcome.ranks:
        if r.first_difference is not None:
            found.add((r.first_difference[0], r.first_difference[1], f"row {r.first_difference[1]}: rank {r.rank}"))
    return found


def _cells(found: Tensor) -> str:
    """One path a level, runs of equal cells joined."""
    down, across = found.shape
    paths: dict[int, list[str]] = {}
    for y, line in enumerate(found.tolist()):
        x = 0
        for level, run in groupby(line):
            width = len(list(run))
            if level >= 0:
                paths.setdefault(level, []).append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    scale = f"translate({_LEFT} {_TOP}) scale({_SIDE / across:.6g} {_SIDE / down:.6g})"
    drawn = "".join(
        f'<path fill="var(--l{level})" d="{"".join(parts)}"><title>{LEVELS[level]} selected</title></path>'
        for level, parts in sorted(paths.items())
    )
    return f'<g transform="{scale}" shape-rendering="crispEdges">{drawn}</g>'


def _strip(outcome: Outcome, rows: int) -> tuple[str, str]:
    """The ranks beside the rows, and words for the caption."""
    plan = ShardPlan.of(outcome.args.shard_plan, rows, outcome.args.ranks)
    spans = [(rank, first, last) for rank in range(plan.size) for _, first, last in plan.blocks(rank).spans(rows)]
    if len(spans) > _STRIPS:
        return "", f" (not drawn: {plan.size} ranks take turns every {plan.block} rows)"
    drawn, unit = "", _SIDE / rows
    for rank, first, last in spans:
        top, height = _TOP + first * unit, (last - first) * unit
        drawn += (
            f'<rect x="{_LEFT - 22}" y="{top:.2f}" width="10" height="{height:.2f}" fill="{rank_colour(rank)}">'
            f"<title>rank {rank}: rows {first:,} to {last - 1:,}</title></rect>"
        )
        if height >= 11:
            drawn += f'<text x="{_LEFT - 26}" y="{top + height / 2 + 4:.2f}" text-anchor="end">{rank}</text>'
    return drawn, " (rank numbers where there is room)"


def _flag(row: int, rows: int, words: str) -> str:
    y = _TOP + (row + 0.5) * _SIDE / rows
    x = _LEFT - 1
    return (
        f'<path fill="#d55e00" stroke="currentColor" d="M{x} {y:.2f}l-10 -6v12z"><title>{html.escape(words)}</title>'
        f"</path>"
    )


def _axes(rows: int, keys: int) -> str:
    right, bottom = _LEFT + _SIDE, _TOP + _SIDE
    drawn = f'<rect class="axis" x="{_LEFT}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}"/>'
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        drawn += (
            f'<text x="{_LEFT + part * _SIDE}" y="{bottom + 16}" text-anchor="{anchor}">{int(part * keys):,}</text>'
        )
        at = _TOP + part * _SIDE + (10 if part == 0 else 0)
        drawn += f'<text x="{_LEFT - 44}" y="{at:.0f}" text-anchor="end">{int(part * rows):,}</text>'
    middle = _TOP + _SIDE / 4
    drawn += f'<text x="{(_LEFT + right) / 2}" y="{bottom + 36}" text-anchor="middle">tokens</text>'
    return drawn + f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">query rows</text>'


def _key() -> str:
    drawn = f'<text x="{_LEFT + _SIDE + 12}" y="{_TOP + 12}">selected</text>'
    for level, name in enumerate(LEVELS):
        y = _TOP + 22 + 20 * level
        drawn += f'<rect x="{_LEFT + _SIDE + 12}" y="{y}" width="16" height="14" fill="var(--l{level})"/>'
        drawn += f'<text x="{_LEFT + _SIDE + 34}" y="{y + 12}">{name}</text>'
    return drawn
