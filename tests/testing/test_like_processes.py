"""Ranks are as separate as processes: programs whose state torch keeps once per process, with what real gloo returns.

The values here were taken from real gloo processes; `tests/conformance/fuzz` compares many more programs with them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from kpool_testing import (
    AsyncError,
    BrokenGroupError,
    DeadlockError,
    MismatchError,
    RefusedError,
    TimedOutError,
    simulate,
)
from tests.testing.torch_names import all_gather_single

POISON_FROM = 2**31 - 64


def spoiled(x: torch.Tensor) -> bool:
    """Whether every element is poison."""
    return bool(x.isnan().all()) if x.is_floating_point() else bool((x >= torch.iinfo(x.dtype).max - 64).all())


class TestMeshes:
    @pytest.mark.parametrize("rows", [3, 5, 7])
    @pytest.mark.parametrize("target", [[Shard(0), Replicate()], [Shard(0), Shard(1)], [Replicate(), Shard(0)]])
    def test_redistribution_on_a_two_dimensional_mesh(self, rows: int, target: list[Any]) -> None:
        """torch caches a redistribution plan by mesh; it holds the sizes of one rank's shard."""
        whole = torch.arange(rows * 2.0).reshape(rows, 2)

        def body(group: Any) -> Any:
            mesh = dist.init_device_mesh("cpu", (2, 2))
            moved = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]).redistribute(mesh, target)
            again = distribute_tensor(whole, mesh, target)
            return moved.to_local(), again.to_local(), moved.full_tensor()

        for moved, again, full in simulate(body, 4).results:
            assert torch.equal(moved, again)
            assert torch.equal(full, whole)

    @pytest.mark.parametrize("rows", [3, 5, 7])
    def test_products_of_uneven_shards(self, rows: int) -> None:
        left, right = torch.arange(rows * 2.0).reshape(rows, 2), torch.arange(6.0).reshape(2, 3)

        def body(group: Any) -> Any:
            mesh = dist.init_device_mesh("cpu", (2, 2))
            d = distribute_tensor(left, mesh, [Shard(0), Shard(0)])
            e = distribute_tensor(right, mesh, [Replicate(), Shard(1)])
            product = d @ e
            assert isinstance(product, DTensor)
            return product.full_tensor()

        assert all(torch.equal(result, left @ right) for result in simulate(body, 4).results)

    def test_the_next_run_does_not_find_the_meshes_of_this_one(self) -> None:
        def body(group: Any) -> Any:
            mesh = dist.init_device_mesh("cpu", (group.size(),))
            return distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]).full_tensor().tolist()

        for size in (2, 3, 2):
            assert simulate(body, size).results == [[0, 1, 2, 3, 4]] * size


class TestReductions:
    def test_reduce_leaves_nothing_that_can_be_used_elsewhere(self) -> None:
        def body(group: Any) -> Any:
            x, y = torch.full((3,), float(group.rank())), torch.full((3,), group.rank())
            dist.reduce(x, 1)
            dist.reduce(y, 1)
            return x, y

        results = simulate(body, 3).results
        assert results[1][0].tolist() == [3, 3, 3] and results[1][1].tolist() == [3, 3, 3]
        assert all(spoiled(part) for rank in (0, 2) for part in results[rank])

    @pytest.mark.parametrize("op", [dist.ReduceOp.MIN, dist.ReduceOp.MAX])
    def test_extremes_of_a_nan_have_no_portable_answer(self, op: Any) -> None:
        def body(group: Any) -> Any:
            x = torch.tensor([float("nan") if group.rank() == 1 else 1.0, 2.0])
            dist.all_reduce(x, op)
            return x

        with pytest.raises(RefusedError, match=r"(MIN|MAX) of a NaN has no portable answer"):
            simulate(body, 2)
        first, second = simulate(body, 2, dialect="gloo").results
        assert first.isnan().tolist() == [True, False] and first[1] == 2
        assert first.view(torch.int32)[0] != second.view(torch.int32)[0], "no two ranks may agree on it"

    def test_average_of_complex_numbers(self) -> None:
        def body(group: Any) -> Any:
            x = torch.full((2,), complex(group.rank(), 1))
            dist.all_reduce(x, dist.ReduceOp.AVG)
            return x.tolist()

        assert simulate(body, 3).results == [[1 + 1j, 1 + 1j]] * 3

    def test_sparse_tensors_are_summed_by_gloo_alone(self) -> None:
        def body(group: Any) -> Any:
            indices = torch.tensor([[0, 0, 2 + group.rank()]])
            x = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2, 3 + group.rank()]), (5,), check_invariants=True)
            dist.all_reduce(x)
            return x.is_coalesced(), x.to_dense().tolist()

        assert simulate(body, 2, dialect="gloo").results == [(True, [6, 0, 3, 4, 0])] * 2
        with pytest.raises(RefusedError, match="sparse tensor: NCCL has none"):
            simulate(body, 2)

    def test_ddp_over_a_sparse_embedding(self) -> None:
        def body(group: Any) -> Any:
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
            model(torch.tensor([group.rank(), 3])).sum().backward()
            gradient = model.module.weight.grad
            assert gradient is not None
            return gradient.to_dense().tolist()

        expected = [[0.5, 0.5], [0.5, 0.5], [0, 0], [1, 1]]
        assert simulate(body, 2, dialect="gloo").results == [expected] * 2


class TestFutures:
    def test_one_that_nobody_waits_for_is_an_error(self) -> None:
        def body(group: Any) -> None:
            dist.all_reduce(torch.ones(1), async_op=True).get_future()

        with pytest.raises(AsyncError, match=r"never waited for all_reduce#0 .*allow_unwaited=True"):
            simulate(body, 2)

    def test_the_outputs_hold_poison_until_the_future_is_waited_for(self) -> None:
        def body(group: Any) -> Any:
            x = torch.ones(2)
            future = dist.all_reduce(x, async_op=True).get_future()
            dist.barrier()
            early = spoiled(x)
            future.wait()
            return early, x.tolist()

        assert simulate(body, 2).results == [(True, [2, 2])] * 2

    def test_those_of_two_groups_may_be_taken_in_opposite_order(self) -> None:
        def body(group: Any) -> Any:
            groups = [dist.new_group([0, 1]) for _ in range(2)]
            xs = [torch.full((1,), float(group.rank() + number)) for number in range(2)]
            order = [0, 1] if group.rank() == 0 else [1, 0]
            futures = {n: dist.all_reduce(xs[n], group=groups[n], async_op=True).get_future() for n in order}
            for number in order:
                futures[number].wait()
            return [x.item() for x in xs]

        assert simulate(body, 2).results == [[1, 3]] * 2

    def test_a_message_may_follow_one(self) -> None:
        def body(group: Any) -> Any:
            x, y = torch.ones(1), torch.zeros(1)
            if group.rank() == 0:
                future = dist.all_reduce(x, async_op=True).get_future()
                dist.send(torch.full((1,), 7.0), 1)
            else:
                dist.recv(y, 0)
                future = dist.all_reduce(x, async_op=True).get_future()
            return future.wait()[0].item(), y.item()

        assert simulate(body, 2).results == [(2, 0), (2, 7)]

    def test_callbacks_run_though_nobody_waits(self) -> None:
        def body(group: Any) -> Any:
            seen: list[float] = []
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            done = future.then(lambda done: seen.append(done.value()[0].item()))
            for _ in range(5):
                dist.barrier()
            return seen, done.done()

        assert simulate(body, 2).results == [([2.0], True)] * 2

    def test_they_can_be_collected_and_waited_for_in_cpp(self) -> None:
        def body(group: Any) -> Any:
            xs = [torch.full((1,), float(number)) for number in range(3)]
            futures = [dist.all_reduce(x, async_op=True).get_future() for x in xs]
            torch.futures.wait_all(futures)
            return [x.item() for x in xs]

        assert simulate(body, 2).results == [[0, 2, 4]] * 2

    def test_a_communication_hook_of_the_users_own(self) -> None:
        def body(group: Any) -> Any:
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))

            def hook(state, bucket):  # annotations that are text are refused by torch
                future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
                return future.then(lambda done: done.value()[0] * 10)

            model.register_comm_hook(None, hook)
            model(torch.full((1, 2), float(group.rank() + 1))).sum().backward()
            gradient = model.module.weight.grad
            assert gradient is not None
            return gradient.tolist()

        assert simulate(body, 2).results == [[[30, 30]]] * 2

    def test_the_form_of_their_value_is_the_backends(self) -> None:
        def body(group: Any) -> Any:
            out = torch.zeros(2)
            future = all_gather_single(out, torch.ones(1), async_op=True).get_future()
            return [tuple(part.shape) for part in future.wait()]

        assert simulate(body, 2, dialect="gloo").results == [[(1,), (1,)]] * 2
        assert simulate(body, 2, dialect="nccl").results == [[(2,)]] * 2


class TestThreads:
    def test_a_thread_that_a_rank_starts_is_that_ranks(self) -> None:
        def body(group: Any) -> Any:
            own = dist.new_group(list(range(group.size())))
            found: list[Any] = []

            def work() -> None:
                x = torch.tensor([float(dist.get_rank())])
                for _ in range(3):
                    dist.all_reduce(x, group=own)
                found.append((dist.get_rank(), x.item()))

            thread = threading.Thread(target=work)
            thread.start()
            y = torch.ones(1)
            dist.all_reduce(y)
            thread.join()
            return found, y.item()

        assert simulate(body, 3).results == [([(rank, 27.0)], 3.0) for rank in range(3)]

    def test_an_executor_made_by_each_rank(self) -> None:
        def body(group: Any) -> Any:
            def total(value: float) -> float:
                x = torch.tensor([value])
                dist.all_reduce(x)
                return x.item()

            with ThreadPoolExecutor(1) as executor:
                futures = [executor.submit(total, group.rank() + number) for number in (0.0, 10.0)]
                return [future.result() for future in futures]

        assert simulate(body, 3).results == [[3, 33]] * 3

    def test_an_executor_that_all_ranks_share(self) -> None:
        with ThreadPoolExecutor(4) as executor:

            def body(group: Any) -> Any:
                def total() -> tuple[int, float]:
                    x = torch.tensor([float(dist.get_rank())])
                    dist.all_reduce(x)
                    return dist.get_rank(), x.item()

                return executor.submit(total).result()

            assert simulate(body, 3).results == [(rank, 3.0) for rank in range(3)]

    def test_functional_collectives_and_meshes_in_a_thread(self) -> None:
        import torch.distributed._functional_collectives as functional

        def body(group: Any) -> Any:
            mesh = dist.init_device_mesh("cpu", (group.size(),))
            found: list[Any] = []

            def work() -> None:
                x = functional.all_reduce(torch.ones(2) * (dist.get_rank() + 1), "sum", mesh)
                whole = distribute_tensor(torch.arange(3.0), mesh, [Shard(0)]).full_tensor()
                found.append((x.tolist(), whole.tolist()))

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return found

        assert simulate(body, 2).results == [[([3, 3], [0, 1, 2])]] * 2

    def test_a_deadlock_between_threads_names_them(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                thread = threading.Thread(target=dist.barrier, name="prefetcher")
                thread.start()
                thread.join()

        with pytest.raises(DeadlockError, match=r"rank 0, thread prefetcher: waits in barrier#0") as caught:
            simulate(body, 2, limit=20)
        assert "rank 0: waits at" in str(caught.value)

    def test_what_a_thread_raises_stays_in_it(self) -> None:
        def body(group: Any) -> Any:
            with ThreadPoolExecutor(1) as executor:
                error = executor.submit(lambda: dist.broadcast(torch.ones(1), 5)).exception()
            dist.barrier()
            return type(error).__name__

        assert simulate(body, 2).results == ["RefusedError"] * 2

    def test_a_rank_ends_with_its_threads(self) -> None:
        def body(group: Any) -> Any:
            results: list[float] = []

            def late() -> None:
                time.sleep(0.02)
                x = torch.ones(1)
                dist.all_reduce(x)
                results.append(x.item())

            threading.Thread(target=late).start()
            return results

        assert simulate(body, 2).results == [[2.0]] * 2


class TestTimeOuts:
    def test_a_wait_that_runs_out_is_caught_and_the_call_goes_on(self) -> None:
        def body(group: Any) -> Any:
            x = torch.ones(1)
            if group.rank() == 0:
                work = dist.all_reduce(x, async_op=True)
                with pytest.raises(RuntimeError, match="timed out"):
                    work.wait(timedelta(milliseconds=100))
                dist.send(torch.zeros(1), 1)
                work.wait()
            else:
                dist.recv(torch.zeros(1), 0)
                dist.all_reduce(x)
            return x.item()

        assert simulate(body, 2).results == [2, 2]

    def test_monitored_barrier_names_who_is_missing_and_breaks_the_group(self) -> None:
        def body(group: Any) -> Any:
            other = dist.new_group([0, 1, 2])
            if group.rank() == 2:
                dist.barrier(group=other)
                with pytest.raises(BrokenGroupError):
                    dist.monitored_barrier(timeout=timedelta(seconds=1))
                return None
            try:
                dist.monitored_barrier(timeout=timedelta(milliseconds=200))
            except RuntimeError as error:
                message = str(error)
            dist.barrier(group=other)
            with pytest.raises(BrokenGroupError):
                dist.all_reduce(torch.ones(1))
            return message

        first, second, _ = simulate(body, 3, dialect="gloo").results
        assert "Rank 2 failed to pass monitoredBarrier in 200 ms" in first
        assert "connection closed" in second

    def test_a_group_with_a_time_out_of_its_own(self) -> None:
        def body(group: Any) -> Any:
            short = dist.new_group([0, 1], timeout=timedelta(milliseconds=300))
            if group.rank() == 0:
                with pytest.raises(TimedOutError):
                    dist.all_reduce(torch.ones(1), group=short)
            x = torch.ones(1)
            dist.all_reduce(x)
            return x.item()

        assert simulate(body, 2).results == [2, 2]

    def test_a_key_that_nobody_sets(self) -> None:
        def body(group: Any) -> str:
            try:
                dist.distributed_c10d._get_default_store().wait(["nowhere"], timedelta(milliseconds=50))
            except dist.DistStoreError as error:
                return str(error)
            return "no error"

        assert all("timeout" in text for text in simulate(body, 2).results)

    def test_without_one_a_deadlock_ends_the_run(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                with contextlib.suppress(RuntimeError):
                    dist.all_reduce(torch.ones(1))

        with pytest.raises(DeadlockError):
            simulate(body, 2)


class TestWhatGlooRefuses:
    def test_monitored_barrier_does_not_meet_barrier(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                dist.monitored_barrier()
            else:
                dist.barrier()

        with pytest.raises(MismatchError, match="barrier / monitored_barrier"):
            simulate(body, 2, dialect="gloo")

    def test_coalescing(self) -> None:
        def body(group: Any) -> None:
            with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")):
                dist.all_reduce(torch.ones(1))

        with pytest.raises(RuntimeError, match="Backend gloo does not implement startCoalescing"):
            simulate(body, 2, dialect="gloo")
        with pytest.raises(RefusedError, match="coalescing: gloo has none"):
            simulate(body, 2)

    @pytest.mark.parametrize("dialect", ["gloo", "portable"])
    def test_a_future_of_reduce_scatter(self, dialect: str) -> None:
        def body(group: Any) -> None:
            work = dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2, async_op=True)
            try:
                work.get_future()
            finally:
                work.wait()

        with pytest.raises(RuntimeError, match=r"getFuture not implemented|no future"):
            simulate(body, 2, dialect=dialect)

    @pytest.mark.parametrize("dialect", ["gloo", "portable"])
    def test_a_message_waited_for_twice(self, dialect: str) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                work = dist.isend(torch.ones(1), 1)
                assert work is not None
                work.wait()
                work.wait()
            else:
                dist.recv(torch.ones(1), 0)

        with pytest.raises(RuntimeError, match="already: gloo waits for ever"):
            simulate(body, 2, dialect=dialect)

    def test_a_group_that_a_member_never_creates(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                dist.new_group([0])
            dist.new_group([0, 1], use_local_synchronization=True)

        for dialect in ("gloo", "portable"):
            with pytest.raises(MismatchError, match="was never created by ranks"):
                simulate(body, 2, dialect=dialect)

    def test_gather_of_complex_numbers(self) -> None:
        def body(group: Any) -> None:
            x = torch.ones(1, dtype=torch.complex64)
            dist.gather(x, [torch.empty_like(x)] * 2 if group.rank() == 0 else None)

        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            simulate(body, 2, dialect="gloo")
        with pytest.raises(RefusedError, match="gloo gathers no complex"):
            simulate(body, 2)

    @pytest.mark.parametrize("root", [-1, 2, 5])
    def test_a_root_out_of_range(self, root: int) -> None:
        def body(group: Any) -> None:
            dist.broadcast(torch.ones(1), root)

        with pytest.raises(RuntimeError, match=f"ProcessGroupGloo::broadcast: invalid root rank: {root}"):
            simulate(body, 2, dialect="gloo")


class TestWorksOfTorch:
    def test_join_leaves_works_that_nobody_waits_for(self) -> None:
        from torch.distributed.algorithms.join import Join

        def body(group: Any) -> Any:
            torch.manual_seed(0)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
            with Join([model]):
                for _ in range(1 + group.rank()):
                    model(torch.ones(1, 1)).sum().backward()
            return model.module.weight.grad is not None

        assert simulate(body, 2, dialect="gloo").results == [True, True]


@pytest.mark.slow
class TestCompiledFunctions:
    """Dynamo takes a rank and its groups for constants; what it compiles for one rank must not run on another."""

    def test_what_depends_on_the_rank(self) -> None:
        def plus_rank(x: torch.Tensor) -> torch.Tensor:
            return x + dist.get_rank()

        def part(x: torch.Tensor) -> torch.Tensor:
            return x[dist.get_rank() * 2 :][:2] * 2

        def branch(x: torch.Tensor) -> torch.Tensor:
            return x * 10 if dist.get_rank() == 1 else x - 1

        def body(group: Any) -> list[list[float]]:
            pairs = [dist.new_group([0, 1]), dist.new_group([2])]
            mine = pairs[group.rank() // 2]

            def of_subgroup(x: torch.Tensor) -> torch.Tensor:
                return x + dist.get_rank(mine) + 100 * dist.get_world_size(mine)

            x = torch.arange(6.0)
            functions = (plus_rank, part, branch, of_subgroup)
            return [torch.compile(function, backend="eager")(x)[:2].tolist() for function in functions]

        assert simulate(body, 3).results == [
            [[0.0, 1.0], [0.0, 2.0], [-1.0, 0.0], [200.0, 201.0]],
            [[1.0, 2.0], [4.0, 6.0], [0.0, 10.0], [201.0, 202.0]],
            [[2.0, 3.0], [8.0, 10.0], [-1.0, 0.0], [100.0, 101.0]],
        ]

    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
    def test_collectives_at_graph_breaks(self) -> None:
        @torch.compile(backend="eager")
        def mixed(x: torch.Tensor) -> torch.Tensor:
            y = x + dist.get_rank()
            dist.broadcast(y, src=1)
            dist.all_reduce(y)
            dist.barrier()
            return y + dist.get_rank()

        assert [result.item() for result in simulate(lambda group: mixed(torch.ones(1)), 2).results] == [4.0, 5.0]

    def test_what_was_compiled_before_a_run_and_after_it(self) -> None:
        @torch.compile(backend="eager")
        def world(x: torch.Tensor) -> torch.Tensor:
            return x + (dist.get_world_size() if dist.is_initialized() else 100)

        x = torch.zeros(1)
        assert world(x).item() == 100
        for size in (2, 3):
            assert [result.item() for result in simulate(lambda group: world(x), size).results] == [size] * size
        assert world(x).item() == 100


# Torch scripts its own decompositions at the first use of forward mode.
TORCH_SCRIPT = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


class TestStateInCpp:
    @TORCH_SCRIPT
    def test_forward_mode_on_ranks_that_meet_inside_it(self) -> None:
        def body(group: Any) -> list[float]:
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(torch.ones(2), torch.full((2,), float(group.rank())))
                dist.barrier()
                return forward_ad.unpack_dual(dual * 3).tangent.tolist()

        assert simulate(body, 2).results == [[0.0, 0.0], [3.0, 3.0]]

    @TORCH_SCRIPT
    def test_forward_mode_that_one_rank_leaves_while_another_is_inside(self) -> None:
        def body(group: Any) -> float:
            def square(x: torch.Tensor) -> torch.Tensor:
                y = x * x
                if group.rank() == 1:
                    dist.recv(torch.zeros(1), src=0)
                return y * x

            _, tangent = torch.func.jvp(square, (torch.ones(1),), (torch.ones(1),))
            if group.rank() == 0:
                dist.send(torch.zeros(1), dst=1)
            return float(tangent)

        assert simulate(body, 2, order=(1, 0)).results == [3.0, 3.0]
        assert torch.func.jvp(torch.square, (torch.ones(1),), (torch.ones(1),))[1].item() == 2.0

    def test_an_operator_that_two_ranks_define_is_refused(self) -> None:
        def custom(group: Any) -> None:
            @torch.library.custom_op("kpool_tests::add_rank", mutates_args=())
            def add_rank(x: torch.Tensor) -> torch.Tensor:
                return x + group.rank()

            dist.barrier()
            add_rank(torch.zeros(1))

        def raw(group: Any) -> None:
            library = torch.library.Library("kpool_tests_raw", "FRAGMENT")
            library.define("f(Tensor x) -> Tensor")
            library.impl("f", lambda x: x + group.rank(), "CPU")
            dist.barrier()

        for body, name in ((custom, "custom_op kpool_tests::add_rank"), (raw, "operator kpool_tests_raw::f")):
            with pytest.raises(RefusedError, match=f"rank 1 defines {name}, which rank 0 has defined"):
                simulate(body, 2)

    def test_one_that_is_gone_before_the_next_rank_defines_it_is_not(self) -> None:
        def body(group: Any) -> float:
            with torch.library._scoped_library("kpool_tests_scoped", "DEF") as library:
                library.define("f(Tensor x) -> Tensor")
                library.impl("f", lambda x: x + group.rank(), "CPU")
                result: float = torch.ops.kpool_tests_scoped.f(torch.zeros(1)).item()
            return result

        assert simulate(body, 2).results == [0.0, 1.0]

    @pytest.mark.parametrize(("together", "expected"), [(True, None), (False, [True, True])])
    def test_two_profilers_at_once_are_refused(self, together: bool, expected: list[bool] | None) -> None:
        def body(group: Any) -> bool:
            with torch.profiler.profile() as profiler:
                torch.ones(1).add_(1)
                if together:
                    dist.barrier()
            return bool(profiler.events())

        if together:
            with pytest.raises(RefusedError, match="rank 1 starts the profiler while rank 0 profiles"):
                simulate(body, 2)
        else:
            assert simulate(body, 2).results == expected

    @pytest.mark.slow
    def test_collectives_under_compiled_autograd_are_refused(self) -> None:
        def body(group: Any) -> None:
            x = torch.ones(2, requires_grad=True)
            x.register_hook(lambda gradient: all_reduce(gradient, "sum", group))
            from torch._dynamo import compiled_autograd

            with compiled_autograd._enable(torch.compile(backend="eager")):
                (x * 2).sum().backward()

        with pytest.raises(RefusedError, match="under compiled autograd"):
            simulate(body, 2)

    def test_rpc_is_refused(self, tmp_path: Path) -> None:
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/rendezvous")
        with pytest.raises(RefusedError, match=r"refuse torch\.distributed\.rpc"):
            simulate(
                lambda group: rpc.init_rpc(
                    f"worker{group.rank()}", rank=group.rank(), world_size=2, rpc_backend_options=options
                ),
                2,
            )
