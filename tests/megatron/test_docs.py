"""The code of docs/megatron.md runs as written."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from kpool.integrations.megatron import KPoolDSAttention
from tests.megatron.support import on_cpu, run

PAGE = Path(__file__).parents[2] / "docs" / "megatron.md"

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
]


def blocks() -> list[str]:
    """The Python blocks of the page, in order."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    page: dict[str, Any] = {}
    try:
        with on_cpu(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
            for number, block in enumerate(blocks()):
                exec(compile(block, f"{PAGE.name}, block {number}", "exec"), page)
    finally:
        parallel_state.destroy_model_parallel()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert len(blocks()) == 4
    assert isinstance(page["attention"].core_attention, KPoolDSAttention)
    assert page["losses"] == sorted(page["losses"], reverse=True)
    assert page["args"].dsa_indexer_kpool_shard_queries_across_tp


def test_the_page_runs_on_two_ranks() -> None:
    """The same lines with tensor and sequence parallelism, as the comments in them say."""
    text = "\n".join(blocks()[:3])
    text = text.replace("tensor_model_parallel_size=1,", "tensor_model_parallel_size=2, sequence_parallel=True,")
    text = text.replace("torch.randn(128,", "torch.randn(64,")
    text = re.sub(r"^torch\.distributed\.init_process_group.*$", "", text, flags=re.MULTILINE)

    def body(world: Any) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            page: dict[str, Any] = {}
            try:
                exec(compile(text, PAGE.name, "exec"), page)
            finally:
                parallel_state.destroy_model_parallel()
        return list(page["losses"])

    found = run(body, 2, isolate=("megatron.core.parallel_state",))
    selections = [call for call in found.trace if call.dtype == "int32" and call.shape == (1, 64, 8)]
    assert len(selections) == 2 * 3
    assert all(torch.isfinite(torch.tensor(losses)).all() for losses in found.results)
