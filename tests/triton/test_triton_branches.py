"""Every line of every kernel runs in some case, and every case equals the reference."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

from kpool.triton import configs, launch
from kpool.triton import pool as pool_room
from kpool.triton import score as score_room
from kpool.triton import select as select_room
from tests.triton.cases import BRANCHES, build
from tests.triton.test_triton_pool import POOL_CASES, same_as_torch

# the branches taken on a GPU, where nothing traces lines: the library's exp and the hardware's rounding
GPU_ONLY = {"return libdevice.exp(x)", "return x.to(tl.bfloat16)"}


def kernel_lines(module: ModuleType) -> dict[int, str]:
    """First line and text of every statement inside the module's jitted functions."""
    source = inspect.getsource(module)
    lines: dict[int, str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            for statement in ast.walk(node):
                if isinstance(statement, ast.stmt) and statement is not node and not _is_docstring(statement):
                    lines[statement.lineno] = ast.unparse(statement).splitlines()[0]
    return lines


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@contextmanager
def executed(modules: tuple[ModuleType, ...]) -> Iterator[set[tuple[str, int]]]:
    """The (file, line) pairs of `modules` that run inside the block."""
    files = {module.__file__ for module in modules}
    seen: set[tuple[str, int]] = set()

    def lines(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            seen.add((frame.f_code.co_filename, frame.f_lineno))
        return lines

    def calls(frame: FrameType, event: str, argument: Any) -> Any:
        return lines if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield seen
    finally:
        sys.settrace(before)


@pytest.mark.interpret
@pytest.mark.skipif(not configs.interpreted(), reason="lines are traced in the interpreter; a GPU runs binaries")
def test_every_kernel_line_runs_and_every_case_equals_the_reference() -> None:
    rooms = (pool_room, score_room, select_room)
    cpu = torch.device("cpu")
    with executed(rooms) as seen:
        results = [(case, build(case, cpu).select(launch)) for case in BRANCHES]
        for case in POOL_CASES:
            same_as_torch(case, cpu)
    for room in rooms:
        missed = {n: text for n, text in kernel_lines(room).items() if (room.__file__, n) not in seen}
        assert not {n: text for n, text in missed.items() if text not in GPU_ONLY}, room.__name__
    for case, ids in results:
        assert torch.equal(ids, build(case, cpu).expected()), case.name
