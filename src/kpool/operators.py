"""Registering the library's own torch operators.

An operator is opaque: FakeTensorMode, torch.compile and activation checkpointing see one call with known outputs and
never look inside. This uses the dispatcher's plain registration. ``torch.library.custom_op`` does the same, but its
first call imports the compiler, which costs every program seconds that it may never need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("kpool", "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(name: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as ``torch.ops.kpool.<name>``; it must not change its arguments.

    Args:
        name: of the operator; the schema follows from the annotations of the function.
        fake: same signature, returns empty tensors of the right shapes and dtypes.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if not hasattr(torch.ops.kpool, name):  # a module loaded twice keeps its first registration
            _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))  # type: ignore[no-untyped-call]
            _LIBRARY.impl(name, _where_its_tensors_are(function), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
            torch.library.register_fake(f"kpool::{name}", fake, lib=_LIBRARY)
        return function

    return register


def _where_its_tensors_are(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the GPU of its first tensor as current device: Triton launches on the current one."""

    @functools.wraps(function)
    def guarded(first: Tensor, *others: Any) -> Any:
        if first.device.type != "cuda":
            return function(first, *others)
        with torch.cuda.device(first.device):
            return function(first, *others)

    return guarded
