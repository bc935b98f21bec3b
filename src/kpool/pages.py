"""Memory for large results, on huge pages where Linux has them.

A selection is 8 KiB a row and written once. On pages of 4 KiB the kernel hands them out one fault at a time, and for
short documents that takes longer than selecting. NumPy gives its large arrays the same advice; torch does only when
``THP_MEM_ALLOC_ENABLE=1`` was set before it started.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_LEAST_BYTES = 4 << 20  # below, two huge pages at most: nothing to gain


def empty_int32(shape: Sequence[int], device: torch.device) -> Tensor:
    """An uninitialised int32 tensor; a large one in CPU memory asks for huge pages, which the system may refuse."""
    out = torch.empty(tuple(shape), dtype=torch.int32, device=device)
    large = out.numel() * out.element_size() >= _LEAST_BYTES
    if large and device.type == "cpu" and type(out) is Tensor and not torch.compiler.is_compiling():
        _advise(out)
    return out


def _advise(tensor: Tensor) -> None:
    """Ask for huge pages for the whole pages of a contiguous tensor."""
    madvise = _madvise()
    if madvise is None:
        return
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(begin, end - begin, mmap.MADV_HUGEPAGE)  # advice: the answer changes nothing


@cache
def _madvise() -> Any:
    """The C library's ``madvise``; None where there is no such function or no such advice."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = getattr(ctypes.CDLL(None), "madvise", None)
    if call is not None:
        call.argtypes, call.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return call
