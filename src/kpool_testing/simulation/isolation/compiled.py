"""Mechanism 3: what torch.compile has compiled serves the rank that it was compiled for.

Dynamo treats a process's rank and groups as constants and keeps what it has compiled with the code, once for the
process. From torch 2.13 on it can keep several sets apart by number ("isolate_recompiles"): during a run every rank has
numbers of its own. Older releases get one more guard in every compiled frame, on the rank; their limits of recompiling
count for all ranks together and are multiplied. What was compiled in a run is dropped at its end.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kpool_testing.simulation.isolation.worlds import RankOf

_MODULE = "torch._dynamo.convert_frame"


class Compiled:
    """Keeps compiled frames apart, from the moment that Dynamo is loaded."""

    def __init__(self, size: int, rank_of: RankOf) -> None:
        self.size, self.rank_of = size, rank_of
        self.frames: Regions | Guards | None = None
        self.flags: dict[int, tuple[Any, ...]] = {}
        self.compile = torch.compile
        torch.compile = self._compile

    def leave(self, rank: int) -> None:
        """Put the rank's flags aside."""
        if self.frames is not None:
            self.flags[rank] = _put_flags(_FLAGS)

    def enter(self, rank: int) -> None:
        """Put the rank's flags in place."""
        if _MODULE in sys.modules:
            self._take_hold(rank)
            _put_flags(self.flags.get(rank, _FLAGS))

    def restore(self) -> None:
        """Let go of Dynamo, and drop what was compiled."""
        torch.compile = self.compile
        if self.frames is not None:
            _put_flags(_FLAGS)
            self.frames.drop()

    def _compile(self, *args: Any, **kwargs: Any) -> Any:
        """`torch.compile`, which loads Dynamo."""

        rank = self.rank_of()
        if rank is not None:
            self._take_hold(rank)
        return self.compile(*args, **kwargs)

    def _take_hold(self, rank: int) -> None:
        if self.frames is None:
            from torch._dynamo import eval_frame

            _skip_own_frames()

            new = hasattr(eval_frame, "set_eval_frame_isolate_recompiles_id")
            self.frames = Regions(self.rank_of) if new else Guards(self.size, self.rank_of)
        self.frames.enter(rank)


class _Replaced:
    """Attributes of Dynamo that are replaced for the time of a run."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> Any:
        """Put a value in place of an attribute and return the original."""
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        setattr(owner, name, value)
        return original

    def put_back(self) -> None:
        """Undo every replacement."""
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)


class Regions(_Replaced):
    """Compiled frames apart by torch's own numbers: one for each rank and each number that the program itself uses."""

    _numbers = itertools.count(1 << 40)

    def __init__(self, rank_of: RankOf) -> None:
        super().__init__()
        from torch._dynamo import convert_frame, eval_frame

        self.rank_of = rank_of
        self.regions: dict[tuple[int | None, int], int] = {}
        self.ours: set[int] = set()
        self.entries: Any = eval_frame._get_cache_entries_for_region
        self.set_region = self.replace(eval_frame, "set_eval_frame_isolate_recompiles_id", self._set_region)
        self.total = self.replace(convert_frame, "_get_total_cache_entry_count", self._total)

        self._forget(lambda code: bool(self.entries(code, -1)))  # a region falls back on what was compiled in none

    def enter(self, rank: int) -> None:
        """The rank has the turn: what it compiles outside of every region of its own goes to its default one."""
        self.set_region(self._region(rank, -1))

    def drop(self) -> None:
        """Drop the run's frames."""
        self.set_region(-1)
        self.put_back()
        self._forget(lambda code: any(self.entries(code, region) for region in self.ours))

    def _forget(self, concerned: Callable[[types.CodeType], bool]) -> None:
        from torch._dynamo.convert_frame import input_codes

        for reference in list(input_codes.seen):
            code = reference()
            if code is not None and concerned(code):
                torch._C._dynamo.eval_frame.reset_code(code)

    def _region(self, rank: int | None, number: int) -> int:
        key = (rank, number)
        if key not in self.regions:
            self.regions[key] = next(self._numbers)
            self.ours.add(self.regions[key])
        return self.regions[key]

    def _set_region(self, number: int) -> Any:
        rank = self.rank_of()
        return self.set_region(number if rank is None or number in self.ours else self._region(rank, number))

    def _total(self, code: Any) -> Any:
        """Frames of the calling rank alone: the limit of all frames is a process's."""
        rank = self.rank_of()
        if rank is None:
            return self.total(code)
        return sum(len(self.entries(code, region)) for (owner, _), region in self.regions.items() if owner == rank)


class Guards(_Replaced):
    """Compiled frames apart by a guard on the rank."""

    def __init__(self, size: int, rank_of: RankOf) -> None:
        super().__init__()
        import torch._dynamo.config as config
        from torch._dynamo import eval_frame
        from torch._dynamo.output_graph import OutputGraph

        self.rank_of = rank_of
        self.codes: weakref.WeakSet[types.CodeType] = weakref.WeakSet()
        for name in ("recompile_limit", "accumulated_recompile_limit"):
            self.replace(config, name, getattr(config, name) * size)
        self.ambient = self.replace(OutputGraph, "init_ambient_guards", lambda graph: self._add_guard(graph))
        self.skip = self.replace(eval_frame, "set_skip_guard_eval_unsafe", self._refuse_skipping)

    def enter(self, rank: int) -> None:
        """Nothing to do: the guards ask for the rank."""

    def drop(self) -> None:
        """Drop the run's frames."""
        self.put_back()
        for code in list(self.codes):
            torch._C._dynamo.eval_frame.reset_code(code)

    def _add_guard(self, graph: Any) -> None:
        from torch._dynamo.source import GlobalStateSource

        self.ambient(graph)
        rank = self.rank_of()
        if rank is not None:
            graph.guards.add(GlobalStateSource().make_guard(self._guard_on(rank)))

    def _guard_on(self, rank: int) -> Callable[[Any, Any], None]:
        def rank_match(builder: Any, guard: Any) -> None:
            self.codes.add(builder.f_code)
            matches, text = lambda _: self.rank_of() == rank, [f"the simulated rank is {rank}"]
            builder.guard_manager.root.add_lambda_guard(matches, text, guard.user_stack)

        return rank_match

    def _refuse_skipping(self, value: bool) -> Any:
        if value and self.rank_of() is not None:
            raise RuntimeError(
                "skip_guard_eval_unsafe is refused on simulated ranks before torch 2.13: without guards a rank would "
                "run what was compiled for another"
            )
        return self.skip(value)


_ROOMS = tuple(f"kpool_testing.{room}" for room in ("bits", "errors", "record", "rules", "simulation"))
_BELOW = (
    "kpool_testing.simulation.run",
    "kpool_testing.simulation.threads",
)  # the program's frames are called by these


@functools.cache
def _skip_own_frames() -> None:
    """Tell Dynamo not to look into the simulation, which runs inside the frames that it traces."""
    native: Any = torch._C._dynamo.eval_frame
    skip = native._FrameAction.SKIP
    strategy = native._FrameExecStrategy(skip, skip)
    for name, module in list(sys.modules.items()):
        if name.startswith(_ROOMS) and name not in _BELOW:
            for code in _codes(vars(module).values(), name):
                native.set_code_exec_strategy(code, strategy)


def _codes(values: Iterable[Any], module: str) -> Iterator[types.CodeType]:
    """The code of functions and methods that a module defines, and of functions inside them."""
    for value in values:
        if isinstance(value, type) and value.__module__ == module:
            yield from _codes(vars(value).values(), module)
        for part in ("__wrapped__", "__func__", "fget", "fset", "func"):
            inner = getattr(value, part, None)
            if inner is not None and not isinstance(value, type):
                yield from _codes([inner], module)
        if isinstance(value, types.FunctionType) and value.__module__ == module:
            yield from _nested(value.__code__)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


# Flags of the eval frame, the process's own, and what it starts with.
_NAMES = ("set_skip_guard_eval_unsafe", "set_fullgraph_compiled_frame_count", "set_fullgraph_error_on_nested_compile")
_FLAGS = (False, -1, False)


def _put_flags(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Set the flags, as far as this torch has them; returns what they were."""
    native: Any = torch._C._dynamo.eval_frame
    pairs = zip(_NAMES, values, strict=True)
    return tuple([getattr(native, name)(value) if hasattr(native, name) else value for name, value in pairs])
