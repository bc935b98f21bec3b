"""The command line: verdicts and their exit codes, captured calls, bad input in one line each, plan and info."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kpool import fused_qk_topk_kpool, sharding
from kpool.captures import CapturedCall
from kpool.cli import main, verdict, verify, workload

SMALL = ["--tokens", "72", "--heads", "4", "--dim", "16", "--topk", "16", "--ranks", "3"]


def kpool_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --json; its exit code and document."""
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def one_line_error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must refuse its input; its one line on stderr."""
    assert main(list(arguments)) == 64
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("kpool: error: ")


def small_call(**changes: Any) -> CapturedCall:
    """The seeded call of `SMALL`, changed."""
    parser_free = {
        "tokens": 72,
        "batch": 1,
        "heads": 4,
        "dim": 16,
        "pool": 4,
        "topk": 16,
        "seed": 0,
        "layout": "causal",
    }
    return replace(workload.seeded_call(workload.argparse.Namespace(**parser_free)), **changes)


def all_ties() -> CapturedCall:
    """A call whose keys are all equal, and so are the scores of a row."""
    call = small_call()
    return replace(call, k=call.k[:1].expand_as(call.k), gate_score=None, ape=None, use_relu=False)


def selection(call: CapturedCall) -> Tensor:
    """Tokens int32 `[B, S, W]` of a call."""
    return fused_qk_topk_kpool(**call.arguments(), return_index_scores=False)[1]


# -- verify: the verdict


@pytest.mark.parametrize("layout", workload.LAYOUTS)
@pytest.mark.parametrize("backend", ["replay", "fake"])
@pytest.mark.parametrize("plan", sharding.PLANS)
def test_verify_agrees(capsys: pytest.CaptureFixture[str], layout: str, backend: str, plan: str) -> None:
    arguments = ["--layout", layout, "--backend", backend, "--shard-plan", plan, "--batch", "2"]
    code, found = kpool_json(capsys, "verify", *SMALL, *arguments)
    assert code == 0
    assert found["verdict"] == "identical"
    assert [r["differing_rows"] for r in found["ranks"]] == [0, 0, 0]
    assert sum(r["rows"] for r in found["ranks"]) == 72
    assert sum(r["work"] for r in found["ranks"]) == pytest.approx(1)
    assert {(r["sent"], r["gathered"]) for r in found["ranks"]} == {(2 * 24 * 4 * 4, 3 * 2 * 24 * 4 * 4)}
    assert found["reference"] == found["reference"] | {"checked": 144, "wrong": 0, "wrong_keys": 0, "differences": []}


@pytest.mark.gloo
@pytest.mark.parametrize("layout", workload.LAYOUTS)
def test_verify_on_real_processes(capsys: pytest.CaptureFixture[str], layout: str) -> None:
    code, found = kpool_json(capsys, "verify", *SMALL, "--layout", layout, "--backend", "gloo")
    assert (code, [r["sent"] for r in found["ranks"]]) == (0, [24 * 4 * 4] * 3)


@pytest.mark.parametrize(
    "options",
    [
        ["--numerics", "hf"],
        ["--order", "position"],
        ["--impl", "reference"],
        ["--chunk-bytes", "1"],
        ["--tokens", "2"],
        ["--ranks", "1"],
    ],
    ids=lambda options: "".join(options),
)
def test_verify_takes_every_option(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    assert kpool_json(capsys, "verify", *SMALL, *options)[0] == 0


def test_the_table_says_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *SMALL]) == 0
    out = capsys.readouterr().out
    assert out.count("identical") == 3 + 1 + 1  # three ranks, their summary, the verdict
    assert "72 rows x 72 keys, B=1 H=4 D=16 P=4 K=16, causal, seed 0" in " ".join(out.split())


def test_a_rank_that_differs_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank reads one gathered id wrong; the others, and the unsharded call, are right."""
    gather = sharding.all_gather

    def wrong_on_rank_1(local: Tensor, group: Any, size: int) -> Tensor:
        out = gather(local, group, size)
        if group.rank() == 1:
            out[2, 5, 0] += 1
        return out

    monkeypatch.setattr(sharding, "all_gather", wrong_on_rank_1)
    code, found = kpool_json(capsys, "verify", *SMALL)
    assert (code, found["verdict"]) == (1, "different")
    assert [r["differing_rows"] for r in found["ranks"]] == [0, 1, 0]
    assert found["ranks"][1]["first_difference"] == [0, 2 * 24 + 5]
    assert found["reference"]["wrong"] == 0
    assert main(["verify", *SMALL]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "rank 1: 1 rows differ, the first is batch 0 row 53" in out
    assert "verdict: different" in out


def _swap_a_pool(tokens: Tensor) -> None:
    """Row 40 takes the first pool it had rejected instead of its last."""
    row = tokens[0, 40]
    rejected = next(start for start in range(0, 40, 4) if start not in row[:16].tolist())
    row[12:16] = torch.arange(rejected, rejected + 4)


def _lose_a_tail(tokens: Tensor) -> None:
    tokens[0, 41, 16:] = -1


def _repeat_a_pool(tokens: Tensor) -> None:
    tokens[0, 42, :4] = tokens[0, 42, 4:8].clone()


@pytest.mark.parametrize(
    ("damage", "row"), [(_swap_a_pool, 40), (_lose_a_tail, 41), (_repeat_a_pool, 42)], ids=["pool", "tail", "twice"]
)
def test_ranks_that_agree_on_a_wrong_answer_are_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, damage: Callable[[Tensor], None], row: int
) -> None:
    select = verify.select

    def wrong(*arguments: Any) -> Tensor:
        tokens = select(*arguments)
        damage(tokens)
        return tokens

    monkeypatch.setattr(verify, "select", wrong)
    code, found = kpool_json(capsys, "verify", *SMALL)
    assert code == 1
    assert [r["differing_rows"] for r in found["ranks"]] == [0, 0, 0]
    assert [d["row"] for d in found["reference"]["differences"]] == [row]


def test_wrong_pooled_keys_are_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are held against the reference too, or a fault in pooling would pass on both sides."""
    pool = verdict.pool_keys
    monkeypatch.setattr(verdict, "pool_keys", lambda k, *rest, **options: pool(k * 1.01, *rest, **options))
    code, found = kpool_json(capsys, "verify", *SMALL)
    assert code == 1
    assert found["reference"]["wrong_keys"] > 0


def test_too_many_near_ties_are_no_verdict(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All keys equal: every row with a choice hangs on the tie rule, which float64 cannot confirm."""
    path = all_ties().save(tmp_path / "ties.safetensors")
    code, found = kpool_json(capsys, "verify", "--ranks", "2", "--input", str(path))
    assert (code, found["verdict"]) == (2, "undecided")
    with_a_choice = 72 - 19  # four pools of four and a tail of up to three see no fifth pool
    assert found["reference"]["undecided"] == with_a_choice
    assert found["reference"]["wrong"] == 0


def test_a_wrong_row_is_found_among_near_ties(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Below the bound a row may be any that rounding explains, but not one with a hidden pool in it."""
    path = all_ties().save(tmp_path / "ties.safetensors")
    select = verify.select

    def future(*arguments: Any) -> Tensor:
        tokens = select(*arguments)
        tokens[0, 40, 12:16] = torch.arange(68, 72)
        return tokens

    monkeypatch.setattr(verify, "select", future)
    code, found = kpool_json(capsys, "verify", "--ranks", "2", "--input", str(path))
    assert (code, found["reference"]["wrong"]) == (1, 1)


def test_the_sample_holds_every_edge() -> None:
    call = replace(small_call(), varlen_starts=None, varlen_ends=None, cu_seqlens_kv=torch.tensor([0, 7, 7, 50, 72]))
    rows = verdict.sample_rows(call, sharding.ShardPlan.contiguous(72, 3), 20)
    shard, chunk, document = {0, 23, 24, 47, 48, 71}, {31, 32, 63, 64}, {6, 7, 49, 50}
    assert shard | chunk | document <= set(rows)
    assert len(rows) >= 20
    assert verdict.sample_rows(call, sharding.ShardPlan.contiguous(72, 3), 72) == list(range(72))


# -- verify: calls from files


def test_a_captured_call_comes_back_as_it_was(tmp_path: Path) -> None:
    call = small_call(numerics="hf", use_relu=False, notes={"layer": "3"})
    back = CapturedCall.load(call.save(tmp_path / "call.safetensors"))
    for name, value in vars(call).items():
        got = getattr(back, name)
        assert torch.equal(got, value) if isinstance(value, Tensor) else got == value, name


@pytest.mark.parametrize("layout", [None, *workload.LAYOUTS])
def test_a_captured_call_replays_in_any_layout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, layout: str | None
) -> None:
    path = small_call().save(tmp_path / "call.safetensors")
    code, found = kpool_json(
        capsys, "verify", "--input", str(path), "--ranks", "5", *(["--layout", layout] if layout else [])
    )
    assert code == 0
    assert found["call"] == found["call"] | {"rows": 72, "layout": layout, "notes": {"source": "seed 0"}}


def test_the_selection_of_another_system(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Order and padding are that system's own business; a wrong pool, a lost tail and a repeated token are not."""
    call = small_call()
    path, theirs = call.save(tmp_path / "call.safetensors"), tmp_path / "tokens.safetensors"
    tokens = torch.nn.functional.pad(selection(call).to(torch.int64).flip(-1), (0, 5), value=-1)
    save_file({"tokens": tokens}, theirs)
    arguments = ["verify", "--input", str(path), "--expect", str(theirs), "--ranks", "2"]
    code, found = kpool_json(capsys, *arguments)
    assert (code, found["expected"]["same"]) == (0, 72)

    wrong = selection(call)
    _swap_a_pool(wrong)
    _lose_a_tail(wrong)
    _repeat_a_pool(wrong)
    save_file({"tokens": wrong}, theirs)
    code, found = kpool_json(capsys, *arguments)
    assert (code, found["expected"]["same"], found["expected"]["wrong"]) == (1, 69, 3)
    swapped, lost, twice = found["expected"]["differences"]
    assert (swapped["row"], len(swapped["only_here"]), len(swapped["only_there"])) == (40, 4, 4)
    assert swapped["margin"] > 0
    assert (lost["row"], lost["only_here"], lost["only_there"]) == (41, [40, 41], [])
    assert (twice["row"], "repeats" in twice["reason"]) == (42, True)
    assert main(arguments) == 1
    assert "batch 0 row 41: margin" in capsys.readouterr().out


def test_another_system_may_break_ties_its_own_way(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = all_ties()
    path, theirs = call.save(tmp_path / "call.safetensors"), tmp_path / "tokens.safetensors"
    tokens = selection(call)
    tokens[0, 40, 12:16] = torch.arange(36, 40)  # the last pool instead of the fourth, same score
    tokens[0, 50, 12:16] = torch.arange(60, 64)  # a pool that row 50 cannot see
    save_file({"tokens": tokens}, theirs)
    code, found = kpool_json(capsys, "verify", "--input", str(path), "--expect", str(theirs), "--ranks", "2")
    assert (code, found["expected"]["near_ties"], found["expected"]["wrong"]) == (1, 1, 1)
    assert [d["row"] for d in found["expected"]["differences"]] == [50, 40]


def test_the_first_ten_differences_are_enough_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    call = small_call()
    path, theirs = call.save(tmp_path / "call.safetensors"), tmp_path / "tokens.safetensors"
    tokens = selection(call)
    tokens[0, 40:65] = -1
    save_file({"tokens": tokens}, theirs)
    arguments = ["verify", "--input", str(path), "--expect", str(theirs), "--ranks", "2"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert out.count("margin ") == 10 and "and 15 more rows; --json lists all" in out
    assert len(kpool_json(capsys, *arguments)[1]["expected"]["differences"]) == 25


@pytest.mark.parametrize(("topk", "vacuous"), [("16", False), ("72", True)])
def test_a_call_without_a_choice_says_so(capsys: pytest.CaptureFixture[str], topk: str, vacuous: bool) -> None:
    assert main(["verify", *SMALL, "--topk", topk]) == 0
    assert ("no row had a choice to make" in capsys.readouterr().out) == vacuous


def test_help_has_no_doubled_signs(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "plan", "bench", "info"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "%%" not in capsys.readouterr().out


# -- bad input: one line, exit 64


def test_a_captured_call_brings_its_own_shape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = small_call().save(tmp_path / "call.safetensors")
    line = one_line_error(capsys, "verify", "--input", str(path), "--tokens", "72", "--topk", "16")
    assert line == "--tokens --topk: --input already says that, leave out one of the two"


def _text(path: Path) -> None:
    path.write_text("not a safetensors file")


def _without(*names: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        small_call().save(path)
        tensors = load_file(path)
        head = {"format": "kpool-call", "version": "1", "index_topk": "16", "pool_size": "4"}
        save_file(
            {n: t for n, t in tensors.items() if n not in names},
            path,
            {n: v for n, v in head.items() if n not in names},
        )

    return write


def _with(metadata: dict[str, str], **tensors: Tensor) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        small_call().save(path)
        head = {"format": "kpool-call", "version": "1", "index_topk": "16", "pool_size": "4"}
        save_file({**load_file(path), **tensors}, path, {**head, **metadata})

    return write


def _misspelt(path: Path) -> None:
    small_call().save(path)
    tensors = load_file(path)
    head = {"format": "kpool-call", "version": "1", "index_topk": "16", "pool_size": "4"}
    save_file({"weight": tensors.pop("weights"), **tensors}, path, head)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "no such file"),
        (_text, "not a readable safetensors file"),
        (_without("q", "index_topk"), "incomplete, missing tensor q [S, B, H, D], metadata index_topk"),
        (_without("format"), "expected metadata format='kpool-call' version='1', got format=None"),
        (_with({"version": "2"}), "got format='kpool-call' version='2'"),
        (_with({"pool_size": "four"}), "metadata pool_size: expected a whole number, got 'four'"),
        (_with({"use_relu": "1"}), "metadata use_relu: expected 'true' or 'false', got '1'"),
        (_with({}, gate=torch.zeros(1)), "unknown tensors gate; known: q, k, weights, gate_score"),
        (_misspelt, "missing tensor weights [S, B, H]; unknown tensors weight"),
        (_with({}, weights=torch.zeros(3)), "weights: expected"),
        (_with({}, mask=torch.zeros(72, 72)), "mask"),
        (_with({}, varlen_ends=torch.zeros(72)), "varlen_ends: expected"),
        (_with({"index_topk": "15"}), "index_topk: expected a positive multiple of pool_size = 4, got 15"),
        (_with({"numerics": "exact"}), "numerics: expected one of"),
    ],
)
def test_a_bad_input_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "call.safetensors"
    write(path)
    assert message in one_line_error(capsys, "verify", "--input", str(path))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"ids": torch.zeros(1, 72, 19)}, "incomplete, missing tensor tokens [B, S, W]"),
        ({"tokens": torch.zeros(1, 72, 19)}, "tokens: expected int32 or int64, got torch.float32"),
        ({"tokens": torch.zeros(2, 72, 19).int()}, "tokens: expected [B, S, W] = [1, 72, *], got [2, 72, 19]"),
    ],
)
def test_a_bad_expected_selection(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    save_file(tensors, tmp_path / "tokens.safetensors")
    line = one_line_error(capsys, "verify", *SMALL, "--expect", str(tmp_path / "tokens.safetensors"))
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", *SMALL, "--topk", "15"], "index_topk: expected a positive multiple of pool_size = 4, got 15"),
        (["verify", *SMALL, "--impl", "triton"], "impl"),
        (["verify", *SMALL, "--device", "tpu9"], "--device: expected a device such as cpu or cuda, got 'tpu9'"),
        (["verify", *SMALL, "--backend", "nccl"], "--backend nccl: expected --device cuda, got cpu"),
        (["plan", "--topk", "15"], "--topk: expected a multiple of --pool 4, got 15"),
        (["plan", "--layout", "packed", "--tokens", "9", "--documents", "4,4"], "add up to --tokens 9, got 8"),
        (["plan", "--layout", "packed", "--documents", "4;4"], "--documents: expected lengths such as 1000,24"),
    ],
)
def test_bad_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in one_line_error(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "kpool COMMAND --help"),
        (["verify", "--tokens", "0"], "argument --tokens: expected at least 1, got 0"),
        (["verify", "--ranks", "two"], "argument --ranks: expected a whole number, got 'two'"),
        (["verify", "--layout", "ring"], "invalid choice: 'ring'"),
        (["verify", "--order", "random"], "invalid choice: 'random'"),
        (["verify", "--shard-plan", "diagonal"], "invalid choice: 'diagonal'"),
        (["verify", "--impl", "cuda"], "invalid choice: 'cuda'"),
    ],
)
def test_a_command_line_that_does_not_parse(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Exit 64, since 2, argparse's own, is a verdict here."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 64
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="the shortage needs a machine without a GPU")
def test_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line_error(capsys, "verify", *SMALL, "--device", "cuda")
    assert line == "--device cuda: expected 1 CUDA device(s), torch sees 0"


# -- endings


def test_an_interrupt_ends_cleanly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(verify, "select", interrupted)
    assert main(["verify", *SMALL]) == 130
    assert capsys.readouterr().err.strip() == "kpool: interrupted"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_in_a_process_of_its_own() -> None:
    """A real signal in the middle of the work: exit 130, one line, no traceback."""
    code = """
import sys, time
from kpool.cli import main, verify
verify.select = lambda *_: (print("begun", flush=True), time.sleep(60))
sys.exit(main(["verify"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "kpool: interrupted"


@pytest.mark.slow
def test_without_its_packages_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['rich'] = None; from kpool.cli import main; sys.exit(main(['info']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 69
    assert done.stderr.strip() == (
        "kpool: rich is not installed; the command line needs: python -m pip install 'kpool[cli]'"
    )


# -- plan and info


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The plans of `kpool plan`, by name."""
    code, found = kpool_json(capsys, "plan", *arguments)
    assert code == 0
    plans: dict[str, Any] = found["plans"]
    return plans


def test_plan_at_512k(capsys: pytest.CaptureFixture[str]) -> None:
    plans = plan(capsys)
    contiguous, cyclic = plans["contiguous"], plans["block_cyclic"]
    assert contiguous["balance"] == pytest.approx(1.875, abs=0.001)
    assert cyclic["balance"] <= 1.01
    for each in (contiguous, cyclic):
        assert sum(r["scored"] for r in each["ranks"]) == sum((i + 1) // 4 for i in range(524_288))
        assert sum(r["rows"] for r in each["ranks"]) == 524_288
        assert {r["sent"] for r in each["ranks"]} == {128 * 2**20}
        assert each["memory"]["gathered_ids"] == 2**30
        assert each["memory"]["tokens"] == 524_288 * 2051 * 4


def test_plan_counts_documents_and_skipped_rows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--layout", "packed", "--tokens", "40", "--documents", "0,30,10", "--topk", "16", "--ranks", "2"]
    plans = plan(capsys, *arguments)
    visible = [(i + 1) // 4 for i in range(30)] + [(i + 1) // 4 for i in range(10)]
    assert sum(r["scored"] for r in plans["contiguous"]["ranks"]) == sum(visible)
    plans = plan(capsys, *arguments, "--order", "position")
    assert sum(r["scored"] for r in plans["contiguous"]["ranks"]) == sum(n for n in visible if n > 4)


def test_plan_prints_a_table_for_each_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--tokens", "1000", "--ranks", "3"]) == 0
    out = capsys.readouterr().out
    assert "contiguous: 1,000 rows" in out
    assert "block_cyclic: 1,000 rows" in out
    assert out.count("busiest rank / mean") == 2


def test_info_says_what_would_run_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = kpool_json(capsys, "info")
    assert code == 0
    assert torch.__version__.startswith(found["packages"]["torch"])  # metadata may lack the +cu130 of the build
    cpu = found["devices"][0]
    assert (cpu["device"], cpu["impl"]) == ("cpu", "torch")
    assert "GPU" in cpu["why"]
    assert found["memory"] > 2**28
    assert main(["info"]) == 0
    assert "impl='auto' here" in capsys.readouterr().out
