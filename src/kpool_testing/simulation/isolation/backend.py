"""Puts the simulated backend in place of torch's process groups for the time of one run, and takes it out again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.c10d_logger as c10d_logger
import torch.distributed.distributed_c10d as c10d

from kpool_testing.simulation.isolation.worlds import RankOf, RankWorld, WorldsByRank

# Parts of it are missing from torch's stubs.
native: Any = torch._C._distributed_c10d

NAME = "kpool"
_REGISTRY = ("backend_list", "backend_capability", "default_device_backend_map", "_plugins", "backend_type_map")


@contextmanager
def installed(create: Callable[[Any], Any], claimed: str, size: int, rank_of: RankOf) -> Iterator[WorldsByRank]:
    """While active, every process group that a rank creates is one of `create`'s, whatever backend it asks for.

    A default group that already exists stays the caller's, out of the ranks' sight.

    Args:
        create: makes a group from the options that torch hands to a backend.
        claimed: what `get_backend()` says of a group for which none was named.
        size, rank_of: number of ranks, and the rank of the calling thread.
    """
    world, helper, hook, threads = c10d._world, c10d._new_process_group_helper, sys.excepthook, torch.get_num_threads()
    describe = getattr(c10d_logger, "_get_msg_dict", None)
    names = {name: getattr(c10d, name) for name in ("_backend", "_default_pg_init_method")}
    registry = {name: _copied(getattr(dist.Backend, name)) for name in _REGISTRY if hasattr(dist.Backend, name)}
    _keep_fake_cuda_guard()
    native._set_thread_isolation_mode(True)
    try:
        c10d._world = RankWorld()
        # Its default arguments bind the default group when it is imported: that must be none.
        importlib.import_module("torch.distributed.nn.functional")
        c10d._world = worlds = WorldsByRank(world, size, rank_of)

        dist.Backend.register_backend(NAME, partial(_created, create), extended_api=True, devices=["cpu", "cuda"])
        c10d._new_process_group_helper = partial(_redirected, claimed, helper)
        # Torch logs a failed call with the version of NCCL where a group claims to be NCCL's; there may be none.
        c10d_logger._get_msg_dict = _message  # type: ignore[assignment]
        torch.set_num_threads(1)
        yield worlds
    finally:
        torch.set_num_threads(threads)
        c10d._world, c10d._new_process_group_helper, sys.excepthook = world, helper, hook
        if describe is not None:
            c10d_logger._get_msg_dict = describe
        for name, value in names.items():
            setattr(c10d, name, value)
        for name, value in registry.items():
            setattr(dist.Backend, name, value)
        if hasattr(dist.Backend, NAME.upper()):
            delattr(dist.Backend, NAME.upper())
        native._set_thread_isolation_mode(False)


def _keep_fake_cuda_guard() -> None:
    """Let the caller's thread, not a rank's, be the first to set the device guard that FakeTensorMode needs.

    In a CUDA build of torch without a GPU that guard belongs to the thread that sets it first; fake tensors (DTensor
    uses them) crash the process once that thread has ended.
    """
    ensure = getattr(torch._C, "_ensureCUDADeviceGuardSet", None)
    if ensure is not None and torch.version.cuda is not None and not torch.cuda.is_available():
        ensure()


def _message(name: str, *arguments: Any, **named: Any) -> dict[str, Any]:
    return {"func_name": name}


def _copied(value: Any) -> Any:
    return {key: _copied(part) for key, part in value.items()} if isinstance(value, dict) else _plain(value)


def _plain(value: Any) -> Any:
    return list(value) if type(value) is list else value


def _created(create: Callable[[Any], Any], options: Any, backend_options: Any = None) -> Any:
    del backend_options
    return create(options)


def _redirected(
    claimed: str, helper: Callable[..., Any], size: int, rank: int, ranks: Any, backend: Any, *rest: Any, **named: Any
) -> Any:
    """Create a simulated group whatever backend was asked for, and keep the name that was asked for."""
    group, store = helper(size, rank, ranks, NAME, *rest, **named)
    if group in c10d._world.pg_map:  # not so for a rank that is no member
        name = claimed if str(backend) == NAME else str(backend)
        c10d._world.pg_map[group] = (name, store)
        c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(name)))
    return group, store
