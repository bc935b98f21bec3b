"""The calls of a run as one HTML page that loads nothing from anywhere and runs no script."""

from __future__ import annotations

import html

from kpool_testing.record.interconnect import INTERCONNECTS
from kpool_testing.record.lanes import Step, cell, site, steps
from kpool_testing.record.log import CallLog

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


def html_page(trace: CallLog, title: str = "collectives", note: str = "") -> str:
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


def html_sections(trace: CallLog) -> str:
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


def _html_bytes(trace: CallLog) -> str:
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


def _html_estimates(trace: CallLog) -> str:
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
