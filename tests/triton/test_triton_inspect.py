"""Ahead-of-time compilation: the table compiles, keeps its budgets, and a lowered budget is noticed.

Compilation and interpretation exclude each other in one process, so every check runs in a fresh Python.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kpool.triton import configs, inspect

LOWERED = """
from dataclasses import replace
from kpool.triton import configs, inspect
configs.PRUNE = replace(configs.PRUNE, {field}={value})
raise SystemExit(inspect.main(["--released", "--target", "sm_90", "--kernel", "prune"]))
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh Python with the interpreter off."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=1500, env=environment
    )


def inspected(*arguments: str) -> list[list[str]]:
    """Words of the lines that `python -m kpool.triton.inspect` prints; it must succeed."""
    done = python("-m", "kpool.triton.inspect", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.aot
def test_released_score_kernel_keeps_its_budget() -> None:
    header, line = inspected("--released", "--target", "sm_90", "--kernel", "score H32 D128")
    assert header[:2] == ["target", "kernel"]
    assert line[:4] == ["sm_90", "score", "H32", "D128"] and line[-1] == "ok" and "HGMMA" in line


@pytest.mark.aot
@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [("registers", 8, "registers"), ("shared", 1, "shared memory")],
)
def test_a_lowered_budget_fails(field: str, value: int, fault: str) -> None:
    done = python("-c", LOWERED.format(field=field, value=value))
    assert done.returncode == 1, done.stderr
    assert f"{fault} " in done.stdout and f"> {value}" in done.stdout


@pytest.mark.aot
def test_a_spill_fails() -> None:
    program = """
from dataclasses import replace
from kpool.triton import configs, inspect
entry = next(e for e in inspect.entries(["sm_90"], released=True) if e.name == "score H32 D128")
report = inspect.examine(replace(entry, config=replace(entry.config, warps=2, registers=255)))
print(report.faults)
raise SystemExit(0 if any("spilled" in fault for fault in report.faults) else 1)
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit, match="2"):
        inspect.main([])
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.aot
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("target", configs.TARGETS)
def test_the_whole_table_compiles_within_its_budgets(target: str) -> None:
    """No spill, registers and shared memory within budget, the target's matrix instruction in every score kernel."""
    lines = [line for line in inspected("--target", target)[1:] if line[0] == target]
    assert len(lines) >= 2 * len(configs.DIMS) * len(configs.SCORE[target]) + len(configs.ORDER)
    assert all(line[-1] == "ok" for line in lines)
