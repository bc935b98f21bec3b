"""What a real backend would refuse of one rank's own arguments.

`check(dialect, kind, ...)` raises for arguments that the backend refuses, or that it accepts and spoils.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kpool_testing.checks import RefusedError


def check(dialect: str, kind: str, **arguments: Any) -> None:
    """Raise what the dialect raises for these arguments; RefusedError for the dialect "portable"."""
    if dialect == "portable":
        for name, value in arguments.items():
            for tensor in [value] if isinstance(value, Tensor) else value if isinstance(value, list) else []:
                if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                    raise RefusedError(f"{kind}: expected {name} to be contiguous, got strides {tensor.stride()}")
        if kind == "all_gather_single":
            output, given, size = arguments["output"], arguments["input"], arguments["size"]
            wanted = [size * given.shape[0], *given.shape[1:]] if given.dim() else None
            if list(output.shape) != wanted or output.dtype != given.dtype:
                raise RefusedError(f"{kind}: expected output {given.dtype}{wanted}, got {output.dtype}{list(output.shape)}")


def allows_uneven_lists(dialect: str) -> bool:
    """Whether all_gather takes a different shape from each rank."""
    return dialect == "nccl"
