"""Programs that other single-process simulators get wrong: right answers where they are right, named errors where not.

One test a row of the comparison that this toolkit was built from. `gather` below is the smallest sharded program: every
rank squares its slice of x, and all ranks gather the whole.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn
from torch.distributed import all_gather_into_tensor

from kpool_testing import (
    AsyncError,
    DeadlockError,
    MismatchError,
    RankError,
    RefusedError,
    assert_matches_unsharded,
    assert_replicated,
    simulate,
)
from tests.testing.torch_names import all_gather_single


def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Squares [S, ...] with rows sharded over the group: ragged last shard, empty shards at small S."""
    size = group.size()
    rows = -(-len(x) // size)
    mine = x[group.rank() * rows : (group.rank() + 1) * rows].square()
    padded = x.new_zeros(rows, *x.shape[1:])
    padded[: len(mine)] = mine
    out = x.new_empty(size * rows, *x.shape[1:])
    all_gather_single(out, padded, group=group)
    return out[: len(x)]


def vector(group: Any, *shape: int) -> torch.Tensor:
    shape = shape or (2,)
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * group.rank()


class TestRightAnswers:
    @pytest.mark.parametrize("rows", [0, 1, 3, 5, 7, 8, 9])
    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    def test_ragged_and_empty_shards(self, rows: int, size: int) -> None:
        x = torch.arange(2.0 * rows).reshape(rows, 2)
        run = simulate(lambda group: gather(x, group), size)
        assert all(torch.equal(result, x.square()) for result in run.results)
        assert len(run.trace) == size

    def test_every_rank_sends_its_own_values(self) -> None:
        def body(group: Any) -> Any:
            out = torch.empty(4)
            all_gather_into_tensor(out, torch.tensor([10.0 * group.rank(), 10.0 * group.rank() + 1]))
            return out

        assert all(result.tolist() == [0, 1, 10, 11] for result in simulate(body, 2).results)

    def test_transposed_input_that_was_made_contiguous(self) -> None:
        def body(group: Any) -> Any:
            out = torch.empty(6, 2)
            all_gather_single(out, vector(group, 2, 3).t().contiguous())
            return out

        expected = torch.cat([torch.arange(6.0).reshape(2, 3).t() + 10 * rank for rank in range(2)])
        assert all(torch.equal(result, expected) for result in simulate(body, 2).results)

    def test_async_call_then_wait(self) -> None:
        def body(group: Any) -> Any:
            out = torch.empty(6)
            work = all_gather_single(out, vector(group), async_op=True)
            work.wait()
            return out, work.is_completed()

        for out, done in simulate(body, 3).results:
            assert out.tolist() == [0, 1, 10, 11, 20, 21]
            assert done

    def test_subgroups(self) -> None:
        def body(group: Any) -> Any:
            groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            mine = groups[group.rank() % 2]
            x = torch.tensor([float(group.rank())])
            dist.all_reduce(x, group=mine)
            return x.item(), dist.get_rank(mine), dist.get_process_group_ranks(mine)

        assert simulate(body, 4).results == [(2, 0, [0, 2]), (4, 0, [1, 3]), (2, 1, [0, 2]), (4, 1, [1, 3])]

    def test_functional_collectives_with_autograd(self) -> None:
        def body(group: Any) -> Any:
            x = vector(group).requires_grad_()
            y = funcol.all_gather_tensor_autograd(x, 0, group)
            (y * torch.arange(6.0)).sum().backward()
            return x.grad

        grads = [result.tolist() for result in simulate(body, 3).results]
        assert grads == [[0, 3], [6, 9], [12, 15]]

    @pytest.mark.parametrize("dialect", ["portable", "nccl"])
    def test_nn_functional_collectives(self, dialect: str) -> None:
        def body(group: Any) -> Any:
            x = vector(group).requires_grad_()
            (torch.cat(dist_nn.all_gather(x)) * torch.arange(6.0)).sum().backward()
            return x.grad

        grads = [result.tolist() for result in simulate(body, 3, dialect=dialect).results]
        assert grads == [[0, 3], [6, 9], [12, 15]]

    @pytest.mark.slow
    def test_nn_functional_first_imported_inside_a_rank(self) -> None:
        """Its default arguments bind the default group when it is imported."""
        code = (
            "import torch, torch.distributed as dist\n"
            "from kpool_testing import simulate\n"
            "def body(group):\n"
            "    import torch.distributed.nn.functional as F\n"
            "    x = torch.ones(2, requires_grad=True)\n"
            "    F.all_reduce(x).sum().backward()\n"
            "    return x.grad.tolist()\n"
            "assert simulate(body, 2, limit=20).results == [[2.0, 2.0]] * 2\n"
            "assert simulate(body, 3, limit=20).results == [[3.0, 3.0]] * 3\n"
            "for _ in range(3):\n"
            "    try:\n"
            "        simulate(lambda group: body(group) if group.rank() else None, 3)\n"
            "    except RuntimeError as error:\n"
            "        print(type(error).__name__)\n"
        )
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
        # Also: the interpreter exits in peace after runs that have failed.
        assert (done.returncode, done.stdout.split()) == (0, ["DeadlockError"] * 3), done.stderr

    def test_batch_isend_irecv(self) -> None:
        def body(group: Any) -> Any:
            rank, size = group.rank(), group.size()
            got = torch.empty(2)
            ops = [
                dist.P2POp(dist.isend, vector(group), (rank + 1) % size),
                dist.P2POp(dist.irecv, got, (rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            return got.tolist()

        assert simulate(body, 3).results == [[20, 21], [0, 1], [10, 11]]

    def test_ragged_all_to_all_single(self) -> None:
        def body(group: Any) -> Any:
            rank, size = group.rank(), group.size()
            sends = [rank + peer for peer in range(size)]
            receives = [peer + rank for peer in range(size)]
            given = torch.arange(float(sum(sends))) + 100 * rank
            out = torch.empty(sum(receives))
            dist.all_to_all_single(out, given, receives, sends)
            return out.tolist()

        assert simulate(body, 3).results == [
            [100, 200, 201],
            [0, 101, 102, 202, 203, 204],
            [1, 2, 103, 104, 105, 205, 206, 207, 208],
        ]

    def test_same_seed_on_each_rank_gives_the_same_numbers(self) -> None:
        def body(group: Any) -> Any:
            torch.manual_seed(0)
            numbers = [torch.rand(3)]
            for _ in range(4):
                dist.barrier()
                numbers.append(torch.rand(3))
            return torch.stack(numbers)

        run = simulate(body, 3, order="shuffled")
        assert_replicated(run.results)
        torch.manual_seed(0)
        assert torch.equal(run.results[0], torch.stack([torch.rand(3) for _ in range(5)]))

    def test_64_ranks(self) -> None:
        x = torch.arange(200.0)
        assert_replicated(simulate(lambda group: gather(x, group), 64).results)


def refused(body: Any, error: type[Exception], *texts: str, size: int = 3, **options: Any) -> str:
    """The message of the error that the program ends with, at once."""
    started = time.monotonic()
    with pytest.raises(error) as caught:
        simulate(body, size, limit=10, **options)
    assert time.monotonic() - started < 2
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for text in texts:
        assert text in message, message
    # The next run is clean.
    assert_replicated(simulate(lambda group: gather(torch.ones(5), group), 3).results)
    return message


class TestWrongPrograms:
    def test_one_rank_skips_the_call(self) -> None:
        def body(group: Any) -> None:
            if group.rank() != 1:
                all_gather_single(torch.empty(6), vector(group))

        message = refused(body, DeadlockError, "rank 0: waits in all_gather_single#0 on group world")
        assert message.count("missing ranks [1]") == 2
        assert "rank 1: returned" in message
        assert "test_scenarios.py:" in message

    def test_one_rank_skips_the_first_of_two_calls(self) -> None:
        def body(group: Any) -> None:
            if group.rank() != 1:
                all_gather_single(torch.empty(6), vector(group))
            all_gather_single(torch.empty(6), vector(group))

        refused(body, DeadlockError, "all_gather_single#1 on group world", "missing ranks [1]", "rank 1: returned")

    def test_different_collectives(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 1:
                dist.all_reduce(vector(group))
            else:
                all_gather_single(torch.empty(6), vector(group))

        refused(body, MismatchError, "rank 0: all_gather_single(", "rank 1: all_reduce(", "rank 2: all_gather_single(")

    def test_different_collectives_while_another_rank_is_missing(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                dist.all_reduce(vector(group))
            elif group.rank() == 1:
                dist.broadcast(vector(group), 0)

        refused(body, MismatchError, "rank 0: all_reduce(", "rank 1: broadcast(", "rank 2: has not made this call")

    @pytest.mark.parametrize("dialect", ["portable", "gloo", "nccl"])
    def test_shapes_differ_in_all_gather(self, dialect: str) -> None:
        def body(group: Any) -> None:
            rows = 2 - group.rank()
            all_gather_single(torch.empty(2 * rows, 3), vector(group, rows, 3))

        refused(body, MismatchError, "rank 0: ", "shape=[2, 3]", "shape=[1, 3]", size=2, dialect=dialect)

    @pytest.mark.parametrize("dialect", ["portable", "gloo", "nccl"])
    def test_shapes_differ_in_all_reduce(self, dialect: str) -> None:
        def body(group: Any) -> None:
            dist.all_reduce(vector(group, 2 + group.rank()))

        refused(body, MismatchError, "shape=[2]", "shape=[3]", "shape=[4]", dialect=dialect)

    def test_same_number_of_elements_in_another_shape(self) -> None:
        def body(group: Any) -> None:
            dist.all_reduce(vector(group, *((4, 1) if group.rank() else (2, 2))))

        refused(body, MismatchError, "shape=[2, 2]", "shape=[4, 1]")

    @pytest.mark.parametrize("other", [torch.float64, torch.int32])
    @pytest.mark.parametrize("dialect", ["portable", "gloo", "nccl"])
    def test_dtypes_differ(self, other: torch.dtype, dialect: str) -> None:
        def body(group: Any) -> None:
            x = vector(group).to(other if group.rank() == 1 else torch.float32)
            all_gather_single(torch.empty(6, dtype=x.dtype), x)

        refused(body, MismatchError, "dtype=float32", f"dtype={str(other)[6:]}", dialect=dialect)

    def test_output_of_another_dtype(self) -> None:
        def body(group: Any) -> None:
            all_gather_single(torch.empty(6, dtype=torch.float64), vector(group))

        refused(body, RefusedError, "output", "float32", "float64")

    def test_output_of_the_wrong_size(self) -> None:
        def body(group: Any) -> None:
            all_gather_single(torch.empty(5), vector(group))

        refused(body, RefusedError, "[6]", "[5]")

    def test_stacked_output(self) -> None:
        """NCCL takes it, gloo does not."""

        def body(group: Any) -> Any:
            out = torch.empty(2, 2, 3)
            all_gather_single(out, vector(group, 2, 3))
            return out

        refused(body, RefusedError, "[4, 3]", "[2, 2, 3]", size=2)
        refused(body, RuntimeError, "invalid tensor size at index 0", size=2, dialect="gloo")
        run = simulate(body, 2, dialect="nccl")
        assert all(torch.equal(result[1], result[0] + 10) for result in run.results)

    def test_transposed_input(self) -> None:
        """gloo takes it, NCCL does not."""

        def body(group: Any) -> Any:
            out = torch.empty(6, 2)
            all_gather_single(out, vector(group, 2, 3).t())
            return out

        refused(body, RefusedError, "contiguous", size=2)
        refused(body, ValueError, "Tensors must be contiguous", size=2, dialect="nccl")
        expected = torch.cat([torch.arange(6.0).reshape(2, 3).t() + 10 * rank for rank in range(2)])
        assert all(torch.equal(result, expected) for result in simulate(body, 2, dialect="gloo").results)

    def test_wrong_group(self) -> None:
        def body(group: Any) -> None:
            pair = dist.new_group([0, 1])
            if group.rank() < 2:
                dist.all_reduce(vector(group), group=pair if group.rank() == 0 else group)
            else:
                dist.all_reduce(vector(group))

        refused(body, DeadlockError, "all_reduce#0 on group 1 [0, 1]", "all_reduce#0 on group world")

    def test_groups_made_in_another_order(self) -> None:
        def body(group: Any) -> None:
            members = [[0, 1], [0, 2]]
            for ranks in members if group.rank() else reversed(members):
                dist.new_group(ranks)

        refused(body, MismatchError, "new_group", "[0, 1]", "[0, 2]")

    def test_one_rank_raises(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 1:
                raise ValueError("boom on rank 1")
            all_gather_single(torch.empty(6), vector(group))

        message = refused(
            body, RankError, "rank 1 raised ValueError: boom on rank 1", "rank 0: waits in", "rank 2: waits"
        )
        assert message.startswith("rank 1 raised")
        with pytest.raises(ValueError, match="boom on rank 1") as caught:
            simulate(body, 3)
        assert type(caught.value.__cause__) is ValueError

    def test_read_before_wait_is_poison(self) -> None:
        def body(group: Any) -> Any:
            out = torch.zeros(6)
            work = all_gather_single(out, vector(group), async_op=True)
            early = out.clone()
            work.wait()
            return early, out

        for early, late in simulate(body, 3).results:
            assert early.isnan().all()
            assert not late.isnan().any()

    def test_reduce_op_differs(self) -> None:
        def body(group: Any) -> None:
            dist.all_reduce(vector(group), dist.ReduceOp.MAX if group.rank() else dist.ReduceOp.SUM)

        refused(body, MismatchError, "op=SUM", "op=MAX")

    def test_root_differs(self) -> None:
        def body(group: Any) -> None:
            dist.broadcast(vector(group), int(group.rank() == 2))

        refused(body, MismatchError, "root=0", "root=1")

    def test_splits_do_not_fit(self) -> None:
        def body(group: Any) -> None:
            splits = [1, 3] if group.rank() else [2, 2]
            dist.all_to_all_single(torch.empty(4), vector(group, 4), splits, splits)

        refused(body, MismatchError, "rank 0 sends 2 rows to rank 1, which expects 1", size=2)

    def test_input_changed_in_flight(self) -> None:
        def body(group: Any) -> None:
            x, out = vector(group), torch.empty(6)
            work = all_gather_single(out, x, async_op=True)
            x.zero_()
            work.wait()

        refused(body, AsyncError, "input [2] was changed in flight")

    def test_two_calls_of_one_shape_swapped_are_caught_by_the_oracle(self) -> None:
        def body(x: torch.Tensor, group: Any) -> torch.Tensor:
            doubled, tripled = gather(2 * x, group), gather(3 * x, group)
            return doubled - tripled

        def swapped(x: torch.Tensor, group: Any) -> torch.Tensor:
            if group is not None and group.size() > 1 and group.rank() == 1:
                tripled, doubled = gather(3 * x, group), gather(2 * x, group)
            else:
                doubled, tripled = gather(2 * x, group), gather(3 * x, group)
            return doubled - tripled

        x = torch.arange(8.0)
        assert_matches_unsharded(lambda group: body(x, group), sizes=(2, 3))
        simulate(lambda group: swapped(x, group), 3)
        with pytest.raises(AssertionError):
            assert_matches_unsharded(lambda group: swapped(x, group), sizes=(2, 3))
