"""Mechanism 2: state that is looked up by the rank of the thread that asks.

torch keeps the groups of a process in `distributed_c10d._world`. During a run that name holds a `WorldsByRank`, which
answers each thread from its own rank's record, and threads that are no rank's from the caller's. torch's C++ registry
of groups by name is per thread in the mode that `backend` switches on; `know_groups` fills it for a thread that a rank
starts. Meshes carry a number of their rank, so that torch's caches, which compare meshes, tell ranks apart.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

native: Any = torch._C._distributed_c10d

RankOf = Callable[[], int | None]

_FIELDS = tuple(
    name for name, value in vars(c10d._World).items() if isinstance(value, property) and name != "pg_config_info"
)
_EMPTY: dict[str, Callable[[], Any]] = {"default_pg": lambda: None, "group_count": int, "comms": list}


class RankWorld(c10d._World):
    """One rank's record of its process groups, in the form in which torch keeps a process's."""

    __slots__ = _FIELDS

    def __init__(self) -> None:
        for name in _FIELDS:
            setattr(self, name, _EMPTY.get(name, dict)())


class WorldsByRank(c10d._World):
    """The record of whichever rank the calling thread belongs to."""

    def __init__(self, original: Any, size: int, rank_of: RankOf) -> None:
        self._original, self._rank_of = original, rank_of
        self._worlds = [RankWorld() for _ in range(size)]

    def mine(self) -> Any:
        """The record of the calling thread's rank."""
        rank = self._rank_of()
        return self._original if rank is None else self._worlds[rank]


def _delegated(name: str) -> property:
    return property(lambda self: getattr(self.mine(), name), lambda self, value: setattr(self.mine(), name, value))


for _name in _FIELDS:
    setattr(WorldsByRank, _name, _delegated(_name))


def know_groups(world: WorldsByRank) -> None:
    """Register the rank's groups in the calling thread: torch's C++ code looks them up by name, per thread."""
    for group, name in list(world.mine().pg_names.items()):
        try:
            native._resolve_process_group(name)
        except (RuntimeError, ValueError):
            native._register_process_group(name, group)


def forget_groups() -> None:
    """Forget the calling thread's groups in torch's C++ registry, which would outlive the thread."""
    native._unregister_all_process_groups()


_runs = itertools.count(1)


@contextmanager
def meshes_of_ranks(rank_of: RankOf) -> Iterator[None]:
    """While active, a `DeviceMesh` differs from every other rank's and every other run's, also for torch's caches."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh: Any = DeviceMesh
    run = next(_runs)
    made, unpickled = mesh.__init__, mesh.__setstate__

    def number(self: Any) -> None:
        rank = rank_of()
        if rank is not None:
            self._thread_id, self._hash = (run << 20) + rank, None

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        number(self)

    def setstate(self: Any, state: Any) -> None:
        unpickled(self, state)
        number(self)

    mesh.__init__, mesh.__setstate__ = init, setstate
    try:
        yield
    finally:
        mesh.__init__, mesh.__setstate__ = made, unpickled
        _forget_meshes()


# Caches by mesh, which would keep a run's groups alive.
_CACHES = (
    ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
    ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
    ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
)


def _forget_meshes() -> None:
    for module, path in _CACHES:
        clear: Any = sys.modules.get(module)
        for part in path.split("."):
            clear = getattr(clear, part, None)
        if clear is not None:
            clear()
