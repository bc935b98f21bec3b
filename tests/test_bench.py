"""`kpool bench`: right before fast, and what it says about itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kpool.cli import bench, bench_gpu, main, measure, png
from kpool.cli.exits import DIFFERENT, OK, UNAVAILABLE, USAGE

SMALL = ["bench", "--heads", "16", "--dim", "16", "--topk", "64", "--rows", "32", "--repeats", "2", "--threads", "1"]


def arguments(**changes: Any) -> argparse.Namespace:
    options = {"tokens": 256, "heads": 16, "dim": 16, "pool": 4, "topk": 64, "seed": 0}
    options |= {"layout": "causal", "documents": 4, "order": "score", "threads": 1}
    return argparse.Namespace(**{**options, **changes})


def run_json(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    code = main([*SMALL, *more, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("layout", ["causal", "packed"])
def test_plain_selects_the_same_sets(layout: str) -> None:
    call = measure.bench_call(arguments(layout=layout))
    ours, plain = measure.kpool_call(call, "position"), measure.plain_call(call)
    assert torch.equal(ours.sort(-1).values, plain.sort(-1).values)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["causal", "packed"])
def test_report(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run_json(capsys, "--lengths", "128,512", "--layout", layout, "--documents", "2", "--no-memory")
    assert code == OK and [found["tokens"] for found in report["lengths"]] == [128, 512]
    for found in report["lengths"]:
        assert found["correct"] and found["checked_rows"] >= 16 and found["runs"] == 2
        assert set(found["seconds"]) == {"kpool", "plain", "gemm"} and found["gemm_flops"] > 0


def test_gemm_is_the_scored_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit multiplies exactly the tiles that a call multiplies, and a call without choices none."""
    seen: list[int] = []
    real = measure.tiled.Scorer.multiply
    monkeypatch.setattr(measure.tiled.Scorer, "multiply", lambda self, key: (seen.append(1), real(self, key))[1])
    for order, topk in (("score", 64), ("position", 64), ("position", 256)):
        call = measure.bench_call(arguments(topk=topk, tokens=700))
        gemm = measure.GemmOnly(call, order)
        seen.clear()
        measure.kpool_call(call, order)
        scored = len(seen)
        seen.clear()
        gemm.run()
        assert len(seen) == scored
    assert scored > 0
    call = measure.bench_call(arguments(topk=1024, tokens=700))
    seen.clear()
    measure.kpool_call(call, "position")
    assert not seen and measure.GemmOnly(call, "position").flops == 0


@pytest.mark.slow
def test_no_speed_while_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = measure.kpool_call

    def broken(call: Any, order: str) -> Tensor:
        tokens = real(call, order)
        tokens[0, -1, 0] = tokens[0, -1, 1]
        return tokens

    monkeypatch.setattr(measure, "kpool_call", broken)
    code, report = run_json(capsys, "--lengths", "512", "--no-memory")
    assert code == DIFFERENT and "seconds" not in report["lengths"][0]
    assert main([*SMALL, "--lengths", "512", "--no-memory"]) == DIFFERENT
    assert "no speed is reported" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_wrong_plain_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = measure.plain_call
    monkeypatch.setattr(measure, "plain_call", lambda call: real(call).roll(4, 1))
    code, report = run_json(capsys, "--lengths", "512", "--no-memory")
    assert code == DIFFERENT and report["lengths"][0]["plain_differs"] > 0


@pytest.mark.slow
def test_memory_in_a_fresh_process() -> None:
    found = measure.memory_in_fresh_process(arguments(tokens=2048, heads=16), "plain")
    assert found["bytes"] > 2048 * 16 * 512 * 4  # at least its products
    small = measure.memory_in_fresh_process(arguments(tokens=2048, heads=16), "kpool")
    assert small["bytes"] < found["bytes"] / 4


@pytest.mark.slow
def test_sampled_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the mark cannot be reset a thread samples."""
    monkeypatch.setattr(measure.PeakMemory, "_reset", lambda self: False)
    with measure.PeakMemory() as memory:
        block = torch.ones(32 << 20)
        for _ in range(20):
            block.add_(1)
    assert memory.peak - memory.before > 100 << 20 and memory.method.startswith("sampled")


def test_says_what_to_distrust(monkeypatch: pytest.MonkeyPatch) -> None:
    report: dict[str, Any] = {
        "machine": {"quiet": False, "busy_before": 0.6},
        "lengths": [{"correct": True, "runs": 2}],
    }
    busy, few = bench.notes(report)
    assert "not quiet" in busy and "60%" in busy and "2 runs only" in few
    report = {"machine": {"quiet": True, "busy_before": 0.0}, "lengths": [{"correct": True, "runs": 5}]}
    assert bench.notes(report) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench.png", "bench.svg"])
def test_plot(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run_json(capsys, "--lengths", "128,256", "--no-memory", "--plot", str(tmp_path / name))
    assert code == OK and (tmp_path / name).stat().st_size > 5000


@pytest.mark.parametrize(
    "more, code",
    [
        ("--lengths x", USAGE),
        ("--topk 63", USAGE),
        ("--lengths 0", USAGE),
        ("--device cuda", UNAVAILABLE),
        ("--device cuda --layout packed", USAGE),
        ("--device cuda --plot bench.svg", USAGE),
        ("--device cuda --plot missing/bench.png", USAGE),
    ],
)
def test_refusals(more: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([*SMALL, *more.split()]) == code


GPU_RESULT = {
    "device": "a card",
    "date": "2026-11-30",
    "records": [
        {"tokens": tokens, "plan": plan, "total_s": total, "select_share": 0.125}
        for tokens, plan, total in ((65536, "whole", 0.01), (65536, "contiguous", 0.002), (262144, "whole", 0.15))
    ],
}


def test_a_gpu_is_measured_by_its_own_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bench_gpu.Options] = []

    def run(options: bench_gpu.Options, say: Callable[[str], None]) -> dict[str, Any]:
        asked.append(options)
        say("[one line]")
        return GPU_RESULT

    monkeypatch.setattr(bench_gpu, "run", run)
    picture = tmp_path / "gpu.png"
    line = "bench --device cuda --ranks 4 --heads 16 --dim 64 --topk 256 --order position --json"
    assert main([*line.split(), "--plot", str(picture)]) == OK
    out, err = capsys.readouterr()
    assert json.loads(out) == GPU_RESULT and "[one line]" in err
    assert asked == [bench_gpu.Options(bench_gpu.LENGTHS, 4, 5, "position", heads=16, dim=64, topk=256)]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "--device", "cuda", "--lengths", "512,1024", "--repeats", "2"]) == OK
    assert asked[1] == bench_gpu.Options((512, 1024), repeats=2)


def test_a_gpu_length_that_would_end_too_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 tokens take 1 s, so 200 are thought to take 4 s, and 400 another 16; what is known is kept each time."""
    pytest.importorskip("triton")
    now, kept = [0.0], []

    def measure_gpu(tokens: int, *_: Any) -> list[dict[str, Any]]:
        now[0] += (tokens / 100) ** 2
        return [{"tokens": tokens}]

    monkeypatch.setenv("TRITON_INTERPRET", "0")  # put back afterwards
    monkeypatch.setattr(bench_gpu, "Workload", lambda tokens, *_: tokens)
    monkeypatch.setattr(bench_gpu, "measure", measure_gpu)
    monkeypatch.setattr(bench_gpu, "line", str)
    monkeypatch.setattr(bench_gpu, "_matrix_rate", lambda *_: 1.0)
    monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: now[0])
    options = bench_gpu.Options((100, 200, 400), seconds=20.0, interpret=True)
    result = bench_gpu.run(options, lambda _: None, lambda so_far: kept.append(len(so_far["records"])))
    assert result["records"] == [{"tokens": 100}, {"tokens": 200}] and result["left_out"] == [400]
    assert kept == [1, 2] and result["seconds"] == 5.0


def test_bars_of_a_gpu_grow_with_time(tmp_path: Path) -> None:
    """Read back by a decoder that is not ours: colours of the plans, heights in the order of the times."""
    image = pytest.importorskip("matplotlib.image")
    png.write_bars(tmp_path / "bars.png", GPU_RESULT)
    pixels = (image.imread(tmp_path / "bars.png")[..., :3] * 255).round().astype(int)
    heights = {}
    for plan in ("whole", "contiguous"):
        found = (pixels == png.COLOURS[plan]).all(-1)
        heights[plan] = sorted(set(found.sum(0).tolist()) - {0})
    assert len(heights["whole"]) == 2 and len(heights["contiguous"]) == 1
    assert heights["contiguous"][0] < heights["whole"][0] < heights["whole"][1]
    assert (pixels[:40] == png.BLACK).all(-1).sum() > 400  # the title is written


def test_letters_are_drawn_as_they_look() -> None:
    canvas = png.Canvas(8, 10)
    canvas.text(0, 0, "f")
    drawn = (canvas.pixels[::2, ::2] == png.BLACK).all(-1)
    assert ["".join(".#"[int(dot)] for dot in row[:3]) for row in drawn] == ["###", "#..", "##.", "#..", "#.."]


@pytest.mark.parametrize(("value", "said"), [(2.5, "2.5 s"), (0.01234, "12.3 ms"), (5e-5, "50 us"), (1e-7, "0.1 us")])
def test_seconds_have_a_unit(value: float, said: str) -> None:
    assert png.seconds(value) == said
