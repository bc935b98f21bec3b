"""async_op=True: a call is posted, its result arrives at wait(), and what happens in between is watched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from kpool_testing import AsyncError, DeadlockError, assert_replicated, simulate
from tests.testing.torch_names import all_gather_single


def poisoned(x: torch.Tensor) -> bool:
    """Whether every element is what an output in flight holds."""
    if x.is_floating_point():
        return bool(x.isnan().all())
    return bool(x.all()) if x.dtype is torch.bool else bool((x > torch.iinfo(x.dtype).max - 64).all())


class TestPosting:
    def test_a_rank_goes_on_before_the_others_have_called(self) -> None:
        order: list[str] = []

        def body(group: Any) -> Any:
            x = torch.tensor([float(group.rank())])
            work = dist.all_reduce(x, async_op=True)
            order.append(f"posted {group.rank()}")
            work.wait()
            order.append(f"done {group.rank()}")
            return x.item()

        assert simulate(body, 3).results == [3.0] * 3
        assert order == ["posted 0", "posted 1", "posted 2", "done 2", "done 0", "done 1"]

    def test_calls_may_be_waited_for_in_any_order(self) -> None:
        def body(group: Any) -> Any:
            xs = [torch.full((1,), float(group.rank() + 10 * number)) for number in range(4)]
            works = [dist.all_reduce(x, async_op=True) for x in xs]
            for number in [2, 0, 3, 1] if group.rank() == 0 else [1, 3, 0, 2]:
                works[number].wait()
            return [x.item() for x in xs]

        assert simulate(body, 2).results == [[1, 21, 41, 61]] * 2

    def test_waiting_twice_is_harmless(self) -> None:
        def body(group: Any) -> Any:
            x = torch.ones(1)
            work = dist.all_reduce(x, async_op=True)
            work.wait()
            x += 1
            work.wait()
            return x.item(), work.is_completed(), work.is_success(), work.exception(), work.result()[0].item()

        assert simulate(body, 2).results == [(3.0, True, True, None, 3.0)] * 2

    def test_a_future_holds_the_outputs(self) -> None:
        def body(group: Any) -> Any:
            x = torch.ones(2)
            future = dist.all_reduce(x, async_op=True).get_future()
            return future.then(lambda done: done.value()[0] * 10).wait().tolist()

        assert simulate(body, 2).results == [[20.0, 20.0]] * 2

    def test_an_async_call_that_others_never_join(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                dist.all_reduce(torch.ones(1), async_op=True).wait()

        with pytest.raises(DeadlockError, match=r"rank 0: waits in all_reduce#0 .* missing ranks \[1\]"):
            simulate(body, 2)

    def test_input_is_what_it_was_when_posted(self) -> None:
        """Writing through .data leaves no version: the values posted are still the ones that arrive."""

        def body(group: Any) -> Any:
            x, out = torch.tensor([float(group.rank())]), torch.empty(2)
            work = all_gather_single(out, x, async_op=True)
            x.data.fill_(99)
            work.wait()
            return out.tolist()

        assert simulate(body, 2).results == [[0, 1]] * 2


class TestPoison:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
    def test_outputs_are_poisoned_until_waited_for(self, dtype: torch.dtype) -> None:
        def body(group: Any) -> Any:
            out = torch.zeros(4, dtype=dtype)
            work = all_gather_single(out, torch.zeros(2, dtype=dtype), async_op=True)
            dist.barrier()
            early = poisoned(out)
            work.wait()
            return early, poisoned(out)

        assert simulate(body, 2).results == [(True, False)] * 2

    def test_what_is_only_read_is_left_alone_and_what_a_reduce_leaves_behind_is_poison(self) -> None:
        def body(group: Any) -> Any:
            x = torch.full((2,), float(group.rank()))
            work = dist.broadcast(x, 1, async_op=True)
            early = poisoned(x)
            work.wait()
            y = torch.full((2,), float(group.rank()))
            work = dist.reduce(y, 0, async_op=True)
            reduced_early = poisoned(y)
            work.wait()
            return early, x.tolist(), reduced_early, y.tolist(), poisoned(y)

        first, second = simulate(body, 2).results
        assert first == (True, [1, 1], True, [1, 1], False)
        assert second[:3] == (False, [1, 1], True) and second[4]
        assert simulate(body, 2, dialect="nccl").results[1][2:4] == (False, [1, 1])

    def test_a_rank_that_is_alone_has_its_result_at_once(self) -> None:
        def body(group: Any) -> Any:
            out = torch.zeros(2)
            work = all_gather_single(out, torch.tensor([3.0, 4.0]), async_op=True)
            early = out.tolist()
            work.wait()
            return early, out.tolist()

        assert simulate(body, 1).results == [([3, 4], [3, 4])]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.int32])
    def test_a_program_that_reads_too_early_is_caught_by_both_proofs(self, dtype: torch.dtype) -> None:
        """Its results are wrong, and NaN on every rank; still no two ranks agree, and one rank alone is right."""

        def total(group: Any) -> torch.Tensor:
            out = torch.zeros(2 * group.size(), dtype=dtype)
            work = all_gather_single(out, torch.ones(2, dtype=dtype), async_op=True)
            early = out.sum().reshape(1)
            work.wait()
            return early * 0 + early if dtype.is_floating_point else early

        assert simulate(total, 1).results[0].item() == 2
        results = simulate(total, 3).results
        with pytest.raises(AssertionError, match="not replicated"):
            assert_replicated(results)

    def test_received_tensors_are_poisoned(self) -> None:
        def body(group: Any) -> Any:
            if group.rank() == 0:
                return dist.send(torch.ones(2), 1)
            x = torch.zeros(2)
            work = dist.irecv(x, 0)
            early = poisoned(x)
            work.wait()
            return early, x.tolist()

        assert simulate(body, 2).results[1] == (True, [1, 1])

    def test_input_that_is_a_slot_of_the_output(self) -> None:
        def body(group: Any) -> Any:
            out = torch.zeros(4)
            slot = out[2 * group.rank() : 2 * group.rank() + 2]
            slot += group.rank() + 1
            work = all_gather_single(out, slot, async_op=True)
            early = poisoned(out)
            work.wait()
            return early, out.tolist()

        assert simulate(body, 2).results == [(True, [1, 1, 2, 2])] * 2


class TestInFlight:
    @pytest.mark.parametrize("which", ["input", "output"])
    def test_a_write_before_wait_is_an_error(self, which: str) -> None:
        def body(group: Any) -> None:
            given, out = torch.ones(2), torch.empty(4)
            work = all_gather_single(out, given, async_op=True)
            (given if which == "input" else out).zero_()
            work.wait()

        with pytest.raises(AsyncError, match=f"{which} .* was changed in flight") as caught:
            simulate(body, 2)
        assert "test_async.py" in str(caught.value)

    def test_a_sent_tensor_may_not_change(self) -> None:
        def body(group: Any) -> None:
            x = torch.ones(2)
            if group.rank() == 0:
                work = dist.isend(x, 1)
                x.zero_()
                work.wait()
            else:
                dist.recv(x, 0)

        with pytest.raises(AsyncError, match="changed in flight"):
            simulate(body, 2)

    def test_parts_of_one_buffer_are_watched_apart(self) -> None:
        """Views share a version counter; a gradient bucket is reduced part by part."""

        def body(group: Any) -> Any:
            buffer = torch.full((3, 2), float(group.rank() + 1))
            works = [dist.all_reduce(part, async_op=True) for part in buffer]
            for work in reversed(works):
                work.wait()
            return buffer.tolist()

        assert simulate(body, 2).results == [[[3, 3]] * 3] * 2

    def test_a_write_to_one_part_is_found_among_others(self) -> None:
        def body(group: Any) -> None:
            buffer = torch.ones(3, 2)
            works = [dist.all_reduce(part, async_op=True) for part in buffer]
            buffer[1] += 1
            for work in works:
                work.wait()

        with pytest.raises(AsyncError, match=r"all_reduce#1 .* was changed in flight"):
            simulate(body, 2)

    def test_changes_after_wait_are_free(self) -> None:
        def body(group: Any) -> Any:
            x, out = torch.ones(2), torch.empty(4)
            all_gather_single(out, x, async_op=True).wait()
            x.zero_()
            return out.tolist()

        assert simulate(body, 2).results == [[1, 1, 1, 1]] * 2


class TestForgottenWorks:
    def test_are_an_error(self) -> None:
        def body(group: Any) -> None:
            dist.all_reduce(torch.ones(1), async_op=True)

        with pytest.raises(AsyncError, match=r"rank 0 never waited for all_reduce#0 on group world at .*test_async"):
            simulate(body, 2)
        simulate(body, 2, allow_unwaited=True)

    def test_also_of_one_rank_and_of_messages(self) -> None:
        def body(group: Any) -> None:
            if group.rank() == 0:
                dist.send(torch.ones(1), 1)
            else:
                dist.irecv(torch.ones(1), 0)

        with pytest.raises(AsyncError, match="rank 1 never waited for recv#0 from 0"):
            simulate(body, 2)

    def test_do_not_hide_a_ranks_own_error(self) -> None:
        def body(group: Any) -> None:
            dist.all_reduce(torch.ones(1), async_op=True)
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            simulate(body, 2)

    def test_coalesced_calls_are_waited_for_by_their_manager(self) -> None:
        def body(group: Any) -> Any:
            xs = [torch.ones(1), torch.ones(2)]
            with dist.distributed_c10d._coalescing_manager(group, torch.device("cpu")):
                for x in xs:
                    dist.all_reduce(x)
            return [x.tolist() for x in xs]

        assert simulate(body, 2, dialect="nccl").results == [[[2], [2, 2]]] * 2
