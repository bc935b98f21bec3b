"""Run pytest inside a test without unloading what was imported meanwhile.

`Pytester` takes modules loaded during its life out of `sys.modules` again; the next import of one with compiled code
would load it a second time into the same process, which some of them answer with an abort.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

Modules = dict[str, ModuleType]


class _Keeper:
    def __init__(self) -> None:
        self.loaded: Modules = {}

    def pytest_unconfigure(self) -> None:
        self.loaded = dict(sys.modules)


def put_back(modules: Modules) -> None:
    """Make modules importable again under their names, unless others have taken them."""
    for name, module in modules.items():
        sys.modules.setdefault(name, module)


def outside(pytester: pytest.Pytester, modules: Modules) -> Modules:
    """The modules that do not lie in the inner project."""
    home = str(pytester.path)
    return {name: m for name, m in modules.items() if not str(getattr(m, "__file__", None) or "").startswith(home)}


def run_inner(pytester: pytest.Pytester, *arguments: Any) -> pytest.RunResult:
    """`pytester.runpytest_inprocess`, keeping every module but those that lie in the inner project."""
    keeper = _Keeper()
    result = pytester.runpytest_inprocess(*arguments, plugins=[keeper])
    put_back(outside(pytester, keeper.loaded))
    return result
