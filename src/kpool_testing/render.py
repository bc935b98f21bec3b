"""A trace for people: text lanes for the terminal, and one HTML page that loads nothing from anywhere."""

from __future__ import annotations

import html
from collections import deque
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from kpool_testing.flight import POINT_TO_POINT
from kpool_testing.interconnect import INTERCONNECTS

if TYPE_CHECKING:
    from kpool_testing.trace import Call, Trace

MISSING, OUTSIDE = "(missing)", "."
_MAX_WIDTH = 150


@dataclass(eq=False)
class Step:
    """One collective as all its ranks saw it; `calls[rank]` is absent for a rank that never came."""

    group: str
    number: int
    members: tuple[int, ...]
    calls: dict[int, Call]

    @property
    def missing(self) -> list[int]:
        """Members that never made the call."""
        return [rank for rank in self.members if rank not in self.calls]

    @property
    def agrees(self) -> bool:
        """True if all members came with the same kind, dtype, shape and detail."""
        seen = {(call.kind, call.dtype, call.shape, call.detail) for call in self.calls.values()}
        uneven = {"all_to_all_single", "all_to_all", "scatter", "gather"}
        if all(call.kind in uneven or call.kind.endswith(("_object", "_object_list")) for call in self.calls.values()):
            seen = {(call.kind, "", (), "") for call in self.calls.values()}
        return len(seen) == 1 and not self.missing


def steps(trace: Trace) -> list[Step]:
    """The calls of a trace lined up.

    The n-th collective of each rank on a group makes one step; a send or a receive is a step of its own. Steps come in
    an order that agrees with every rank's own, as far as there is one.
    """
    found: dict[tuple[str, str, int], Step] = {}
    counts: dict[tuple[int, str], int] = {}
    queues: dict[int, deque[Step]] = {rank: deque() for rank in range(trace.size)}
    for index, call in enumerate(trace):
        if call.kind in POINT_TO_POINT:
            step = Step(call.group, call.seq, (call.rank,), {call.rank: call})
            found["p2p", call.group, index] = step
            queues[call.rank].append(step)
            continue
        number = counts.get((call.rank, call.group), 0)
        counts[call.rank, call.group] = number + 1
        key = ("all", call.group, number)
        step = found.setdefault(key, Step(call.group, number, call.ranks, {}))
        step.calls[call.rank] = call
        queues[call.rank].append(step)
    return _ordered(queues)


def _ordered(queues: dict[int, deque[Step]]) -> list[Step]:
    """Take a step once it is next for all its ranks; where ranks went in different orders, one of them goes ahead."""
    rows: list[Step] = []
    while any(queues.values()):
        heads = list({id(queue[0]): queue[0] for queue in queues.values() if queue}.values())
        ready = [step for step in heads if all(queues[rank][0] is step for rank in step.calls)]
        for step in ready or heads[:1]:
            rows.append(step)
            for rank in step.calls:
                queues[rank].remove(step)
    return rows


def cell(call: Call) -> str:
    """One call in a few words: `all_gather_single f32[2, 3]`."""
    dtype = call.dtype.replace("float", "f").replace("uint", "u").replace("int", "i").replace("complex", "c")
    shape = f" {dtype}{list(call.shape)}" if call.dtype else ""
    return f"{call.kind}{shape}" + (f" {call.detail}" if call.detail else "")


def site(call: Call) -> str:
    """`file:line` with the last two parts of the path."""
    file, _, line = call.site.rpartition(":")
    return "/".join(PurePath(file).parts[-2:]) + f":{line}"


def lanes(trace: Trace, width: int = 34) -> str:
    """The run as text: one column a rank, one line a collective, calls that disagree or lack a rank marked with `!`.

    With more columns than fit in a terminal, ranks that did the same share one entry ("ranks 0-6: ...").
    `width` is the widest a column gets.
    """
    rows = steps(trace)
    if not rows:
        return "no collectives"
    width = min(width, max(len(cell(call)) for call in trace) + 1, 80)
    width = max(width, len(MISSING) + 1)
    if trace.size * width + 12 > _MAX_WIDTH:
        return "\n".join(_folded(row) for row in rows)
    head = " " * 5 + "".join(f"rank {rank}".ljust(width) for rank in range(trace.size)).rstrip()
    lines = [head]
    for index, row in enumerate(rows):
        texts = [_lane(row, rank)[: width - 1].ljust(width) for rank in range(trace.size)]
        lines.append(f"{'!' if not row.agrees else ' '}{index:>3} " + "".join(texts) + _place(row))
    return "\n".join(lines)


def _lane(row: Step, rank: int) -> str:
    if rank in row.calls:
        return cell(row.calls[rank])
    return MISSING if rank in row.members else OUTSIDE


def _place(row: Step) -> str:
    places = sorted({site(call) for call in row.calls.values()})
    where = " ".join(places[:2]) + (" ..." if len(places) > 2 else "")
    return where if row.group == "world" else f"{where} [{row.group}]"


def _folded(row: Step) -> str:
    texts: dict[str, list[int]] = {}
    for rank in row.members:
        texts.setdefault(_lane(row, rank), []).append(rank)
    parts = [f"ranks {_ranges(ranks)}: {text}" for text, ranks in texts.items()]
    return f"{'!' if not row.agrees else ' '} #{row.number} " + "; ".join(parts) + f"  {_place(row)}"


def _ranges(ranks: list[int]) -> str:
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{low}-{high}" if high > low else str(low) for low, high in parts)


# Okabe and Ito's colours, told apart with any colour vision; each call also carries its name as text.
_COLOURS = {
    "all_gather": "#0072b2",
    "all_reduce": "#d55e00",
    "reduce": "#e69f00",
    "all_to_all": "#cc79a7",
    "broadcast": "#009e73",
    "barrier": "#666666",
    "send": "#56b4e9",
    "isend": "#56b4e9",
    "recv": "#56b4e9",
    "irecv": "#56b4e9",
}

STYLE = """
:root { color-scheme: light dark; --line: #8888; --soft: #8882; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 96rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
pre, td, th.n { font-family: ui-monospace, Consolas, monospace; font-size: 13px; }
pre { background: var(--soft); padding: .8rem; white-space: pre-wrap; border-left: .3rem solid #d55e00; }
.scroll { overflow-x: auto; } table { border-collapse: separate; border-spacing: 3px; }
th { text-align: left; font-weight: 600; white-space: nowrap; padding: .2rem .5rem; }
td { padding: .3rem .5rem; vertical-align: top; background: var(--soft); border-left: .35rem solid var(--c, #8888); }
td small { display: block; opacity: .75; overflow-wrap: anywhere; }
td.out { background: none; border: none; } td.gone { background: none; border: 2px dashed currentColor; }
tr.bad td.call { outline: 2px solid currentColor; } .flag { font-weight: 700; }
.sum td { text-align: right; border: none; } .sum td:first-child { text-align: left; }
"""


def html_page(trace: Trace, title: str = "collectives", note: str = "") -> str:
    """The run as one HTML page: ranks side by side, calls that disagree outlined and marked, bytes and estimates below.

    Colours are a second sign only; every fact is in the text. Nothing is loaded from elsewhere, no script runs.
    """
    warning = f"<h2>What went wrong</h2><pre>{html.escape(note)}</pre>" if note else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f"<p>{len(trace)} calls by {trace.size} ranks, {trace.total_bytes():,} bytes sent.</p>{warning}"
        f"{html_sections(trace)}</body></html>\n"
    )


def html_sections(trace: Trace) -> str:
    """The calls, bytes and estimates of `html_page`, for a page that carries `STYLE` and more than a trace."""
    ranks = range(trace.size)
    head = "".join(f'<th scope="col">rank {rank}</th>' for rank in ranks)
    body = "".join(_html_row(index, row, ranks) for index, row in enumerate(steps(trace)))
    return (
        f'<h2>Calls</h2><div class="scroll"><table><thead><tr><th scope="col">#</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{_html_bytes(trace)}{_html_estimates(trace)}"
    )


def _html_row(index: int, row: Step, ranks: range) -> str:
    flag = "" if row.agrees else ' <span class="flag">&#9888; differs</span>'
    if row.missing:
        flag = ' <span class="flag">&#9888; ranks missing</span>'
    group = "" if row.group == "world" else f"<br><small>{html.escape(row.group)}</small>"
    cells = "".join(_html_cell(row, rank) for rank in ranks)
    state = "" if row.agrees else ' class="bad"'
    return f'<tr{state}><th scope="row" class="n">{index}{flag}{group}</th>{cells}</tr>'


def _html_cell(row: Step, rank: int) -> str:
    if rank not in row.calls:
        return '<td class="gone">never called</td>' if rank in row.members else '<td class="out"></td>'
    call = row.calls[rank]
    colour = next((value for key, value in _COLOURS.items() if call.kind.startswith(key)), "#666666")
    return (
        f'<td class="call" style="--c:{colour}" title="{html.escape(str(call), quote=True)}">'
        f"{html.escape(cell(call))}<small>{call.bytes:,} B &middot; {html.escape(site(call))}</small></td>"
    )


def _html_bytes(trace: Trace) -> str:
    kinds = sorted({call.kind for call in trace})
    head = "".join(f'<th scope="col">{html.escape(kind)}</th>' for kind in kinds)
    lines = ""
    for rank in range(trace.size):
        values = "".join(f"<td>{trace.total_bytes(rank, kind):,}</td>" for kind in kinds)
        lines += f'<tr><th scope="row">rank {rank}</th>{values}<td>{trace.total_bytes(rank):,}</td></tr>'
    return (
        f'<h2>Bytes sent</h2><div class="scroll"><table class="sum"><thead><tr><th></th>{head}'
        f'<th scope="col">all</th></tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _html_estimates(trace: Trace) -> str:
    lines = "".join(
        f'<tr><th scope="row">{name}</th><td>{link.latency * 1e6:.0f} &micro;s</td>'
        f"<td>{link.bandwidth / 1e9:g} GB/s</td><td>{trace.estimate(link) * 1e6:,.1f} &micro;s</td></tr>"
        for name, link in INTERCONNECTS.items()
    )
    return (
        "<h2>Estimated time in collectives, slowest rank</h2><p>latency + bytes / bandwidth per message, rings and "
        f'trees; no overlap, no congestion.</p><div class="scroll"><table class="sum"><tbody>{lines}</tbody>'
        "</table></div>"
    )
