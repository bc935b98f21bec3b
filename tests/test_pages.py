"""Memory for large results: what is asked for, for which tensors, and that nothing depends on the answer."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kpool import pages

CPU = torch.device("cpu")
LARGE = (3, (1 << 20) + 5)  # int32: 12 MiB and a bit, so neither end is at a page's edge

Advice = list[tuple[int, int, int]]


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Advice:
    """What the system was told; it refuses."""
    told: Advice = []

    def madvise(begin: int, length: int, what: int) -> int:
        told.append((begin, length, what))
        return -1

    monkeypatch.setattr(pages, "_madvise", lambda: madvise)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    return told


def test_whole_pages_inside_a_large_tensor_are_advised(advice: Advice) -> None:
    out = pages.empty_int32(LARGE, CPU)
    assert (out.shape, out.dtype, out.is_contiguous()) == (LARGE, torch.int32, True)
    ((begin, length, what),) = advice
    assert what == 14
    assert begin % mmap.PAGESIZE == 0 and length % mmap.PAGESIZE == 0
    first, last = out.data_ptr(), out.data_ptr() + 4 * out.numel()
    assert first <= begin < first + mmap.PAGESIZE and last - mmap.PAGESIZE < begin + length <= last


def _small() -> Tensor:
    return pages.empty_int32((1024, 1023), CPU)


def _empty() -> Tensor:
    return pages.empty_int32((0, 1 << 30), CPU)


def _meta() -> Tensor:
    return pages.empty_int32(LARGE, torch.device("meta"))


def _fake() -> Tensor:
    with FakeTensorMode():
        return pages.empty_int32(LARGE, CPU)


@pytest.mark.parametrize("make", [_small, _empty, _meta, _fake])
def test_others_are_left_alone(advice: Advice, make: Callable[[], Tensor]) -> None:
    assert make().dtype == torch.int32
    assert advice == []


def test_a_system_without_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert pages.empty_int32(LARGE, CPU).fill_(7).eq(7).all()


def test_the_system_takes_the_advice() -> None:
    """The real call: 0 for accepted, or an error number for a kernel without huge pages; memory works either way."""
    out = pages.empty_int32(LARGE, CPU).fill_(7)
    assert out.eq(7).all()
    pages._madvise.cache_clear()
    assert (pages._madvise() is None) == (not hasattr(mmap, "MADV_HUGEPAGE"))
