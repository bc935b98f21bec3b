"""Record the collectives of a real process group, by wrapping the methods of torch's ProcessGroup for a while.

Every function of `torch.distributed`, whatever name it was bound to earlier, calls such a method; the functions
themselves stay as they are, because torch compares some of them by identity. Calls that torch's C++ code makes by
itself (DDP's buckets, functional collectives) are not seen: the trace of a real run is a help for reading, not evidence
of absence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from kpool_testing.record.call import Call, canonical_kind, user_site
from kpool_testing.record.log import CallLog
from kpool_testing.rules.arguments import reduce_op, root_of

# Method to the place of what the rank sends among its arguments; None where it sends nothing.
_SENT: dict[str, int | None] = {
    "_allgather_base": 1,
    "_reduce_scatter_base": 1,
    "all_gather_single": 1,
    "all_gather_single_coalesced": 1,
    "all_to_all_single": 1,
    "allgather": 1,
    "allgather_coalesced": 1,
    "allgather_into_tensor_coalesced": 1,
    "allreduce": 0,
    "allreduce_coalesced": 0,
    "alltoall": 1,
    "alltoall_base": 1,
    "barrier": None,
    "broadcast": 0,
    "gather": 1,
    "monitored_barrier": None,
    "recv": 0,
    "recv_anysource": 0,
    "reduce": 0,
    "reduce_scatter": 1,
    "reduce_scatter_single": 1,
    "reduce_scatter_single_coalesced": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "scatter": 1,
    "send": 0,
}
_REDUCTIONS = ("all_reduce", "reduce")
_ROOTED = {"broadcast": "from", "scatter": "from", "gather": "to", "reduce": "to"}
_PEERS = {"send": "to", "recv": "from"}


@contextmanager
def recording(trace: CallLog) -> Iterator[None]:
    """Append every collective that Python code makes on a process group to `trace`."""
    kind: Any = dist.ProcessGroup
    # As they lie in the class: what getattr returns no longer binds to a group when it is put back.
    methods = {name: method for name, method in vars(kind).items() if name in _SENT}
    counts: dict[str, int] = {}
    for name in methods:
        setattr(kind, name, _noting(trace, counts, name, getattr(kind, name)))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(kind, name, method)


def _noting(trace: CallLog, counts: dict[str, int], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noting(group: Any, *args: Any, **kwargs: Any) -> Any:
        _note(trace, counts, name, group, args)
        return original(group, *args, **kwargs)

    return noting


def _note(trace: CallLog, counts: dict[str, int], name: str, group: Any, args: tuple[Any, ...]) -> None:
    label = "world" if group is dist.group.WORLD else str(getattr(group, "group_name", "group"))
    place = _SENT[name]
    tensors = _tensors(args[place]) if place is not None and len(args) > place else []
    number = counts.get(label, 0)
    counts[label] = number + 1
    kind = canonical_kind(name)
    trace.append(
        Call(
            rank=dist.get_rank(),
            kind=kind,
            group=label,
            ranks=tuple(dist.get_process_group_ranks(group)),
            seq=number,
            shape=tuple(tensors[0].shape) if tensors else (),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            site=user_site(),
            detail=_detail(kind, group, args),
        )
    )


def _tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [tensor for part in given for tensor in _tensors(part)] if isinstance(given, (list, tuple)) else []


def _detail(kind: str, group: Any, args: tuple[Any, ...]) -> str:
    """Reduce op, root and peer in the words a simulated trace uses: "SUM", "from 1", "to 0"."""
    words: list[str] = []
    options = args[-1] if args else None
    if kind.startswith(_REDUCTIONS):
        words.append(reduce_op(options))
    if kind in _ROOTED:
        words.append(f"{_ROOTED[kind]} {dist.get_global_rank(group, root_of(options))}")
    if kind in _PEERS and len(args) > 1:
        words.append(f"{_PEERS[kind]} {dist.get_global_rank(group, args[1])}")
    return " ".join(words)
