"""What every test gets: one thread, a device to run on, hypothesis without deadlines, and arms that cannot run empty.

An arm that needs GPUs says so with `--require-gpus N` and fails by name where they are missing, instead of
skipping; it fails too where every test was skipped. pytest itself fails an arm whose selection is empty (exit code 5).
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch starts its team: the tests are many and small

import hypothesis
import pytest
import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
if DEVICES == ["cpu"]:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before anything imports triton, transformers included

hypothesis.settings.register_profile("kpool", deadline=None, print_blob=True)
hypothesis.settings.register_profile("deep", parent=hypothesis.settings.get_profile("kpool"), max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("KPOOL_HYPOTHESIS_PROFILE", "kpool"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--require-gpus`, for the arms that make no sense without one."""
    parser.addoption(
        "--require-gpus", type=int, default=0, metavar="N", help="fail at once where torch sees fewer than N GPUs"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start an arm whose hardware is missing, or would not be used."""
    wanted, found = config.getoption("--require-gpus"), torch.cuda.device_count()
    if found < wanted:
        pytest.exit(f"this arm needs {wanted} CUDA device(s), torch {torch.__version__} sees {found}", returncode=3)
    if wanted and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        pytest.exit("this arm runs the kernels on a GPU: unset TRITON_INTERPRET", returncode=3)
    if wanted:
        config.pluginmanager.register(_Executed(), "executed")


class _Executed:
    """Fails a run that passed without executing a test, with pytest's exit code for an empty selection."""

    def __init__(self) -> None:
        self.tests = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests += report.when == "call" and not report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        idle = self.tests == 0 and not session.config.option.collectonly
        if idle and session.exitstatus == pytest.ExitCode.OK and not hasattr(session.config, "workerinput"):
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{self.tests} tests executed, {torch.cuda.device_count()} GPU(s) seen")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every numeric test runs on the CPU, and once more on CUDA where there is a device."""
    return torch.device(request.param)
