"""`kpool plan`: who would score what, and what it costs, under each shard plan. Arithmetic alone, nothing is scored.

Seconds are estimates for a card and a link (`kpool.cli.estimate`); `--plot` draws everything as one picture.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kpool.cli import estimate, view
from kpool.cli.estimate import CARDS, PARTS, Card, Geometry, Step
from kpool.cli.exits import OK, CommandError
from kpool.cli.workload import add_geometry, document_edges, positive
from kpool.dispatch import chunk_bytes
from kpool.sharding import PLANS, ShardPlan
from kpool.visibility import Visibility
from kpool.windows import RowWindows
from kpool_testing.record.interconnect import INTERCONNECTS


@dataclass(frozen=True)
class Share:
    """What one rank does under one plan, for one layer and one call.

    Attributes:
        rank: the rank; rows: its real rows; padding: rows added to make all ranks equal.
        scored: pools it scores, all batch entries together.
        work: the same as a share of all ranks' work.
        sent: bytes of pool ids it hands to the all-gather.
    """

    rank: int
    rows: int
    padding: int
    scored: int
    work: float
    sent: int


@dataclass(frozen=True)
class Memory:
    """Bytes every rank holds: its ids, everyone's ids, the token ids it returns, and the score buffer's limit."""

    local_ids: int
    gathered_ids: int
    tokens: int
    score_buffer: int


def add_parser(commands: Any) -> None:
    """Declare `kpool plan`."""
    parser = commands.add_parser(
        "plan",
        help="rows, work, memory and bytes per rank under each shard plan",
        description="Who would score which rows, what that costs, and from which length sharding pays. "
        "Arithmetic alone: nothing is scored, and seconds are estimates.",
    )
    parser.add_argument("--tokens", type=positive, default=524_288, help="query rows and keys (default: 524288)")
    parser.add_argument("--ranks", type=positive, default=8, help="ranks that share the rows (default: 8)")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--layout", choices=["causal", "packed"], default="causal")
    parser.add_argument("--documents", metavar="N,N,...", help="document lengths of --layout packed (default: seeded)")
    parser.add_argument("--order", choices=["score", "position"], default="score", help="position skips short rows")
    parser.add_argument("--device", default="cpu", help="whose default score buffer to count (default: cpu)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--card", choices=sorted(CARDS), default="h200", help="whose rates to assume (default: h200)")
    parser.add_argument(
        "--score-tflops",
        type=float,
        metavar="X",
        help="rate of scoring, if you measured it (default: the card's range)",
    )
    parser.add_argument(
        "--interconnect", choices=sorted(INTERCONNECTS), default="nvlink4", help="between ranks (default: nvlink4)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it all, png or svg")
    add_geometry(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print each plan's table, or all as JSON."""
    if args.topk % args.pool:
        raise CommandError(f"--topk: expected a multiple of --pool {args.pool}, got {args.topk}")
    if args.score_tflops is not None and not args.score_tflops > 0:
        raise CommandError(f"--score-tflops: expected more than 0, got {args.score_tflops}")
    if args.plot:
        from kpool.cli import plot, plot_plan  # matplotlib, before any work

        plot.check(args.plot)
    windows = layout_windows(args)
    shares = {kind: plan_shares(kind, windows, args) for kind in PLANS}
    memory = {kind: plan_memory(kind, args) for kind in PLANS}
    times = step_times(args, shares)
    pays = {kind: break_even(kind, args) for kind in PLANS}
    if args.plot:
        plot.save(plot_plan.picture(args, windows, shares, times, pays), args.plot)
        view.wrote(args.plot)
    if args.json:
        view.print_json({
            "tokens": args.tokens, "ranks": args.ranks, "batch": args.batch, "layout": args.layout, "order": args.order,
            "estimate": estimate_json(args, times, pays),
            "plans": {
                kind: {"ranks": [asdict(share) for share in shares[kind]], "balance": balance(shares[kind]),
                       "memory": asdict(memory[kind])}
                for kind in PLANS
            },
        })  # fmt: skip
        return OK
    for kind in PLANS:
        view.OUT.print(table(kind, shares[kind], args))
        view.say(summary(shares[kind], memory[kind], args.device) + "\n")
    view.OUT.print(estimate_table(args, times, pays))
    view.say("gather: the all-gather. reorder: putting its rows back in order.")
    view.say("same: pooling, and expanding to tokens, which every rank does for all rows.")
    view.say("pays from: the shortest length at which sharding is faster.")
    return OK


def layout_windows(args: argparse.Namespace) -> RowWindows:
    """The row windows of the layout in `args`."""
    if args.layout == "causal":
        visibility = Visibility.causal(args.tokens)
    else:
        visibility = Visibility.packed(_edges(args))
    return visibility.windows(rows=args.tokens, tokens=args.tokens, batch=args.batch, pool_size=args.pool)


def _edges(args: argparse.Namespace) -> Tensor:
    if args.documents is None:
        return document_edges(args.tokens, args.seed)
    try:
        lengths = [int(text) for text in args.documents.split(",")]
    except ValueError:
        raise CommandError(f"--documents: expected lengths such as 1000,24, got {args.documents!r}") from None
    if min(lengths) < 0 or sum(lengths) != args.tokens:
        raise CommandError(f"--documents: expected lengths that add up to --tokens {args.tokens}, got {sum(lengths)}")
    return torch.tensor([0, *lengths]).cumsum(0)


def scored_pools(windows: RowWindows, order: str, budget: int) -> Tensor:
    """int64 `[S]`: pools each row scores; rows with no choice to make score none with `order="position"`."""
    visible = (windows.pool_hi - windows.pool_lo).to(torch.int64)[0]
    return visible.masked_fill(visible <= budget, 0) if order == "position" else visible


def plan_shares(kind: str, windows: RowWindows, args: argparse.Namespace) -> list[Share]:
    """Each rank's share under the plan called `kind`."""
    work = scored_pools(windows, args.order, args.topk // args.pool) * args.batch
    before = torch.nn.functional.pad(work.cumsum(0), (1, 0))  # pools of all rows before a row
    total = int(before[-1])
    plan = ShardPlan.of(kind, args.tokens, args.ranks)
    sent = args.batch * plan.rows_per_rank * (args.topk // args.pool) * 4 if args.ranks > 1 else 0
    shares = []
    for rank in range(args.ranks):
        spans = torch.tensor([span[1:] for span in plan.blocks(rank).spans(args.tokens)], dtype=torch.int64)
        first, last = spans.view(-1, 2).T
        mine, rows = int((before[last] - before[first]).sum()), int((last - first).sum())
        padding = plan.rows_per_rank - rows
        shares.append(Share(rank, rows, padding, mine, mine / total if total else 0.0, sent))
    return shares


def plan_memory(kind: str, args: argparse.Namespace) -> Memory:
    """Bytes a rank needs besides inputs."""
    local = args.batch * ShardPlan.of(kind, args.tokens, args.ranks).rows_per_rank * (args.topk // args.pool) * 4
    tokens = args.batch * args.tokens * (args.topk + args.pool - 1) * 4
    return Memory(
        local, local * args.ranks if args.ranks > 1 else 0, tokens, chunk_bytes(None, torch.device(args.device))
    )


def balance(shares: list[Share]) -> float:
    """Work of the busiest rank over the mean: 1.0 is perfect, and the time all ranks take goes with it."""
    mean = sum(share.scored for share in shares) / len(shares)
    return max(share.scored for share in shares) / mean if mean else 1.0


def table(kind: str, shares: list[Share], args: argparse.Namespace) -> Table:
    """One row a rank."""
    title = f"{kind}: {args.tokens:,} rows, {args.layout}, {args.ranks} ranks"
    out = Table(title=title, title_justify="left")
    for name in ("rank", "rows", "padding", "scored pools", "work", "sent per call"):
        out.add_column(name, justify="right")
    for s in shares:
        cells = (s.rank, f"{s.rows:,}", f"{s.padding:,}", f"{s.scored:,}", f"{s.work:.1%}", view.size(s.sent))
        out.add_row(*map(str, cells))
    return out


def summary(shares: list[Share], memory: Memory, device: str) -> str:
    """Balance and memory in two lines."""
    return (
        f"busiest rank / mean: {balance(shares):.2f}\n"
        f"memory per rank: ids {view.size(memory.local_ids)}, gathered {view.size(memory.gathered_ids)}, "
        f"tokens {view.size(memory.tokens)}, score buffer at most {view.size(memory.score_buffer)} ({device})"
    )


def card_of(args: argparse.Namespace) -> Card:
    """The card of `args`, at the measured rate if one is given."""
    card = CARDS[args.card]
    if args.score_tflops is None:
        return card
    rate = args.score_tflops * 1e12
    return Card(f"{card.name} at {args.score_tflops:g} TF/s", (rate, rate), card.cache, card.memory)


def step_times(args: argparse.Namespace, shares: dict[str, list[Share]]) -> dict[str, tuple[Step, Step]]:
    """Estimated `(fast, slow)` step of the unsharded call, named "unsharded", and of each plan in `shares`."""
    call = Geometry(args.tokens, args.batch, args.heads, args.dim, args.pool, args.topk)
    card, link = card_of(args), INTERCONNECTS[args.interconnect]
    total = sum(share.scored for share in next(iter(shares.values())))
    times = {"unsharded": (estimate.step(total, call, card, fast=True), estimate.step(total, call, card, fast=False))}
    for kind, each in shares.items():
        busiest, sent = max(share.scored for share in each), each[0].sent
        fast, slow = (
            estimate.sharded_step(busiest, sent, kind, args.ranks, call, card, link, fast=fast)
            for fast in (True, False)
        )
        times[kind] = (fast, slow)
    return times


def at_length(args: argparse.Namespace, tokens: int) -> argparse.Namespace:
    """The same question for another length; documents keep their shares of it."""
    changed: dict[str, Any] = {"tokens": tokens}
    if args.layout == "packed":
        edges = (_edges(args).double() * tokens / args.tokens).round().to(torch.int64)
        changed["documents"] = ",".join(map(str, edges.diff().tolist()))
    return argparse.Namespace(**{**vars(args), **changed})


def times_at(args: argparse.Namespace, tokens: int, kinds: tuple[str, ...] = PLANS) -> dict[str, tuple[Step, Step]]:
    """`step_times` of another length."""
    other = at_length(args, tokens)
    windows = layout_windows(other)
    return step_times(other, {kind: plan_shares(kind, windows, other) for kind in kinds})


def break_even(kind: str, args: argparse.Namespace) -> tuple[int | None, int | None]:
    """From how many tokens the plan beats the unsharded call, by the `(fast, slow)` end of the rates; None: never."""
    if args.ranks == 1:
        return None, None

    def pays(tokens: int, end: int) -> bool:
        times = times_at(args, tokens, (kind,))
        return times[kind][end].total < times["unsharded"][end].total

    return estimate.break_even(lambda n: pays(n, 0)), estimate.break_even(lambda n: pays(n, 1))


def estimate_json(
    args: argparse.Namespace, times: dict[str, tuple[Step, Step]], pays: dict[str, tuple[int | None, int | None]]
) -> dict[str, Any]:
    """The estimate for programs, seconds."""
    ends = {
        name: {end: {**asdict(step), "total": step.total} for end, step in zip(("fast", "slow"), both, strict=True)}
        for name, both in times.items()
    }
    breaks = {kind: {"fast": fast, "slow": slow} for kind, (fast, slow) in pays.items()}
    return {"card": card_of(args).name, "interconnect": args.interconnect, "seconds": ends, "pays_from_tokens": breaks}


def pays_text(both: tuple[int | None, int | None]) -> str:
    """A break-even length for people."""
    if both[0] is None or both[1] is None:
        return "-"
    low, high = sorted((both[0], both[1]))
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def estimate_table(
    args: argparse.Namespace, times: dict[str, tuple[Step, Step]], pays: dict[str, tuple[int | None, int | None]]
) -> Table:
    """One column for the unsharded step and one for each plan."""
    title = f"estimate, not measured: slowest rank, {card_of(args).name}, {args.interconnect}"
    out = Table("part", title=title, title_justify="left")
    for name in times:
        out.add_column(name, justify="right")
    for part in (*PARTS, "total"):
        cells = (estimate.span(getattr(fast, part), getattr(slow, part)) for fast, slow in times.values())
        out.add_row(part, *cells, end_section=part in (PARTS[-1], "total"))
    out.add_row("speedup", *(speedup(times["unsharded"], both) for both in times.values()))
    out.add_row("pays from, tokens", *(pays_text(pays.get(name, (None, None))) for name in times))
    return out


def speedup(whole: tuple[Step, Step], both: tuple[Step, Step]) -> str:
    """How many times faster than `whole`, at either end of the rates."""
    ratios = sorted(w.total / s.total for w, s in zip(whole, both, strict=True))
    return "-".join(dict.fromkeys(f"{ratio:.1f}" for ratio in ratios))
