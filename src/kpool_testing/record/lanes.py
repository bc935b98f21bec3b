"""The calls of a run lined up, and as text for the terminal: one column a rank, one line a call."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import PurePath

from kpool_testing.record.call import POINT_TO_POINT, Call
from kpool_testing.record.log import CallLog

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


def steps(trace: CallLog) -> list[Step]:
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


def lanes(trace: CallLog, width: int = 34) -> str:
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
