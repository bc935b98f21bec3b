"""What a real backend would refuse of one rank's own arguments.

`check(dialect, kind, ...)` raises for arguments that the backend refuses, or accepts and spoils:

- "gloo" raises the exception types and texts that gloo of torch 2.13 raises on a CPU (compared with real processes in
  `tests/testing/test_conformance_gloo.py`), and `RefusedError` where real gloo corrupts data or aborts;
- "nccl" raises what the source of ProcessGroupNCCL says; no run on GPUs has confirmed these texts;
- "portable" raises `RefusedError` for what either refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from kpool_testing.errors import RefusedError
from kpool_testing.rules.backends import BITWISE, GLOO_DTYPES, Named, all_tensors, check_gloo, check_nccl, refuse


def check(dialect: str, kind: str, **arguments: Any) -> None:
    """Raise what the dialect raises for these arguments of one rank; return if it takes them."""
    root = arguments.get("root")
    if root is not None and not 0 <= root < arguments["size"]:
        _refuse_root(dialect, kind, root, arguments["size"])
    tensors = all_tensors(arguments)
    if any(tensor.is_sparse for _, tensor in tensors):
        _check_sparse(dialect, kind, arguments)
    else:
        _CHECKS[dialect](kind, arguments, tensors)


def check_values(dialect: str, kind: str, op: str, tensors: Sequence[Tensor]) -> bool:
    """Whether a reduction of these tensors of all ranks has an answer that every backend gives.

    MIN and MAX of a NaN have none: gloo keeps or drops it by its place. Raises RefusedError for it where the dialect is
    "portable".
    """
    if op not in ("MIN", "MAX") or not tensors[0].is_floating_point():
        return True
    if not any(bool(tensor.isnan().any()) for tensor in tensors):
        return True
    if dialect == "portable":
        raise RefusedError(
            f"{kind}: {op} of a NaN has no portable answer: gloo keeps or drops it by its place; expected tensors "
            "without NaN, or a flag of its own for it"
        )
    return False


def refuse_future(dialect: str, what: str) -> NoReturn:
    """Raise what asking for the future of a gloo work raises that has none."""
    if dialect == "gloo":
        raise RuntimeError("Work::getFuture not implemented.")
    raise RefusedError(f"{what}: gloo has no future for it; expected wait()")


def allows_uneven_lists(dialect: str) -> bool:
    """Whether all_gather of a list takes another shape from each rank, as NCCL does by broadcasting."""
    return dialect == "nccl"


def _refuse_root(dialect: str, kind: str, root: int, size: int) -> NoReturn:
    if dialect == "portable":
        raise RefusedError(f"{kind}: expected a root rank in [0, {size}), got {root}")
    backend = "NCCL" if dialect == "nccl" else "Gloo"
    raise RuntimeError(f"ProcessGroup{backend}::{kind}: invalid root rank: {root}")


def _check_sparse(dialect: str, kind: str, a: dict[str, Any]) -> None:
    if dialect != "gloo":
        raise RefusedError(f"{kind}: got a sparse tensor: NCCL has none (gloo sums them); expected a dense one")
    if kind != "all_reduce":
        raise NotImplementedError(f"Could not run 'c10d::{kind}_' with arguments from the 'SparseCPU' backend")
    if a["op"] != "SUM":
        raise RuntimeError(
            "ProcessGroupGloo::allreduce: unsupported reduction operation "
            "(allreduce of sparse tensors only works with ReduceOp.SUM)"
        )


# -- both at once


def _portable(kind: str, a: dict[str, Any], tensors: Named) -> None:
    if kind == "recv_anysource":
        raise RefusedError("recv from any source: NCCL has no such call, expected a source rank")
    if kind == "monitored_barrier":
        raise RefusedError("monitored_barrier: NCCL has no such call, expected barrier")
    if kind == "coalescing":
        raise RefusedError("coalescing: gloo has none, expected one call after the other")
    for name, tensor in tensors:
        if not tensor.is_contiguous():
            refuse(kind, name, "contiguous memory", tensor)
        if tensor.dtype not in GLOO_DTYPES and not tensor.dtype.is_complex:
            refuse(kind, name, "a dtype that both gloo and NCCL carry", tensor)
    if "op" in a:
        _portable_op(kind, a["op"], [tensor.dtype for _, tensor in tensors])
    specific = _PORTABLE.get(kind)
    if specific is not None:
        specific(kind, a)


def _portable_op(kind: str, op: str, dtypes: Sequence[torch.dtype]) -> None:
    if op in BITWISE or op == "PREMUL_SUM":
        backend = "gloo" if op == "PREMUL_SUM" else "NCCL"
        raise RefusedError(f"{kind}: {backend} has no ReduceOp.{op}, expected SUM, AVG, PRODUCT, MIN or MAX")
    if op == "AVG" and not all(dtype.is_floating_point for dtype in dtypes):
        raise RefusedError(f"{kind}: gloo refuses ReduceOp.AVG of {dtypes[0]}, expected a floating dtype")


def _concatenated(kind: str, large: tuple[str, Tensor], small: tuple[str, Tensor], size: int) -> None:
    (large_name, whole), (small_name, part) = large, small
    if part.dim() == 0:
        refuse(kind, small_name, "at least one dimension", part)
    if whole.dtype != part.dtype:
        refuse(kind, large_name, f"dtype {part.dtype}, as {small_name} has", whole)
    wanted = [size * part.shape[0], *part.shape[1:]]
    if list(whole.shape) != wanted:
        form = f"shape {wanted}: {size} times {list(part.shape)} along dim 0, the one form that every backend takes"
        refuse(kind, large_name, form, whole)


def _portable_all_gather_single(kind: str, a: dict[str, Any]) -> None:
    _concatenated(kind, ("output", a["output"]), ("input", a["input"]), a["size"])
    if a["input"].requires_grad and torch.is_grad_enabled():
        refuse(kind, "input", "requires_grad=False (gloo refuses it outside no_grad)", a["input"])


def _same_as(kind: str, name: str, entries: Sequence[Tensor], like: Tensor, size: int) -> None:
    if len(entries) != size:
        raise RefusedError(f"{kind}: expected {name} of {size} tensors, got {len(entries)}")
    for index, entry in enumerate(entries):
        if entry.shape != like.shape or entry.dtype != like.dtype:
            refuse(kind, f"{name}[{index}]", f"{like.dtype} {list(like.shape)}", entry)


def _portable_all_to_all_single(kind: str, a: dict[str, Any]) -> None:
    size = a["size"]
    for name, splits in (("output", a["received"]), ("input", a["cut"])):
        tensor = a[name]
        if splits and len(splits) != size:
            raise RefusedError(f"{kind}: expected {size} {name} splits, got {splits}")
        if splits and sum(splits) != tensor.shape[0]:
            refuse(kind, name, f"dim 0 of {sum(splits)}, the sum of the splits {splits}", tensor)
        if not splits and tensor.shape[0] % size:
            refuse(kind, name, f"a dim 0 that is a multiple of {size} where no splits are given", tensor)


def _portable_reduce_scatter(kind: str, a: dict[str, Any]) -> None:
    if len(a["inputs"]) != a["size"]:
        raise RefusedError(f"{kind}: expected {a['size']} inputs, got {len(a['inputs'])}")
    mine = a["inputs"][a["place"]]
    if mine.shape != a["output"].shape:
        refuse(kind, "output", f"shape {list(mine.shape)}, as this rank's input has", a["output"])


def _portable_all_to_all(kind: str, a: dict[str, Any]) -> None:
    # gloo wants every entry alike, NCCL does not; what gloo refuses is refused.
    _same_as(kind, "inputs", a["inputs"], a["inputs"][0], a["size"])
    _same_as(kind, "outputs", a["outputs"], a["outputs"][0], a["size"])


def _portable_gather(kind: str, a: dict[str, Any]) -> None:
    if a["input"].dtype.is_complex:
        refuse(kind, "input", "a real dtype (gloo gathers no complex ones)", a["input"])
    if a["place"] == a["root"]:
        _same_as(kind, "outputs", a["outputs"], a["input"], a["size"])


_PORTABLE: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "all_gather_single": _portable_all_gather_single,
    "all_gather": lambda k, a: _same_as(k, "outputs", a["outputs"], a["input"], a["size"]),
    "reduce_scatter_single": lambda k, a: _concatenated(k, ("input", a["input"]), ("output", a["output"]), a["size"]),
    "reduce_scatter": _portable_reduce_scatter,
    "scatter": lambda k, a: (
        _same_as(k, "inputs", a["inputs"], a["output"], a["size"]) if a["place"] == a["root"] else None
    ),
    "gather": _portable_gather,
    "all_to_all_single": _portable_all_to_all_single,
    "all_to_all": _portable_all_to_all,
}

_CHECKS: dict[str, Callable[[str, dict[str, Any], Named], None]] = {
    "gloo": check_gloo,
    "nccl": check_nccl,
    "portable": _portable,
}
