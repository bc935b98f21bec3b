"""The pytest plugin: fixtures `ranks`, `fake_group`, `collective_trace`, marker `world_size`, option `--ranks-backend`.

Thin on purpose: torch and the rest of this package are imported when a test first runs ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kpool_testing.record.trace import Run, Trace

DEFAULT_SIZES = (2, 3)
_RECORD = pytest.StashKey[list[Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the group "ranks"."""
    group = parser.getgroup("ranks", "multi-rank tests (kpool_testing)")
    group.addoption(
        "--ranks-backend",
        choices=("fake", "gloo", "nccl", "world"),
        default="fake",
        help="where the `ranks` fixture runs: fake = simulated in this process (default); gloo, nccl = one process a "
        "rank; world = this process is one rank of a group that torchrun started",
    )
    group.addoption(
        "--ranks-timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="limit of every group with gloo, nccl and world (default 30) and of a simulated run (default 60)",
    )
    group.addoption(
        "--ranks-trace",
        metavar="DIR",
        help="write the collectives of every failing multi-rank test as one HTML page into DIR",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-randomly draws its seed
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; refuse `world` without a launcher or under xdist; let its ranks run in one order."""
    config.addinivalue_line(
        "markers",
        f"world_size(*sizes): run the test once per group size with the fixtures `ranks` and `fake_group` "
        f"(default {', '.join(map(str, DEFAULT_SIZES))})",
    )
    if config.getoption("--ranks-backend") == "world":
        if "PYTEST_XDIST_WORKER" in os.environ or config.getoption("numprocesses", None):
            raise pytest.UsageError("--ranks-backend=world runs every test on every rank: leave out -n")
        if not os.environ.get("WORLD_SIZE", "").isdigit() or "RANK" not in os.environ:
            raise pytest.UsageError(
                "--ranks-backend=world needs a launcher: torchrun --nproc-per-node=N -m pytest --ranks-backend=world"
            )
        if getattr(config.option, "randomly_seed", None) in ("default", "last"):
            config.option.randomly_seed = 0  # else every rank has its own order of tests, and its own random data


def pytest_report_header(config: pytest.Config) -> str:
    """One line with the settings in force."""
    trace = config.getoption("--ranks-trace") or "off"
    return f"ranks: backend={config.getoption('--ranks-backend')}, trace={trace}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests that use ranks over the sizes of their marker."""
    if "world_size" not in metafunc.fixturenames or _is_parametrized(metafunc, "world_size"):
        return
    marker = metafunc.definition.get_closest_marker("world_size")
    sizes = marker.args if marker is not None else DEFAULT_SIZES
    if not sizes or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: world_size takes positive integers, as in world_size(2, 3), got {sizes}"
        )
    params: list[Any] = list(sizes)
    if metafunc.config.getoption("--ranks-backend") == "world":
        params = _of_the_world(marker is not None, sizes)
    metafunc.parametrize("world_size", params, ids=lambda size: f"{size}ranks", indirect=True)


def _of_the_world(chosen: bool, sizes: tuple[int, ...]) -> list[Any]:
    """Under a launcher there is one size; a marker that leaves it out makes a visible skip, the same on every rank."""
    world = int(os.environ["WORLD_SIZE"])
    if not chosen or world in sizes:
        return [world]
    skip = pytest.mark.skip(reason=f"the launcher's world has {world} ranks, the test asks for {sizes}")
    return [pytest.param(world, marks=skip)]


def _is_parametrized(metafunc: pytest.Metafunc, name: str) -> bool:
    for marker in metafunc.definition.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs.get("argnames", "")
        if name in ([part.strip() for part in names.split(",")] if isinstance(names, str) else names):
            return True
    return False


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """Number of ranks of this run of the test: one of those in the marker `world_size(2, 3, 8)`."""
    return int(request.param)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world_size: int) -> Callable[..., Run]:
    """Call `ranks(fn)` to run `fn(group)` on every rank, on the backend of `--ranks-backend`; returns a `Run`.

    `run.results[r]` is what rank r returned, `run.trace` the collectives. `ranks(fn, size=4)` overrides the size;
    further keywords go to `simulate` (dialect, seed, faults) and are refused by real processes.

        @pytest.mark.world_size(2, 3, 8)
        def test_total(ranks):
            run = ranks(lambda group: total(rows(group.rank()), group))
            assert_replicated(run.results)
    """
    backend = request.config.getoption("--ranks-backend")
    timeout = request.config.getoption("--ranks-timeout")

    def call(fn: Callable[[Any], Any], *, size: int | None = None, **options: Any) -> Run:
        __tracebackhide__ = True
        from kpool_testing.launch.pool import run_ranks

        settings = {"timeout": timeout, **options}
        return _recorded(request.node, partial(run_ranks, fn, size or world_size, backend, **settings))

    return call


@pytest.fixture
def fake_group(request: pytest.FixtureRequest, world_size: int) -> Callable[..., Run]:
    """Call `fake_group(fn)` to `replay` `fn(FakeGroup)` for every rank: no process group, whatever the backend option.

    For code that asks its group for `rank()` and `size()` and calls
    `torch.distributed.all_gather_into_tensor` or `all_gather_single` by attribute. `size=` overrides the marker.
    """

    def call(fn: Callable[[Any], Any], *, size: int | None = None) -> Run:
        __tracebackhide__ = True
        from kpool_testing.replays.run import replay

        return _recorded(request.node, partial(replay, fn, size or world_size))

    return call


@pytest.fixture
def collective_trace(request: pytest.FixtureRequest) -> Trace:
    """The `Trace` of what this test has run through `ranks` and `fake_group` so far, failed runs included."""
    from kpool_testing.record.trace import Trace

    trace = Trace()
    request.node.stash.setdefault(_RECORD, []).append(trace)
    return trace


def _recorded(node: pytest.Item, run: Callable[[], Run]) -> Run:
    """Run, and keep the trace for the fixture `collective_trace` and for the page of a failing test."""
    __tracebackhide__ = True
    record = node.stash.setdefault(_RECORD, [])
    try:
        result = run()
    except Exception as error:
        _keep(record, getattr(error, "trace", None))
        raise
    _keep(record, result.trace)
    return result


def _keep(record: list[Any], trace: Trace | None) -> None:
    if trace is None:
        return
    if not record:
        from kpool_testing.record.trace import Trace

        record.append(Trace())
    for kept in record:
        kept.extend(trace)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With `--ranks-trace=DIR`, write the page of a failing test and say where it is."""
    report = yield
    directory = item.config.getoption("--ranks-trace")
    if not directory or not report.failed:
        return report
    record = item.stash.get(_RECORD, [])
    trace = record[0] if record else getattr(call.excinfo.value if call.excinfo else None, "trace", None)
    if trace is None:
        return report
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "_", item.nodeid)[-150:].strip("_")
    note = str(call.excinfo.value) if call.excinfo else ""
    path = trace.write_html(folder / f"{name}-{report.when}.html", title=item.nodeid, note=note)
    report.sections.append(("collectives", f"{path}\n{trace.lanes()}"))
    return report
