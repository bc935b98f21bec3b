"""Plant small defects in the rooms that decide, one at a time; each must make a test fail.

    python tools/mutate.py [--rooms selection,sharding,...] [--every N] [--show]

A mutant is one change to one expression: a comparison moved by one, plus for minus, min for max, and for or, a number
off by one, a condition denied, a branch never taken. It takes the place of its module when that is imported; nothing is
written. A mutant that no test notices is a missing test, or it changes nothing; those are named, with the reason, in
`tools/equivalent_mutants.txt`. Needs `os.fork`: torch is imported once, and every mutant runs in a child.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("selection", "sharding", "visibility", "windows", "grid")
TESTS = ("tests/test_grid.py", "tests/test_visibility.py", "tests/test_selection.py", "tests/test_sharding.py",
         "tests/test_bad_input.py", "tests/test_cases.py", "tests/test_against_reference.py", "tests/test_pooling.py",
         "tests/test_ops.py", "tests/test_invariance.py", "tests/conformance")  # fmt: skip
KNOWN = ROOT / "tools" / "equivalent_mutants.txt"
# plain asserts: pytest's rewriting loader would come before ours, and load the room as it is
OPTIONS = ("-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--assert=plain")
LIMIT = 60  # seconds, several times what the tests take; a mutant that never ends counts as found

COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
           ast.Is: ast.IsNot, ast.IsNot: ast.Is}  # fmt: skip
BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
          ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}  # fmt: skip
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "clamp_min": "clamp_max",
         "clamp_max": "clamp_min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: `room.py:line`, that line before and after, and the whole module's text."""

    room: str
    line: int
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        """How `equivalent_mutants.txt` names it: by text, so that lines may move."""
        return f"{self.room}: {self.before} => {self.after}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every way to change one node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        yield ast.Compare(node.left, [COMPARE[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        yield ast.BinOp(node.left, BINARY[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.Not)):
        yield node.operand
    elif isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)
    elif isinstance(node, ast.Name) and node.id in NAMES and isinstance(node.ctx, ast.Load):
        yield ast.Name(NAMES[node.id], node.ctx)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.If):
        yield ast.If(ast.Constant(False), node.body, node.orelse)


class _Swap(ast.NodeTransformer):
    def __init__(self, place: int, change: int) -> None:
        self.place, self.change, self.seen = place, change, -1

    def visit(self, node: ast.AST) -> ast.AST:
        self.seen += 1
        if self.seen == self.place:
            return ast.copy_location(list(changes(node))[self.change], node)
        return self.generic_visit(node)


def _places(tree: ast.AST) -> list[ast.AST]:
    """Nodes in the order `_Swap` visits them."""
    out: list[ast.AST] = []

    class Order(ast.NodeVisitor):
        def visit(self, node: ast.AST) -> None:
            out.append(node)
            self.generic_visit(node)

    Order().visit(tree)
    return out


def mutants(room: str) -> list[Mutant]:
    """Every mutant of a room, leaving out imports, docstrings, annotations, messages and the module's own constants."""
    tree = ast.parse((ROOT / "src" / "kpool" / f"{room}.py").read_text(encoding="utf-8"))
    constants = [node for node in tree.body if isinstance(node, ast.Assign)]
    silent: set[int] = set()
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.ImportFrom)) or node in constants:
            parts = [node]
        elif isinstance(node, ast.FunctionDef):
            parts = [node.returns, node.args]
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        for part in parts:
            silent |= {id(inner) for inner in ast.walk(part)} if part is not None else set()
    found = []
    plain = ast.unparse(tree)
    for place, node in enumerate(_places(tree)):
        if id(node) in silent:
            continue
        for change, _ in enumerate(changes(node)):
            source = ast.unparse(ast.fix_missing_locations(_Swap(place, change).visit(deepcopy(tree))))
            lines = zip(plain.splitlines(), source.splitlines(), strict=False)
            before, after = next((old.strip(), new.strip()) for old, new in lines if old != new)
            found.append(Mutant(room, getattr(node, "lineno", 0), before, after, source))
    return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Hands out a mutant's text for its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != f"kpool.{self.mutant.room}":
            return None
        return importlib.util.spec_from_loader(name, self, origin="mutant")

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.source, f"<mutant of {self.mutant.room}.py>", "exec"), module.__dict__)


def survives(mutant: Mutant | None, tests: list[str], *, show: bool = False) -> bool:
    """Run the tests in a child with the mutant in place (None: without one); whether all of them pass."""
    child = os.fork()
    if child == 0:
        if not show:
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant))
        import pytest

        os._exit(int(pytest.main([*OPTIONS, *tests])))
    end = time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    return ended[1] == 0


def main() -> int:
    """Run all, name the survivors, return 1 if there are any that are not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", default=",".join(ROOMS))
    parser.add_argument("--every", type=int, default=1, help="only every Nth mutant")
    parser.add_argument("--show", action="store_true", help="list the mutants and run none")
    args = parser.parse_args()
    chosen = [m for room in args.rooms.split(",") for m in mutants(room)][:: args.every]
    if args.show:
        for m in chosen:
            print(f"(line {m.line}) {m.name}")
        return 0
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # once for all children; nothing that pytest wants to import itself

    assert torch
    if not survives(None, list(TESTS), show=True):
        raise SystemExit("the tests fail without any mutant")
    if survives(Mutant("selection", 0, "the room", "nothing", ""), list(TESTS)):
        raise SystemExit("an empty room went unnoticed: mutants are not what is tested")
    lines = KNOWN.read_text(encoding="utf-8").splitlines() if KNOWN.exists() else []
    known = {line for line in lines if line and not line.startswith("#")}
    unknown = known - {mutant.name for room in ROOMS for mutant in mutants(room)}
    if unknown:
        raise SystemExit(f"{KNOWN.name}: expected names of mutants, got {sorted(unknown)}: the code has moved on")
    began, survivors = time.monotonic(), []
    for number, mutant in enumerate(chosen, 1):
        if mutant.name in known:
            continue
        own = f"tests/test_{mutant.room}.py"
        if survives(mutant, sorted(TESTS, key=lambda test: test != own)):  # those that know the room come first
            survivors.append(mutant)
            print(f"SURVIVES (line {mutant.line}) {mutant.name}", flush=True)
        if number % 20 == 0:
            print(f"{number} of {len(chosen)}, {time.monotonic() - began:.0f} s", flush=True)
    print(f"mutants: {len(chosen) - len(survivors)} passed, {len(survivors)} failed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
