"""Which implementation runs, and how large its score buffer is.

Decided from what every rank of a group shares (device type, dtype, sizes), never from the data of one rank and never by
catching an exception. What is asked for is what runs: an implementation that cannot serve the call is an error.
"""

from __future__ import annotations

import importlib.util
import os
from types import ModuleType

import torch
from torch import Tensor

_DEFAULT_CHUNK_BYTES = {"cpu": 8 << 20}  # CPU: stays in cache
_DEFAULT_CHUNK_BYTES_ELSEWHERE = 256 << 20
CHUNK_VARIABLE = "KPOOL_SCORE_CHUNK_BYTES"


def chunk_bytes(argument: int | None, device: torch.device) -> int:
    """Bytes of the fp32 score buffer: the argument, else ``KPOOL_SCORE_CHUNK_BYTES``, else a default per device.

    Raises:
        ValueError: the environment variable is not a positive integer.
    """
    if argument is not None:
        return argument
    text = os.environ.get(CHUNK_VARIABLE)
    if text is None:
        return _DEFAULT_CHUNK_BYTES.get(device.type, _DEFAULT_CHUNK_BYTES_ELSEWHERE)
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{CHUNK_VARIABLE}: expected a positive number of bytes, got {text!r}")
    return int(text)


def why_not_triton(
    device: torch.device, dtype: torch.dtype, heads: int, dim: int, pool_size: int, budget: int
) -> str | None:
    """Why the Triton path cannot serve a call, or None if it can."""
    if device.type != "cuda":
        return f"Triton kernels need a GPU, the tensors are on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install 'kpool[triton]')"
    from kpool.triton.configs import unsupported_reason

    return unsupported_reason(dtype=dtype, heads=heads, dim=dim, pool_size=pool_size, budget=budget, device=device)


def triton_pools(impl: str, k: Tensor, pool_size: int) -> bool:
    """Whether the Triton kernel pools the keys ``k [T, B, D]``: ``impl`` allows it, and serves ``D`` and ``P``."""
    if impl not in ("auto", "triton"):
        return False
    return why_not_triton(k.device, k.dtype, 1, k.shape[2], pool_size, 1) is None


def choose(impl: str, q: Tensor, keys: Tensor, budget: int, pool_size: int) -> ModuleType:
    """The implementation module for ``impl``: the reference, the tiled torch path or the Triton path.

    ``"auto"`` is Triton where it can serve the call, else the tiled torch path.

    Raises:
        ValueError: ``"triton"`` was asked for and cannot serve the call; the message says why.
    """
    if impl == "reference":
        from kpool import naive

        return naive
    if impl in ("auto", "triton"):
        reason = why_not_triton(q.device, q.dtype, q.shape[2], q.shape[3], pool_size, budget)
        if reason is None and keys.dtype != q.dtype:  # pooled by the caller: their product would not compile
            reason = f"the kernels take pooled keys of the dtype of q, {q.dtype}, got {keys.dtype}"
        if reason is None:
            from kpool.triton import launch

            return launch
        if impl == "triton":
            raise ValueError(
                f"impl: expected a call the Triton path can serve, got impl='triton' where {reason}; use 'auto'"
            )
    from kpool import tiled

    return tiled
