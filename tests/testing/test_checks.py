"""What each dialect refuses of one rank's arguments, and the errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kpool_testing import CollectiveError, DeadlockError, MismatchError, RankError, simulate
from kpool_testing.errors import RefusedError, rank_error
from kpool_testing.rules.backends import _dense
from tests.testing.torch_names import all_gather_single, reduce_scatter_single


def outcome(call: Callable[[int], Any], dialect: str, size: int = 2) -> Exception | None:
    """The error that the call ends with on every rank, None if it passes."""

    def body(group: Any) -> Exception | None:
        try:
            call(group.rank())
        except Exception as error:
            return error
        return None

    try:
        return simulate(body, size, dialect=dialect).results[0]
    except CollectiveError as error:
        return error


def strided(*shape: int) -> torch.Tensor:
    """Every other column of a wider tensor."""
    return torch.zeros(*shape[:-1], 2 * shape[-1])[..., ::2]


def two_sends_first(rank: int) -> None:
    dist.send(torch.zeros(2), 1 - rank)
    dist.recv(torch.zeros(2), 1 - rank)


# Real gloo aborts, corrupts or silently passes on each of these (torch 2.13); "-" where it hangs until its timeout.
SPOILED_BY_GLOO: dict[str, tuple[Callable[[int], Any], type[Exception]]] = {
    "all_reduce of a strided view overwrites its neighbours": (lambda r: dist.all_reduce(strided(2, 3)), RefusedError),
    "broadcast of a strided view": (lambda r: dist.broadcast(strided(2, 3), 0), RefusedError),
    "reduce of a strided view": (lambda r: dist.reduce(strided(2, 3), 0), RefusedError),
    "scatter into a strided view": (
        lambda r: dist.scatter(strided(2, 3), [torch.zeros(2, 3)] * 2 if r == 0 else None, 0),
        RefusedError,
    ),
    "all_to_all_single into a strided view": (
        lambda r: dist.all_to_all_single(strided(2, 3), torch.zeros(2, 3)),
        RefusedError,
    ),
    "all_to_all_single of rows that do not divide": (
        lambda r: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)),
        RefusedError,
    ),
    "reduce_scatter_single into a scalar crashes": (
        lambda r: reduce_scatter_single(torch.zeros(()), torch.zeros(2)),
        RefusedError,
    ),
    "all_gather_single of other shapes aborts": (
        lambda r: all_gather_single(torch.zeros(2 * r + 2), torch.zeros(r + 1)),
        MismatchError,
    ),
    "all_gather_single of float32 and int32": (
        lambda r: all_gather_single(*(torch.zeros(n, dtype=[torch.float32, torch.int32][r]) for n in (4, 2))),
        MismatchError,
    ),
    "all_reduce of other sizes": (lambda r: dist.all_reduce(torch.zeros(r + 1)), MismatchError),
    "all_reduce of other shapes": (lambda r: dist.all_reduce(torch.zeros([4, 1] if r else [2, 2])), MismatchError),
    "all_reduce by other ops": (
        lambda r: dist.all_reduce(torch.zeros(1), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][r]),
        MismatchError,
    ),
    "broadcast of other sizes aborts": (lambda r: dist.broadcast(torch.zeros(r + 1), 0), MismatchError),
    "broadcast of other dtypes of one size": (
        lambda r: dist.broadcast(torch.zeros(1, dtype=[torch.float32, torch.int32][r]), 0),
        MismatchError,
    ),
    "broadcast from other roots": (lambda r: dist.broadcast(torch.zeros(1), r), MismatchError),
    "all_to_all_single with splits that differ aborts": (
        lambda r: dist.all_to_all_single(
            torch.zeros(4), torch.zeros(4), *([[1, 3], [1, 3]] if r else [[2, 2], [2, 2]])
        ),
        MismatchError,
    ),
    "recv of more than was sent": (
        lambda r: dist.recv(torch.zeros(3), 0) if r else dist.send(torch.zeros(2), 1),
        MismatchError,
    ),
    "recv of another dtype": (
        lambda r: dist.recv(torch.zeros(2, dtype=torch.int32), 0) if r else dist.send(torch.zeros(2), 1),
        MismatchError,
    ),
    "both ranks send first": (two_sends_first, DeadlockError),
    "all_gather_single of an input that requires grad, refused or not by timing": (
        lambda r: all_gather_single(torch.zeros(2), torch.zeros(1, requires_grad=True)),
        RuntimeError,
    ),
}


@pytest.mark.parametrize("dialect", ["gloo", "portable"])
@pytest.mark.parametrize("name", SPOILED_BY_GLOO)
def test_what_gloo_spoils_is_refused(name: str, dialect: str) -> None:
    call, kind = SPOILED_BY_GLOO[name]
    assert isinstance(outcome(call, dialect), kind)


# By the source of ProcessGroupNCCL; no GPU has confirmed these.
REFUSED_BY_NCCL: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "strided input": (
        lambda r: all_gather_single(torch.zeros(4, 3), strided(2, 3)),
        ValueError,
        "Tensors must be contiguous",
    ),
    "output of another dtype": (
        lambda r: all_gather_single(torch.zeros(4, dtype=torch.float64), torch.zeros(2)),
        TypeError,
        "output tensor must have the same type as input tensor",
    ),
    "output of the wrong size": (
        lambda r: all_gather_single(torch.zeros(5), torch.zeros(2)),
        ValueError,
        "output tensor size must be equal to world_size times input tensor size",
    ),
    "input of the wrong size": (
        lambda r: reduce_scatter_single(torch.zeros(2), torch.zeros(5)),
        ValueError,
        "input tensor size must be equal to world_size times output tensor size",
    ),
    "int16": (lambda r: dist.all_reduce(torch.zeros(2, dtype=torch.int16)), TypeError, "not supported for NCCL"),
    "bitwise op": (
        lambda r: dist.all_reduce(torch.zeros(2, dtype=torch.int32), dist.ReduceOp.BAND),
        ValueError,
        "Cannot use ReduceOp.BAND with NCCL",
    ),
    "float8 reduction": (
        lambda r: dist.all_reduce(torch.zeros(2).to(torch.float8_e4m3fn)),
        TypeError,
        "Float8 dtypes are not supported for NCCL reductions",
    ),
    "boolean average": (
        lambda r: dist.all_reduce(torch.zeros(2, dtype=torch.bool), dist.ReduceOp.AVG),
        TypeError,
        "boolean inputs",
    ),
    "rows that do not divide": (
        lambda r: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)),
        RuntimeError,
        "does not divide equally across group size",
    ),
    "recv from any source": (lambda r: dist.recv(torch.zeros(2)), NotImplementedError, "recvAnysource"),
}


@pytest.mark.parametrize("name", REFUSED_BY_NCCL)
def test_what_nccl_refuses(name: str) -> None:
    call, kind, text = REFUSED_BY_NCCL[name]
    error = outcome(call, "nccl")
    assert type(error) is kind
    assert text in str(error)
    assert isinstance(outcome(call, "portable"), RefusedError)


@pytest.mark.parametrize(
    "call",
    [
        lambda r: all_gather_single(torch.zeros(2, 2, 3), torch.zeros(2, 3)),
        lambda r: all_gather_single(torch.zeros(4).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn)),
        lambda r: reduce_scatter_single(torch.zeros(2, 3), torch.zeros(2, 2, 3)),
        lambda r: dist.all_gather([torch.zeros(1), torch.zeros(2)], torch.zeros(r + 1)),
        lambda r: dist.all_reduce(torch.zeros(2, dtype=torch.int32), dist.ReduceOp.AVG),
    ],
    ids=["stacked gather", "float8 gather", "stacked reduce_scatter", "uneven list", "integer average"],
)
def test_what_nccl_takes_and_gloo_refuses(call: Callable[[int], Any]) -> None:
    assert outcome(call, "nccl") is None
    assert isinstance(outcome(call, "portable"), RefusedError)
    assert outcome(call, "gloo") is not None


def test_nccl_ignores_tags_and_portable_says_so() -> None:
    def body(group: Any) -> Any:
        if group.rank() == 0:
            works = [dist.isend(torch.full((1,), float(tag)), 1, tag=tag) for tag in (1, 2)]
        else:
            got = [torch.zeros(1), torch.zeros(1)]
            works = [dist.irecv(got[0], 0, tag=2), dist.irecv(got[1], 0, tag=1)]
        for work in works:
            work.wait()
        return [x.item() for x in got] if group.rank() else None

    assert simulate(body, 2, dialect="gloo").results[1] == [2, 1]
    assert simulate(body, 2, dialect="nccl").results[1] == [1, 2]
    with pytest.raises(MismatchError, match="tags out of order"):
        simulate(body, 2)


def test_refusals_say_call_argument_expected_and_got() -> None:
    error = outcome(lambda r: all_gather_single(torch.zeros(2, 2, 3), torch.zeros(2, 3)), "portable")
    assert str(error) == (
        "all_gather_single: expected output with shape [4, 3]: 2 times [2, 3] along dim 0, the one form that every "
        "backend takes; got float32 [2, 2, 3]"
    )
    error = outcome(lambda r: dist.all_reduce(strided(2, 3)), "portable")
    assert str(error) == ("all_reduce: expected tensors with contiguous memory; got float32 [2, 3] with strides (6, 2)")


def test_shared_memory_is_refused() -> None:
    """In real processes no two ranks write to the same tensor."""
    shared = torch.ones(2)
    with pytest.raises(MismatchError, match="ranks 0 and 1 pass the same memory as output"):
        simulate(lambda group: dist.all_reduce(shared), 2)
    simulate(lambda group: dist.broadcast(shared, 0), 2)


def test_dense_means_one_block_of_memory() -> None:
    x = torch.zeros(2, 3, 4)
    dense = [x, x.transpose(0, 1), x.permute(2, 0, 1), x[:1], torch.zeros(0, 3).t(), torch.zeros(()), x[:, :1, :1][:1]]
    assert all(_dense(tensor) for tensor in dense)
    assert not any(_dense(tensor) for tensor in [x[..., ::2], x[:, :2], torch.zeros(1).expand(3)])


class TestErrors:
    def test_one_family(self) -> None:
        assert issubclass(RefusedError, ValueError)
        for kind in (RankError, MismatchError, DeadlockError, RefusedError):
            assert issubclass(kind, CollectiveError)
            assert issubclass(kind, RuntimeError)

    def test_rank_error_is_also_its_cause(self) -> None:
        error = rank_error("rank 1 raised", FileNotFoundError(2, "missing", "name"))
        assert isinstance(error, RankError)
        assert isinstance(error, FileNotFoundError)
        assert str(error) == "rank 1 raised"

    def test_attributes_of_the_cause_are_kept(self) -> None:
        class CodedError(Exception):
            def __init__(self, code: int) -> None:
                super().__init__(f"code {code}")
                self.code = code

        error = rank_error("rank 0 raised", CodedError(7))
        assert isinstance(error, CodedError)
        assert error.code == 7
