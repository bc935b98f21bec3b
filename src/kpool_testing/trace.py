"""The record of a run: every collective of every rank, as text lanes, an HTML page, byte totals or a torch dump.

run = replay(fn, 2)
print(run.trace.lanes())
run.trace.write_html("trace.html")
run.trace.write_flight_recorder("dump/")      # then: torchfrtrace dump/
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from kpool_testing.interconnect import INTERCONNECTS, Interconnect, seconds

_PACKAGE = Path(__file__).resolve().parent.as_posix() + "/"
_SKIPPED = ("/typing_extensions.py", "/contextlib.py", "/threading.py")

# The names torch 2.13 uses; a trace always holds these, whichever spelling the code under test used.
_CANONICAL = {
    "all_gather_into_tensor": "all_gather_single",
    "_all_gather_base": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}


def canonical_kind(kind: str) -> str:
    """The name a trace uses for a collective: `all_gather_into_tensor` becomes `all_gather_single`."""
    return _CANONICAL.get(kind, kind)


@functools.cache
def is_user_file(filename: str) -> bool:
    """True for code that belongs neither to torch, nor to this package, nor to what wraps calls in between."""
    name = filename.replace("\\", "/")
    if name.startswith((_PACKAGE, "<frozen ")) or name.endswith(_SKIPPED):
        return False
    torch = sys.modules.get("torch")
    home = Path(torch.__file__).parent.as_posix() + "/" if torch is not None and torch.__file__ else "/torch/"
    return not name.startswith(home)


def user_site() -> str:
    """`file:line` of the innermost frame that belongs to the user's code (see `is_user_file`)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}".replace("\\", "/")
        frame = frame.f_back
    return "?"


@dataclass(frozen=True)
class Call:
    """One collective as one rank issued it.

    Attributes:
        rank: global rank of the caller.
        kind: canonical name, such as "all_gather_single".
        group: name of the group the call was made on.
        ranks: global ranks of that group, in group order.
        seq: number of the call on that group, counted on this rank from 0.
        shape: shape of what the rank sent (or receives, where it sends nothing).
        dtype: dtype of the same, without "torch.".
        bytes: size of the same in bytes.
        site: `file:line` in the user's code.
        detail: what else tells calls apart: reduce op, root, peer.
    """

    rank: int
    kind: str
    group: str
    ranks: tuple[int, ...]
    seq: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    site: str
    detail: str = ""

    def __str__(self) -> str:
        extra = f" {self.detail}" if self.detail else ""
        return f"{self.kind}#{self.seq} {self.dtype}{list(self.shape)}{extra} on {self.group} at {self.site}"


class Trace:
    """The calls of one run in global order."""

    def __init__(self, calls: Iterable[Call] = (), size: int | None = None) -> None:
        """`size`: number of ranks; taken from the calls where it is not given."""
        self.calls: list[Call] = list(calls)
        self._size = size

    def append(self, call: Call) -> None:
        """Add the next call."""
        self.calls.append(call)

    def extend(self, other: Trace) -> None:
        """Add another run's calls, in order."""
        self._size = max(self.size, other.size)
        self.calls.extend(other.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(self.calls)

    def __repr__(self) -> str:
        return f"Trace({len(self.calls)} calls, {self.size} ranks, {self.total_bytes()} bytes sent)"

    @property
    def size(self) -> int:
        """Number of ranks in the run."""
        seen = max((max(call.ranks, default=call.rank) for call in self.calls), default=-1) + 1
        return max(seen, self._size or 0)

    def of_rank(self, rank: int) -> list[Call]:
        """The calls of one rank, in its own order."""
        return [call for call in self.calls if call.rank == rank]

    def total_bytes(self, rank: int | None = None, kind: str | None = None) -> int:
        """Bytes handed to collectives: by all ranks or by one, of all kinds or of one."""
        wanted = canonical_kind(kind) if kind is not None else None
        return sum(
            call.bytes
            for call in self.calls
            if (rank is None or call.rank == rank) and (wanted is None or call.kind == wanted)
        )

    def estimate(self, interconnect: str | Interconnect) -> float:
        """Seconds the slowest rank would spend in its collectives under the alpha-beta model.

        Args:
            interconnect: a key of `INTERCONNECTS` or an `Interconnect`.

        Raises:
            ValueError: unknown name.
        """
        if isinstance(interconnect, str):
            if interconnect not in INTERCONNECTS:
                raise ValueError(f"unknown interconnect {interconnect!r}, expected one of {sorted(INTERCONNECTS)}")
            interconnect = INTERCONNECTS[interconnect]
        per_rank = [0.0] * max(1, self.size)
        for call in self.calls:
            per_rank[call.rank] += seconds(call.kind, call.bytes, len(call.ranks), interconnect)
        return max(per_rank)

    def lanes(self, width: int = 34) -> str:
        """The run as text, one column a rank, one line a call number; see `render.lanes`."""
        from kpool_testing.render import lanes

        return lanes(self, width)

    def html(self, title: str = "collectives", note: str = "") -> str:
        """The run as one HTML page that loads nothing from anywhere; `note` (an error, say) is shown on top."""
        from kpool_testing.render import html_page

        return html_page(self, title, note)

    def write_html(self, path: str | Path, title: str = "collectives", note: str = "") -> Path:
        """Write `html()` to `path` and return it."""
        target = Path(path)
        target.write_text(self.html(title, note), encoding="utf-8")
        return target

    def write_flight_recorder(self, directory: str | Path, prefix: str = "rank_") -> list[Path]:
        """Write one flight-recorder dump per rank that torch's own `torchfrtrace` reads; return the files."""
        from kpool_testing.flight import write_dumps

        return write_dumps(self, directory, prefix)


@dataclass
class Run:
    """What a run gave back: `results[r]` is what fn returned on rank r, `trace` every collective of it."""

    results: list[Any]
    trace: Trace = field(default_factory=Trace)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)
