"""Write a trace as flight-recorder dumps, one pickle a rank, that torch's own analyzer (`torchfrtrace DIR`) reads.

Sends and receives are left out: the analyzer matches them only inside coalesced groups.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from kpool_testing.record.call import POINT_TO_POINT, Call
from kpool_testing.record.log import CallLog

_VERSION = "2.10"
_BACKEND = "nccl"  # the one backend every version of the analyzer accepts

# Names the analyzer of torch 2.11 and of later versions both know. The frame of each entry holds the call's own name.
_NAMES = {
    "all_gather": "all_gather",
    "all_gather_object": "all_gather",
    "all_gather_single": "_all_gather_base",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "all_reduce_barrier",
    "broadcast": "broadcast",
    "broadcast_object_list": "broadcast",
    "gather": "gather",
    "gather_object": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "_reduce_scatter_base",
    "scatter": "scatter",
    "scatter_object_list": "scatter",
}


def write_dumps(trace: CallLog, directory: str | Path, prefix: str = "rank_") -> list[Path]:
    """Write `<prefix><rank>` for every rank of the trace into `directory`, making it if need be; return the files."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    groups = {call.group: call.ranks for call in trace if call.kind not in POINT_TO_POINT}
    if not groups:
        groups = {"world": tuple(range(trace.size))}
    numbers = {group: str(index) for index, group in enumerate(groups)}
    arrived = _arrivals(trace)
    files = []
    for rank in range(trace.size):
        config = {
            numbers[group]: {"name": numbers[group], "desc": group, "ranks": str(list(members))}
            for group, members in groups.items()
            if rank in members
        }
        dump = {
            "version": _VERSION,
            "pg_config": config,
            "pg_status": {},
            "entries": _entries(trace.of_rank(rank), numbers, arrived),
        }
        path = folder / f"{prefix}{rank}"
        path.write_bytes(pickle.dumps(dump))
        files.append(path)
    return files


def _arrivals(trace: CallLog) -> dict[tuple[str, int], set[int]]:
    found: dict[tuple[str, int], set[int]] = {}
    for call in trace:
        found.setdefault((call.group, call.seq), set()).add(call.rank)
    return found


def _entries(
    calls: list[Call], numbers: dict[str, str], arrived: dict[tuple[str, int], set[int]]
) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    for call in calls:
        if call.kind in POINT_TO_POINT:
            continue
        order[call.group] = order.get(call.group, 0) + 1
        complete = arrived[call.group, call.seq] >= set(call.ranks)
        entries.append(_entry(call, len(entries), order[call.group], numbers[call.group], complete))
    return entries


def _entry(call: Call, record: int, number: int, group: str, complete: bool) -> dict[str, Any]:
    file, _, line = call.site.rpartition(":")
    dtype = call.dtype.capitalize()
    return {
        "record_id": record,
        "pg_id": int(group),
        "process_group": (group, call.group),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": f"{_BACKEND}:{_NAMES.get(call.kind, 'all_reduce_barrier')}",
        "time_created_ns": record,
        "duration_ms": None,
        "input_sizes": [list(call.shape)],
        "input_dtypes": [dtype],
        "output_sizes": [_output_shape(call)],
        "output_dtypes": [dtype],
        "state": "completed" if complete else "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": complete,
        "timeout_ms": 0,
        "is_p2p": False,
        "frames": [{"name": f"{call.kind} {call.detail}".strip(), "filename": file, "line": int(line or 0)}],
    }


def _output_shape(call: Call) -> list[int]:
    """Shape of what the call returns on dim 0, of which the analyzer compares the number of elements."""
    shape, size = list(call.shape), max(1, len(call.ranks))
    if not shape:
        return shape
    if call.kind.startswith("all_gather"):
        shape[0] *= size
    elif call.kind.startswith("reduce_scatter"):
        shape[0] //= size
    return shape
