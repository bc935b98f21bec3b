"""The picture of `kpool plan --plot`: who scores what, how much, what goes over the wire, and an estimate of the time.

triangle, one a plan    rows x tokens, coloured by the rank that scores the row
work                    share of the scored pools, by rank
bytes                   what each rank receives, beside what gathering tokens or scores instead would take
time                    the estimated step, part by part; and its total against length, with the break-even lengths
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from kpool.cli import plan as planning
from kpool.cli import view
from kpool.cli.estimate import PARTS, Step, span
from kpool.cli.plan import Share
from kpool.cli.plot import BLACK, BLUE, GREEN, ORANGE, PURPLE, RANKS, SKY, VERMILLION, figure, length_axis
from kpool.sharding import PLANS, ShardPlan
from kpool.windows import RowWindows

_PIXELS = 480  # of a triangle's side
_STRIPES = 48  # more than these cannot be told apart
_LOOKS = {"unsharded": (BLACK, "s"), "contiguous": (VERMILLION, "^"), "block_cyclic": (BLUE, "o")}
_PART_COLOURS = dict(zip(PARTS, (BLUE, SKY, ORANGE, PURPLE, GREEN), strict=True))
_HATCHES = dict(zip(PARTS, ("", "//", "..", "xx", "\\\\"), strict=True))
Times = dict[str, tuple[Step, Step]]
Pays = dict[str, tuple[int | None, int | None]]


def picture(
    args: argparse.Namespace, windows: RowWindows, shares: dict[str, list[Share]], times: Times, pays: Pays
) -> Any:
    """The whole figure; see the module."""
    drawn = figure(16, 9.6)
    grid = drawn.subplots(2, 3)
    for axes, kind in zip(grid[0], PLANS, strict=False):
        triangle(axes, kind, windows, args, planning.balance(shares[kind]))
    work(grid[0][2], shares)
    wire(grid[1][0], shares, args)
    parts(grid[1][1], times, args)
    lengths(grid[1][2], pays, args)
    drawn.suptitle(
        f"k-pool selection of {args.tokens:,} {args.layout} tokens on {args.ranks} ranks: "
        f"B={args.batch} H={args.heads} D={args.dim} P={args.pool} K={args.topk}",
        fontsize=14,
    )
    return drawn


def owners(kind: str, windows: RowWindows, args: argparse.Namespace) -> tuple[np.ndarray, int]:
    """Who scores what, seen from afar.

    Returns:
        image int64 `[pixels, pixels]`, rows x tokens: the rank, -1 where the row sees nothing, -2 where it sees
        everything it may choose and so scores nothing; and how many blocks of rows it shows, where there are more.
    """
    rows = args.tokens
    pixels = min(_PIXELS, rows)
    plan = ShardPlan.of(kind, rows, args.ranks)
    blocks = -(-rows // plan.block)
    stripes = min(blocks, max(args.ranks, _STRIPES // args.ranks * args.ranks)) if kind != "contiguous" else blocks
    at = np.arange(pixels) * rows // pixels
    row_rank = (at * stripes // rows if stripes < blocks else at // plan.block) % args.ranks
    start, end = (edge[0].numpy()[at] for edge in (windows.start, windows.end))
    column = np.arange(pixels) * rows // pixels
    scored = planning.scored_pools(windows, args.order, args.topk // args.pool).numpy()[at]
    image = np.where(scored > 0, row_rank, -2)[:, None]
    seen = (column[None] >= start[:, None]) & (column[None] < end[:, None])
    return np.where(seen, image, -1), stripes if stripes < blocks else 0


def triangle(axes: Any, kind: str, windows: RowWindows, args: argparse.Namespace, balance: float) -> None:
    """Rows x tokens, coloured by the rank that scores the row."""
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    image, drawn = owners(kind, windows, args)
    palette = np.array([to_rgb(colour) for colour in RANKS])
    pixels = palette[np.maximum(image, 0) % len(RANKS)]
    pixels[image == -1], pixels[image == -2] = 1.0, 0.8
    size = args.tokens
    axes.imshow(pixels, extent=(0, size, size, 0), interpolation="nearest", aspect="auto")
    axes.set(xlabel="tokens a row sees", ylabel="query rows")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_major_locator(_locator())
    block = ShardPlan.of(kind, size, args.ranks).block
    note = f"\n{-(-size // block):,} blocks of {block} rows, drawn as {drawn}" if drawn else ""
    axes.set_title(f"{kind}: busiest rank / mean {balance:.2f}{note}", fontsize=11)
    shown = min(args.ranks, len(RANKS))
    handles = [Patch(color=RANKS[rank], label=f"rank {rank}") for rank in range(shown)]
    if (image == -2).mean() > 0.001:
        handles.append(Patch(color="0.8", label="nothing to score"))
    title = f"colours repeat every {shown} ranks" if args.ranks > shown else None
    if args.layout == "causal":
        axes.legend(handles=handles, loc="upper right", fontsize=9, ncols=2, title=title, title_fontsize=9)
    else:
        axes.legend(handles=handles, loc="lower left", fontsize=8, ncols=2, title=title, title_fontsize=8)
    if args.ranks <= 16 and kind == "contiguous":
        _number(axes, args)


def _locator() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=4, integer=True)


def _number(axes: Any, args: argparse.Namespace) -> None:
    """Write each rank beside its rows, so that colours need not be matched."""
    plan = ShardPlan.of("contiguous", args.tokens, args.ranks)
    for rank in range(args.ranks):
        _, first, last = next(iter(plan.blocks(rank).spans(args.tokens)), (0, 0, 0))
        if last > first:
            axes.text(
                0.012, 1 - (first + last) / 2 / args.tokens, str(rank), transform=axes.transAxes, va="center",
                fontsize=9, bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none"},
            )  # fmt: skip


def work(axes: Any, shares: dict[str, list[Share]]) -> None:
    """Share of the scored pools, by rank, one bar a plan, and the mean."""
    width = 0.8 / len(shares)
    for place, (kind, each) in enumerate(shares.items()):
        at = [share.rank + (place - (len(shares) - 1) / 2) * width for share in each]
        axes.bar(at, [100 * share.work for share in each], width, color=_LOOKS[kind][0], label=kind)
    ranks = len(next(iter(shares.values())))
    axes.axhline(100 / ranks, color=BLACK, linestyle="--", linewidth=1, label="equal shares")
    axes.set(xlabel="rank", ylabel="scored pools (% of all)", title="work")
    axes.set_xticks(range(ranks) if ranks <= 16 else range(0, ranks, -(-ranks // 16)))
    axes.margins(y=0.25)
    axes.legend(loc="upper left", fontsize=9)


def wire(axes: Any, shares: dict[str, list[Share]], args: argparse.Namespace) -> None:
    """Bytes each rank receives, for the plans and for what could be gathered instead."""
    from matplotlib.ticker import LogLocator, NullLocator

    others = args.batch * args.tokens * (args.ranks - 1) / args.ranks
    bars = [(f"pool ids,\n{kind}", (args.ranks - 1) * each[0].sent, _LOOKS[kind][0]) for kind, each in shares.items()]
    bars += [
        ("if tokens were\ngathered", others * (args.topk + args.pool - 1) * 4, "0.6"),
        ("if scores were\ngathered", others * (args.tokens // args.pool) * 4, "0.6"),
    ]
    names, values, colours = zip(*bars, strict=True)
    drawn = axes.barh(names, values, color=colours, height=0.6)
    axes.bar_label(drawn, [view.size(value) for value in values], padding=4, fontsize=10)
    if any(values):
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(v for v in values if v) / 4, max(values) * 32)
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=5))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: view.size(value).replace(".0", ""))
    axes.tick_params(axis="x", labelsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="bytes per call, logarithmic", title="received by each rank from the others")


def parts(axes: Any, times: Times, args: argparse.Namespace) -> None:
    """The estimated step, part by part, between the two ends of the card's rates; whiskers show the ends."""
    scale, unit = _unit(max(slow.total for _, slow in times.values()))
    names = list(times)
    bottom = np.zeros(len(names))
    for part in PARTS:
        values = np.array([scale * (getattr(f, part) + getattr(s, part)) / 2 for f, s in times.values()])
        axes.bar(names, values, 0.55, bottom, color=_PART_COLOURS[part], hatch=_HATCHES[part], edgecolor="white",
                 label=part)  # fmt: skip
        bottom += values
    ends = np.array([[scale * step.total for step in both] for both in times.values()]).T
    axes.errorbar(names, bottom, [bottom - ends[0], ends[1] - bottom], fmt="none", ecolor=BLACK, capsize=6)
    for place, (fast, slow) in enumerate(times.values()):
        axes.annotate(span(fast.total, slow.total), (place, scale * slow.total), (0, 5), textcoords="offset points",
                      ha="center", fontsize=10)  # fmt: skip
    axes.margins(y=0.15)
    card = planning.card_of(args).name
    axes.set(ylabel=f"time per call ({unit})", title=f"estimate, not measured: {card}, {args.interconnect}")
    axes.legend(fontsize=9)


def _unit(longest: float) -> tuple[float, str]:
    return next((s, u) for s, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if longest * s >= 1 or u == "µs")


def lengths(axes: Any, pays: Pays, args: argparse.Namespace) -> None:
    """Total estimated time against length, as bands between the ends of the rates; lines where a plan starts to pay."""
    span_of = [1 << power for power in range(10, 21)]
    found = [planning.times_at(args, tokens) for tokens in span_of]
    for name, (colour, marker) in _LOOKS.items():
        ends = np.array([[1e3 * step.total for step in each[name]] for each in found]).T
        axes.fill_between(span_of, *ends, color=colour, alpha=0.2, linewidth=0)
        axes.plot(span_of, ends.mean(0), color=colour, marker=marker, markersize=4, label=name)
    if args.ranks > 1:
        for (kind, (fast, slow)), style in zip(pays.items(), (":", "--"), strict=True):
            if fast is not None and slow is not None:
                label = f"{kind} pays from {planning.pays_text((fast, slow))}"
                axes.axvline(max(fast, slow), color=_LOOKS[kind][0], linestyle=style, linewidth=1.2, label=label)
    axes.set_yscale("log")
    length_axis(axes, span_of)
    axes.grid(alpha=0.3)
    axes.set(ylabel="time per call (ms)", title="the same estimate against length")
    axes.legend(fontsize=9)
