"""What `kpool verify` found, its exit code, and its two forms: a table for people, JSON for programs."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from torch import Tensor

from kpool.captures import CapturedCall
from kpool.cli import view
from kpool.cli.exits import DIFFERENT, OK, UNDECIDED
from kpool.cli.verdict import Expected, Judgement
from kpool_testing import Trace

_HOW = {
    "replay": "in turn, in this process",
    "fake": "simulated in this process",
    "gloo": "a process each",
    "nccl": "a process each",
}
_SHOWN = 10  # rows of another selection that are listed
VERDICTS = {OK: "identical", DIFFERENT: "different", UNDECIDED: "undecided"}


@dataclass(frozen=True)
class RankReport:
    """What one rank found.

    Attributes:
        rank: the rank; rows: rows it scored.
        work: pools it scored, as a share of all ranks' pools.
        seconds: time of its call; on "fake", where ranks take turns, its own processor time.
        sent, gathered: bytes it handed to the all-gather, and got back.
        differing_rows: rows that are not the unsharded call's, bit for bit; first_difference: the first of them,
            `[batch, row]`.
    """

    rank: int
    rows: int
    work: float
    seconds: float
    sent: int
    gathered: int
    differing_rows: int
    first_difference: list[int] | None


@dataclass(frozen=True)
class Outcome:
    """Everything one verification found.

    Attributes:
        args: the command's arguments; call: what was verified; seconds: time of the unsharded call.
        ranks: one report a rank; reference: the comparison with float64; expected: that with `--expect`, or None.
        tokens: int32 `[B, S, W]` of the unsharded call; trace: what the ranks sent.
    """

    args: argparse.Namespace
    call: CapturedCall
    seconds: float
    ranks: list[RankReport]
    reference: Judgement
    expected: Expected | None
    tokens: Tensor
    trace: Trace

    @property
    def code(self) -> int:
        """0 identical, 1 different, 2 undecided: more than 1 % of the sampled rows have no clear margin."""
        differing = any(report.differing_rows for report in self.ranks)
        if (
            differing
            or self.reference.wrong_keys
            or self.reference.wrong
            or (self.expected is not None and self.expected.wrong)
        ):
            return DIFFERENT
        return UNDECIDED if self.reference.undecided > 0.01 * self.reference.checked else OK

    def as_json(self) -> dict[str, Any]:
        """Everything the table says, and the margins behind it."""
        args, call = self.args, self.call
        rows, batch, heads, dim = call.q.shape
        described = {
            "source": str(args.input) if args.input else f"seed {args.seed}", "layout": args.layout, "rows": rows,
            "tokens": call.k.shape[0], "batch": batch, "heads": heads, "dim": dim, "pool_size": call.pool_size,
            "index_topk": call.index_topk, "numerics": call.numerics, "notes": call.notes,
        }  # fmt: skip
        names = ("ranks", "backend", "device", "impl", "order", "shard_plan")
        return {
            "verdict": VERDICTS[self.code],
            "exit_code": self.code,
            "call": described,
            "run": {name: getattr(args, name) for name in names} | {"unsharded_seconds": self.seconds},
            "ranks": [asdict(report) for report in self.ranks],
            "reference": asdict(self.reference),
            "expected": None if self.expected is None else asdict(self.expected),
        }

    def show(self) -> None:
        """Print the table and the verdict."""
        view.OUT.print(self._table())
        view.say(f"unsharded call: {view.duration(self.seconds)}, start-up included (for speed: kpool bench)")
        for line in self.lines():
            view.say(line)
        colour = {OK: "green", DIFFERENT: "red", UNDECIDED: "yellow"}[self.code]
        view.OUT.print(f"[bold {colour}]verdict: {VERDICTS[self.code]}[/]")

    def lines(self) -> list[str]:
        """What was found, a sentence a line, in rich's markup."""
        return [*self._ranks_lines(), *self._reference_lines(), *self._expected_lines()]

    def _table(self) -> Table:
        args, call = self.args, self.call
        rows, batch, heads, dim = call.q.shape
        source = args.input.name if args.input else f"{args.layout}, seed {args.seed}"
        title = (
            f"{rows:,} rows x {call.k.shape[0]:,} keys, B={batch} H={heads} D={dim} P={call.pool_size} "
            f"K={call.index_topk}, {source}\n"
            f"{args.ranks} ranks on {args.backend} ({_HOW[args.backend]}), {args.shard_plan} rows"
        )
        table = Table(title=title, title_justify="left")
        for name in ("rank", "rows", "work", "sent", "gathered", "against unsharded"):
            table.add_column(name, justify="right")
        for r in self.ranks:
            same = "[green]identical[/]" if not r.differing_rows else f"[red]{r.differing_rows:,} rows differ[/]"
            cells = (r.rank, f"{r.rows:,}", f"{r.work:.1%}", view.size(r.sent))
            table.add_row(*map(str, cells), view.size(r.gathered), same)
        return table

    def _ranks_lines(self) -> list[str]:
        differing = [r for r in self.ranks if r.differing_rows]
        if not differing:
            return [f"ranks: all {len(self.ranks)} bit-identical to the unsharded call"]
        return [
            f"[red]rank {r.rank}: {r.differing_rows:,} rows differ, the first is batch {r.first_difference[0]} "
            f"row {r.first_difference[1]}[/]"
            for r in differing
            if r.first_difference is not None
        ]

    def _reference_lines(self) -> list[str]:
        ref = self.reference
        clear, share = ref.checked - ref.undecided, ref.undecided / max(1, ref.checked)
        lines = [
            f"float64 reference: {ref.checked:,} rows, {clear:,} with a clear margin, "
            f"{ref.undecided:,} too close to a tie ({share:.2%}), {ref.wrong:,} wrong"
        ]
        if ref.smallest_margin is None and not ref.undecided:
            lines.append(
                "[yellow]no row had a choice to make: none sees more whole pools than it may select "
                f"(K={self.call.index_topk:,}); a longer call or a smaller K tests more[/]"
            )
        if ref.wrong_keys:
            lines.append(f"[red]{ref.wrong_keys:,} elements of the pooled keys are wrong[/]")
        return lines + [f"[red]  {difference}[/]" for difference in ref.differences]

    def _expected_lines(self) -> list[str]:
        if self.expected is None:
            return []
        e = self.expected
        lines = [
            f"expected selection: {e.rows:,} rows, {e.same:,} the same, {e.near_ties:,} differ at a near tie, "
            f"{e.wrong:,} differ with a clear margin"
        ]
        lines += [f"[red]  {difference}[/]" for difference in e.differences[:_SHOWN]]
        more = len(e.differences) - _SHOWN
        return lines + ([f"  and {more:,} more rows; --json lists all"] if more > 0 else [])
