"""`kpool.capture`: what it saves is what the module computed, for transformers' indexer and for ours."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kpool
from kpool.captures import CapturedCall
from kpool.cli import main
from kpool.config import KPoolConfig
from kpool.indexer import IndexerCache, KPoolIndexer
from tests.glm5 import hf_indexer, text_config

ROWS = 61


def inputs(config: Any, batch: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden states `[B, S, hidden]` and low-rank queries `[B, S, q_lora]`."""
    gen = torch.Generator().manual_seed(0)
    widths = (config.hidden_size, config.q_lora_rank)
    hidden, q_resid = (torch.randn(batch, ROWS, width, generator=gen).to(dtype) for width in widths)
    return hidden, q_resid


def replayed(path: Path) -> Tensor:
    """The selection of a saved call."""
    return kpool.fused_qk_topk_kpool(**CapturedCall.load(path).arguments(), return_index_scores=False)[1]


@pytest.mark.hf
def test_transformers_indexer(tmp_path: Path) -> None:
    config = text_config()
    module = hf_indexer(config)
    hidden, q_resid = inputs(config)
    with kpool.capture(module, tmp_path / "call.safetensors", step="7") as path:
        first = module(hidden, q_resid, torch.ones(2, ROWS, dtype=torch.bool), None)
        module(hidden * 2, q_resid, torch.ones(2, ROWS, dtype=torch.bool), None)  # a second call is not saved
    call = CapturedCall.load(path)
    assert (call.numerics, call.index_topk, call.pool_size, call.notes) == ("hf", 16, 4, {"step": "7"})
    theirs, ours = (tokens.sort(-1).values for tokens in (first, replayed(path)))
    assert torch.equal(theirs, ours)
    assert not module._forward_pre_hooks


@pytest.mark.parametrize("numerics", ["megatron", "hf"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_kpool_indexer(tmp_path: Path, numerics: str, batch_first: bool, packed: bool) -> None:
    """The saved call gives the module's own result, bit for bit."""
    config = KPoolConfig(
        hidden_size=48, q_lora_rank=24, index_n_heads=8, index_head_dim=16, index_topk=24, index_kpool=4
    )
    torch.manual_seed(0)
    module = KPoolIndexer(config, numerics, batch_first)
    hidden, q_resid = inputs(config)
    if not batch_first:
        hidden, q_resid = hidden.transpose(0, 1), q_resid.transpose(0, 1)
    cu_seqlens = torch.tensor([0, 20, 20, ROWS]) if packed else None
    with kpool.capture(module, tmp_path / "call.safetensors") as path:
        expected = module(hidden, q_resid, cu_seqlens=cu_seqlens)
    assert torch.equal(replayed(path), expected)
    assert CapturedCall.load(path).numerics == numerics


def test_what_cannot_be_captured(tmp_path: Path) -> None:
    config = KPoolConfig(
        hidden_size=48, q_lora_rank=24, index_n_heads=8, index_head_dim=16, index_topk=24, index_kpool=4
    )
    module = KPoolIndexer(config)
    hidden, q_resid = inputs(config)
    path = tmp_path / "call.safetensors"
    with (
        pytest.raises(TypeError, match=r"expected an indexer with wq_b, .* got Linear without"),
        kpool.capture(torch.nn.Linear(2, 2), path),
    ):
        pass
    with pytest.raises(RuntimeError, match="was not called inside the block"), kpool.capture(module, path):
        pass
    padded = torch.ones(2, ROWS, dtype=torch.bool)
    padded[0, 0] = False
    with pytest.raises(ValueError, match="expected no padding"), kpool.capture(module, path):
        module(hidden, q_resid, padded)
    cache = IndexerCache()
    module(hidden, q_resid, cache=cache)
    with (
        pytest.raises(ValueError, match=f"expected a prefill, got {ROWS} cached tokens"),
        kpool.capture(module, path),
    ):
        module(hidden[:, :1], q_resid[:, :1], cache=cache)
    assert not path.exists()
    assert not module._forward_pre_hooks


def test_a_folder_that_is_not_there_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path: expected a file in a folder that exists, got .*nowhere"):
        kpool.capture(
            KPoolIndexer(KPoolConfig(hidden_size=8, q_lora_rank=8)), tmp_path / "nowhere" / "call.safetensors"
        ).__enter__()


def test_notes_may_not_shadow_the_format(tmp_path: Path) -> None:
    call = CapturedCall(
        torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4), torch.zeros(1, 1, 1), 4, 4, notes={"format": "x"}
    )
    with pytest.raises(ValueError, match="expected names other than the format's own, got format"):
        call.save(tmp_path / "call.safetensors")


@pytest.mark.hf
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_example_captures_a_call_that_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A real text through a real (random) model, then the selection of its indexer on five ranks."""
    text, out = tmp_path / "text.txt", tmp_path / "call.safetensors"
    text.write_text("Sphinx of black quartz, judge my vow. " * 8)
    example = Path(__file__).resolve().parent.parent / "examples" / "capture_glm5_next.py"
    monkeypatch.setattr("sys.argv", [str(example), str(text), "--out", str(out), "--dtype", dtype])
    runpy.run_path(str(example), run_name="__main__")
    assert f"kpool verify --input {out}" in capsys.readouterr().out
    call = CapturedCall.load(out)
    assert tuple(call.q.shape) == (304, 1, 32, 128)
    assert (call.pool_size, call.index_topk, call.numerics) == (4, 2048, "hf")
    assert main(["verify", "--input", str(out), "--ranks", "5", "--json"]) == 0
