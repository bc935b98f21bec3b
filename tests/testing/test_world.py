"""simulate(): what each rank has to itself, what it inherits, and what is as before afterwards."""

from __future__ import annotations

import _thread
import io
import logging
import os
import pdb
import random
import sys
import threading
import time
import types
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.utils.flop_counter import FlopCounterMode

import kpool_testing
from kpool_testing import CollectiveError, DeadlockError, LimitError, RankError, Run, assert_replicated


def total(group: Any) -> float:
    """The sum of all ranks' numbers."""
    x = torch.tensor([float(group.rank())])
    dist.all_reduce(x, group=group)
    return x.item()


def state_of_the_process() -> dict[str, Any]:
    return {
        "world": id(c10d._world),
        "helper": c10d._new_process_group_helper,
        "backend": c10d._backend,
        "plugins": dict(dist.Backend._plugins),
        "backends": list(dist.Backend.backend_list),
        "names": [name for name in dir(dist.Backend) if "kpool" in name.lower()],
        "hook": sys.excepthook,
        "initialized": dist.is_initialized(),
        "rng": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": numpy.random.get_state()[1].tolist(),
        "environment": dict(os.environ),
        "threads": [thread.name for thread in threading.enumerate()],
        "compute threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "warnings": list(warnings.filters),
    }


def simulate(fn: Any, size: int, left_behind: bool = False, **options: Any) -> Run:
    """The function under test, and a check that the process is afterwards what it was, however the run ends."""
    before = state_of_the_process()
    try:
        return kpool_testing.simulate(fn, size, **options)
    finally:
        after = state_of_the_process()
        changed = {key for key in before if before[key] != after[key]}
        assert changed == ({"threads"} if left_behind else set())


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"size": 0}, "size must be at least 1, got 0"),
            ({"size": 2, "dialect": "mpi"}, "unknown dialect 'mpi'"),
            ({"size": 2, "order": [0, 0]}, "permutation of range"),
            ({"size": 2, "order": "random"}, "shuffled"),
            ({"size": 2, "limit": 0}, "limit must be positive"),
            ({"size": 2, "faults": ["x"]}, "unknown fault 'x'"),
        ],
    )
    def test_out_of_range(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            simulate(total, **options)

    def test_nested_runs_are_refused(self) -> None:
        with pytest.raises(RankError, match="nested simulations are refused"):
            simulate(lambda group: kpool_testing.simulate(total, 2), 2)
        assert simulate(total, 2).results == [1.0, 1.0]

    def test_unsupported_call_is_named(self) -> None:
        def body(group: Any) -> None:
            dist.split_group(split_ranks=[[0, 1]])

        with pytest.raises(RankError, match="split"):
            simulate(body, 2)


class TestWhatARankSees:
    def test_its_own_torch_distributed(self) -> None:
        def body(group: Any) -> Any:
            assert group is dist.group.WORLD
            return (
                dist.get_rank(),
                dist.get_world_size(),
                dist.get_backend(),
                dist.get_process_group_ranks(group),
                group.rank(),
                group.size(),
                dist.is_initialized(),
            )

        expected = [(rank, 3, "gloo", [0, 1, 2], rank, 3, True) for rank in range(3)]
        assert simulate(body, 3).results == expected

    def test_the_backend_it_claims(self) -> None:
        def body(group: Any) -> Any:
            return dist.get_backend(), dist.get_backend(dist.new_group([0, 1], backend="nccl"))

        assert simulate(body, 2).results[0] == ("gloo", "nccl")
        assert simulate(body, 2, dialect="nccl").results[0] == ("nccl", "nccl")
        assert simulate(body, 2, backend="nccl").results[0] == ("nccl", "nccl")

    def test_environment(self) -> None:
        def body(group: Any) -> Any:
            seen = []
            for _ in range(3):
                dist.barrier()
                seen.append((os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]))
            os.environ["KPOOL_LEFT_BY_A_RANK"] = "1"
            return seen

        assert simulate(body, 3).results == [[(str(rank), str(rank), "3")] * 3 for rank in range(3)]

    def test_random_streams_are_its_own(self) -> None:
        def body(group: Any) -> Any:
            torch.manual_seed(5)
            random.seed(5)
            numpy.random.seed(5)
            drawn = []
            for _ in range(5):
                drawn.append((torch.rand(1).item(), random.random(), random.gauss(0, 1), numpy.random.randn()))
                dist.barrier()
            return drawn

        run = simulate(body, 3, order="shuffled")
        assert_replicated(run.results)

    def test_a_rank_that_draws_does_not_move_the_others(self) -> None:
        def body(group: Any) -> Any:
            random.seed(5)
            numpy.random.seed(5)
            first = (random.random(), numpy.random.rand())
            dist.barrier()
            if group.rank() == 1:
                [(random.random(), numpy.random.rand()) for _ in range(700)]
            dist.barrier()
            return first, random.random(), numpy.random.rand()

        results = simulate(body, 3).results
        assert results[0] == results[2]
        assert results[0] != results[1]

    def test_unseeded_ranks_draw_differently_and_reproducibly(self) -> None:
        runs = [simulate(lambda group: torch.rand(4), 3, seed=seed).results for seed in (0, 0, 1)]
        assert torch.equal(torch.stack(runs[0]), torch.stack(runs[1]))
        assert len({tuple(draw.tolist()) for run in (runs[0], runs[2]) for draw in run}) == 6

    def test_one_compute_thread(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            assert simulate(lambda group: torch.get_num_threads(), 3).results == [1, 1, 1]
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(threads)

    def test_default_dtype_and_warning_filters_are_its_own(self) -> None:
        def body(group: Any) -> Any:
            if group.rank() == 1:
                torch.set_default_dtype(torch.float64)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if group.rank() == 1 else "error")
                dist.barrier()
                try:
                    warnings.warn("noise", stacklevel=1)
                except UserWarning:
                    return torch.zeros(1).dtype, "raised"
            return torch.zeros(1).dtype, "ignored"

        assert simulate(body, 3).results == [
            (torch.float32, "raised"),
            (torch.float64, "ignored"),
            (torch.float32, "raised"),
        ]

    def test_isolated_module_globals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module = types.ModuleType("kpool_isolated_example")
        exec(
            "groups = []\ncount = 0\ndef add(n):\n    global count, late\n    count += n\n    late = n\n", vars(module)
        )
        monkeypatch.setitem(sys.modules, module.__name__, module)

        def body(group: Any) -> Any:
            for _ in range(3):
                module.add(group.rank())
                module.groups.append(group.rank())
                dist.barrier()
            return module.count, module.groups, module.late

        run = simulate(body, 3, isolate=[module.__name__])
        assert run.results == [(3 * rank, [rank] * 3, rank) for rank in range(3)]
        assert (module.count, module.groups, hasattr(module, "late")) == (0, [], False)

    def test_no_deprecation_noise_for_old_names(self) -> None:
        def body(group: Any) -> Any:
            out, part = torch.empty(4), torch.empty(2)
            dist.all_gather_into_tensor(out, torch.ones(2))
            dist.reduce_scatter_tensor(part, out)
            return part.tolist()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert simulate(body, 2).results == [[2.0, 2.0]] * 2


class TestWhatARankInherits:
    def test_grad_mode(self) -> None:
        def body(group: Any) -> Any:
            dist.barrier()
            before = torch.is_grad_enabled()
            torch.set_grad_enabled(group.rank() == 0)
            dist.barrier()
            return before, torch.is_grad_enabled()

        assert simulate(body, 2).results == [(True, True), (True, False)]
        with torch.no_grad():
            assert simulate(body, 2).results == [(False, True), (False, False)]

    def test_inference_mode(self) -> None:
        with torch.inference_mode():
            run = simulate(lambda group: (torch.is_inference_mode_enabled(), total(group)), 2)
        assert run.results == [(True, 1.0), (True, 1.0)]

    def test_autocast(self) -> None:
        def body(group: Any) -> Any:
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, total(group)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert simulate(body, 2).results == [(torch.bfloat16, 1.0)] * 2
        assert simulate(body, 2).results == [(torch.float32, 1.0)] * 2

    def test_default_device(self) -> None:
        def body(group: Any) -> Any:
            dist.barrier()
            return torch.empty(2).device.type

        with torch.device("meta"):
            assert simulate(body, 2).results == ["meta", "meta"]
        assert simulate(body, 2).results == ["cpu", "cpu"]

    def test_default_dtype(self) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            assert simulate(lambda group: torch.empty(1).dtype, 2).results == [torch.float64] * 2
        finally:
            torch.set_default_dtype(torch.float32)

    def test_context_variables(self) -> None:
        import contextvars

        variable = contextvars.ContextVar("variable", default=0)
        variable.set(7)

        def body(group: Any) -> Any:
            seen = variable.get()
            variable.set(group.rank())
            dist.barrier()
            return seen, variable.get()

        assert simulate(body, 2).results == [(7, 0), (7, 1)]
        assert variable.get() == 7

    def test_dispatch_modes_are_refused(self) -> None:
        with FlopCounterMode(display=False), pytest.raises(RuntimeError, match=r"FlopCounterMode.*enter it inside fn"):
            simulate(total, 2)

    def test_saved_tensor_hooks_are_refused(self) -> None:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with hooks, pytest.raises(RuntimeError, match="saved-tensor hooks"):
            simulate(total, 2)

    def test_function_transforms_are_refused(self) -> None:
        def outer(x: torch.Tensor) -> torch.Tensor:
            simulate(total, 2)
            return x

        with pytest.raises(RuntimeError, match=r"torch\.func transform"):
            torch.func.vmap(outer)(torch.ones(2))

    def test_modes_entered_inside_fn_do_not_see_the_simulation_at_work(self) -> None:
        def body(group: Any) -> int:
            with FlopCounterMode(display=False) as counter:
                torch.ones(2, 3) @ torch.ones(3, 4)
                total(group)
            return counter.get_total_flops()

        assert simulate(body, 3).results == [48] * 3


class TestOrder:
    @staticmethod
    def order_of(**options: Any) -> list[int]:
        seen: list[int] = []

        def body(group: Any) -> None:
            for _ in range(4):
                seen.append(group.rank())
                dist.barrier()

        simulate(body, 4, **options)
        return seen

    def test_ascending_and_repeatable(self) -> None:
        assert self.order_of()[:4] == [0, 1, 2, 3]
        assert self.order_of() == self.order_of()

    def test_permutation(self) -> None:
        assert self.order_of(order=[2, 0, 3, 1])[:4] == [2, 0, 3, 1]

    def test_shuffle_follows_the_seed(self) -> None:
        orders = [tuple(self.order_of(order="shuffled", seed=seed)) for seed in range(6)]
        assert orders[0] == tuple(self.order_of(order="shuffled", seed=0))
        assert len(set(orders)) > 3
        assert all(sorted(order) == sorted([0, 1, 2, 3] * 4) for order in orders)

    def test_only_one_rank_runs_at_a_time(self) -> None:
        inside: list[int] = []

        def body(group: Any) -> None:
            for _ in range(20):
                inside.append(1)
                time.sleep(0.0005)
                assert len(inside) == 1
                inside.pop()
                dist.barrier()

        simulate(body, 4)


class TestAnOuterGroup:
    def test_stays_untouched(self, tmp_path: Path) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 1)
        hook = sys.excepthook
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=20))
        try:
            outer = dist.group.WORLD
            side = dist.new_group([0])
            assert simulate(total, 4).results == [6.0] * 4
            with pytest.raises(DeadlockError):
                simulate(lambda group: total(group) if group.rank() else None, 2)
            assert dist.group.WORLD is outer
            assert dist.get_world_size() == 1
            x = torch.ones(2)
            dist.all_reduce(x, group=side)
            found: list[Any] = []

            def by_name() -> None:
                """Torch's C++ registry of groups is again one for all threads."""
                y = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", outer.group_name)
                found.append(torch.ops._c10d_functional.wait_tensor(y).tolist())

            thread = threading.Thread(target=by_name)
            thread.start()
            thread.join()
            assert found == [[1.0, 1.0]]
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook

    def test_group_destroyed_by_the_rank_itself(self) -> None:
        def body(group: Any) -> Any:
            value = total(group)
            dist.destroy_process_group()
            return value, dist.is_initialized()

        assert simulate(body, 2).results == [(1.0, False)] * 2


class TestTheEnd:
    def test_a_rank_that_never_comes_back(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 1:
                while True:
                    pass
            dist.barrier()

        started = time.monotonic()
        with pytest.raises(LimitError, match=r"did not end within its limit of 0\.3 s") as caught:
            simulate(body, 3, limit=0.3)
        assert time.monotonic() - started < 5
        assert "rank 0: waits in barrier#0" in str(caught.value)
        assert "rank 1: runs at" in str(caught.value)
        assert "test_world.py" in str(caught.value)

    def test_a_rank_that_swallows_everything_still_ends(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                for _ in range(3):
                    try:
                        dist.barrier()
                    except BaseException:
                        continue

        with pytest.raises(DeadlockError):
            simulate(body, 2, limit=5)

    @pytest.mark.slow
    def test_a_rank_stuck_in_native_code_is_reported(self) -> None:
        release = _thread.allocate_lock()
        release.acquire()

        def body(group: Any) -> None:
            if group.rank() == 0:
                release.acquire()
            dist.barrier()

        with pytest.raises(LimitError) as caught:
            simulate(body, 2, left_behind=True, limit=0.2)
        assert any("ranks [0]" in note and "left behind" in note for note in caught.value.__notes__)
        left = [thread for thread in threading.enumerate() if thread.name == "rank 0"]
        release.release()
        for thread in left:
            thread.join(5)
        assert simulate(total, 2).results == [1.0, 1.0]

    def test_polling_that_never_ends_is_a_deadlock(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                work = dist.barrier(async_op=True)
                while not work.is_completed():
                    pass

        with pytest.raises(DeadlockError, match="polls barrier#0 on group world"):
            simulate(body, 2, limit=10)

    def test_polling_that_ends(self) -> None:
        def body(group: Any) -> float:
            x = torch.tensor([float(group.rank())])
            work = dist.all_reduce(x, async_op=True)
            while not work.is_completed():
                pass
            work.wait()
            return x.item()

        assert simulate(body, 3).results == [3.0] * 3

    def test_exceptions_that_are_not_errors_come_through(self) -> None:
        with pytest.raises(pytest.skip.Exception, match="not today"):
            simulate(lambda group: pytest.skip("not today"), 2)
        with pytest.raises(SystemExit):
            simulate(lambda group: sys.exit(3), 2)

    @pytest.mark.parametrize("kind", [ValueError, KeyError, FileNotFoundError, AssertionError, NotImplementedError])
    def test_errors_keep_their_type(self, kind: type[Exception]) -> None:
        def body(group: Any) -> None:
            raise kind("details")

        with pytest.raises(kind, match="rank 0 raised") as caught:
            simulate(body, 2)
        assert isinstance(caught.value, RankError)
        assert type(caught.value.__cause__) is kind
        assert caught.value.trace is not None

    def test_errors_whose_type_cannot_be_kept(self) -> None:
        class Picky(Exception):
            def __init_subclass__(cls) -> None:
                raise TypeError("no subclasses")

        def body(group: Any) -> None:
            raise Picky("details")

        with pytest.raises(RankError, match="Picky: details"):
            simulate(body, 2)

    def test_first_error_in_time_is_the_one_raised(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 2:
                raise ValueError("first")
            dist.barrier(dist.new_group([0, 1]))
            raise KeyError("second")

        with pytest.raises(RankError, match=r"^rank 2 raised ValueError: first"):
            simulate(body, 3, order=[2, 0, 1])

    def test_a_collective_on_a_foreign_thread_is_refused(self) -> None:
        found: list[BaseException] = []
        given: list[Any] = []
        ready = threading.Event()

        def foreign() -> None:
            ready.wait()
            try:
                dist.barrier(given[0])
            except BaseException as error:
                found.append(error)

        thread = threading.Thread(target=foreign)
        thread.start()

        def body(group: Any) -> None:
            if group.rank() == 0:
                given.append(group)
                ready.set()
                thread.join()

        kpool_testing.simulate(body, 2)
        assert isinstance(found[0], (RuntimeError, ValueError))

    def test_keyboard_interrupt_ends_the_run(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                _thread.interrupt_main()
            while True:
                time.sleep(0.001)

        with pytest.raises(KeyboardInterrupt):
            simulate(body, 2, limit=20)

    def test_a_run_leaves_no_memory_of_its_groups(self) -> None:
        """Thread identities are used again: a name left in torch's C++ registry would be taken for the next run's."""
        for size in (2, 3, 4, 3, 2):
            for _ in range(10):
                assert simulate(lambda group: total(dist.new_group(range(group.size()))), size).results[0] >= 1


class TestDebugging:
    def test_pdb_inside_a_rank(self) -> None:
        """The debugger stops in the rank's frame; its time does not count."""
        outputs = {}

        def body(group: Any) -> float:
            marker = 40 + group.rank()
            if group.rank() == 1:
                outputs[marker] = io.StringIO()
                script = io.StringIO("p marker\nc\n")
                pdb.Pdb(stdin=script, stdout=outputs[marker], nosigint=True, readrc=False).set_trace()
            return total(group)

        assert simulate(body, 2).results == [1.0, 1.0]
        assert "41" in outputs[41].getvalue()

    def test_errors_say_how_to_repeat_the_run(self) -> None:
        with pytest.raises(CollectiveError) as caught:
            simulate(lambda group: total(group) if group.rank() else None, 2, seed=9, dialect="gloo")
        assert any("size=2" in note and "seed=9" in note and "'gloo'" in note for note in caught.value.__notes__)

    def test_the_trace_of_a_failed_run_is_on_the_error(self) -> None:
        def body(group: Any) -> None:
            total(group)
            if group.rank():
                total(group)

        with pytest.raises(DeadlockError) as caught:
            simulate(body, 3)
        assert [call.rank for call in caught.value.trace] == [0, 1, 2, 2, 1]

    def test_logging_is_left_alone(self) -> None:
        before = logging.getLogger("torch.distributed").handlers[:]
        simulate(total, 2)
        assert logging.getLogger("torch.distributed").handlers == before
