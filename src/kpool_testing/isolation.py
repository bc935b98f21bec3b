"""What belongs to one simulated rank: its torch.distributed state, random state, environment and module globals.

All of this is process-wide in Python, so it follows the baton: `RankState.leave` puts a rank's values aside and
`RankState.enter` puts them back. `CallerModes` carries the caller's thread-local torch modes into the ranks' threads.
"""

from __future__ import annotations

import copy
import ctypes
import importlib
import os
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
import torch.overrides
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Untyped in torch.
_function_modes: Callable[[], Any] = torch.overrides._get_current_function_mode_stack
_cuda_started: Callable[[], bool] = torch.cuda.is_initialized


class CallerModes:
    """The thread-local torch modes of the thread that calls `simulate`, to be entered in every rank's thread.

    Raises RuntimeError for modes that cannot be carried: dispatch modes, torch-function modes other than a default
    device, saved-tensor hooks and function transforms. Enter those inside fn.
    """

    def __init__(self) -> None:
        modes: list[Any] = list(_function_modes())
        foreign = [mode for mode in modes if not isinstance(mode, DeviceContext)]
        foreign += _get_current_dispatch_mode_stack()
        if foreign:
            names = sorted({type(mode).__name__ for mode in foreign})
            raise RuntimeError(
                f"simulate was called under {', '.join(names)}, which does not reach the ranks' threads; "
                "enter it inside fn"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("simulate was called inside a torch.func transform; apply the transform inside fn")
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise RuntimeError("simulate was called under saved-tensor hooks; enter them inside fn")
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.cache = torch.is_autocast_cache_enabled()
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        self.device = torch.get_default_device() if modes else None
        self.cuda = torch.cuda.current_device() if _cuda_started() else None

    def enter(self, stack: ExitStack) -> None:
        """Enter the modes in the current thread."""
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if self.inference:
            stack.enter_context(torch.inference_mode())
        torch.set_grad_enabled(self.grad)
        for kind, dtype in self.autocast.items():
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        if self.device is not None:
            torch.set_default_device(self.device)
        if self.cuda is not None:
            torch.cuda.set_device(self.cuda)


_FIELDS = tuple(
    name for name, value in vars(c10d._World).items() if isinstance(value, property) and name != "pg_config_info"
)


class RankWorld(c10d._World):
    """One rank's record of its process groups, in the form in which torch keeps a process's."""

    __slots__ = _FIELDS

    def __init__(self) -> None:
        for name in _FIELDS:
            setattr(self, name, _EMPTY.get(name, dict)())


_EMPTY: dict[str, Callable[[], Any]] = {"default_pg": lambda: None, "group_count": int, "comms": list}


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
        self.saved[rank] = self._take()

    def enter(self, rank: int) -> None:
        values = self.saved.get(rank)
        if values is None:
            values = {name: _own(value) for name, value in self.original.items()}
        self._put(values)

    def restore(self) -> None:
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


class LazyRandom:
    """Python's and numpy's global generators, one state a rank; swapped only once a rank has drawn from them.

    All ranks start from the caller's state. `probe` reads a few words of a generator's state, which is much cheaper
    than taking all of it at each hand-off, and sees every draw and every seeding.
    """

    def __init__(self, probe: Callable[[], Any], take: Callable[[], Any], put: Callable[[Any], None]) -> None:
        self.probe, self.take, self.put = probe, take, put
        self.original, self.mark = take(), probe()
        self.used = False
        self.saved: dict[int, Any] = {}

    def leave(self, rank: int) -> None:
        if self.used or self.probe() != self.mark:
            self.used = True
            self.saved[rank] = self.take()

    def enter(self, rank: int) -> None:
        if self.used:
            self.put(self.saved.get(rank, self.original))

    def restore(self) -> None:
        self.put(self.original)


def python_random() -> LazyRandom:
    """The generator behind the module `random`."""
    instance: Any = random._inst
    address = id(instance) + object.__basicsize__
    words = ctypes.c_uint32 * 625

    def peek() -> tuple[int, ...]:
        found = words.from_address(address)
        return (found[0], found[1], found[2])

    state = random.getstate()[1]
    known = sys.implementation.name == "cpython" and peek() == (state[624], state[0], state[1])
    probe: Callable[[], Any] = (lambda: (peek(), instance.gauss_next)) if known else random.getstate
    return LazyRandom(probe, random.getstate, random.setstate)


def numpy_random() -> LazyRandom | None:
    """The generator behind `numpy.random`'s functions; None where numpy is not loaded."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    source = numpy.random

    def whole() -> Any:
        kind, keys, *rest = source.get_state()
        return (kind, keys.tobytes(), *rest)

    probe: Callable[[], Any] = whole
    state = source.get_state()
    if state[0] == "MT19937" and hasattr(source, "get_bit_generator"):
        words = (ctypes.c_uint32 * 625).from_address(source.get_bit_generator().ctypes.state_address)
        if (words[0], words[1], words[624]) == (int(state[1][0]), int(state[1][1]), state[2]):
            probe = lambda: (words[0], words[1], words[624])  # noqa: E731
    return LazyRandom(probe, source.get_state, source.set_state)


class RankState:
    """Everything of a run that follows the baton, and its restoration."""

    def __init__(self, size: int, seed: int, modules: Iterable[str]) -> None:
        self.size, self.seed = size, seed
        self.environment = dict(os.environ)
        self.generator = torch.default_generator
        self.torch_state = self.generator.get_state()
        self.cuda_state = torch.cuda.get_rng_state_all() if _cuda_started() else None
        self.dtype = torch.get_default_dtype()
        self.warnings = _warning_state()
        self.modules = [ModuleGlobals(name) for name in modules]
        self.lazy = [source for source in (python_random(), numpy_random()) if source is not None]
        self.ranks: list[tuple[Any, ...] | None] = [None] * size
        self.worlds = [RankWorld() for _ in range(size)]
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)

    def leave(self, rank: int) -> None:
        """Put the rank's values aside."""
        cuda = torch.cuda.get_rng_state_all() if self.cuda_state is not None else None
        self.ranks[rank] = (self.generator.get_state(), cuda, torch.get_default_dtype(), _warning_state())
        for source in self.lazy:
            source.leave(rank)
        for module in self.modules:
            module.leave(rank)

    def enter(self, rank: int) -> None:
        """Put the rank's values in place."""
        c10d._world = self.worlds[rank]
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        kept = self.ranks[rank]
        if kept is None:
            # Distinct streams, as in processes that nobody seeded: code that forgets to seed must not look replicated.
            self.generator.manual_seed(rank_seed(self.seed, rank))
            if self.cuda_state is not None:
                torch.cuda.manual_seed_all(rank_seed(self.seed, rank))
            kept = (None, None, self.dtype, (_quiet(self.warnings[0]), *self.warnings[1:]))
        else:
            self.generator.set_state(kept[0])
            if kept[1] is not None:
                torch.cuda.set_rng_state_all(kept[1])
        if torch.get_default_dtype() is not kept[2]:
            torch.set_default_dtype(kept[2])
        _set_warning_state(kept[3])
        for source in self.lazy:
            source.enter(rank)
        for module in self.modules:
            module.enter(rank)

    def restore(self) -> None:
        """Put everything back to where it stood when the run began."""
        self.generator.set_state(self.torch_state)
        if self.cuda_state is not None:
            torch.cuda.set_rng_state_all(self.cuda_state)
        torch.set_default_dtype(self.dtype)
        _set_warning_state(self.warnings)
        for source in self.lazy:
            source.restore()
        for module in self.modules:
            module.restore()
        for name in set(os.environ) | set(self.environment):
            value = self.environment.get(name)
            if value is None:
                del os.environ[name]
            elif os.environ.get(name) != value:
                os.environ[name] = value


def rank_seed(seed: int, rank: int) -> int:
    """The torch seed a rank starts with."""
    return (seed * 1_000_003 + 7919 * (rank + 1)) % (2**63)


_NOISE: list[Any] = [
    (
        "ignore",
        re.compile(r"`?torch\.distributed\.[\w.]+`? (is|will be|is a .* be) deprecated"),
        FutureWarning,
        None,
        0,
    ),
    ("ignore", re.compile(r"Attempted to get default timeout for nccl backend"), UserWarning, None, 0),
]


def _quiet(filters: Any) -> list[Any]:
    """A rank's own copy of the filters: torch's old names and a missing NCCL are not worth a warning here."""
    return [*_NOISE, *filters]


def _warning_state() -> tuple[Any, ...]:
    return (warnings.filters, warnings.showwarning, warnings._showwarnmsg_impl)  # type: ignore[attr-defined]


def _set_warning_state(state: tuple[Any, ...]) -> None:
    if warnings.filters is not state[0]:
        warnings.filters = state[0]
        warnings._filters_mutated()  # type: ignore[attr-defined]
    warnings.showwarning = state[1]
    warnings._showwarnmsg_impl = state[2]  # type: ignore[attr-defined]
