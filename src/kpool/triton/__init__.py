"""The GPU path: Triton kernels for pooling, scoring and selection. Imported only when asked for.

`configs` (what is supported, with which tiles) needs torch alone; everything else needs the package ``triton``.
Importing `launch` registers the operator ``kpool::select_triton``.
"""

from __future__ import annotations

from typing import Any

_LAUNCH = ("pool", "scores", "select")


def __getattr__(name: str) -> Any:
    """`select`, `scores` and `pool`, from `launch`, loaded on first use: importing kpool never imports Triton."""
    if name in _LAUNCH:
        from kpool.triton import launch

        return getattr(launch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
