"""Settings of the process: its environment, working directory, warning filters, and torch's global switches."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

from kpool_testing.simulation.isolation.swapped import Lazy

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


class Environment:
    """The environment variables; every rank has the caller's, and RANK, LOCAL_RANK and the sizes as a launcher sets."""

    def __init__(self, size: int) -> None:
        self.original = dict(os.environ)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(size)
        self.raw: Any = os.environ._data  # type: ignore[attr-defined]
        self.expected: list[dict[Any, Any]] = []
        for rank in range(size):
            self._name(rank)
            self.expected.append(dict(self.raw))
        self.saved: dict[int, dict[str, str]] = {}

    def leave(self, rank: int) -> None:
        """Put the rank's variables aside if it, or another rank, has changed any."""
        if self.saved or self.raw != self.expected[rank]:
            self.saved[rank] = dict(os.environ)

    def enter(self, rank: int) -> None:
        """Put the rank's variables in place."""
        if self.saved:
            self._put(self.saved.get(rank, self.original | {key: os.environ[key] for key in _SIZES}))
        if rank not in self.saved:
            self._name(rank)

    def restore(self) -> None:
        """Put the caller's variables in place."""
        self._put(self.original)

    def _name(self, rank: int) -> None:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)

    def _put(self, values: dict[str, str]) -> None:
        for name in set(os.environ) - set(values):
            del os.environ[name]
        for name, value in values.items():
            if os.environ.get(name) != value:
                os.environ[name] = value


_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


def directory() -> Lazy:
    """The working directory."""
    return Lazy(os.getcwd, os.getcwd, os.chdir)


def switches() -> Lazy:
    """torch's switches for the whole process: default dtype, determinism, precision of fp32 products, anomaly mode."""
    found = [switch for switch in _SWITCHES if _works(switch)]
    getters = [get for get, _ in found]

    def take() -> tuple[Any, ...]:
        return tuple([get() for get in getters])

    def put(values: tuple[Any, ...]) -> None:
        for (get, set_), value in zip(found, values, strict=True):
            if get() != value:
                set_(value)

    return Lazy(take, take, put)


_native: Any = torch._C
_backends: Any = torch.backends


def _attribute(place: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(place, name), lambda value: setattr(place, name, value)


_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        lambda: (_native._get_deterministic_algorithms(), _native._get_deterministic_algorithms_warn_only()),
        lambda value: _native._set_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_native._get_float32_matmul_precision, _native._set_float32_matmul_precision),
    _attribute(_backends, "fp32_precision"),
    _attribute(_backends.cuda.matmul, "fp32_precision"),
    _attribute(getattr(_backends.mkldnn, "matmul", None), "fp32_precision"),
]
for _name, _set in {
    "deterministic_fill_uninitialized_memory": "_set_deterministic_fill_uninitialized_memory",
    "cudnn_benchmark": "_set_cudnn_benchmark",
    "cudnn_deterministic": "_set_cudnn_deterministic",
    "cudnn_enabled": "_set_cudnn_enabled",
    "mkldnn_enabled": "_set_mkldnn_enabled",
    "flash_sdp_enabled": "_set_sdp_use_flash",
    "mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "math_sdp_enabled": "_set_sdp_use_math",
    "cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "warnAlways": "_set_warnAlways",
}.items():
    if hasattr(_native, f"_get_{_name}") and hasattr(_native, _set):
        _SWITCHES.append((getattr(_native, f"_get_{_name}"), getattr(_native, _set)))


def _works(switch: tuple[Callable[[], Any], Any]) -> bool:
    try:
        switch[0]()
    except (AttributeError, RuntimeError):
        return False
    return True


class Warnings:
    """Warning filters and hooks. Ranks are not told of torch's old names and of a missing NCCL."""

    def __init__(self) -> None:
        self.original = self._take()
        self.saved: dict[int, tuple[Any, ...]] = {}

    def leave(self, rank: int) -> None:
        """Put the rank's filters aside."""
        self.saved[rank] = self._take()

    def enter(self, rank: int) -> None:
        """Put the rank's filters in place."""
        saved = self.saved.get(rank)
        self._put(saved if saved is not None else ([*_NOISE, *self.original[0]], *self.original[1:]))

    def restore(self) -> None:
        """Put the caller's filters in place."""
        self._put(self.original)

    def _take(self) -> tuple[Any, ...]:
        module: Any = warnings
        return (module.filters, module.showwarning, module._showwarnmsg_impl)

    def _put(self, state: tuple[Any, ...]) -> None:
        module: Any = warnings
        if module.filters is not state[0]:
            module.filters = state[0]
            module._filters_mutated()
        module.showwarning, module._showwarnmsg_impl = state[1], state[2]
