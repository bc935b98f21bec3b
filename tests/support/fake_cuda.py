"""Fake CUDA tensors on any build of torch: shapes, dtypes and devices, no values and no GPU.

Reading a value (`.item()`, `int(tensor)`) and shapes that depend on values (`nonzero`, boolean indexing) raise. A torch
built without CUDA refuses a few notations on them, such as `tensor[...]` and `~tensor`, whose bindings ask CUDA for the
current device; there the operators they stand for are called.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda")


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Tensors made inside are fake."""
    with FakeTensorMode():
        if torch.backends.cuda.is_built():
            yield
        else:
            with _ByOperators():
                yield


_READS = (Tensor.item, Tensor.__int__, Tensor.__bool__, Tensor.__float__, Tensor.__index__)


class _ByOperators(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _read(*args)
        if func is Tensor.__setitem__:
            return _write(*args)
        if func is Tensor.__invert__:
            return torch.bitwise_not(*args)
        if func is Tensor.contiguous:
            return torch.ops.aten.contiguous.default(*args)
        if func in _READS:
            return torch.ops.aten._local_scalar_dense.default(*args)
        if func is Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        return func(*args, **(kwargs or {}))


def _read(tensor: Tensor, index: Any) -> Tensor:
    items = list(index) if isinstance(index, tuple) else [index]
    named = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        place = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[place : place + 1] = [slice(None)] * (tensor.dim() - named)
    tensors: list[Tensor | None] = []
    dim = 0
    for item in items:
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(item, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, item.start, item.stop, item.step or 1)
        elif isinstance(item, Tensor):
            tensors += [None] * (dim - len(tensors)) + [item]
        else:
            tensor = tensor.select(dim, item)
            continue
        dim += 1
    return torch.ops.aten.index.Tensor(tensor, tensors) if tensors else tensor


def _write(tensor: Tensor, index: Any, value: Any) -> None:
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, Tensor) for item in items):
        assert all(isinstance(item, Tensor) for item in items), "tensors beside slices: write it with index_put_"
        tensor.index_put_(items, value)
    elif isinstance(value, Tensor):
        torch.ops.aten.copy_.default(_read(tensor, index), value)
    else:
        _read(tensor, index).fill_(value)
