"""`benchmarks/gpu_selection.py` runs from a bare checkout, on the GPU where there is one, else in the interpreter.

Where a GPU is missing it says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kpool.cli import bench_gpu
from kpool.cli.exits import UNAVAILABLE, CommandError
from kpool.triton import configs

ROOT = Path(__file__).parents[2]


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT / "src")
    script = str(ROOT / "benchmarks" / "gpu_selection.py")
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=280
    )


@pytest.mark.interpret
def test_measures_every_plan_and_writes_json_and_png(tmp_path: Path) -> None:
    tokens, how = (256, ["--interpret"]) if configs.interpreted() else (8192, [])
    ranks = 2 if configs.interpreted() else min(8, torch.cuda.device_count())
    done = benchmark(*how, "--tokens", str(tokens), "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu_selection.json").read_text())
    assert result["interpreted"] is configs.interpreted()
    assert [record["plan"] for record in result["records"]] == ["whole", "contiguous", "block_cyclic"]
    for record in result["records"]:
        assert record["tokens"] == tokens and record["total_s"] > 0 and record["rows_checked"] > 0
        assert record["score_s"] > 0 and record["select_s"] > 0 and 0 < record["select_share"] < 1
        assert 0 < record["flops_visible"] <= record["flops_all"]
    for record in result["records"][1:]:
        assert record["gather_ranks"] == ranks
        assert record["gather_s"] > 0 if ranks > 1 else record["gather_s"] is None
    assert (tmp_path / "gpu_selection.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.interpret
def test_no_speed_of_a_wrong_result(monkeypatch: pytest.MonkeyPatch, gpu: torch.device) -> None:
    options = bench_gpu.Options((256,), 2, 1, interpret=configs.interpreted(), heads=4, dim=32, topk=32)
    work = bench_gpu.Workload(256, options, gpu)
    right = work.select
    assert work.check() > 0
    monkeypatch.setattr(work, "select", lambda rows: right(rows) ^ 1)
    with pytest.raises(CommandError, match=r"256 tokens, row .*: wrong, so no speed is reported"):
        bench_gpu.measure(work, options, bench_gpu.Clock(work.device, 1), 1.0)


@pytest.mark.interpret
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = benchmark("--tokens", "256")
    assert done.returncode == UNAVAILABLE and "no CUDA device" in done.stderr
