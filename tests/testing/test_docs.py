"""The examples of README.md and docs/ run, and print what they say they print.

A block marked `python` is run; in one document they share a namespace, top to bottom. A block that defines test
functions is a test file of its own and is given to pytest; marked `python fails` it must fail. A `text` block right
after a `python` block is compared with the output, `...` standing for anything. `python no-run` is for what needs
hardware or files a reader has.

And docs/api.md names all that is public, and nothing that is not there.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import io
import pkgutil
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.testing.inner_pytest import run_inner

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
OWN_ARM = {"megatron.md"}  # needs megatron-core: tests/megatron runs it
DOCUMENTS = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name not in OWN_ARM)]
API = ROOT / "docs" / "api.md"
MEGATRON = "kpool.integrations.megatron"  # read, not imported: its package may not be installed
DIRECTIVE = re.compile(r"^::: (?P<path>\S+)\n(?P<options>(?:[ ]+\S.*\n)*)", re.MULTILINE)
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, its text, the line its text starts on, and the output said to follow."""

    info: str
    body: str
    line: int
    output: str | None = None

    @property
    def is_test_file(self) -> bool:
        return re.search(r"^\s*def test_", self.body, re.MULTILINE) is not None


def blocks(text: str) -> list[Block]:
    """The Python blocks of a document that are to be run, in order."""
    found: list[Block] = []
    end = -1
    for match in FENCE.finditer(text):
        info, body = match["info"].strip(), match["body"]
        follows = end >= 0 and not text[end : match.start()].strip()
        if info == "text" and follows and found and found[-1].output is None:
            found[-1] = Block(found[-1].info, found[-1].body, found[-1].line, body)
        if info in ("python", "python fails"):
            found.append(Block(info, body, text.count("\n", 0, match.start()) + 2))
        elif info.startswith("python") and info != "python no-run":
            raise ValueError(f"unknown info string {info!r}")
        end = match.end() if info in ("python", "python fails") else -1
    return found


def shows(printed: str, expected: str) -> bool:
    """True if the expected lines are in the output; runs of spaces count as one.

    `...` in a line is any text, a line of `...` alone any number of lines.
    """
    parts = [r"(?:^|\n)"]
    for line in expected.splitlines():
        text = re.escape(" ".join(line.split())).replace(re.escape("..."), "[^\n]*")
        parts.append("(?:[^\n]*\n)*?" if line.strip() == "..." else f"{text}\n")
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    return re.search("".join(parts), "\n".join([*lines, ""])) is not None


def run_script(block: Block, path: Path, names: dict[str, Any]) -> str:
    """Run a block in the document's namespace; its tracebacks point into the document."""
    code = compile("\n" * (block.line - 1) + block.body, str(path), "exec")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def run_tests(block: Block, pytester: pytest.Pytester) -> str:
    """Give a block to pytest and return what it printed."""
    pytester.makeini(
        "[pytest]\naddopts = -p no:cacheprovider -p no:randomly --strict-markers\nfilterwarnings = error\n"
    )
    path = pytester.path / f"test_line_{block.line}.py"
    path.write_text(block.body, encoding="utf-8")
    result = run_inner(pytester, str(path))
    outcomes = result.parseoutcomes()
    wanted = {"failed"} if block.info == "python fails" else {"passed"}
    assert outcomes.keys() == wanted, f"line {block.line}: {outcomes}"
    return result.stdout.str()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_document(path: Path, inner_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(path.read_text(encoding="utf-8")):
        printed = run_tests(block, inner_project) if block.is_test_file else run_script(block, path, names)
        if block.output is not None:
            text = f"{path.name}:{block.line} printed\n{printed}\nnot\n{block.output}"
            assert shows(printed, block.output), text


def test_the_manual_has_examples() -> None:
    manual = blocks((ROOT / "docs" / "testing-toolkit.md").read_text(encoding="utf-8"))
    assert len(manual) >= 10 and sum(block.output is not None for block in manual) >= 6
    assert sum(block.is_test_file for block in manual) >= 4


def documented(text: str) -> set[str]:
    """The names in the directives of a page: each one's own, and the members it lists."""
    names: set[str] = set()
    for match in DIRECTIVE.finditer(text):
        names.add(match["path"])
        names |= {f"{match['path']}.{member}" for member in re.findall(r"^ +- (\w+)$", match["options"], re.MULTILINE)}
    return names


def public(module: str) -> set[str]:
    """The full names in a module's `__all__`."""
    if module == MEGATRON:
        tree = ast.parse((ROOT / "src" / module.replace(".", "/") / "__init__.py").read_text(encoding="utf-8"))
        (names,) = [node.value for node in tree.body if isinstance(node, ast.Assign)]
        return {f"{module}.{name}" for name in ast.literal_eval(names)}
    return {f"{module}.{name}" for name in importlib.import_module(module).__all__}


@pytest.mark.parametrize("module", ["kpool", "kpool_testing", "kpool.integrations.transformers", MEGATRON])
def test_every_public_name_is_in_the_api(module: str) -> None:
    missing = public(module) - documented(API.read_text(encoding="utf-8"))
    assert not missing, f"docs/api.md has no directive for {sorted(missing)}"


def test_every_name_in_the_api_is_there() -> None:
    names = documented(API.read_text(encoding="utf-8"))
    of_megatron = {name for name in names if name.startswith(MEGATRON)}
    assert of_megatron <= public(MEGATRON)
    for name in sorted(names - of_megatron):
        pkgutil.resolve_name(name)  # raises where there is none


OUTPUTS = [
    ("a\nb1 c", True),
    ("a\n...\nd", True),
    ("b... c\nd", True),
    ("a\nd", False),
    ("d\n...\na", False),
    ("b[1] c", False),
]


class TestCollector:
    def test_what_is_collected(self) -> None:
        text = "x\n```python\na = 1\n```\n\n```text\nout\n```\n```bash\nls\n```\n```python no-run\nb\n```\n"
        text += "```python fails\nc\n```\n"
        assert blocks(text) == [Block("python", "a = 1\n", 3, "out\n"), Block("python fails", "c\n", 16)]

    def test_what_a_directive_names(self) -> None:
        text = "::: a.b\n::: c\n    options:\n      show: true\n      members:\n        - D\n        - e\n\n- f\n"
        assert documented(text) == {"a.b", "c", "c.D", "c.e"}

    def test_an_unknown_kind_is_refused(self) -> None:
        with pytest.raises(ValueError, match="unknown info string 'python3'"):
            blocks("```python3\n```\n")

    @pytest.mark.parametrize(("expected", "same"), OUTPUTS)
    def test_output_is_compared_line_by_line(self, expected: str, same: bool) -> None:
        assert shows("a\n  b1   c\nd\n", expected) == same

    def test_a_wrong_block_fails_with_its_line(self) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            run_script(Block("python", "x = 1\n1 / 0\n", 40), Path("page.md"), {})
        last = caught.traceback[-1]
        assert (Path(last.path).name, last.lineno + 1) == ("page.md", 41)

    def test_a_failing_test_block_fails(self, inner_project: pytest.Pytester) -> None:
        with pytest.raises(AssertionError, match=r"line 7: \{'failed': 1\}"):
            run_tests(Block("python", "def test_it():\n    assert False\n", 7), inner_project)
        with pytest.raises(AssertionError, match=r"line 7: \{'passed': 1\}"):
            run_tests(Block("python fails", "def test_it():\n    pass\n", 7), inner_project)


def _collect_example(name: str) -> None:
    """Make the tests of an example part of this module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    tests = {key: value for key, value in vars(module).items() if key.startswith("test_")}
    assert tests, f"examples/{name}.py has no tests"
    globals().update({f"test_example_{key.removeprefix('test_')}": value for key, value in tests.items()})


_collect_example("test_token_indexer")
