"""What is installed, what it needs, and which room may know which."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import entry_points, metadata, version
from pathlib import Path

import pytest

import kpool

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MODULES = sorted(SRC.rglob("*.py"))


def python(code: str) -> str:
    """Run code in a process of its own, with warnings as errors; what it printed."""
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_kpool_needs_and_loads_torch_alone() -> None:
    """With everything else blocked it still imports, and it does not even look for what it does not need."""
    others = ("triton", "transformers", "megatron", "pytest", "rich", "psutil", "safetensors", "hypothesis")
    code = f"""
import sys
sys.modules.update(dict.fromkeys({others}))
import torch
before = set(sys.modules)
import kpool
print(sorted(m for m in set(sys.modules) - before if m.partition(".")[0] == "kpool_testing" or m == "kpool.cli"))
import kpool_testing
print(kpool_testing.replay, kpool_testing.simulate)
"""
    assert python(code).startswith("[]\n<function replay")


def test_the_pytest_plugin_does_not_import_torch() -> None:
    """Every pytest run on a machine with kpool installed loads the plugin."""
    assert python("import sys, kpool_testing.plugin; print('torch' in sys.modules)") == "False"


def test_the_names_of_kpool_are_there() -> None:
    assert all(hasattr(kpool, name) for name in kpool.__all__)
    assert sorted(kpool.__all__) == list(kpool.__all__)


def test_the_installed_metadata() -> None:
    about = metadata("kpool")
    assert (version("kpool"), about["License-Expression"]) == (kpool.__version__, "Apache-2.0")
    assert (SRC / "kpool" / "py.typed").is_file()
    assert (SRC / "kpool_testing" / "py.typed").is_file()
    plugins = {e.name: e.value for e in entry_points(group="pytest11")}
    assert plugins["kpool_testing"] == "kpool_testing.plugin"
    scripts = {e.name: e.value for e in entry_points(group="console_scripts")}
    assert scripts["kpool"] == "kpool.cli:main"


@cache
def _imports(path: Path) -> set[str]:
    """Dotted names a module imports, wherever in its text; names for type checkers alone count too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _room(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def _within(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


# (rooms, what they must not import, rooms excepted)
WALLS = [
    ("kpool", "kpool_testing", ("kpool.cli",)),
    ("kpool_testing", "kpool", ()),
    ("kpool", "kpool.cli", ("kpool.cli",)),
    ("kpool", "rich", ("kpool.cli",)),
    ("kpool.tiled", "kpool.triton", ()),
    ("kpool.tiled", "kpool.reference", ()),
    ("kpool.triton", "kpool.tiled", ()),
    ("kpool.triton", "kpool.reference", ()),
    ("kpool.reference", "kpool.tiled", ()),
    ("kpool.reference", "kpool.selection", ()),
    ("kpool", "kpool.ops", ("kpool.indexer", "kpool.attention", "kpool.integrations", "kpool.cli")),
]


@pytest.mark.parametrize(("rooms", "wall", "excepted"), WALLS, ids=[f"{a}-{b}" for a, b, _ in WALLS])
def test_imports_go_one_way(rooms: str, wall: str, excepted: tuple[str, ...]) -> None:
    crossing = [
        (_room(path), name)
        for path in MODULES
        for name in _imports(path)
        if _within(_room(path), rooms) and _room(path) != "kpool" and _within(name, wall)
        if not any(_within(_room(path), room) for room in (*excepted, wall))
    ]
    assert crossing == []
    assert any(_within(_room(path), rooms) for path in MODULES)


def test_constraints_pin_everything_that_is_asked_for() -> None:
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line and line[0] != "#"
    )
    assert pins["torch"] == "2.13.0"
    extras = PROJECT["project"]["optional-dependencies"]
    asked = {name for names in extras.values() for name in names}
    plain = {name.split(";")[0].split(">")[0].split("[")[0].strip() for name in asked} - {"kpool"}
    assert plain - set(pins) == set()


def test_every_arm_of_the_markers_has_an_environment() -> None:
    """A marker that plain pytest leaves out must be run by an arm of its name."""
    options = PROJECT["tool"]["pytest"]["ini_options"]
    left_out = {
        word for word in options["addopts"].replace("'", " ").split("-m")[-1].split() if word not in ("not", "and")
    }
    declared = {marker.split(":")[0] for marker in options["markers"]}
    environments = (ROOT / "tox.ini").read_text(encoding="utf-8")
    assert left_out <= declared
    assert [arm for arm in left_out if f"[testenv:{arm}]" not in environments] == []


def test_every_tox_arm_has_something_to_install() -> None:
    """pip refuses a constraint file alone, and an arm that cannot be set up tells nothing."""
    arms = configparser.ConfigParser(interpolation=None)
    arms.read(ROOT / "tox.ini")
    lists = {name: arms[name].get("deps", "").split("\n") for name in arms.sections()}
    assert len(lists) > 15
    alone = [name for name, deps in lists.items() if any(deps) and all(d.startswith("-c") for d in deps if d)]
    assert alone == []


def test_importing_kpool_does_not_import_torch_and_its_rooms_are_there_when_asked_for() -> None:
    code = """
import sys
import kpool
assert "torch" not in sys.modules and "kpool.ops" not in sys.modules
assert set(kpool.__all__) <= set(dir(kpool))
assert kpool.reference.__name__ == "kpool.reference" and kpool.ShardPlan is kpool.sharding.ShardPlan
assert vars(kpool)["ShardPlan"] is kpool.ShardPlan  # found without asking from now on
for name in ("nothing", "_nothing"):
    assert not hasattr(kpool, name), name
print("yes")
"""
    assert python(code) == "yes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "argument", "policy"),
    [
        ("", "info", "passive"),
        ("", "bench", None),
        ("import torch", "info", None),  # too late
        ("os.environ['OMP_WAIT_POLICY'] = 'active'", "info", "active"),
    ],
)
def test_the_command_line_lets_threads_sleep_where_it_can(first: str, argument: str, policy: str | None) -> None:
    code = f"""
import contextlib, os, sys
os.environ.pop("OMP_WAIT_POLICY", None)
{first}
from kpool.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
    main([{argument!r}, "--help"])
assert "torch" in sys.modules
print(os.environ.get("OMP_WAIT_POLICY"))
"""
    assert python(code) == str(policy)
