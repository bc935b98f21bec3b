"""Fixtures of the toolkit's own tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.testing.inner_pytest import Modules, outside, put_back


@pytest.fixture
def loaded_meanwhile() -> Iterator[Modules]:
    """Modules to put back once `pytester` has unloaded them."""
    modules: Modules = {}
    yield modules
    put_back(modules)


@pytest.fixture
def inner_project(loaded_meanwhile: Modules, pytester: pytest.Pytester) -> Iterator[pytest.Pytester]:
    """A `pytester` that keeps modules: run it with `run_inner`."""
    yield pytester
    loaded_meanwhile.update(outside(pytester, dict(sys.modules)))
