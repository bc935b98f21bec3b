"""What gloo accepts and refuses: named calls on two ranks, for the simulated arm and for real processes alike.

A case is a function of the rank; it runs on a fresh default-sized group `g` and returns what the rank holds afterwards.
A case with `ranks=(0,)` is one that only rank 0 enters, because it is refused before anything is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn

from tests.testing.torch_names import all_gather_single, reduce_scatter_single

Body = Callable[[int, Any], Any]


@dataclass(frozen=True)
class Case:
    name: str
    body: Body
    ranks: tuple[int, ...] = (0, 1)


CASES: dict[str, Case] = {}


def case(name: str, ranks: tuple[int, ...] = (0, 1)) -> Callable[[Body], Body]:
    def register(body: Body) -> Body:
        if name in CASES:
            raise ValueError(f"two cases are called {name!r}")
        CASES[name] = Case(name, body, ranks)
        return body

    return register


def outcome_of(case: Case, rank: int, group: Any) -> tuple[Any, ...]:
    """("ok", value) or ("error", type name, text) or ("skipped",)."""
    if rank not in case.ranks:
        return ("skipped",)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ("ok", case.body(rank, group))
    except Exception as error:
        return ("error", type(error).__name__, str(error))


def ramp(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ at every position and on every rank, exact in every dtype used here."""
    numel = torch.Size(shape).numel()
    values = torch.arange(numel) % 13 + 3 * rank
    if dtype is torch.bool:
        return (values % 2 == 0).reshape(shape)
    return (
        values.to(torch.float32).to(dtype).reshape(shape)
        if not dtype.is_complex
        else (torch.complex(values.float(), values.float() + 1).to(dtype).reshape(shape))
    )


# -- all_gather_single


def gather_into(rank: int, g: Any, out: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    all_gather_single(out, given, group=g)
    return out


for _dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn,
):  # fmt: skip
    _short = str(_dtype).removeprefix("torch.")

    @case(f"all_gather_single {_short}")
    def _(rank: int, g: Any, dtype: torch.dtype = _dtype) -> Any:
        return gather_into(rank, g, torch.zeros(4, 3, dtype=dtype), ramp(rank, 2, 3, dtype=dtype))

    @case(f"all_gather list {_short}")
    def _(rank: int, g: Any, dtype: torch.dtype = _dtype) -> Any:
        out = [torch.zeros(2, 3, dtype=dtype) for _ in range(2)]
        dist.all_gather(out, ramp(rank, 2, 3, dtype=dtype), group=g)
        return out

    @case(f"all_reduce sum {_short}")
    def _(rank: int, g: Any, dtype: torch.dtype = _dtype) -> Any:
        x = ramp(rank, 2, 3, dtype=dtype)
        dist.all_reduce(x, group=g)
        return x

    @case(f"broadcast {_short}")
    def _(rank: int, g: Any, dtype: torch.dtype = _dtype) -> Any:
        x = ramp(rank, 2, 3, dtype=dtype)
        dist.broadcast(x, 1, group=g)
        return x


for _name, _in, _out in [
    ("stacked output", (2, 3), (2, 2, 3)),
    ("wide output", (2, 3), (2, 6)),
    ("flat output", (2, 3), (12,)),
    ("short output", (2, 3), (3, 3)),
    ("long output", (2, 3), (6, 3)),
    ("flat input", (6,), (4, 3)),
    ("scalar input", (), (2,)),
    ("scalar input and output", (), ()),
    ("one row, concatenated", (1, 3), (2, 3)),
    ("one row, stacked", (1, 3), (2, 1, 3)),
    ("empty", (0, 3), (0, 3)),
    ("empty columns", (2, 0), (4, 0)),
    ("three dims", (2, 3, 4), (4, 3, 4)),
]:

    @case(f"all_gather_single {_name}")
    def _(rank: int, g: Any, a: Any = _in, b: Any = _out) -> Any:
        return gather_into(rank, g, torch.zeros(b), ramp(rank, *a))


@case("all_gather_single output of another dtype")
def _(rank: int, g: Any) -> Any:
    return gather_into(rank, g, torch.zeros(4, 3, dtype=torch.int64), ramp(rank, 2, 3, dtype=torch.int32))


@case("all_gather_single transposed input")
def _(rank: int, g: Any) -> Any:
    return gather_into(rank, g, torch.zeros(6, 2), ramp(rank, 2, 3).t())


@case("all_gather_single strided column input")
def _(rank: int, g: Any) -> Any:
    return gather_into(rank, g, torch.zeros(4, 2), ramp(rank, 2, 4)[:, ::2])


@case("all_gather_single transposed output")
def _(rank: int, g: Any) -> Any:
    return gather_into(rank, g, torch.zeros(3, 4).t(), ramp(rank, 2, 3))


@case("all_gather_single strided column output")
def _(rank: int, g: Any) -> Any:
    whole = torch.zeros(4, 6)
    gather_into(rank, g, whole[:, ::2], ramp(rank, 2, 3))
    return whole


@case("all_gather_single input is a slot of the output")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(4, 3)
    out[2 * rank : 2 * rank + 2] = ramp(rank, 2, 3)
    return gather_into(rank, g, out, out[2 * rank : 2 * rank + 2])


@case("all_gather_single input requires grad, under no_grad")
def _(rank: int, g: Any) -> Any:
    with torch.no_grad():
        return gather_into(rank, g, torch.zeros(4, 3), ramp(rank, 2, 3).requires_grad_())


@case("all_gather_single async")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(4, 3)
    work = all_gather_single(out, ramp(rank, 2, 3), group=g, async_op=True)
    work.wait()
    return out, work.is_completed()


@case("all_gather_into_tensor, the old name")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(4, 3)
    dist.all_gather_into_tensor(out, ramp(rank, 2, 3), group=g)
    return out


@case("all_gather_single not a tensor")
def _(rank: int, g: Any) -> Any:
    all_gather_single([1.0], ramp(rank, 2), group=g)


# -- all_gather of a list


@case("all_gather list, uneven")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(1, 3), torch.zeros(2, 3)]
    dist.all_gather(out, ramp(rank, rank + 1, 3), group=g)
    return out


@case("all_gather list, entries of another shape")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(6), torch.zeros(6)]
    dist.all_gather(out, ramp(rank, 2, 3), group=g)
    return out


@case("all_gather tuple")
def _(rank: int, g: Any) -> Any:
    dist.all_gather((torch.zeros(2), torch.zeros(2)), ramp(rank, 2), group=g)


@case("all_gather list too short")
def _(rank: int, g: Any) -> Any:
    dist.all_gather([torch.zeros(2)], ramp(rank, 2), group=g)


@case("all_gather list of mixed dtypes")
def _(rank: int, g: Any) -> Any:
    dist.all_gather([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], ramp(rank, 2), group=g)


@case("all_gather list, transposed input")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(3, 2) for _ in range(2)]
    dist.all_gather(out, ramp(rank, 2, 3).t(), group=g)
    return out


@case("all_gather list, transposed outputs")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(3, 2).t() for _ in range(2)]
    dist.all_gather(out, ramp(rank, 2, 3), group=g)
    return out


@case("all_gather list, empty")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(0, 3) for _ in range(2)]
    dist.all_gather(out, ramp(rank, 0, 3), group=g)
    return out


@case("all_gather list, input requires grad")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(out, ramp(rank, 2).requires_grad_(), group=g)
    return out


# -- all_reduce

for _op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"):
    for _dtype in (torch.float32, torch.int32):

        @case(f"all_reduce {_op} {str(_dtype).removeprefix('torch.')}")
        def _(rank: int, g: Any, op: str = _op, dtype: torch.dtype = _dtype) -> Any:
            x = ramp(rank, 5, dtype=dtype)
            dist.all_reduce(x, getattr(dist.ReduceOp, op), group=g)
            return x


@case("all_reduce MAX complex")
def _(rank: int, g: Any) -> Any:
    dist.all_reduce(ramp(rank, 2, dtype=torch.complex64), dist.ReduceOp.MAX, group=g)


@case("all_reduce MAX bool")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 4, dtype=torch.bool)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=g)
    return x


@case("all_reduce transposed")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 2, 3).t()
    dist.all_reduce(x, group=g)
    return x


@case("all_reduce empty")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 0, 3)
    dist.all_reduce(x, group=g)
    return x


@case("all_reduce scalar")
def _(rank: int, g: Any) -> Any:
    x = torch.tensor(float(rank + 1))
    dist.all_reduce(x, group=g)
    return x


@case("all_reduce leaf that requires grad")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 3).requires_grad_()
    dist.all_reduce(x, group=g)
    return x.detach()


@case("all_reduce async")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 3)
    dist.all_reduce(x, group=g, async_op=True).wait()
    return x


@case("all_reduce future")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 3)
    return dist.all_reduce(x, group=g, async_op=True).get_future().wait()[0]


@case("all_reduce not a tensor")
def _(rank: int, g: Any) -> Any:
    dist.all_reduce(1.0, group=g)


@case("all_reduce_coalesced")
def _(rank: int, g: Any) -> Any:
    xs = [ramp(rank, 3), ramp(rank, 2, 2)]
    dist.all_reduce_coalesced(xs, group=g)
    return xs


# -- reduce_scatter

for _name, _in, _out in [
    ("concatenated", (4, 3), (2, 3)),
    ("stacked input", (2, 2, 3), (2, 3)),
    ("flat input", (12,), (2, 3)),
    ("flat output", (4, 3), (6,)),
    ("wrong size", (4, 3), (3, 3)),
    ("other columns", (4, 5), (2, 3)),
    ("fewer dims", (4, 3), (2,)),
    ("empty", (0, 3), (0, 3)),
]:

    @case(f"reduce_scatter_single {_name}")
    def _(rank: int, g: Any, a: Any = _in, b: Any = _out) -> Any:
        out = torch.zeros(b)
        reduce_scatter_single(out, ramp(rank, *a), group=g)
        return out


for _op in ("AVG", "MAX", "PRODUCT", "BAND"):

    @case(f"reduce_scatter_single {_op}")
    def _(rank: int, g: Any, op: str = _op) -> Any:
        out = torch.zeros(2, 3)
        reduce_scatter_single(out, ramp(rank, 4, 3), getattr(dist.ReduceOp, op), group=g)
        return out


@case("reduce_scatter_single int64")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(2, dtype=torch.int64)
    reduce_scatter_single(out, ramp(rank, 4, dtype=torch.int64), group=g)
    return out


@case("reduce_scatter_single output of another dtype")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(2, dtype=torch.float64)
    reduce_scatter_single(out, ramp(rank, 4), group=g)
    return out


@case("reduce_scatter_single transposed input")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(2, 3)
    reduce_scatter_single(out, ramp(rank, 3, 4).t(), group=g)
    return out


@case("reduce_scatter_tensor, the old name")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, ramp(rank, 4), group=g)
    return out


@case("reduce_scatter list")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(2)
    dist.reduce_scatter(out, [ramp(rank, 2), ramp(rank + 5, 2)], group=g)
    return out


@case("reduce_scatter list, uneven")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, [ramp(rank, 1), ramp(rank + 5, 2)], group=g)
    return out


@case("reduce_scatter list too short")
def _(rank: int, g: Any) -> Any:
    dist.reduce_scatter(torch.zeros(2), [ramp(rank, 2)], group=g)


# -- broadcast, reduce, scatter, gather


@case("broadcast group_src")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 3)
    dist.broadcast(x, group_src=0, group=g)
    return x


@case("broadcast bad root")
def _(rank: int, g: Any) -> Any:
    dist.broadcast(ramp(rank, 3), 5, group=g)


@case("broadcast empty")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 0)
    dist.broadcast(x, 0, group=g)
    return x


@case("broadcast scalar")
def _(rank: int, g: Any) -> Any:
    x = torch.tensor(float(rank))
    dist.broadcast(x, 1, group=g)
    return x


@case("broadcast async")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 3)
    dist.broadcast(x, 0, group=g, async_op=True).wait()
    return x


for _op in ("SUM", "MAX", "AVG"):

    @case(f"reduce {_op}")
    def _(rank: int, g: Any, op: str = _op) -> Any:
        x = ramp(rank, 3)
        dist.reduce(x, 1, getattr(dist.ReduceOp, op), group=g)
        return x if rank == 1 else None


@case("reduce bad root")
def _(rank: int, g: Any) -> Any:
    dist.reduce(ramp(rank, 3), 7, group=g)


@case("scatter")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(2)
    dist.scatter(out, [ramp(0, 2), ramp(1, 2)] if rank == 0 else None, src=0, group=g)
    return out


@case("scatter without a list on the root", ranks=(0,))
def _(rank: int, g: Any) -> Any:
    dist.scatter(torch.zeros(2), None, src=0, group=g)


@case("scatter with a list on another rank", ranks=(1,))
def _(rank: int, g: Any) -> Any:
    dist.scatter(torch.zeros(2), [ramp(0, 2), ramp(1, 2)], src=0, group=g)


@case("scatter list too short", ranks=(0,))
def _(rank: int, g: Any) -> Any:
    dist.scatter(torch.zeros(2), [ramp(0, 2)], src=0, group=g)


@case("scatter list of another shape", ranks=(0,))
def _(rank: int, g: Any) -> Any:
    dist.scatter(torch.zeros(2), [ramp(0, 2), ramp(0, 3)], src=0, group=g)


@case("scatter complex")
def _(rank: int, g: Any) -> Any:
    out = torch.zeros(2, dtype=torch.complex64)
    given = [ramp(0, 2, dtype=torch.complex64), ramp(1, 2, dtype=torch.complex64)]
    dist.scatter(out, given if rank == 0 else None, src=0, group=g)
    return out


@case("gather")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(2) for _ in range(2)] if rank == 1 else None
    dist.gather(ramp(rank, 2), out, dst=1, group=g)
    return out


@case("gather without a list on the root", ranks=(0,))
def _(rank: int, g: Any) -> Any:
    dist.gather(ramp(rank, 2), None, dst=0, group=g)


@case("gather with a list on another rank", ranks=(1,))
def _(rank: int, g: Any) -> Any:
    dist.gather(ramp(rank, 2), [torch.zeros(2), torch.zeros(2)], dst=0, group=g)


@case("gather list too short", ranks=(0,))
def _(rank: int, g: Any) -> Any:
    dist.gather(ramp(rank, 2), [torch.zeros(2)], dst=0, group=g)


@case("gather list of another shape", ranks=(0,))
def _(rank: int, g: Any) -> Any:
    dist.gather(ramp(rank, 2), [torch.zeros(2), torch.zeros(3)], dst=0, group=g)


# -- all_to_all


def exchange(g: Any, out: torch.Tensor, given: torch.Tensor, *splits: Any) -> torch.Tensor:
    dist.all_to_all_single(out, given, *splits, group=g)
    return out


@case("all_to_all_single equal")
def _(rank: int, g: Any) -> Any:
    return exchange(g, torch.zeros(4, 2), ramp(rank, 4, 2))


@case("all_to_all_single complex")
def _(rank: int, g: Any) -> Any:
    return exchange(g, torch.zeros(4, dtype=torch.complex64), ramp(rank, 4, dtype=torch.complex64))


@case("all_to_all_single uneven splits")
def _(rank: int, g: Any) -> Any:
    if rank == 0:
        return exchange(g, torch.zeros(3, 2), ramp(rank, 3, 2), [1, 2], [1, 2])
    return exchange(g, torch.zeros(5, 2), ramp(rank, 5, 2), [2, 3], [2, 3])


@case("all_to_all_single nothing to one rank")
def _(rank: int, g: Any) -> Any:
    if rank == 0:
        return exchange(g, torch.zeros(0, 2), ramp(rank, 3, 2), [0, 0], [0, 3])
    return exchange(g, torch.zeros(5, 2), ramp(rank, 2, 2), [3, 2], [0, 2])


@case("all_to_all_single transposed input")
def _(rank: int, g: Any) -> Any:
    return exchange(g, torch.zeros(4, 2), ramp(rank, 2, 4).t())


@case("all_to_all_single splits that do not add up")
def _(rank: int, g: Any) -> Any:
    return exchange(g, torch.zeros(4), ramp(rank, 4), [1, 2], [1, 2])


@case("all_to_all_single too few splits")
def _(rank: int, g: Any) -> Any:
    return exchange(g, torch.zeros(4), ramp(rank, 4), [4], [4])


@case("all_to_all_single of two dtypes")
def _(rank: int, g: Any) -> Any:
    return exchange(g, torch.zeros(4, dtype=torch.int32), ramp(rank, 4))


@case("all_to_all lists")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(2), torch.zeros(2)]
    dist.all_to_all(out, [ramp(rank, 2), ramp(rank + 5, 2)], group=g)
    return out


@case("all_to_all lists, outputs of another shape")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(3), torch.zeros(3)]
    dist.all_to_all(out, [ramp(rank, 2), ramp(rank + 5, 2)], group=g)
    return out


@case("all_to_all lists too short")
def _(rank: int, g: Any) -> Any:
    dist.all_to_all([torch.zeros(2)], [ramp(rank, 2)], group=g)


@case("all_to_all lists, uneven")
def _(rank: int, g: Any) -> Any:
    out = [torch.zeros(rank + 1), torch.zeros(rank + 1)]
    dist.all_to_all(out, [ramp(rank, 1), ramp(rank + 5, 2)], group=g)
    return out


# -- point to point


@case("send and recv")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 2, 3)
    if rank == 0:
        return dist.send(x, 1, group=g)
    return dist.recv(x, 0, group=g), x


@case("isend and irecv")
def _(rank: int, g: Any) -> Any:
    x, y = ramp(rank, 3), torch.zeros(3)
    works = [dist.isend(x, 1 - rank, group=g), dist.irecv(y, 1 - rank, group=g)]
    for work in works:
        work.wait()
    return y


@case("batch_isend_irecv")
def _(rank: int, g: Any) -> Any:
    x, y = ramp(rank, 3), torch.zeros(3)
    ops = [dist.P2POp(dist.irecv, y, 1 - rank, g), dist.P2POp(dist.isend, x, 1 - rank, g)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y


@case("tags out of order")
def _(rank: int, g: Any) -> Any:
    if rank == 0:
        works = [dist.isend(ramp(0, 2), 1, group=g, tag=1), dist.isend(ramp(1, 2), 1, group=g, tag=2)]
        return [work.wait() for work in works] and None
    x, y = torch.zeros(2), torch.zeros(2)
    dist.recv(x, 0, group=g, tag=2)
    dist.recv(y, 0, group=g, tag=1)
    return x, y


@case("recv from any source")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 2)
    if rank == 0:
        return dist.send(x, 1, group=g)
    return dist.recv(x, group=g), x


@case("both isend first, then receive")
def _(rank: int, g: Any) -> Any:
    y = torch.zeros(3)
    work = dist.isend(ramp(rank, 3), 1 - rank, group=g)
    dist.recv(y, 1 - rank, group=g)
    work.wait()
    return y


@case("send to oneself")
def _(rank: int, g: Any) -> Any:
    dist.send(ramp(rank, 2), rank, group=g)


@case("send to a rank that is not there")
def _(rank: int, g: Any) -> Any:
    dist.send(ramp(rank, 2), 9, group=g)


@case("send strided", ranks=(0,))
def _(rank: int, g: Any) -> Any:
    dist.send(ramp(rank, 2, 4)[:, ::2], 1, group=g)


@case("recv strided", ranks=(0,))
def _(rank: int, g: Any) -> Any:
    dist.recv(torch.zeros(2, 4)[:, ::2], 1, group=g)


@case("send and recv complex")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 2, dtype=torch.complex64)
    if rank == 0:
        return dist.send(x, 1, group=g)
    return dist.recv(x, 0, group=g), x


@case("send and recv nothing")
def _(rank: int, g: Any) -> Any:
    x = torch.zeros(0)
    if rank == 0:
        return dist.send(x, 1, group=g)
    return dist.recv(x, 0, group=g), x


# -- barrier and objects


@case("barrier")
def _(rank: int, g: Any) -> Any:
    dist.barrier(group=g)


@case("monitored_barrier")
def _(rank: int, g: Any) -> Any:
    dist.monitored_barrier(group=g)


@case("all_gather_object")
def _(rank: int, g: Any) -> Any:
    out: list[Any] = [None, None]
    dist.all_gather_object(out, {"rank": rank, "text": "x" * (3 + 20 * rank)}, group=g)
    return out


@case("all_gather_object into a short list")
def _(rank: int, g: Any) -> Any:
    dist.all_gather_object([None], rank, group=g)


@case("gather_object")
def _(rank: int, g: Any) -> Any:
    out = [None, None] if rank == 0 else None
    dist.gather_object({"rank": rank}, out, dst=0, group=g)
    return out


@case("broadcast_object_list")
def _(rank: int, g: Any) -> Any:
    out = [rank, "a" * (rank + 1), None]
    dist.broadcast_object_list(out, src=1, group=g)
    return out


@case("scatter_object_list")
def _(rank: int, g: Any) -> Any:
    out: list[Any] = [None]
    dist.scatter_object_list(out, ["zero", "one"] if rank == 0 else None, src=0, group=g)
    return out


@case("send_object_list")
def _(rank: int, g: Any) -> Any:
    out = [rank, "text"] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(out, dst=1, group=g)
    else:
        dist.recv_object_list(out, src=0, group=g)
    return out


# -- functional collectives, autograd, coalescing


@case("functional all_reduce")
def _(rank: int, g: Any) -> Any:
    return funcol.all_reduce(ramp(rank, 3), "sum", g).wait()


@case("functional all_gather_tensor")
def _(rank: int, g: Any) -> Any:
    return funcol.all_gather_tensor(ramp(rank, 2, 3), 0, g).wait()


@case("functional all_gather_tensor along dim 1")
def _(rank: int, g: Any) -> Any:
    return funcol.all_gather_tensor(ramp(rank, 2, 3), 1, g)


@case("functional all_gather_tensor, input requires grad")
def _(rank: int, g: Any) -> Any:
    return funcol.all_gather_tensor(ramp(rank, 2, 3).requires_grad_(), 0, g).wait().detach()


@case("functional all_reduce, input requires grad")
def _(rank: int, g: Any) -> Any:
    return funcol.all_reduce(ramp(rank, 2, 3).requires_grad_(), "sum", g).wait().detach()


@case("functional all_gather_tensor complex")
def _(rank: int, g: Any) -> Any:
    return funcol.all_gather_tensor(ramp(rank, 2, 3, dtype=torch.complex64), 0, g).wait()


@case("functional all_to_all_single uneven")
def _(rank: int, g: Any) -> Any:
    return funcol.all_to_all_single(ramp(rank, 3), [1 + rank, 1 + rank], [1, 2], g).wait()


@case("functional reduce_scatter_tensor")
def _(rank: int, g: Any) -> Any:
    return funcol.reduce_scatter_tensor(ramp(rank, 4, 3), "sum", 0, g).wait()


@case("functional all_to_all_single")
def _(rank: int, g: Any) -> Any:
    return funcol.all_to_all_single(ramp(rank, 4), None, None, g).wait()


@case("functional broadcast")
def _(rank: int, g: Any) -> Any:
    return funcol.broadcast(ramp(rank, 3), 1, g).wait()


@case("functional all_reduce_coalesced")
def _(rank: int, g: Any) -> Any:
    return [t.wait() for t in funcol.all_reduce_coalesced([ramp(rank, 3), ramp(rank, 2)], "sum", g)]


@case("functional all_gather_into_tensor_coalesced")
def _(rank: int, g: Any) -> Any:
    return [t.wait() for t in funcol.all_gather_into_tensor_coalesced([ramp(rank, 3), ramp(rank, 2)], g)]


@case("functional reduce_scatter_tensor_coalesced")
def _(rank: int, g: Any) -> Any:
    given = [ramp(rank, 4), ramp(rank, 2, 2)]
    return [t.wait() for t in funcol.reduce_scatter_tensor_coalesced(given, "sum", [0, 0], g)]


@case("functional all_gather with backward")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 2, 3).requires_grad_()
    y = funcol.all_gather_tensor_autograd(x, 0, g)
    (y * (ramp(rank, 4, 3) + 1)).sum().backward()
    return y.detach().clone(), x.grad


@case("functional reduce_scatter with backward")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 4, 3).requires_grad_()
    y = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, g)
    (y * (ramp(rank, 2, 3) + 1)).sum().backward()
    return y.detach().clone(), x.grad


@case("nn all_reduce with backward")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 3).requires_grad_()
    y = dist_nn.all_reduce(x, group=g)
    (y * (ramp(rank, 3) + 1)).sum().backward()
    return y.detach(), x.grad


@case("nn all_gather with backward")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 3).requires_grad_()
    y = torch.cat(dist_nn.all_gather(x, group=g))
    (y * (ramp(rank, 6) + 1)).sum().backward()
    return y.detach(), x.grad


@case("nn broadcast with backward")
def _(rank: int, g: Any) -> Any:
    x = ramp(rank, 3).requires_grad_()
    y = dist_nn.broadcast(x, 0, group=g)
    (y * (ramp(rank, 3) + 1)).sum().backward()
    return y.detach(), x.grad


@case("coalescing manager, all_reduce")
def _(rank: int, g: Any) -> Any:
    xs = [ramp(rank, 3), ramp(rank, 2)]
    with dist.distributed_c10d._coalescing_manager(g):
        for x in xs:
            dist.all_reduce(x, group=g)
    return xs


@case("coalescing manager, all_gather_single")
def _(rank: int, g: Any) -> Any:
    outs = [torch.zeros(6), torch.zeros(4)]
    with dist.distributed_c10d._coalescing_manager(g):
        all_gather_single(outs[0], ramp(rank, 3), group=g)
        all_gather_single(outs[1], ramp(rank, 2), group=g)
    return outs


@case("coalescing manager, reduce_scatter_single")
def _(rank: int, g: Any) -> Any:
    outs = [torch.zeros(2), torch.zeros(1)]
    with dist.distributed_c10d._coalescing_manager(g, async_ops=True) as manager:
        reduce_scatter_single(outs[0], ramp(rank, 4), group=g)
        reduce_scatter_single(outs[1], ramp(rank, 2), group=g)
    manager.wait()
    return outs


@case("all_gather_coalesced")
def _(rank: int, g: Any) -> Any:
    outs = [[torch.zeros(3), torch.zeros(2)] for _ in range(2)]
    dist.all_gather_coalesced(outs, [ramp(rank, 3), ramp(rank, 2)], group=g)
    return outs


# -- groups


@case("group of one")
def _(rank: int, g: Any) -> Any:
    alone = [dist.new_group([0]), dist.new_group([1])]
    x = ramp(rank, 2)
    dist.all_reduce(x, group=alone[rank])
    return x, dist.get_world_size(alone[rank]), dist.get_rank(alone[rank])


@case("group that the rank is not in")
def _(rank: int, g: Any) -> Any:
    other = [dist.new_group([1]), dist.new_group([0])][rank]
    x = ramp(rank, 2)
    dist.all_reduce(x, group=other)
    return x, dist.get_rank(other)


@case("group with a rank that is not there")
def _(rank: int, g: Any) -> Any:
    dist.new_group([0, 5])


@case("group with a rank twice")
def _(rank: int, g: Any) -> Any:
    dist.new_group([1, 1])
