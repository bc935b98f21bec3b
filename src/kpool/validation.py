"""Argument checks, made once at the door. Every message names the argument, what was expected and what came.

Shapes, dtypes and combinations are always checked; values only on the CPU, where reading them costs nothing
(``visibility`` does that). Wrong dtypes raise TypeError, everything else ValueError.

Shapes: ``S`` rows, ``T`` keys, ``B`` batch, ``H`` heads, ``D`` dimensions, ``P`` pool size, ``K`` tokens, ``M`` pool
budget.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kpool.scoring import TRANSFORMS
from kpool.selection import ORDERS
from kpool.sharding import PLANS
from kpool.visibility import check_cu_seqlens

NUMERICS = ("megatron", "hf")
IMPLS = ("auto", "reference", "torch", "triton")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MAX_KEYS = 2**31  # key slots are returned as int32


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {value!r}")


def check_kind(name: str, value: object, kind: type) -> None:
    """TypeError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected a kpool.{kind.__name__}, got {type(value).__name__}")


def check_dtype(name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """TypeError unless the dtype of ``tensor`` is allowed."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name}: expected {names}, got {tensor.dtype}")


def check_shape(name: str, tensor: Tensor, legend: str, expected: tuple[int | None, ...]) -> None:
    """ValueError unless ``tensor`` has the expected shape; None matches any size."""
    got = tuple(tensor.shape)
    if len(got) != len(expected) or any(e is not None and e != g for e, g in zip(expected, got, strict=True)):
        sizes = ", ".join("*" if e is None else str(e) for e in expected)
        raise ValueError(f"{name}: expected shape {legend} = [{sizes}], got {list(got)}")


def check_pool_size(pool_size: int) -> None:
    """ValueError unless ``pool_size`` is a positive int."""
    if not _is_positive_int(pool_size):
        raise ValueError(f"pool_size: expected a positive int, got {pool_size!r}")


def check_pooling(
    k: Tensor,
    gate_score: Tensor | None,
    ape: Tensor | None,
    pool_size: int,
    cu_seqlens_kv: Tensor | None,
    numerics: str,
) -> None:
    """The arguments of pooling; see ``kpool.pool_keys``."""
    check_choice("numerics", numerics, NUMERICS)
    check_pool_size(pool_size)
    check_dtype("k", k, _FLOATS)
    check_shape("k", k, "[T, B, D]", (None, None, None))
    tokens, batch, dim = k.shape
    if tokens >= _MAX_KEYS:
        raise ValueError(
            f"k: expected fewer than 2^31 keys, since token ids are int32, got T = {tokens}; split the sequence"
        )
    if gate_score is not None:
        check_dtype("gate_score", gate_score, tuple(dict.fromkeys((k.dtype, torch.float32))))
        check_shape("gate_score", gate_score, "[T, B, D]", (tokens, batch, dim))
    if ape is not None:
        check_dtype("ape", ape, (*_FLOATS, torch.float64))
        check_shape("ape", ape, "[P, D]", (pool_size, dim))
    if cu_seqlens_kv is not None:
        check_cu_seqlens(cu_seqlens_kv, "cu_seqlens_kv", tokens)
    _check_devices(k=k, gate_score=gate_score, ape=ape, cu_seqlens_kv=cu_seqlens_kv)


def check_queries(q: Tensor, keys: Tensor, weights: Tensor, *, key_name: str, same_dtype: bool) -> None:
    """Queries and weights against keys ``[T or N, B, D]``."""
    check_dtype("q", q, _FLOATS)
    check_shape("q", q, "[S, B, H, D]", (None, keys.shape[1], None, keys.shape[2]))
    if same_dtype and q.dtype != keys.dtype:
        raise TypeError(f"q: expected the dtype of {key_name}, {keys.dtype}, got {q.dtype}")
    rows, batch, heads, dim = q.shape
    if heads < 1 or dim < 1:
        raise ValueError(f"q: expected at least one head and one dimension, got H = {heads}, D = {dim}")
    check_dtype("weights", weights, (torch.bfloat16, torch.float32))
    check_shape("weights", weights, "[S, B, H]", (rows, batch, heads))
    _check_devices(q=q, weights=weights, **{key_name: keys})


def check_budget(index_topk: int, pool_size: int, name: str = "index_topk") -> int:
    """``M = K // P``; ValueError unless ``K`` is a positive multiple of ``P``. ``P = 1``: the budget itself."""
    if not _is_positive_int(index_topk) or index_topk % pool_size:
        wanted = "a positive int" if name == "budget" else f"a positive multiple of pool_size = {pool_size}"
        raise ValueError(f"{name}: expected {wanted}, got {index_topk!r}; whole pools are selected")
    return index_topk // pool_size


def check_width_multiple(width_multiple: int) -> None:
    """ValueError unless ``width_multiple`` is a positive int."""
    if not _is_positive_int(width_multiple):
        raise ValueError(f"width_multiple: expected a positive int, got {width_multiple!r}")


def check_pooled(keys: Tensor, tokens: int, pool_size: int) -> None:
    """Pooled keys ``[N, B, D]`` that a caller kept, for ``T = tokens`` key slots."""
    check_dtype("pooled.keys", keys, _FLOATS)
    check_shape("pooled.keys", keys, "[N, B, D]", (None, None, None))
    if tokens < 0:
        raise ValueError(f"tokens: expected the number of key slots T >= 0, got {tokens}")
    if keys.shape[0] < tokens // pool_size:
        raise ValueError(
            f"pooled.keys: expected at least T // P = {tokens // pool_size} pools, got {keys.shape[0]}; "
            "a row could see a pool that is not there"
        )


def check_visibility_arguments(
    mask: Tensor | None,
    varlen_starts: Tensor | None,
    varlen_ends: Tensor | None,
    key_positions: Tensor | None,
    cu_seqlens_kv: Tensor | None,
) -> None:
    """Which of the visibility arguments may come together."""
    others = {"varlen_starts": varlen_starts, "varlen_ends": varlen_ends, "key_positions": key_positions}
    given = [name for name, value in {**others, "cu_seqlens_kv": cu_seqlens_kv}.items() if value is not None]
    if mask is not None and given:
        raise ValueError(f"mask: expected no other visibility argument beside a mask, got {', '.join(given)} as well")
    if (varlen_starts is None) != (varlen_ends is None):
        missing = "varlen_starts" if varlen_starts is None else "varlen_ends"
        raise ValueError(
            f"{missing}: expected varlen_starts and varlen_ends together, got only one; pass {missing} too"
        )
    if key_positions is not None and varlen_starts is None:
        raise ValueError(
            "key_positions: expected varlen_starts and varlen_ends beside it, got neither; "
            "positions only say where bounds apply"
        )


def check_options(
    *,
    order: str,
    numerics: str,
    impl: str,
    width_multiple: int,
    score_chunk_bytes: int | None,
    transform: str,
    dim: int,
) -> None:
    """Options shared by the public functions."""
    check_choice("order", order, ORDERS)
    check_choice("numerics", numerics, NUMERICS)
    check_choice("impl", impl, IMPLS)
    check_choice("transform", transform, TRANSFORMS)
    check_width_multiple(width_multiple)
    if score_chunk_bytes is not None and not _is_positive_int(score_chunk_bytes):
        raise ValueError(f"score_chunk_bytes: expected a positive number of bytes or None, got {score_chunk_bytes!r}")
    if transform != "none" and dim & (dim - 1):
        raise ValueError(f"q: expected a power of two as index head dim D for the Hadamard rotation, got {dim}")


def check_sharding(group: object | None, return_index_scores: bool, shard_plan: str) -> None:
    """Sharding options; scores cannot be returned for rows other ranks computed."""
    check_choice("shard_plan", shard_plan, PLANS)
    if group is not None and return_index_scores:
        raise ValueError(
            "return_index_scores: expected False with query_shard_group, got True; each rank scores only its own rows"
        )


def _check_devices(**tensors: Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        listing = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"{', '.join(devices)}: expected all on one device, got {listing}")


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
