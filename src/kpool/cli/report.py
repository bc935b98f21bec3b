"""`kpool verify --report`: one HTML page of verdict, ranks, a map of the selection, calls and environment.

The page loads nothing from anywhere and runs no script; its own policy forbids both. It follows the reader's choice of
light or dark. Colours are a second sign only: whatever they say is also in words.
"""

from __future__ import annotations

import argparse
import datetime
import html
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from kpool.cli import info, view
from kpool.cli.exits import DIFFERENT, OK, UNDECIDED, CommandError
from kpool.cli.heatmap import heat_map, rank_colour
from kpool.cli.outcome import VERDICTS, Outcome
from kpool_testing import CollectiveError
from kpool_testing.record.page import STYLE, html_sections

_COLOURS = {OK: "#009e73", DIFFERENT: "#d55e00", UNDECIDED: "#e69f00"}
_SIGNS = {OK: "&#10003;", DIFFERENT: "&#10007;", UNDECIDED: "?"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_OWN_STYLE = """
:root { --l0: #e3e5e8; --l1: #b5d4ea; --l2: #82b6da; --l3: #4c93c4; --l4: #1f6aa5; --l5: #083d6e; }
@media (prefers-color-scheme: dark) {
  :root { --l0: #30343a; --l1: #1f4a6b; --l2: #2f6f9f; --l3: #539bcd; --l4: #8fc4ea; --l5: #d8eeff; }
}
.verdict { border-left: .5rem solid var(--c); background: var(--soft); padding: .6rem 1rem; font-size: 1.2rem; }
.verdict b { text-transform: capitalize; } ul { padding-left: 1.2rem; } figure { margin: 0; }
.bar { display: inline-block; height: .7em; background: var(--c); } .map { width: 100%; max-width: 52rem; }
.map text { fill: currentColor; font: 12px system-ui, sans-serif; } .map .axis { stroke: currentColor; fill: none; }
.facts th { font-weight: 400; } .facts td { border: none; }
"""


def check(path: Path) -> None:
    """Refuse a page that could not be written, before any work is done for it.

    Raises:
        CommandError: its folder does not exist, or it is a folder itself.
    """
    if not path.parent.is_dir():
        raise CommandError(f"--report: expected an existing folder, got {str(path.parent)!r}")
    if path.is_dir():
        raise CommandError(f"--report: expected a file, got the folder {str(path)!r}")


def write(path: Path, text: str) -> None:
    """Write the page.

    Raises:
        CommandError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--report: cannot write {path}: {error.strerror or error}") from error


def page(outcome: Outcome) -> str:
    """Everything one verification found."""
    call, args = outcome.call, outcome.args
    rows, batch, heads, dim = call.q.shape
    sizes = f"S={rows:,} T={call.k.shape[0]:,} B={batch} H={heads} D={dim} P={call.pool_size} K={call.index_topk}"
    seen = args.layout or "as captured"
    what = f"{sizes}, {seen}, {args.ranks} ranks on {args.backend}, {args.shard_plan} rows"
    found = "".join(f"<li>{html.escape(Text.from_markup(line).plain)}</li>" for line in outcome.lines())
    return _document(
        "kpool verify",
        f"<p>{html.escape(what)}</p>{_verdict(outcome.code)}<ul>{found}</ul>"
        f"<h2>Ranks</h2>{_ranks(outcome)}"
        f"<h2>What was selected</h2>{heat_map(outcome)}"
        f"{html_sections(outcome.trace)}"
        f"<h2>The call</h2>{_facts(_call_facts(outcome))}"
        f"<h2>Environment</h2>{_facts(_environment())}",
    )


def failure_page(args: argparse.Namespace, error: CollectiveError) -> str:
    """The page of ranks that did not finish: what each was doing, and the calls made until then."""
    calls = "" if error.trace is None else html_sections(error.trace)
    return _document(
        "kpool verify",
        f"<p>{args.ranks} ranks on {html.escape(args.backend)}</p>{_verdict(DIFFERENT, 'the ranks did not finish')}"
        f"<h2>What went wrong</h2><pre>{html.escape(str(error))}</pre>{calls}"
        f"<h2>Environment</h2>{_facts(_environment())}",
    )


def _document(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}{_OWN_STYLE}</style></head><body><h1>{html.escape(title)}</h1>{body}</body></html>\n"
    )


def _verdict(code: int, words: str = "") -> str:
    text = words or VERDICTS[code]
    return (
        f'<p class="verdict" style="--c:{_COLOURS[code]}">{_SIGNS[code]} <b>{html.escape(text)}</b> '
        f"<small>(exit code {code})</small></p>"
    )


def _ranks(outcome: Outcome) -> str:
    head = "".join(
        f'<th scope="col">{name}</th>' for name in ("", "rows", "work", "sent", "gathered", "against unsharded")
    )
    body = ""
    for r in outcome.ranks:
        bar = f'<span class="bar" style="--c:{rank_colour(r.rank)};width:{10 * r.work:.2f}rem"></span> {r.work:.1%}'
        same = "identical" if not r.differing_rows else f"&#9888; {r.differing_rows:,} rows differ"
        if r.first_difference is not None:
            same += f", first: batch {r.first_difference[0]} row {r.first_difference[1]:,}"
        cells = (f"{r.rows:,}", bar, view.size(r.sent), view.size(r.gathered), same)
        body += f'<tr><th scope="row">rank {r.rank}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<p>The unsharded call took {view.duration(outcome.seconds)}: the first of the process, start-up included.</p>"
    )


def _call_facts(outcome: Outcome) -> Iterable[tuple[str, Any]]:
    found = outcome.as_json()
    for name in ("call", "run"):
        yield from ((key.replace("_", " "), value) for key, value in found[name].items() if key != "notes")
    yield from ((f"note: {key}", value) for key, value in outcome.call.notes.items())
    margin = outcome.reference.smallest_margin
    yield "smallest margin of a decided row", "no row had a choice to make" if margin is None else f"{margin:.3g}"


def _environment() -> Iterable[tuple[str, Any]]:
    yield "written", datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield from ((name, version or "not installed") for name, version in info.versions().items())
    yield "threads", torch.get_num_threads()
    yield "memory", view.size(info.memory())
    for device in info.devices():
        yield str(device), torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def _facts(facts: Iterable[tuple[str, Any]]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in facts
    )
    return f'<div class="scroll"><table class="facts"><tbody>{lines}</tbody></table></div>'
