"""`kpool plan`: who would score what, and what it costs, under each shard plan. Arithmetic alone, nothing is scored."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kpool.cli import view
from kpool.cli.exits import OK, CommandError
from kpool.cli.workload import document_edges, positive
from kpool.dispatch import chunk_bytes
from kpool.sharding import PLANS, ShardPlan
from kpool.visibility import Visibility
from kpool.windows import RowWindows


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
    parser = commands.add_parser("plan", help="rows, work, memory and bytes per rank under each shard plan")
    parser.add_argument("--tokens", type=positive, default=524_288, help="query rows and keys (default: 524288)")
    parser.add_argument("--ranks", type=positive, default=8, help="ranks that share the rows (default: 8)")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--layout", choices=["causal", "packed"], default="causal")
    parser.add_argument("--documents", metavar="N,N,...", help="document lengths of --layout packed (default: seeded)")
    parser.add_argument("--order", choices=["score", "position"], default="score", help="position skips short rows")
    parser.add_argument("--pool", type=positive, default=4, metavar="P")
    parser.add_argument("--topk", type=positive, default=2048, metavar="K")
    parser.add_argument("--device", default="cpu", help="whose default score buffer to count (default: cpu)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print each plan's table, or all as JSON."""
    if args.topk % args.pool:
        raise CommandError(f"--topk: expected a multiple of --pool {args.pool}, got {args.topk}")
    windows = layout_windows(args)
    shares = {kind: plan_shares(kind, windows, args) for kind in PLANS}
    memory = {kind: plan_memory(kind, args) for kind in PLANS}
    if args.json:
        view.print_json({
            "tokens": args.tokens, "ranks": args.ranks, "batch": args.batch, "layout": args.layout, "order": args.order,
            "plans": {
                kind: {"ranks": [asdict(share) for share in shares[kind]], "balance": balance(shares[kind]),
                       "memory": asdict(memory[kind])}
                for kind in PLANS
            },
        })  # fmt: skip
        return OK
    for kind in PLANS:
        view.OUT.print(table(kind, shares[kind], args))
        view.OUT.print(summary(shares[kind], memory[kind]), "")
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
    total = int(work.sum())
    plan = ShardPlan.of(kind, args.tokens, args.ranks)
    sent = args.batch * plan.rows_per_rank * (args.topk // args.pool) * 4 if args.ranks > 1 else 0
    shares = []
    for rank in range(args.ranks):
        rows = plan.rows(rank)
        mine = int(work[rows].sum())
        padding = plan.rows_per_rank - len(rows)
        shares.append(Share(rank, len(rows), padding, mine, mine / total if total else 0.0, sent))
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


def summary(shares: list[Share], memory: Memory) -> str:
    """Balance and memory in two lines."""
    return (
        f"busiest rank / mean: {balance(shares):.2f}\n"
        f"memory per rank: ids {view.size(memory.local_ids)}, gathered {view.size(memory.gathered_ids)}, "
        f"tokens {view.size(memory.tokens)}, score buffer at most {view.size(memory.score_buffer)}"
    )
