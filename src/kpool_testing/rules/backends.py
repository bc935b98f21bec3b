"""The rules of real backends: what gloo (as observed) and NCCL (by its source) refuse of one rank's arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from kpool_testing.errors import RefusedError

GLOO_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
_FLOAT8 = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("float8_"))
_NCCL_DTYPES = GLOO_DTYPES | _FLOAT8
_ANY_DTYPE = ("send", "recv", "recv_anysource")  # gloo moves bytes
BITWISE = ("BAND", "BOR", "BXOR")
_SCALAR_NAMES = {torch.int8: "Char", torch.uint8: "Byte", torch.int32: "Int", torch.int64: "Long", torch.bool: "Bool"}
_C_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.int16: "short int",
    torch.int32: "int",
    torch.int64: "long int",
    torch.bool: "bool",
}


Named = list[tuple[str, Tensor]]


def all_tensors(arguments: dict[str, Any]) -> Named:
    """The tensors among a call's arguments, with the arguments' names."""
    named: Named = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            named.append((name, value))
        elif isinstance(value, (list, tuple)):
            named += [(name, part) for part in value if isinstance(part, Tensor)]
    return named


def _sizes(tensor: Tensor) -> str:
    return "(" + ", ".join(str(extent) for extent in tensor.shape) + ")"


# -- gloo, as observed


def check_gloo(kind: str, a: dict[str, Any], tensors: Named) -> None:
    """Raise what gloo raises on a CPU; RefusedError where it corrupts data or crashes."""
    if kind == "coalescing":
        raise RuntimeError("Backend gloo does not implement startCoalescing")
    if kind == "recv_anysource" and any(tensor.numel() == 0 for tensor in a["tensors"]):
        raise RuntimeError("enforce fail offset < this->size. 0 vs 0 (an empty receive from any source)")
    specific = _GLOO.get(kind)
    if specific is not None:
        specific(a)
    for _, tensor in tensors:
        if tensor.dtype not in GLOO_DTYPES and not (kind in _ANY_DTYPE or tensor.dtype.is_complex):
            raise RuntimeError("Invalid scalar type")


def _gloo_match(call: str, expected: Tensor, entries: Sequence[Tensor]) -> None:
    for index, entry in enumerate(entries):
        if entry.dtype != expected.dtype:
            raise RuntimeError(
                f"ProcessGroupGloo::{call}: invalid tensor type at index {index} "
                f"(expected {_options(expected)}, got {_options(entry)})"
            )
        if entry.shape != expected.shape:
            raise RuntimeError(
                f"ProcessGroupGloo::{call}: invalid tensor size at index {index} "
                f"(expected {_sizes(expected)}, got {_sizes(entry)})"
            )


def _options(tensor: Tensor) -> str:
    kind = _C_NAMES.get(tensor.dtype, str(tensor.dtype))
    return (
        f"TensorOptions(dtype={kind}, device={tensor.device}, layout=Strided, requires_grad=false (default), "
        "pinned_memory=false (default), memory_format=(nullopt))"
    )


def _gloo_all_gather_single(a: dict[str, Any]) -> None:
    output, given = a["output"], a["input"]
    if output.dim() == 0:
        raise RuntimeError("chunk expects at least a 1-dimensional tensor")
    _gloo_all_gather({"outputs": list(output.detach().chunk(a["size"])), "input": given, "size": a["size"]})
    if given.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "A view was created in no_grad mode and is being modified inplace with grad mode enabled. This view is the "
            "output of a function that returns multiple views. Such functions do not allow the output views to be "
            "modified inplace. You should replace the inplace operation by an out-of-place one."
        )


def _gloo_all_gather(a: dict[str, Any]) -> None:
    outputs, size = a["outputs"], a["size"]
    if len(outputs) != size:
        raise RuntimeError(
            "ProcessGroupGloo::allgather: invalid output tensor list at index 0 "
            f"(expected length {size}, got {len(outputs)})"
        )
    _gloo_match("allgather", a["input"], outputs)


def _gloo_reduction(a: dict[str, Any]) -> None:
    for name, tensor in all_tensors(a):
        _gloo_op(a["op"], tensor.dtype)
        if not _dense(tensor):
            refuse("reduction", name, "dense memory (gloo overwrites what lies between strided rows)", tensor)


def _gloo_op(op: str, dtype: torch.dtype) -> None:
    if op in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"Cannot use ReduceOp.{op} with non-integral dtype")
    if op == "AVG" and not (dtype.is_floating_point or dtype.is_complex):
        name = _SCALAR_NAMES.get(dtype, str(dtype))
        raise RuntimeError(f"result type Float can't be cast to the desired output type {name}")
    if op == "PREMUL_SUM":
        raise RuntimeError("Cannot use ReduceOp.PREMUL_SUM with Gloo")


def _gloo_reduce_scatter_single(a: dict[str, Any]) -> None:
    output, given, size = a["output"], a["input"], a["size"]
    if output.dtype != given.dtype:
        kinds = f"{_C_NAMES.get(output.dtype)} vs. {_C_NAMES.get(given.dtype)}"
        raise RuntimeError(f"Check failed: outputTensors[i].dtype() == inputTensors[i].dtype() ({kinds}). \n")
    if output.dim() == 0:
        refuse("reduce_scatter_single", "output", "at least one dimension (gloo crashes)", output)
    if output.shape[0] * size != given.shape[0]:
        numbers = f"{output.shape[0] * size} vs. {given.shape[0]}"
        raise RuntimeError(f"Check failed: outputShape[0] * worldSize == inputShape[0] ({numbers}). \n")
    if output.dim() != given.dim():
        raise RuntimeError(f"output {_sizes(output)} and input {_sizes(given)} have different numbers of dimensions")
    for mine, theirs in zip(output.shape[1:], given.shape[1:], strict=True):
        if mine != theirs:
            raise RuntimeError(f"Check failed: outputShape[i] == inputShape[i] ({mine} vs. {theirs}). \n")
    _gloo_op(a["op"], given.dtype)


def _gloo_reduce_scatter(a: dict[str, Any]) -> None:
    if len(a["inputs"]) != a["size"]:
        raise RuntimeError("invalid input tensor list size, must be world size")
    _gloo_op(a["op"], a["output"].dtype)


def _gloo_scatter(a: dict[str, Any]) -> None:
    if a["place"] == a["root"]:
        if len(a["inputs"]) != a["size"]:
            raise RuntimeError(
                f"ProcessGroupGloo::scatter: Incorrect input list size {len(a['inputs'])}. "
                f"Input list size should be {a['size']}, same as size of the process group."
            )
        _gloo_match("scatter", a["output"], a["inputs"])
    _gloo_dense("scatter", a)


def _gloo_gather(a: dict[str, Any]) -> None:
    if a["input"].dtype.is_complex:
        raise RuntimeError("Invalid scalar type")
    if a["place"] == a["root"]:
        if len(a["outputs"]) != a["size"]:
            raise RuntimeError(
                f"ProcessGroupGloo::gather: Incorrect output list size {len(a['outputs'])}. "
                f"Output list size should be {a['size']}, same as size of the process group."
            )
        _gloo_match("gather", a["input"], a["outputs"])


def _gloo_dense(kind: str, a: dict[str, Any]) -> None:
    for name, tensor in all_tensors(a):
        if not tensor.is_contiguous():
            refuse(kind, name, "contiguous memory (gloo spoils strided tensors)", tensor)


def _gloo_all_to_all_single(a: dict[str, Any]) -> None:
    if not a["input"].is_contiguous():
        raise ValueError("Tensors must be contiguous")
    if not a["output"].is_contiguous():
        refuse("all_to_all_single", "output", "contiguous memory (gloo overwrites its neighbours)", a["output"])
    _splits(a)
    for name, splits in (("output", a["received"]), ("input", a["cut"])):
        if not splits and a[name].dim() and a[name].shape[0] % a["size"]:
            wanted = f"a dim 0 that is a multiple of {a['size']} where no splits are given (gloo returns garbage)"
            refuse("all_to_all_single", name, wanted, a[name])


def _splits(a: dict[str, Any]) -> None:
    for splits, tensor in ((a["cut"], a["input"]), (a["received"], a["output"])):
        if splits and len(splits) != a["size"]:
            raise RuntimeError("Number of tensor splits not equal to group size")
        if splits and sum(splits) != tensor.shape[0]:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")


def _gloo_all_to_all(a: dict[str, Any]) -> None:
    for name, entries in (("input", a["inputs"]), ("output", a["outputs"])):
        if len(entries) != a["size"]:
            raise RuntimeError(
                f"ProcessGroupGloo::alltoall: {name} tensor list size {len(entries)} "
                f"does not match world size {a['size']}"
            )
    _gloo_match("alltoall", a["inputs"][0], a["inputs"])
    if any(entry.shape != a["inputs"][0].shape for entry in a["outputs"]):
        raise RuntimeError("ProcessGroupGloo::alltoall: input and output tensors must have the same size")


def _gloo_peer(a: dict[str, Any]) -> None:
    if any(not tensor.is_contiguous() for tensor in a["tensors"]):
        raise RuntimeError("input tensor has to be contiguous")


_GLOO: dict[str, Callable[[dict[str, Any]], None]] = {
    "all_gather_single": _gloo_all_gather_single,
    "all_gather": _gloo_all_gather,
    "all_reduce": _gloo_reduction,
    "reduce": _gloo_reduction,
    "reduce_scatter_single": _gloo_reduce_scatter_single,
    "reduce_scatter": _gloo_reduce_scatter,
    "broadcast": lambda a: _gloo_dense("broadcast", a),
    "scatter": _gloo_scatter,
    "gather": _gloo_gather,
    "all_to_all_single": _gloo_all_to_all_single,
    "all_to_all": _gloo_all_to_all,
    "send": _gloo_peer,
    "recv": _gloo_peer,
}


# -- NCCL, from its source


def check_nccl(kind: str, a: dict[str, Any], tensors: Named) -> None:
    """Raise what the source of ProcessGroupNCCL says it raises."""
    if kind == "recv_anysource":
        raise NotImplementedError("ProcessGroupNCCL does not support recvAnysource")
    if any(not tensor.is_contiguous() for _, tensor in tensors):
        raise ValueError("Tensors must be contiguous")
    for _, tensor in tensors:
        if tensor.dtype not in _NCCL_DTYPES and not tensor.dtype.is_complex:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    if kind == "all_gather_single":
        _nccl_sizes(a["output"], a["input"], a["size"], "output tensor", "input tensor")
    elif kind == "reduce_scatter_single":
        _nccl_sizes(a["input"], a["output"], a["size"], "input tensor", "output tensor")
    elif kind == "all_to_all_single":
        _splits(a)
        for name, splits in (("output", a["received"]), ("input", a["cut"])):
            if not splits and a[name].shape[0] % a["size"]:
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
    if "op" in a:
        _nccl_op(a["op"], [tensor.dtype for _, tensor in tensors])


def _nccl_sizes(large: Tensor, small: Tensor, size: int, large_name: str, small_name: str) -> None:
    if large.dtype != small.dtype:
        raise TypeError(f"{large_name} must have the same type as {small_name}")
    if large.numel() != small.numel() * size:
        raise ValueError(f"{large_name} size must be equal to world_size times {small_name} size")


def _nccl_op(op: str, dtypes: Sequence[torch.dtype]) -> None:
    if op in BITWISE:
        raise ValueError(f"Cannot use ReduceOp.{op} with NCCL")
    if op == "AVG" and torch.bool in dtypes:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if op == "PREMUL_SUM":
        raise NotImplementedError("ReduceOp.PREMUL_SUM is not supported by simulated groups")
    if any(dtype in _FLOAT8 for dtype in dtypes):
        raise TypeError("Float8 dtypes are not supported for NCCL reductions")


def refuse(kind: str, name: str, expected: str, tensor: Tensor) -> NoReturn:
    """Raise a RefusedError: call, argument, expected, got."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    raise RefusedError(f"{kind}: expected {name} with {expected}; got {dtype} {list(tensor.shape)}{layout}")


def _dense(tensor: Tensor) -> bool:
    """True if the elements fill one block of memory, in whatever order of dimensions."""
    if tensor.is_contiguous():
        return True
    strides = sorted(
        (stride, extent) for stride, extent in zip(tensor.stride(), tensor.shape, strict=True) if extent != 1
    )
    expected = 1
    for stride, extent in strides:
        if stride != expected:
            return tensor.numel() < 2
        expected *= extent
    return True
