"""Which implementation runs, and the chunk budget."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kpool import dispatch, naive, tiled
from tests.support.calls import exact_call
from tests.support.properties import same_rows

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_budget_argument_wins_over_the_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.CHUNK_VARIABLE, raising=False)
    assert dispatch.chunk_bytes(None, CPU) < dispatch.chunk_bytes(None, CUDA) == 256 << 20
    monkeypatch.setenv(dispatch.CHUNK_VARIABLE, "12345")
    assert dispatch.chunk_bytes(None, CPU) == dispatch.chunk_bytes(None, CUDA) == 12345
    assert dispatch.chunk_bytes(7, CPU) == 7


def test_the_variable_reaches_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    select = tiled.select

    def spied(*tensors: torch.Tensor, chunk_bytes: int, **options: object) -> torch.Tensor:
        seen.append(chunk_bytes)
        return select(*tensors, chunk_bytes=chunk_bytes, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tiled, "select", spied)
    monkeypatch.setenv(dispatch.CHUNK_VARIABLE, "999")
    call = exact_call(0)
    call.run(impl="torch")
    call.run(impl="torch", score_chunk_bytes=5)
    assert seen == [999, 5]


def test_what_is_asked_for_is_what_runs() -> None:
    q, keys = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16), torch.empty(1, 1, 1, dtype=torch.bfloat16)
    assert dispatch.choose("reference", q, keys, 1, 1) is naive
    assert dispatch.choose("torch", q, keys, 1, 1) is tiled
    assert dispatch.choose("auto", q, keys, 1, 1) is tiled
    with pytest.raises(ValueError, match="impl='triton' where Triton kernels need a GPU, the tensors are on cpu"):
        dispatch.choose("triton", q, keys, 1, 1)


def test_triton_is_not_chosen_for_pooled_keys_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "why_not_triton", lambda *call: None)
    q, keys = torch.empty(1, 1, 1, 1, dtype=torch.bfloat16), torch.empty(1, 1, 1)
    assert dispatch.choose("auto", q, keys, 1, 1) is tiled
    with pytest.raises(ValueError, match=r"pooled keys of the dtype of q, torch.bfloat16, got torch.float32; use"):
        dispatch.choose("triton", q, keys, 1, 1)


def test_why_not_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = {"heads": 32, "dim": 128, "pool_size": 4, "budget": 512}
    if importlib.util.find_spec("triton") is not None:
        assert dispatch.why_not_triton(torch.device("cuda"), torch.bfloat16, **geometry) is None
        assert dispatch.why_not_triton(torch.device("cuda"), torch.float64, **geometry) is not None
    assert "on mps" in str(dispatch.why_not_triton(torch.device("mps"), torch.bfloat16, **geometry))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(dispatch.why_not_triton(torch.device("cuda"), torch.bfloat16, **geometry))


def test_the_reference_serves_every_layout(device: torch.device) -> None:
    for layout in ("causal", "mask_batched", "packed", "nothing"):
        for order in ("score", "position"):
            call = exact_call(1, layout, rows=20, batch=2, order=order).to(device)
            same_rows(call.run(impl="torch"), call.run(impl="reference"), f"{layout}, {order}")
            assert torch.equal(call.scores(impl="torch"), call.scores(impl="reference"))
