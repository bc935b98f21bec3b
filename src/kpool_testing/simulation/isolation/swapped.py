"""Mechanism 1: state of the process that follows the turn.

When a rank's turn ends its values are put aside, and when its next turn begins they are put back. `generators` and
`settings` say what; this module says how.
"""

from __future__ import annotations

import copy
import importlib
import operator
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol


class Source(Protocol):
    """Some state of the process, and the value that each rank has of it."""

    def leave(self, rank: int) -> None:
        """Put the rank's value aside."""

    def enter(self, rank: int) -> None:
        """Put the rank's value in place."""

    def restore(self) -> None:
        """Put the caller's value in place."""


class Swapped:
    """Everything of a run that follows the turn, and its restoration."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.active: int | None = None

    def switch(self, rank: int) -> None:
        """The rank gets the turn."""
        before, self.active = self.active, rank
        if rank == before:
            return
        for source in self.sources:
            if before is not None:
                source.leave(before)
            source.enter(rank)

    def restore(self) -> None:
        """Put everything back to where it stood when the run began."""
        for source in reversed(self.sources):
            source.restore()


class Lazy:
    """State that few ranks touch: it is swapped only once a rank has changed it.

    All ranks start from the caller's state. `probe` is a cheap look at the state that sees every change.
    """

    def __init__(self, probe: Callable[[], Any], take: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.probe, self.take, self.put = probe, take, put
        self.original, self.mark = take(), probe()
        self.used = False
        self.saved: dict[int, Any] = {}

    def leave(self, rank: int) -> None:
        """Put the rank's state aside."""
        if self.used or self.probe() != self.mark:
            self.used = True
            self.saved[rank] = self.take()

    def enter(self, rank: int) -> None:
        """Put the rank's state in place."""
        if self.used:
            self.put(self.saved.get(rank, self.original))

    def restore(self) -> None:
        """Put the caller's state in place."""
        if self.used or self.probe() != self.mark:
            self.put(self.original)


class Attributes:
    """Attributes of modules, and of classes and functions in them, one value a rank.

    Args:
        places: module and attribute (dotted where it is a class's), to a function that makes what a new process has
            there of what the caller's process has. A module may be loaded at any time.
    """

    def __init__(self, places: Mapping[tuple[str, str], Callable[[Any], Any]]) -> None:
        self.places = places
        self.owners: list[_Owner] = []
        self.loaded = 0
        self.running = False

    def leave(self, rank: int) -> None:
        """Put the rank's values aside."""
        for owner in self.owners:
            owner.saved[rank] = owner.take()

    def enter(self, rank: int) -> None:
        """Put the rank's values in place."""
        if self.loaded != len(sys.modules):
            self._find_more()
        self.running = True
        for owner in self.owners:
            owner.put(owner.saved.get(rank) or owner.fresh())

    def restore(self) -> None:
        """Put the caller's values in place."""
        for owner in self.owners:
            owner.put(owner.original)

    def _find_more(self) -> None:
        """Modules may have been loaded since the last turn."""
        self.loaded = len(sys.modules)
        known = {id(owner.owner) for owner in self.owners}
        found: dict[int, tuple[Any, dict[str, Callable[[Any], Any]]]] = {}
        for (module, path), fresh in self.places.items():
            *parts, name = path.split(".")
            owner: Any = sys.modules.get(module)
            for part in parts:
                owner = getattr(owner, part, None)
            if owner is not None and hasattr(owner, name) and id(owner) not in known:
                found.setdefault(id(owner), (owner, {}))[1][name] = fresh
        # What a rank has loaded starts as in a new process for the caller too.
        self.owners += [_Owner(owner, names, self.running) for owner, names in found.values()]


class _Owner:
    """The attributes of one module, class or function, taken and put together."""

    def __init__(self, owner: Any, names: dict[str, Callable[[Any], Any]], start_fresh: bool) -> None:
        self.owner, self.names = owner, tuple(names)
        self.makers = tuple(names.values())
        self.saved: dict[int, tuple[Any, ...]] = {}
        self.take: Callable[[], tuple[Any, ...]] = self._getter()
        self.original = self.take()
        if start_fresh:
            self.original = self.fresh()

    def fresh(self) -> tuple[Any, ...]:
        """What a new process has."""
        return tuple([make(value) for make, value in zip(self.makers, self.original, strict=True)])

    def put(self, values: tuple[Any, ...]) -> None:
        """Put values in place."""
        if isinstance(self.owner, types.ModuleType):
            vars(self.owner).update(zip(self.names, values, strict=True))
            return
        for name, value in zip(self.names, values, strict=True):
            setattr(self.owner, name, value)

    def _getter(self) -> Callable[[], tuple[Any, ...]]:
        owner, get = self.owner, operator.attrgetter(*self.names)
        return (lambda: get(owner)) if len(self.names) > 1 else (lambda: (get(owner),))


class ModuleGlobals:
    """The globals of one module, one set a rank.

    Every rank starts from what the module holds now; lists, dicts and sets among it are copied. Functions, classes and
    modules are shared.
    """

    def __init__(self, name: str) -> None:
        self.space = vars(importlib.import_module(name))
        self.original = self._take()
        self.saved: dict[int, dict[str, Any]] = {}

    def leave(self, rank: int) -> None:
        """Put the rank's globals aside."""
        self.saved[rank] = self._take()

    def enter(self, rank: int) -> None:
        """Put the rank's globals in place."""
        values = self.saved.get(rank)
        if values is None:
            values = {name: _own(value) for name, value in self.original.items()}
        self._put(values)

    def restore(self) -> None:
        """Put the caller's globals in place."""
        self._put(self.original)

    def _take(self) -> dict[str, Any]:
        return {name: value for name, value in self.space.items() if _is_state(name, value)}

    def _put(self, values: dict[str, Any]) -> None:
        gone = [name for name, value in self.space.items() if name not in values and _is_state(name, value)]
        for name in gone:
            del self.space[name]
        self.space.update(values)


_SHARED = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def _is_state(name: str, value: Any) -> bool:
    return not (name.startswith("__") or isinstance(value, _SHARED))


def _own(value: Any) -> Any:
    return copy.copy(value) if type(value) in (list, dict, set) else value
