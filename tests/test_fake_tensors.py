"""No value is read back to the host: the call runs on fake CUDA tensors, which have none. No GPU is needed.

Reading one (`.item()`, `int(tensor)`, boolean indexing) raises `DataDependentOutputException` or a relative of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

import kpool_testing
from kpool import (
    IndexerCache,
    KPoolConfig,
    KPoolIndexer,
    Visibility,
    fused_qk_topk_kpool,
    pool_keys,
    scoring,
    select_pools,
)
from tests.support.fake_cuda import CUDA, fake_cuda

S, T, B, H, D, P, K = 24, 24, 2, 4, 16, 4, 8


@pytest.fixture(autouse=True)
def fake_mode() -> Iterator[None]:
    """Fake tensors, and an error for each value that would be read."""
    with fake_cuda():
        yield


def tensors(rows: int = S) -> dict[str, Any]:
    return {
        "q": torch.empty(rows, B, H, D, dtype=torch.bfloat16, device=CUDA),
        "k": torch.empty(T, B, D, dtype=torch.bfloat16, device=CUDA),
        "weights": torch.empty(rows, B, H, device=CUDA),
        "gate_score": torch.empty(T, B, D, device=CUDA),
        "ape": torch.empty(P, D, device=CUDA),
        "index_topk": K,
        "pool_size": P,
    }


def index(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=CUDA)


VISIBILITIES = ["nothing", "bounds", "positions", "packed", "packed_bounds", "mask", "mask_batched"]


def visibility(name: str) -> dict[str, torch.Tensor]:
    bounds = {"varlen_starts": index(S), "varlen_ends": index(S)}
    return {
        "nothing": {},
        "bounds": bounds,
        "positions": {**bounds, "key_positions": index(T)},
        "packed": {"cu_seqlens_kv": index(4)},
        "packed_bounds": {**bounds, "cu_seqlens_kv": index(4)},
        "mask": {"mask": torch.empty(S, T, device=CUDA)},
        "mask_batched": {"mask": torch.empty(B, S, T, device=CUDA)},
    }[name]


OPTIONS: dict[str, dict[str, Any]] = {
    "position": {"order": "position", "score_chunk_bytes": 1},
    "hf": {"numerics": "hf", "width_multiple": 64},
    "fp8": {"fp8_indexer": True, "use_relu": False, "always_select_tail": False},
    "rotated": {"rotate_activation_enabled": True},
}


@pytest.mark.parametrize("impl", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "option"), [(name, None) for name in VISIBILITIES] + [("mask", option) for option in OPTIONS]
)
def test_selection(name: str, option: str | None, impl: str) -> None:
    options = {} if option is None else OPTIONS[option]
    scores, chosen = fused_qk_topk_kpool(
        **tensors(), **visibility(name), **options, impl=impl, return_index_scores=False
    )
    width = 64 if "width_multiple" in options else K + (P - 1 if options.get("always_select_tail", True) else 0)
    assert scores is None
    assert chosen.shape == (B, S, width) and chosen.dtype == torch.int32 and chosen.device.type == "cuda"


@pytest.mark.parametrize("impl", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", VISIBILITIES)
def test_scores(name: str, impl: str) -> None:
    scores, chosen = fused_qk_topk_kpool(**tensors(), **visibility(name), impl=impl)
    assert scores is not None and scores.shape == (B, S, T // P) and scores.device.type == "cuda"
    assert chosen.shape == (B, S, K + P - 1)


@pytest.mark.parametrize("masked", [False, True])
def test_backward_of_the_scores(masked: bool) -> None:
    """The function itself: the engine asks for a real device."""
    given, pools = tensors(), T // P
    keys = torch.empty(pools, B, D, dtype=torch.bfloat16, device=CUDA)
    mask = torch.empty(1, S, T, device=CUDA) if masked else None
    saved = (given["q"], keys, given["weights"], index(1, S), index(1, S), mask)
    context = SimpleNamespace(saved_tensors=saved, formula=(P, True, 1.0))
    gradients = scoring._Scores.backward(context, torch.empty(B, S, pools, device=CUDA))  # type: ignore[arg-type]
    shapes = [tuple(gradient.shape) for gradient in gradients if gradient is not None]
    assert shapes == [(S, B, H, D), (pools, B, D), (S, B, H)]


@pytest.mark.parametrize(
    ("plan", "name"),
    [*(("contiguous", name) for name in VISIBILITIES), ("block_cyclic", "packed"), ("block_cyclic", "mask")],
)
def test_sharded(name: str, plan: str) -> None:
    def body(group: Any) -> torch.Tensor:
        options = {"query_shard_group": group, "shard_plan": plan, "return_index_scores": False}
        return fused_qk_topk_kpool(**tensors(), **visibility(name), **options)[1]

    run = kpool_testing.replay(body, 5)
    assert all(tokens.shape == (B, S, K + P - 1) and tokens.device.type == "cuda" for tokens in run.results)
    kpool_testing.expect_collectives(run.trace, {"all_gather_single": 1})


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows: int) -> None:
    bounds = {"varlen_starts": index(rows), "varlen_ends": index(rows)}
    chosen = fused_qk_topk_kpool(**tensors(rows), **bounds, return_index_scores=False)[1]
    assert chosen.shape == (B, rows, K + P - 1)


def test_pools_of_a_caller() -> None:
    given = tensors()
    pooled = pool_keys(given["k"], given["gate_score"], given["ape"], P, index(4))
    assert pooled.keys.shape == (T // P, B, D) and pooled.starts.shape == (T // P,)
    for visibility in (
        Visibility.causal(S),
        Visibility.packed(index(4), index(S)),
        Visibility.left_padded(torch.empty(B, T, dtype=torch.bool, device=CUDA)),
    ):
        ids = select_pools(given["q"], pooled, given["weights"], visibility, 2)
        assert ids.shape == (B, S, 2) and ids.device.type == "cuda"


@pytest.mark.parametrize("numerics", ["megatron", "hf"])
def test_indexer(numerics: str) -> None:
    """The module, padded and packed, and its cache while decoding."""
    sizes = {"hidden_size": 32, "q_lora_rank": 16, "index_n_heads": H, "index_head_dim": D, "index_topk": K}
    module = KPoolIndexer(KPoolConfig(**sizes), numerics)
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                empty = torch.empty(weight.shape, device=CUDA)
                part._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
    x, r = torch.empty(B, S, 32, device=CUDA), torch.empty(B, S, 16, device=CUDA)
    padded, plain = IndexerCache(), IndexerCache()
    results = [
        module(x, r, torch.empty(B, S, dtype=torch.bool, device=CUDA), padded),
        module(x, r, None, padded),
        module(x, r, None, plain),
        module(x, r, None, plain),
        module(x, r, cu_seqlens=index(4)),
    ]
    padded.reorder(index(B))
    assert all(chosen.shape == (B, S, K + P - 1) and chosen.device.type == "cuda" for chosen in results)


@contextmanager
def reads(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """A defect: the windows are looked at on the host."""
    from kpool.visibility import Visibility as Seen

    windows = Seen.windows

    def looking(self: Seen, **sizes: Any) -> Any:
        made = windows(self, **sizes)
        made.end.max().item()
        return made

    with patch.context() as within:
        within.setattr(Seen, "windows", looking)
        yield


def test_a_read_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with reads(monkeypatch), pytest.raises(Exception, match="_local_scalar_dense"):
        fused_qk_topk_kpool(**tensors(), **visibility("bounds"), return_index_scores=False)
