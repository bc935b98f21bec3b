"""Bad input, one clear error each: the message names the argument, what was expected, and what came."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kpool import PooledKeys, Visibility, fused_qk_topk_kpool, pool_keys, select_pools
from kpool_testing import FakeGroup

S, T, B, H, D, P, K = 6, 8, 2, 3, 4, 2, 4
GOOD: dict[str, Any] = {
    "q": torch.zeros(S, B, H, D, dtype=torch.bfloat16),
    "k": torch.zeros(T, B, D, dtype=torch.bfloat16),
    "weights": torch.zeros(S, B, H),
    "index_topk": K,
    "pool_size": P,
    "gate_score": torch.zeros(T, B, D),
    "ape": torch.zeros(P, D),
    "return_index_scores": False,
}
BOUNDS = {"varlen_starts": torch.zeros(S, dtype=torch.int64), "varlen_ends": torch.full((S,), T)}
MASK = torch.zeros(S, T)


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def test_the_good_call_is_good() -> None:
    for visibility in ({}, BOUNDS, {"mask": MASK}, {**BOUNDS, "key_positions": torch.arange(T)}):
        assert fused_qk_topk_kpool(**GOOD, **visibility)[1].shape == (B, S, K + P - 1)


DTYPES = [
    ({"q": zeros(S, B, H, D, dtype=torch.float64)}, "q: expected torch.bfloat16 or .* got torch.float64"),
    ({"k": zeros(T, B, D, dtype=torch.int32)}, "k: expected torch.bfloat16 or .* got torch.int32"),
    ({"q": zeros(S, B, H, D, dtype=torch.float32)}, "q: expected the dtype of k, torch.bfloat16, got torch.float32"),
    ({"weights": zeros(S, B, H, dtype=torch.float16)}, "weights: expected torch.bfloat16 or .* got torch.float16"),
    ({"gate_score": zeros(T, B, D, dtype=torch.float16)}, "gate_score: expected .* got torch.float16"),
    ({"ape": zeros(P, D, dtype=torch.int64)}, "ape: expected .* got torch.int64"),
    ({"q": [1.0]}, "q: expected a torch.Tensor, got list"),
    ({"k": None}, "k: expected a torch.Tensor, got NoneType"),
    ({"mask": [[0.0]]}, "mask: expected a torch.Tensor, got list"),
    ({"varlen_starts": [0] * S, "varlen_ends": [T] * S}, "varlen_starts: expected a torch.Tensor, got list"),
    ({**BOUNDS, "key_positions": list(range(T))}, "key_positions: expected a torch.Tensor, got list"),
    ({"cu_seqlens_kv": [0, T]}, "cu_seqlens_kv: expected a torch.Tensor, got list"),
    ({"mask": MASK.bool()}, "mask: expected an additive float32 mask .* got torch.bool; convert"),
    ({"mask": MASK.to(torch.bfloat16)}, "mask: expected .* got torch.bfloat16"),
    ({**BOUNDS, "varlen_starts": torch.zeros(S)}, "varlen_starts: expected torch.int32 or .* got torch.float32"),
    ({**BOUNDS, "varlen_ends": torch.zeros(S, dtype=torch.int16)}, "varlen_ends: expected .* got torch.int16"),
    ({**BOUNDS, "key_positions": torch.zeros(T)}, "key_positions: expected torch.int32 or .* got torch.float32"),
    ({"cu_seqlens_kv": torch.tensor([0.0, 8.0])}, "cu_seqlens_kv: expected torch.int32 or .* got torch.float32"),
]  # fmt: skip

VALUES = [
    # shapes that disagree
    ({"q": zeros(S, B, D)}, r"q: expected shape \[S, B, H, D\] = \[\*, 2, \*, 4\], got \[6, 2, 4\]"),
    ({"q": zeros(S, 1, H, D)}, r"q: expected shape .* = \[\*, 2, \*, 4\], got \[6, 1, 3, 4\]"),
    ({"q": zeros(S, B, H, 8)}, r"q: expected shape .* got \[6, 2, 3, 8\]"),
    ({"q": zeros(S, B, 0, D), "weights": torch.zeros(S, B, 0)}, "q: expected at least one head .* H = 0"),
    ({"k": zeros(T, D)}, r"k: expected shape \[T, B, D\] = \[\*, \*, \*\], got \[8, 4\]"),
    ({"weights": torch.zeros(S, H, B)}, r"weights: expected shape \[S, B, H\] = \[6, 2, 3\], got \[6, 3, 2\]"),
    ({"gate_score": torch.zeros(T, B, 1)}, r"gate_score: expected shape \[T, B, D\] = \[8, 2, 4\], got \[8, 2, 1\]"),
    ({"ape": torch.zeros(D, P)}, r"ape: expected shape \[P, D\] = \[2, 4\], got \[4, 2\]"),
    ({"mask": torch.zeros(T, S)}, r"mask: expected shape .*6.*8.* got .*8, 6\]"),
    ({"mask": torch.zeros(3, S, T)}, r"mask: expected .*got .*3"),
    ({"mask": torch.zeros(T)}, r"mask: expected \[S, T\] or \[B, S, T\], got .*8"),
    ({**BOUNDS, "varlen_ends": torch.full((S + 1,), T)}, "varlen_ends: expected the shape of varlen_starts .* got .*7"),
    ({"varlen_starts": ints(0), "varlen_ends": ints(1)}, "varlen_starts: expected .*6.* got .*1"),
    ({**BOUNDS, "varlen_starts": torch.zeros(S, 1, dtype=torch.int64)}, "varlen_starts: expected one dimension, got"),
    ({**BOUNDS, "key_positions": torch.arange(T - 1)}, "key_positions: expected .*8.* got .*7"),
    # values
    ({**BOUNDS, "varlen_starts": torch.full((S,), T + 1)}, r"varlen_starts: expected .* got \[9, 8\) in row 0"),
    ({**BOUNDS, "key_positions": torch.arange(T).flip(0)}, "key_positions: .* got 7 then 6 at slot 0"),
    ({**BOUNDS, "cu_seqlens_kv": ints(0, 5, 3)}, "cu_seqlens_kv: expected ascending .* got 5 then 3 at document 1"),
    ({**BOUNDS, "cu_seqlens_kv": ints(1, 8)}, "cu_seqlens_kv: expected .* from 0, got a first value of 1"),
    ({**BOUNDS, "cu_seqlens_kv": ints(0, 9)}, "cu_seqlens_kv: expected a last value within T = 8 keys, got 9"),
    ({**BOUNDS, "cu_seqlens_kv": torch.zeros(0, dtype=torch.int64)}, "cu_seqlens_kv: expected .* got an empty tensor"),
    ({**BOUNDS, "cu_seqlens_kv": torch.zeros(2, 2, dtype=torch.int64)}, "cu_seqlens_kv: expected one dimension"),
    # combinations
    ({"mask": MASK, **BOUNDS}, "mask: expected no other .* got varlen_starts, varlen_ends as well"),
    ({"mask": MASK, "cu_seqlens_kv": ints(0, 8)}, "mask: expected no other .* got cu_seqlens_kv as well"),
    ({"mask": MASK, "key_positions": torch.arange(T)}, "mask: expected no other .* got key_positions as well"),
    ({"varlen_starts": BOUNDS["varlen_starts"]}, "varlen_ends: expected varlen_starts and .* together, got only one"),
    ({"varlen_ends": BOUNDS["varlen_ends"]}, "varlen_starts: expected varlen_starts and .* together, got only one"),
    ({"key_positions": torch.arange(T)}, "key_positions: expected varlen_starts and .* got neither"),
    ({"cu_seqlens_kv": ints(0, 8)}, "cu_seqlens_kv: expected S == T .* got S = 6, T = 8"),
    # sizes
    ({"index_topk": 5}, "index_topk: expected a positive multiple of pool_size = 2, got 5"),
    ({"index_topk": 0}, "index_topk: expected a positive multiple of pool_size = 2, got 0"),
    ({"index_topk": 4.0}, "index_topk: expected a positive multiple of pool_size = 2, got 4.0"),
    ({"pool_size": 0}, "pool_size: expected a positive int, got 0"),
    ({"pool_size": True}, "pool_size: expected a positive int, got True"),
    ({"width_multiple": 0}, "width_multiple: expected a positive int, got 0"),
    ({"width_multiple": True}, "width_multiple: expected a positive int, got True"),
    ({"score_chunk_bytes": True}, "score_chunk_bytes: expected a positive number of bytes or None, got True"),
    ({"score_chunk_bytes": 0}, "score_chunk_bytes: expected a positive number of bytes or None, got 0"),
    ({"score_chunk_bytes": 2.5}, "score_chunk_bytes: expected .* got 2.5"),
    # choices
    ({"order": "id"}, r"order: expected one of \('score', 'position'\), got 'id'"),
    ({"numerics": "fp32"}, r"numerics: expected one of \('megatron', 'hf'\), got 'fp32'"),
    ({"impl": "cuda"}, r"impl: expected one of \('auto', 'reference', 'torch', 'triton'\), got 'cuda'"),
    ({"shard_plan": "zigzag"}, r"shard_plan: expected one of \('contiguous', 'block_cyclic'\), got 'zigzag'"),
    # groups
    (
        {"query_shard_group": FakeGroup(0, 2), "return_index_scores": True},
        "return_index_scores: expected False with query_shard_group, got True",
    ),
    ({"query_shard_group": FakeGroup(0, 1), "return_index_scores": True}, "return_index_scores: expected False"),
    ({"query_shard_group": -100}, "query_shard_group: expected a group this process belongs to, got the handle"),
    ({"query_shard_group": object()}, r"query_shard_group: expected an object with rank\(\) and size\(\)"),
    (
        {"query_shard_group": SimpleNamespace(rank=lambda: -1, size=lambda: 2)},
        "query_shard_group: expected a member, 0 <= rank < size, got rank -1 of size 2",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DTYPES)
def test_dtypes(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fused_qk_topk_kpool(**{**GOOD, **change})


@pytest.mark.parametrize(("change", "message"), VALUES)
def test_values(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_qk_topk_kpool(**{**GOOD, **change})


@pytest.mark.parametrize("flag", ["fp8_indexer", "rotate_activation_enabled"])
def test_rotation_needs_a_power_of_two(flag: str) -> None:
    call = {**GOOD, "q": zeros(S, B, H, 12), "k": zeros(T, B, 12), "gate_score": None, "ape": None}
    with pytest.raises(ValueError, match=r"q: expected a power of two .* got 12"):
        fused_qk_topk_kpool(**call, **{flag: True})


def test_more_keys_than_int32_can_number() -> None:
    k = torch.zeros(1, 1, 1, dtype=torch.bfloat16).expand(2**31, 1, 1)
    call = {**GOOD, "q": zeros(1, 1, 1, 1), "k": k, "weights": torch.zeros(1, 1, 1), "gate_score": None, "ape": None}
    with pytest.raises(ValueError, match=r"k: expected fewer than 2\^31 keys, .* got T = 2147483648"):
        fused_qk_topk_kpool(**call)


def test_triton_without_a_gpu() -> None:
    with pytest.raises(
        ValueError, match="impl='triton' where Triton kernels need a GPU, the tensors are on cpu; use 'auto'"
    ):
        fused_qk_topk_kpool(**{**GOOD, "impl": "triton"})


@pytest.mark.parametrize("name", ["q", "weights", "gate_score", "ape", "mask", "cu_seqlens_kv"])
def test_tensors_on_two_devices(name: str) -> None:
    given = {**GOOD, "mask": MASK, "cu_seqlens_kv": ints(0, 8)}
    change = {name: given[name].to("meta")}
    with pytest.raises(ValueError, match=f"{name}.*: expected .* on .*cpu.*|{name}: .* got one on meta"):
        fused_qk_topk_kpool(**{**GOOD, **change})


def test_a_refused_call_makes_no_collective() -> None:
    """Every rank refuses before the gather, so none waits for another."""
    from kpool_testing import RankError, replay

    with pytest.raises(ValueError, match="order: expected") as caught:
        replay(lambda group: fused_qk_topk_kpool(**{**GOOD, "order": "id"}, query_shard_group=group), 2)
    assert isinstance(caught.value, RankError) and not caught.value.trace.calls


@pytest.mark.parametrize("text", ["", "0", "-5", "1e6", "many"])
def test_the_chunk_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPOOL_SCORE_CHUNK_BYTES", text)
    with pytest.raises(ValueError, match=f"KPOOL_SCORE_CHUNK_BYTES: expected a positive number of bytes, got '{text}'"):
        fused_qk_topk_kpool(**GOOD)


class TestPoolKeys:
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"k": zeros(T, B)}, ValueError, r"k: expected shape \[T, B, D\]"),
            ({"k": zeros(T, B, D, dtype=torch.int8)}, TypeError, "k: expected .* got torch.int8"),
            ({"pool_size": -1}, ValueError, "pool_size: expected a positive int, got -1"),
            ({"ape": torch.zeros(3, D)}, ValueError, r"ape: expected shape \[P, D\] = \[2, 4\], got \[3, 4\]"),
            ({"cu_seqlens_kv": ints(0, 9)}, ValueError, "cu_seqlens_kv: .* within T = 8 keys, got 9"),
            ({"numerics": "x"}, ValueError, "numerics: expected one of"),
            ({"impl": "x"}, ValueError, "impl: expected one of"),
        ],
    )
    def test_refused(self, change: dict[str, Any], error: type[Exception], message: str) -> None:
        names = ("k", "gate_score", "ape", "pool_size")
        with pytest.raises(error, match=message):
            pool_keys(**{**{name: GOOD[name] for name in names}, **change})


class TestVisibility:
    @pytest.mark.parametrize(
        ("build", "error", "message"),
        [
            (lambda: Visibility.causal(-1), ValueError, r"rows, first: expected integers >= 0, got -1, 0"),
            (lambda: Visibility.causal(2, first=-3), ValueError, "got 2, -3"),
            (lambda: Visibility.packed(ints(0, 4, 2)), ValueError, "cu_seqlens: expected ascending .* got 4 then 2"),
            (lambda: Visibility.packed(ints(0, 4), torch.zeros(2)), TypeError, "positions: expected torch.int32"),
            (lambda: Visibility.bounds(ints(3), ints(2)), ValueError, r"starts: .* got \[3, 2\) in row 0"),
            (lambda: Visibility.bounds(ints(3), ints(2, 3)), ValueError, "ends: expected the shape of starts"),
            (lambda: Visibility.from_mask(MASK.bool()), TypeError, "mask: expected an additive float32 mask"),
            (lambda: Visibility.from_mask(MASK[None, None]), ValueError, r"mask: expected \[S, T\] or \[B, S, T\]"),
            (lambda: Visibility.left_padded([[True]]), TypeError, "valid: expected a torch.Tensor, got list"),
            (lambda: Visibility.left_padded(torch.ones(1, 3)), TypeError, "valid: expected .* got torch.float32"),
            (lambda: Visibility.left_padded(torch.ones(3).bool()), ValueError, r"valid: expected \[B, T\]"),
            (lambda: Visibility.left_padded(torch.ones(1, 3).bool(), 4), ValueError, "queries: .* T = 3, got 4"),
            (
                lambda: Visibility.left_padded(torch.tensor([[True, True], [True, True]]).repeat(1, 2).bitwise_and(
                    torch.tensor([[True] * 4, [True, False, True, True]]))),
                ValueError,
                "valid: expected one contiguous span .* got a hole in row 1",
            ),
        ],
    )  # fmt: skip
    def test_refused(self, build: Callable[[], Visibility], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            build()

    @pytest.mark.parametrize(
        ("visibility", "message"),
        [
            (Visibility.causal(5), "expected .*6.* got .*5"),
            (Visibility.packed(ints(0, 8)), "cu_seqlens: expected S == T .* got S = 6, T = 8"),
            (Visibility.packed(ints(0, 9), torch.arange(S)), "cu_seqlens: .* within T = 8 keys, got 9"),
            (Visibility.packed(ints(0, 8), torch.arange(5)), "positions: expected .*6.* got .*5"),
            (Visibility.left_padded(torch.ones(B, 9).bool()), "valid: expected .*8.* got .*9"),
            (Visibility.left_padded(torch.ones(3, T).bool(), S), "valid: expected .*2.* got .*3"),
            (Visibility.left_padded(torch.ones(B, T).bool(), 5), "expected .*6.* got .*5"),
        ],
    )
    def test_a_call_of_other_sizes(self, visibility: Visibility, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            visibility.windows(rows=S, tokens=T, batch=B, pool_size=P)


class TestSelectPools:
    POOLED = PooledKeys(zeros(4, B, D), torch.arange(0, 8, 2, dtype=torch.int32), P)

    def test_the_good_call_is_good(self) -> None:
        ids = select_pools(GOOD["q"], self.POOLED, GOOD["weights"], Visibility.causal(S), 2)
        assert ids.shape == (B, S, 2) and ids.dtype == torch.int32

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"q": zeros(S, B, H, 8)}, ValueError, r"q: expected shape .* got \[6, 2, 3, 8\]"),
            ({"weights": torch.zeros(S, B)}, ValueError, "weights: expected shape"),
            ({"budget": 0}, ValueError, "budget: expected a positive int, got 0"),
            ({"visibility": Visibility.causal(9)}, ValueError, "expected .*6.* got .*9"),
            ({"order": "x"}, ValueError, "order: expected one of"),
            ({"shard_plan": "x"}, ValueError, "shard_plan: expected one of"),
            ({"impl": "x"}, ValueError, "impl: expected one of"),
            ({"pooled": replace(POOLED, pool_size=0)}, ValueError, "pool_size: expected a positive int, got 0"),
            ({"tokens": 100}, ValueError, r"pooled.keys: expected at least T // P = 50 pools, got 4"),
            ({"tokens": -1}, ValueError, "tokens: expected the number of key slots T >= 0, got -1"),
            ({"pooled": POOLED.keys}, TypeError, "pooled: expected a kpool.PooledKeys, got Tensor"),
            ({"pooled": replace(POOLED, keys=zeros(4, D))}, ValueError, r"pooled.keys: expected shape \[N, B, D\]"),
            ({"pooled": replace(POOLED, keys=POOLED.keys.int())}, TypeError, "pooled.keys: expected .* torch.int32"),
            ({"visibility": None}, TypeError, "visibility: expected a kpool.Visibility, got NoneType"),
        ],
    )
    def test_refused(self, change: dict[str, Any], error: type[Exception], message: str) -> None:
        good = {"q": GOOD["q"], "pooled": self.POOLED, "weights": GOOD["weights"], "visibility": Visibility.causal(S)}
        with pytest.raises(error, match=message):
            select_pools(**{**good, "budget": 2, **change})
