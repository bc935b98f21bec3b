"""Record the collectives of a real process group by wrapping the functions of `torch.distributed` for a while.

Calls made through names bound earlier (`from torch.distributed import all_reduce`), functional collectives and those
torch makes by itself are not seen: the trace of a real run is a help for reading, not evidence of absence.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from kpool_testing.record.call import Call, canonical_kind, user_site
from kpool_testing.record.trace import Trace

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
_SENT = ("input_tensor", "input", "input_tensor_list", "input_list", "tensor")
# Old spellings are carried out under their new name where there is one: torch warns about them otherwise.
_RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}


@contextmanager
def recording(trace: Trace) -> Iterator[None]:
    """Append every collective called through a `torch.distributed` attribute to `trace`."""
    originals = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
    counts: dict[str, int] = {}
    depth = [0]

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        target = originals.get(_RENAMED.get(name, name), original)
        signature = inspect.signature(target)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if depth[0] == 0:
                _note(trace, counts, name, signature, args, kwargs)
            depth[0] += 1
            try:
                return target(*args, **kwargs)
            finally:
                depth[0] -= 1

        return wrapped

    for name, original in originals.items():
        setattr(dist, name, wrap(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _note(
    trace: Trace, counts: dict[str, int], name: str, signature: inspect.Signature, args: Any, kwargs: Any
) -> None:
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:
        return  # the call itself is about to fail with the better message
    bound.apply_defaults()
    given = bound.arguments
    group = given.get("group") or dist.group.WORLD
    if group is None or dist.get_rank(group) < 0:
        return
    label = "world" if group is dist.group.WORLD else str(getattr(group, "group_name", "group"))
    sent = next((given[key] for key in _SENT if given.get(key) is not None), None)
    tensors = [t for t in (sent if isinstance(sent, (list, tuple)) else [sent]) if isinstance(t, torch.Tensor)]
    number = counts.get(label, 0)
    counts[label] = number + 1
    trace.append(
        Call(
            rank=dist.get_rank(),
            kind=canonical_kind(name),
            group=label,
            ranks=tuple(dist.get_process_group_ranks(group)),
            seq=number,
            shape=tuple(tensors[0].shape) if tensors else (),
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            site=user_site(),
            detail=_detail(given),
        )
    )


def _detail(given: dict[str, Any]) -> str:
    """Reduce op, root and peer in the words a simulated trace uses: "SUM", "from 1", "to 0"."""
    words = [str(given["op"]).rsplit(".", 1)[-1]] if given.get("op") is not None else []
    for key, word in (("src", "from"), ("group_src", "from"), ("dst", "to"), ("group_dst", "to")):
        if given.get(key) is not None:
            words.append(f"{word} {given[key]}")
    return " ".join(words)
