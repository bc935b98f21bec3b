"""The plugin as a user meets it: fixtures, marker, options, header, and no cost where no rank runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.inner_pytest import run_inner

pytest_plugins = ["pytester"]

GATHER = """
    import pytest, torch, torch.distributed as dist

    NAME = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

    def gathered(group):
        output = torch.empty(group.size(), dtype=torch.int64)
        getattr(dist, NAME)(output, torch.tensor([10 * group.rank()]), group=group)
        return output.tolist()
"""


@pytest.fixture
def inner(inner_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of its own with warnings as errors; nothing of the outer launcher or xdist reaches it."""
    for name in [name for name in os.environ if name.startswith(("PYTEST_XDIST", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    inner_project.makeini("[pytest]\naddopts = -p no:cacheprovider --strict-markers\nfilterwarnings = error\n")
    return inner_project


def write(inner: pytest.Pytester, body: str) -> None:
    inner.makepyfile(GATHER + body)


def test_ranks_run_once_per_size_of_the_marker(inner: pytest.Pytester) -> None:
    write(
        inner,
        """
    @pytest.mark.world_size(2, 5)
    def test_it(ranks, world_size):
        run = ranks(gathered)
        assert run.results == [[10 * r for r in range(world_size)]] * world_size
""",
    )
    result = run_inner(inner, "-v", "-p", "no:randomly")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["ranks: backend=fake, trace=off", "*::test_it?2ranks? PASSED*", "*::test_it?5ranks? PASSED*"]
    )


def test_without_a_marker_an_even_and_an_odd_size_run(inner: pytest.Pytester) -> None:
    write(
        inner,
        """
    def test_it(fake_group, collective_trace, world_size):
        assert fake_group(gathered).results[0] == [10 * r for r in range(world_size)]
        assert len(collective_trace) == world_size
        fake_group(gathered, size=4)
        assert len(collective_trace) == world_size + 4

    @pytest.mark.world_size(2)
    def test_failed_runs(fake_group, collective_trace):
        with pytest.raises(RuntimeError):
            fake_group(lambda group: gathered(group) if group.rank() == 0 else None)
        assert len(collective_trace) == 1

    @pytest.mark.world_size(3)
    def test_no_calls(fake_group, collective_trace):
        fake_group(lambda group: None)
        assert len(collective_trace) == 0 and collective_trace.size == 3
""",
    )
    result = run_inner(inner, "-v")
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines_random(["*test_it?2ranks?*", "*test_it?3ranks?*"])


def test_a_projects_own_parametrization_wins(inner: pytest.Pytester) -> None:
    write(
        inner,
        """
    @pytest.mark.parametrize("world_size", [4], indirect=True)
    def test_fixture(ranks):
        assert len(ranks(gathered)) == 4

    @pytest.mark.parametrize(("rows", "world_size"), [(1, 3)], indirect=["world_size"])
    def test_several(ranks, rows):
        assert len(ranks(gathered)) == 3

    class TestMarkedClass:
        pytestmark = pytest.mark.world_size(2)
        def test_it(self, ranks):
            assert len(ranks(gathered)) == 2
""",
    )
    run_inner(inner).assert_outcomes(passed=3)


@pytest.mark.parametrize("arguments", ["", "0", "True", "'2'"])
def test_a_bad_marker_is_refused(inner: pytest.Pytester, arguments: str) -> None:
    write(
        inner,
        f"""
    @pytest.mark.world_size({arguments})
    def test_it(ranks):
        pass
""",
    )
    result = run_inner(inner)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*world_size takes positive integers*"])


def test_options_go_to_the_simulation(inner: pytest.Pytester) -> None:
    write(
        inner,
        """
    @pytest.mark.world_size(2)
    def test_it(ranks):
        with pytest.raises(ValueError, match="dialect"):
            ranks(gathered, dialect="latin")
""",
    )
    run_inner(inner).assert_outcomes(passed=1)


def test_a_failing_test_leaves_its_page(inner: pytest.Pytester) -> None:
    write(
        inner,
        """
    @pytest.mark.world_size(3)
    def test_deadlock(ranks):
        ranks(lambda group: gathered(group) if group.rank() != 1 else None)

    @pytest.mark.world_size(2)
    def test_wrong(fake_group):
        assert fake_group(gathered).results[0] == [1, 2]

    @pytest.mark.world_size(2)
    def test_right(ranks):
        ranks(gathered)

    def test_plain():
        assert False
""",
    )
    result = run_inner(inner, "--ranks-trace=pages", "-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=3)
    pages = sorted(path.name for path in (inner.path / "pages").iterdir())
    assert [name.partition(".py_")[2] for name in pages] == [
        "test_deadlock_3ranks-call.html",
        "test_wrong_2ranks-call.html",
    ]
    text = (inner.path / "pages" / pages[0]).read_text(encoding="utf-8")
    assert "never called" in text and "missing ranks [1]" in text
    result.stdout.fnmatch_lines(["ranks: backend=fake, trace=pages", "*- collectives -*", "*!*(missing)*"])


def test_a_run_that_simulates_by_itself_leaves_its_page_too(inner: pytest.Pytester) -> None:
    write(
        inner,
        """
    from kpool_testing import simulate
    def test_it():
        simulate(lambda group: gathered(group) if group.rank() else None, 2)
""",
    )
    run_inner(inner, "--ranks-trace=pages").assert_outcomes(failed=1)
    assert len(list((inner.path / "pages").iterdir())) == 1


def test_a_diagnosis_ends_on_the_users_line_and_comes_once(inner: pytest.Pytester) -> None:
    write(
        inner,
        """
    @pytest.mark.world_size(3)
    def test_mismatch(ranks):
        ranks(lambda group: dist.all_reduce(torch.zeros(2 + group.rank() // 2), group=group))

    @pytest.mark.world_size(2)
    def test_raised_in_torch(ranks):
        ranks(lambda group: torch.distributions.Bernoulli(probs=2.0, validate_args=True))
""",
    )
    text = run_inner(inner, "-p", "no:randomly").stdout.str()
    assert "MismatchError: ranks disagree on call #0" in text and "distributed_c10d.py" not in text
    assert "Captured log" not in text
    assert re.search(r"rank 0: raised \w+: .* at \S*test_a_diagnosis\w+\.py:\d+", text)


def test_fixtures_and_markers_are_documented(inner: pytest.Pytester) -> None:
    fixtures = run_inner(inner, "--fixtures").stdout.str()
    for words in ("ranks --", "fake_group --", "collective_trace --", "world_size --", "Call `ranks(fn)` to run"):
        assert words in fixtures
    run_inner(inner, "--markers").stdout.fnmatch_lines(["*world_size(?sizes): run the test once per*"])
    run_inner(inner, "--help").stdout.fnmatch_lines(["*--ranks-backend=*", "*--ranks-trace=DIR*"])


def test_the_world_is_refused_without_a_launcher_and_under_xdist(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_inner(inner, "--ranks-backend=world")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*needs a launcher: torchrun*"])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = run_inner(inner, "--ranks-backend=world", "-n", "2")
    result.stderr.fnmatch_lines(["*runs every test on every rank: leave out -n*"])


def test_simulated_tests_stay_simulated_under_a_launcher(
    inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        inner,
        """
    @pytest.mark.world_size(3)
    def test_it(ranks):
        assert ranks(gathered).results == [[0, 10, 20]] * 3
        assert not dist.is_initialized()
""",
    )
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    run_inner(inner).assert_outcomes(passed=1)


@pytest.mark.slow
def test_a_session_without_ranks_does_not_pay(inner: pytest.Pytester) -> None:
    inner.makepyfile(
        """
        import sys

        def test_it():
            assert "kpool_testing.plugin" in sys.modules
            loaded = sorted(name for name in sys.modules if name.startswith(("torch", "numpy", "kpool_testing.")))
            assert loaded == ["kpool_testing.plugin"]
        """
    )
    inner.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=1)
    code = "import pytest, time; t = time.perf_counter(); import kpool_testing.plugin; print(time.perf_counter() - t)"
    taken = [float(subprocess.check_output([sys.executable, "-c", code], timeout=60)) for _ in range(2)]
    assert min(taken) < 0.05


@pytest.mark.gloo
class TestRealProcesses:
    def test_under_xdist_and_in_random_order(self, inner: pytest.Pytester) -> None:
        write(
            inner,
            """
    @pytest.mark.parametrize("n", range(6))
    def test_it(ranks, fake_group, n):
        assert ranks(gathered).results == fake_group(gathered).results
""",
        )
        inner.runpytest_subprocess("-n", "2", "-p", "randomly").assert_outcomes(passed=12)

    def test_the_same_test_on_gloo(self, inner: pytest.Pytester) -> None:
        write(
            inner,
            """
    @pytest.mark.world_size(2, 3)
    def test_it(ranks, collective_trace, world_size):
        assert ranks(gathered).results == [[10 * r for r in range(world_size)]] * world_size
        assert len(collective_trace) == world_size

    @pytest.mark.world_size(2)
    def test_fails(ranks):
        ranks(lambda group: 1 / group.rank())
""",
        )
        result = inner.runpytest_subprocess("--ranks-backend=gloo", "-W", "error")
        result.assert_outcomes(passed=2, failed=1)
        result.stdout.fnmatch_lines(["ranks: backend=gloo, trace=off", "*rank 0 raised ZeroDivisionError*"])

    def test_gloo_under_xdist(self, inner: pytest.Pytester) -> None:
        write(
            inner,
            """
    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("n", range(4))
    def test_it(ranks, n):
        assert ranks(gathered).results == [[0, 10]] * 2
""",
        )
        inner.runpytest_subprocess("--ranks-backend=gloo", "-n", "2").assert_outcomes(passed=4)

    def test_functions_in_test_modules_travel(self, inner: pytest.Pytester) -> None:
        for mode in ("prepend", "importlib"):
            write(
                inner,
                """
    @pytest.mark.world_size(2)
    def test_it(ranks):
        assert ranks(gathered).results == [[0, 10]] * 2
""",
            )
            inner.runpytest_subprocess("--ranks-backend=gloo", f"--import-mode={mode}").assert_outcomes(passed=1)

    def test_torchrun_runs_the_body_once_per_process(self, inner: pytest.Pytester) -> None:
        write(
            inner,
            """
    import os, pathlib

    @pytest.mark.world_size(2, 3)
    def test_it(ranks, world_size):
        def body(group):
            pathlib.Path(f"ran-{group.rank()}-{os.getpid()}").touch()
            return gathered(group)
        assert ranks(body).results == [[0, 10]] * 2 and world_size == 2

    @pytest.mark.world_size(3)
    def test_other_size(ranks):
        raise AssertionError

    @pytest.mark.world_size(2)
    def test_one_rank_fails(ranks):
        with pytest.raises(ZeroDivisionError, match="rank 0 raised") if os.environ["RANK"] == "0" else \\
                pytest.raises(RuntimeError, match="rank 0 raised ZeroDivisionError"):
            ranks(lambda group: 1 / group.rank())
""",
        )
        done = launch(inner.path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("2 passed, 1 skipped") == 2, done.stdout
        assert len(list(inner.path.glob("ran-*"))) == 2

    def test_ranks_under_torchrun_run_in_one_order_with_the_same_random_data(self, inner: pytest.Pytester) -> None:
        pytest.importorskip("pytest_randomly")
        write(
            inner,
            """
    import random

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("case", range(12))
    def test_it(ranks, case):
        mine = (case, random.random())
        def body(group):
            found = [None] * group.size()
            dist.all_gather_object(found, mine)
            return found
        assert ranks(body).results == [[mine] * 2] * 2
""",
        )
        done = launch(inner.path, "-p", "randomly")
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("12 passed") == 2, done.stdout


def launch(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "pytest"]
    return subprocess.run(
        [*command, "--ranks-backend=world", *(options or ("-p", "no:randomly"))],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
    )
