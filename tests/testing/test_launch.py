"""run_ranks: the same function on real processes, and a named error for whatever a real process can do."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kpool_testing import DeadlockError, RankError, assert_replicated, close_pool, expect_collectives, run_ranks

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def gathered(group: Any, tensor: torch.Tensor | None = None) -> torch.Tensor:
    tensor = torch.tensor([10 * group.rank(), 10 * group.rank() + 1]) if tensor is None else tensor
    output = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    getattr(dist, GATHER)(output, tensor, group=group)
    return output


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    close_pool()
    assert multiprocessing.active_children() == []


@pytest.mark.gloo
def test_one_small_run_on_real_processes() -> None:
    offset = torch.tensor([100])
    run = run_ranks(lambda group: gathered(group) + offset, 2, "gloo")
    assert [result.tolist() for result in run.results] == [[100, 101, 110, 111]] * 2
    expect_collectives(run, {"all_gather_single": 1}, max_bytes=16)
    assert all("test_launch.py:" in call.site for call in run.trace)
    assert not dist.is_initialized()


@pytest.mark.parametrize("backend", ["fake", "replay"])
def test_the_same_call_without_processes(backend: str) -> None:
    run = run_ranks(gathered, 3, backend)
    assert_replicated(run)
    assert run.results[2].tolist() == [0, 1, 10, 11, 20, 21]


def test_options_reach_the_simulation_and_nothing_else() -> None:
    with pytest.raises(ValueError, match="dialect"):
        run_ranks(gathered, 2, "fake", dialect="latin")
    with pytest.raises(ValueError, match=r"backend='gloo' takes no \['seed'\]"):
        run_ranks(gathered, 2, "gloo", seed=1)


@pytest.mark.parametrize(
    ("size", "backend", "message"),
    [(2, "mpi", "unknown backend 'mpi'"), (0, "fake", "size must be at least 1, got 0")],
)
def test_bad_arguments_are_refused(size: int, backend: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(gathered, size, backend)


def test_too_few_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"3 ranks asked for, 1 GPUs visible \(2 short\)"):
        run_ranks(gathered, 3, "nccl")


def test_the_world_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="needs a launcher"):
        run_ranks(gathered, 2, "world")


@pytest.mark.gloo
class TestProcesses:
    def test_workers_are_kept_and_fork_a_rank_for_every_run(self) -> None:
        first = run_ranks(lambda group: (os.getppid(), os.getpid()), 3, "gloo").results
        second = run_ranks(lambda group: (os.getppid(), os.getpid()), 3, "gloo").results
        assert [worker for worker, _ in first] == [worker for worker, _ in second]
        assert len({os.getpid(), *(process for pair in first + second for process in pair)}) == 10

    def test_nothing_that_a_run_leaves_in_torch_reaches_the_next(self) -> None:
        def leave(group: Any) -> tuple[Any, ...]:
            import torch.distributed.nn.functional as dist_nn  # binds this run's default group

            found = torch.get_default_dtype(), torch.is_grad_enabled(), hasattr(torch, "_left_by_a_rank")
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            torch._left_by_a_rank = True  # type: ignore[attr-defined]
            return *found, dist_nn.all_reduce(torch.ones(1)).item(), torch.rand(1).item()

        runs = [run_ranks(leave, size, "gloo").results for size in (2, 2, 3)]
        for results in runs:
            assert [result[:4] for result in results] == [(torch.float32, True, False, len(results))] * len(results)
        assert len({result[4] for results in runs for result in results}) == 7

    def test_a_compiled_collective_is_compiled_whole(self) -> None:
        def compiled(group: Any) -> list[float]:
            @torch.compile(fullgraph=True, backend="eager")
            def double_and_sum(x: torch.Tensor) -> torch.Tensor:
                y = x * 2
                dist.all_reduce(y)
                return y + 1

            return double_and_sum(torch.ones(2)).tolist()

        assert run_ranks(compiled, 2, "gloo").results == [[5.0, 5.0]] * 2

    def test_more_ranks_than_cores(self) -> None:
        assert_replicated(run_ranks(gathered, 8, "gloo"))

    def test_an_exception_comes_back_with_its_type_and_traceback(self) -> None:
        def fail(group: Any) -> torch.Tensor:
            if group.rank() == 1:
                raise LookupError("boom")
            return gathered(group)

        start = time.monotonic()
        with pytest.raises(RankError, match=r"^rank 1 raised LookupError: boom\n  rank 0: .*\n  rank 1: ") as caught:
            run_ranks(fail, 3, "gloo")
        assert time.monotonic() - start < 15
        assert isinstance(caught.value, LookupError) and isinstance(caught.value.__cause__, LookupError)
        assert any("test_launch.py" in note and "raise LookupError" in note for note in caught.value.__notes__)
        assert_replicated(run_ranks(gathered, 3, "gloo"))

    def test_a_rank_that_skips_a_call_ends_at_the_limit(self) -> None:
        lines = (
            r"rank 0 raised RuntimeError: .*timed out",
            r"  rank 0: .*timed out.*; its last call: all_gather_single#0 on group world at .*test_launch.py",
            r"  rank 1: returned; made no collective call",
        )
        with pytest.raises(DeadlockError, match="(?i)" + "\\n".join(f"{line}.*" for line in lines)):
            run_ranks(lambda group: gathered(group) if group.rank() == 0 else None, 2, "gloo", timeout=2)

    def test_subgroups_have_the_limit_too(self) -> None:
        def skip(group: Any) -> Any:
            subgroup = dist.new_group([0, 1])
            return gathered(subgroup) if group.rank() == 0 else None

        start = time.monotonic()
        with pytest.raises(DeadlockError):
            run_ranks(skip, 2, "gloo", timeout=2)
        assert time.monotonic() - start < 20

    def test_a_dead_process_is_reported_and_replaced(self) -> None:
        def die(group: Any) -> torch.Tensor:
            if group.rank() == 1:
                os._exit(7)
            return gathered(group)

        with pytest.raises(RankError, match=r"^rank 1: its process died with exit code 7"):
            run_ranks(die, 2, "gloo")
        assert_replicated(run_ranks(gathered, 2, "gloo"))

    def test_a_crash_comes_with_its_stack(self) -> None:
        def crash(group: Any) -> None:
            if group.rank() == 1:
                os.abort()
            gathered(group)

        with pytest.raises(RankError, match=r"^rank 1: its process died") as caught:
            run_ranks(crash, 2, "gloo")
        assert any(
            "Fatal Python error: Aborted" in note and "test_launch.py" in note for note in caught.value.__notes__
        )

    def test_a_rank_that_never_returns_is_ended_with_its_stack(self) -> None:
        with pytest.raises(DeadlockError, match=r"^rank 0: did not return within 4 s, ended") as caught:
            run_ranks(lambda group: time.sleep(60) if group.rank() == 0 else None, 2, "gloo", timeout=1)
        assert any("test_launch.py" in note for note in caught.value.__notes__)

    def test_what_ranks_print_is_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        run_ranks(lambda group: print("hello from", group.rank()), 2, "gloo")  # noqa: T201
        assert "[rank 1] hello from 1" in capsys.readouterr().err

    def test_a_result_that_cannot_travel_is_an_error_of_that_rank(self) -> None:
        with pytest.raises(RankError, match=r"rank \d raised TypeError"):
            run_ranks(lambda group: group, 2, "gloo")

    def test_every_kind_of_call_is_recorded(self) -> None:
        def calls(group: Any) -> None:
            x = torch.ones(4)
            dist.all_reduce(x)
            dist.broadcast(x, src=1)
            if group.rank() == 0:
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
            dist.barrier()

        trace = run_ranks(calls, 2, "gloo").trace
        assert [call.kind for call in trace.of_rank(0)] == ["all_reduce", "broadcast", "send", "barrier"]
        assert [call.detail for call in trace.of_rank(1)] == ["SUM", "from 1", "from 0", ""]

    def test_a_script_without_pytest(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent(
                """
                import torch, torch.distributed as dist
                from kpool_testing import run_ranks

                def total(group):
                    x = torch.ones(1)
                    dist.all_reduce(x, group=group)
                    return float(x)

                if __name__ == "__main__":
                    print(run_ranks(total, 2, "gloo").results)
                """
            )
        )
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == "[2.0, 2.0]", done.stderr
        assert done.returncode == 0 and done.stderr == ""
