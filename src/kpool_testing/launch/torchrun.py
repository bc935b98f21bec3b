"""This process as one rank of a group that a launcher started: `torchrun -m pytest --ranks-backend=world`."""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Callable
from typing import Any

from kpool_testing.errors import RankError, rank_error
from kpool_testing.record.trace import Run, Trace


def world_size() -> int | None:
    """Ranks of the launcher's group, from its environment; None without a launcher."""
    value = os.environ.get("WORLD_SIZE", "")
    return int(value) if value.isdigit() and "RANK" in os.environ else None


def run_in_world(fn: Callable[[Any], Any], size: int, timeout: float) -> Run:
    """Run `fn(group)` once in this process on the default group, then share results: all ranks get the same `Run`.

    The default group is made from the launcher's environment if there is none yet (gloo without a GPU, NCCL with
    one); one made here is left again when python exits.

    Raises:
        ValueError: no launcher, or its world has another size than `size`.
        RankError: fn raised on some rank. Every rank raises it; on the rank itself `__cause__` is the exception.
    """
    import torch.distributed as dist

    from kpool_testing.record.recorder import recording

    if not dist.is_initialized():
        _join(timeout)
    if dist.get_world_size() != size:
        raise ValueError(f"the launcher's world has {dist.get_world_size()} ranks, the test asks for {size}")
    trace = Trace(size=size)
    result, error = None, None
    with recording(trace):
        try:
            result = fn(dist.group.WORLD)
        except Exception as raised:
            error = raised
    headline = f"{type(error).__name__}: {error}" if error is not None else None
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, (result, headline, trace.calls))
    calls = sorted((call for _, _, calls in gathered for call in calls), key=lambda call: (call.seq, call.rank))
    failed = [rank for rank, (_, text, _) in enumerate(gathered) if text is not None]
    if failed:
        lines = [f"  rank {rank}: {text or 'returned'}" for rank, (_, text, _) in enumerate(gathered)]
        message = "\n".join([f"rank {failed[0]} raised {gathered[failed[0]][1]}", *lines])
        problem = rank_error(message, error) if error is not None else RankError(message)
        problem.trace = Trace(calls, size=size)
        raise problem from error
    return Run([entry[0] for entry in gathered], Trace(calls, size=size))


def _join(timeout: float) -> None:
    import torch
    import torch.distributed as dist

    if world_size() is None:
        raise ValueError('backend="world" needs a launcher that sets RANK and WORLD_SIZE, such as torchrun')
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    atexit.register(_leave)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
