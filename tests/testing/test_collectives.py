"""Every collective, by all of its names: the pure functions, and what ranks receive through torch.distributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import all_reduce as bound_all_reduce
from torch.distributed import broadcast as bound_broadcast

from kpool_testing import simulate
from kpool_testing.rules import collectives
from tests.testing.torch_names import all_gather_single


def mine(rank: int, *shape: int) -> torch.Tensor:
    """Different values at every position and on every rank."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * rank


class TestPureFunctions:
    def test_gather_concatenates_in_rank_order(self) -> None:
        parts = [mine(rank, 2, 3) for rank in range(3)]
        assert torch.equal(collectives.all_gather_single(parts), torch.cat(parts))
        assert collectives.all_gather_single([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]

    @given(st.integers(1, 5), st.sampled_from(collectives.REDUCE_OPS), st.integers(0, 6))
    def test_reduce_matches_one_tensor_of_all(self, size: int, op: str, numel: int) -> None:
        tensors = [(torch.arange(numel, dtype=torch.int64) * 7 + 3 * rank) % 11 for rank in range(size)]
        if op == "AVG":
            tensors = [tensor.double() for tensor in tensors]
        before = [tensor.clone() for tensor in tensors]
        stacked = torch.stack(tensors)
        expected = {
            "SUM": lambda: stacked.sum(0),
            "AVG": lambda: stacked.sum(0) / size,
            "PRODUCT": lambda: stacked.prod(0),
            "MIN": lambda: stacked.amin(0),
            "MAX": lambda: stacked.amax(0),
            "BAND": lambda: self.fold(stacked, torch.bitwise_and),
            "BOR": lambda: self.fold(stacked, torch.bitwise_or),
            "BXOR": lambda: self.fold(stacked, torch.bitwise_xor),
        }[op]()
        assert torch.equal(collectives.reduce(tensors, op), expected)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))

    @staticmethod
    def fold(stacked: torch.Tensor, combine: Any) -> torch.Tensor:
        total = stacked[0]
        for row in stacked[1:]:
            total = combine(total, row)
        return total

    def test_reduce_runs_in_rank_order_and_own_dtype(self) -> None:
        tensors = [torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0])]
        rounded = collectives.reduce([tensor.bfloat16() for tensor in tensors])
        assert (rounded.dtype, rounded.item()) == (torch.bfloat16, 256.0)
        assert collectives.reduce([tensor.bfloat16() for tensor in reversed(tensors)]).item() == 258.0

    def test_booleans(self) -> None:
        a, b = torch.tensor([True, True, False]), torch.tensor([True, False, False])
        assert collectives.reduce([a, b]).tolist() == [True, True, False]
        assert collectives.reduce([a, b], "PRODUCT").tolist() == [True, False, False]

    def test_unknown_reduce_op(self) -> None:
        with pytest.raises(ValueError, match="unknown reduce op 'MEAN'"):
            collectives.reduce([torch.ones(1)], "MEAN")

    @given(st.integers(1, 5), st.data())
    def test_all_to_all_single_is_a_transposition_of_pieces(self, size: int, data: st.DataObject) -> None:
        row = st.lists(st.integers(0, 3), min_size=size, max_size=size)
        splits = [data.draw(row) for _ in range(size)]
        tensors = [mine(rank, sum(cut), 2) for rank, cut in enumerate(splits)]
        received = collectives.all_to_all_single(tensors, splits)
        back = collectives.all_to_all_single(received, [[splits[s][r] for s in range(size)] for r in range(size)])
        assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))

    def test_reduce_scatter_parts_make_up_the_reduced_whole(self) -> None:
        tensors = [mine(rank, 6, 2) for rank in range(3)]
        parts = collectives.reduce_scatter_single(tensors)
        assert torch.equal(torch.cat(parts), collectives.reduce(tensors).flatten())

    def test_results_share_no_memory_with_arguments(self) -> None:
        x = [torch.ones(2)]
        results = [
            collectives.all_gather_single(x),
            *collectives.all_gather(x),
            collectives.reduce(x),
            *collectives.reduce_scatter_single(x),
            *collectives.all_to_all([x])[0],
            *collectives.all_to_all_single(x, [[2]]),
        ]
        assert all(result.data_ptr() != x[0].data_ptr() for result in results)


def run(body: Any, size: int = 3, **options: Any) -> list[Any]:
    return simulate(lambda group: body(group.rank(), group), size, **options).results


class TestThroughTorch:
    """Names that the conformance list does not already hold against real gloo, and more than two ranks."""

    def test_names_bound_before_the_run(self) -> None:
        def body(rank: int, group: Any) -> Any:
            x, y = mine(rank, 2), mine(rank, 2)
            bound_all_reduce(x)
            bound_broadcast(y, 2)
            return x.tolist(), y.tolist()

        assert run(body) == [([300, 303], [200, 201])] * 3

    def test_private_old_names(self) -> None:
        def body(rank: int, group: Any) -> Any:
            out, part = torch.empty(6), torch.empty(1)
            dist._all_gather_base(out, mine(rank, 2))
            dist._reduce_scatter_base(part, mine(rank, 3))
            return out.tolist(), part.item()

        assert run(body) == [([0, 1, 100, 101, 200, 201], 300 + 3 * rank) for rank in range(3)]

    def test_methods_of_the_group(self) -> None:
        def body(rank: int, group: Any) -> Any:
            x, y, out = mine(rank, 2), mine(rank, 2), torch.empty(6)
            group.allreduce(x).wait()
            group.broadcast(y, root=1).wait()
            group._allgather_base(out, mine(rank, 2)).wait()
            group.barrier().wait()
            return x.tolist(), y.tolist(), out.tolist()

        assert run(body) == [([300, 303], [100, 101], [0, 1, 100, 101, 200, 201])] * 3

    @pytest.mark.parametrize("root", [0, 1, 2])
    def test_rooted_collectives(self, root: int) -> None:
        def body(rank: int, group: Any) -> Any:
            at_root = rank == root
            summed, gathered, part = mine(rank, 2), [torch.empty(2) for _ in range(3)], torch.empty(2)
            dist.reduce(summed, root)
            dist.gather(mine(rank, 2), gathered if at_root else None, root)
            dist.scatter(part, [mine(peer + 5, 2) for peer in range(3)] if at_root else None, root)
            return (summed.tolist(), [x.tolist() for x in gathered]) if at_root else None, part.tolist()

        for rank, (at_root, part) in enumerate(run(body)):
            expected = ([300, 303], [[0, 1], [100, 101], [200, 201]]) if rank == root else None
            assert at_root == expected
            assert part == [100 * (rank + 5), 100 * (rank + 5) + 1]

    def test_rooted_collectives_in_a_subgroup_take_global_ranks(self) -> None:
        def body(rank: int, group: Any) -> Any:
            pair = dist.new_group([1, 3])
            if rank not in (1, 3):
                return None
            x, y = mine(rank, 2), mine(rank, 2)
            dist.broadcast(x, 3, group=pair)
            dist.broadcast(y, group_src=0, group=pair)
            return x.tolist(), y.tolist()

        assert run(body, 4) == [None, ([300, 301], [100, 101])] * 2

    def test_list_reduce_scatter_and_all_to_all(self) -> None:
        def body(rank: int, group: Any) -> Any:
            part, received = torch.empty(2), [torch.empty(2) for _ in range(3)]
            dist.reduce_scatter(part, [mine(rank + 10 * peer, 2) for peer in range(3)])
            dist.all_to_all(received, [mine(rank + 10 * peer, 2) for peer in range(3)])
            return part.tolist(), [x[0].item() for x in received]

        for rank, (part, received) in enumerate(run(body)):
            assert part == [300 + 3000 * rank, 303 + 3000 * rank]
            assert received == [100 * (peer + 10 * rank) for peer in range(3)]

    def test_uneven_lists_where_nccl_allows_them(self) -> None:
        def body(rank: int, group: Any) -> Any:
            out = [torch.empty(peer + 1) for peer in range(3)]
            dist.all_gather(out, mine(rank, rank + 1))
            received = [torch.empty(rank + 1) for _ in range(3)]
            dist.all_to_all(received, [mine(rank, peer + 1) for peer in range(3)])
            return [x.tolist() for x in out], [x[-1].item() for x in received]

        for rank, (out, received) in enumerate(run(body, dialect="nccl")):
            assert out == [[0], [100, 101], [200, 201, 202]]
            assert received == [rank, 100 + rank, 200 + rank]

    def test_objects(self) -> None:
        def body(rank: int, group: Any) -> Any:
            every: list[Any] = [None] * 3
            dist.all_gather_object(every, {"rank": rank, "pad": "x" * rank})
            at_root: list[Any] = [None] * 3
            dist.gather_object((rank,), at_root if rank == 1 else None, dst=1)
            things = [rank, [rank]]
            dist.broadcast_object_list(things, src=2)
            own: list[Any] = [None]
            dist.scatter_object_list(own, ["a", "b", "c"] if rank == 0 else None, src=0)
            return every, at_root if rank == 1 else None, things, own

        for rank, (every, at_root, sent, own) in enumerate(run(body)):
            assert every == [{"rank": peer, "pad": "x" * peer} for peer in range(3)]
            assert at_root == ([(0,), (1,), (2,)] if rank == 1 else None)
            assert (sent, own) == ([2, [2]], ["abc"[rank]])

    def test_object_messages(self) -> None:
        def body(rank: int, group: Any) -> Any:
            things = ["text", {"a": 1}] if rank == 0 else [None, None]
            if rank == 0:
                dist.send_object_list(things, dst=2)
            elif rank == 2:
                dist.recv_object_list(things, src=0)
            return things

        assert run(body)[2] == ["text", {"a": 1}]

    def test_messages_keep_their_order(self) -> None:
        def body(rank: int, group: Any) -> Any:
            if rank == 0:
                for number in range(4):
                    dist.send(torch.tensor([float(number)]), 1)
                return None
            got = []
            for _ in range(4) if rank == 1 else ():
                x = torch.empty(1)
                assert dist.recv(x, 0) == 0
                got.append(x.item())
            return got

        assert run(body)[1] == [0, 1, 2, 3]

    def test_receive_from_any_source_on_gloo(self) -> None:
        def body(rank: int, group: Any) -> Any:
            if rank:
                return dist.send(mine(rank, 1), 0)
            got = {}
            for _ in range(2):
                x = torch.empty(1)
                source = dist.recv(x)
                got[source] = x.item()
            return got

        assert run(body, dialect="gloo", order=[2, 0, 1])[0] == {1: 100, 2: 200}

    def test_messages_between_ranks_of_a_subgroup(self) -> None:
        def body(rank: int, group: Any) -> Any:
            pair = dist.new_group([1, 2])
            x = mine(rank, 2)
            if rank == 1:
                dist.send(x, 2, group=pair)
            elif rank == 2:
                assert dist.recv(x, group_src=0, group=pair) == 1
            return x.tolist()

        assert run(body)[2] == [100, 101]

    def test_requires_grad_and_inference_tensors(self) -> None:
        def body(rank: int, group: Any) -> Any:
            leaf = mine(rank, 2).requires_grad_()
            dist.all_reduce(leaf)
            with torch.inference_mode():
                x = mine(rank, 2)
                dist.all_reduce(x)
                work = dist.all_reduce(x, async_op=True)
                work.wait()
            return leaf.tolist(), x.tolist()

        assert run(body) == [([300, 303], [900, 909])] * 3

    def test_group_of_one_still_calls(self) -> None:
        def body(rank: int, group: Any) -> Any:
            out = torch.empty(2)
            all_gather_single(out, mine(rank, 2))
            return out.tolist()

        assert run(body, 1) == [[0, 1]]

    def test_destroyed_subgroups_can_be_made_again(self) -> None:
        def body(rank: int, group: Any) -> Any:
            total = []
            for _ in range(3):
                sub = dist.new_group([0, 1], use_local_synchronization=True)
                if rank < 2:
                    x = torch.ones(1)
                    dist.all_reduce(x, group=sub)
                    total.append(x.item())
                    dist.destroy_process_group(sub)
            return total

        assert run(body) == [[2, 2, 2], [2, 2, 2], []]

    def test_new_subgroups_helpers(self) -> None:
        def body(rank: int, group: Any) -> Any:
            mine_of, _ = dist.new_subgroups(2)
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=mine_of)
            return x.item()

        assert run(body, 4) == [1, 1, 5, 5]

    def test_the_trace_names_what_was_called(self) -> None:
        def body(group: Any) -> None:
            pair = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX, group=pair)
            dist.all_gather_into_tensor(torch.empty(8, dtype=torch.int32), torch.ones(4, dtype=torch.int32))
            dist.broadcast(torch.ones(2), 1)

        calls = simulate(body, 2).trace.of_rank(1)
        assert [
            (call.kind, call.group, call.ranks, call.seq, call.shape, call.dtype, call.bytes) for call in calls
        ] == [
            ("all_reduce", "1 [0, 1]", (0, 1), 0, (3,), "float32", 12),
            ("all_gather_single", "world", (0, 1), 0, (4,), "int32", 16),
            ("broadcast", "world", (0, 1), 1, (2,), "float32", 8),
        ]
        assert "MAX" in calls[0].detail
        assert all("test_collectives.py:" in call.site for call in calls)
