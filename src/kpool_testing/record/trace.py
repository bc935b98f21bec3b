"""The record of a run: every collective of every rank, as text lanes, an HTML page, byte totals or a torch dump.

run = replay(fn, 2)
print(run.trace.lanes())
run.trace.write_html("trace.html")
run.trace.write_flight_recorder("dump/")      # then: torchfrtrace dump/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kpool_testing.record import flight, page
from kpool_testing.record import lanes as text
from kpool_testing.record.log import CallLog


class Trace(CallLog):
    """The calls of one run in global order, and pictures of them."""

    def lanes(self, width: int = 34) -> str:
        """The run as text, one column a rank, one line a call number; see `kpool_testing.record.lanes`."""
        return text.lanes(self, width)

    def html(self, title: str = "collectives", note: str = "") -> str:
        """The run as one HTML page that loads nothing from anywhere; `note` (an error, say) is shown on top."""
        return page.html_page(self, title, note)

    def write_html(self, path: str | Path, title: str = "collectives", note: str = "") -> Path:
        """Write `html()` to `path` and return it."""
        target = Path(path)
        target.write_text(self.html(title, note), encoding="utf-8")
        return target

    def write_flight_recorder(self, directory: str | Path, prefix: str = "rank_") -> list[Path]:
        """Write one flight-recorder dump per rank that torch's own `torchfrtrace` reads; return the files."""
        return flight.write_dumps(self, directory, prefix)


@dataclass
class Run:
    """What a run gave back: `results[r]` is what fn returned on rank r, `trace` every collective of it."""

    results: list[Any]
    trace: Trace = field(default_factory=Trace)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)
