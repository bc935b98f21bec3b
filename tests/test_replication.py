"""`check_replicated`: silent on equal inputs, and naming tensor, ranks and row where they differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import kpool_testing
from kpool.replication import check_replicated
from tests.support.calls import Call, exact_call, noisy

CALL = noisy(exact_call(0, rows=10, batch=2))


def sharded(call: Call, group: Any) -> torch.Tensor:
    return call.run(query_shard_group=group, check_replicated=True)


@pytest.mark.world_size(2, 3, 5)
def test_equal_inputs_cost_one_small_exchange(fake_group: Any, world_size: int) -> None:
    run = fake_group(lambda group: sharded(CALL, group))
    whole = CALL.run()
    assert all(torch.equal(whole, tokens) for tokens in run.results)
    first, second = run.trace.of_rank(0)
    assert first.dtype == "int64" and first.bytes < 300
    assert second.dtype == "int32" and second.shape == (2, -(-10 // world_size), 3)


def test_alone_nothing_is_exchanged() -> None:
    run = kpool_testing.replay(lambda group: sharded(CALL, group), 1)
    assert not run.trace.calls and torch.equal(run.results[0], CALL.run())


@pytest.mark.parametrize("name", ["q", "k", "weights", "gate_score", "ape", "varlen_ends"])
@pytest.mark.parametrize("arm", [kpool_testing.replay, kpool_testing.simulate], ids=["replay", "simulate"])
def test_one_bit_on_one_rank(name: str, arm: Any) -> None:
    def body(group: Any) -> torch.Tensor:
        call = CALL
        if group.rank() == 1:
            if name == "varlen_ends":
                call = replace(call, visibility={**call.visibility, name: call.visibility[name].clone()})
                call.visibility[name][3] -= 1
            else:
                changed = getattr(call, name).clone()
                changed[3 if name != "ape" else 1].view(-1)[2] += 1
                call = replace(call, **{name: changed})
        return sharded(call, group)

    row = 1 if name == "ape" else 3
    with pytest.raises(RuntimeError) as caught:
        arm(body, 3)
    message = str(caught.value)
    assert f"identical {name} on every rank" in message
    assert "rank [1] differ from the majority" in message
    assert f"first differing row (index along dim 0): {row}" in message


@pytest.mark.parametrize("size", [2, 4])
def test_no_majority(size: int) -> None:
    def body(group: Any) -> None:
        check_replicated({"x": torch.full((3,), float(group.rank() % 2))}, group, group.rank(), size)

    with pytest.raises(
        RuntimeError, match=rf"ranks {list(range(size))} disagree".replace("[", r"\[").replace("]", r"\]")
    ):
        kpool_testing.replay(body, size)


@pytest.mark.parametrize("other", [torch.zeros(2, 6), torch.zeros(12), torch.zeros(3, 4, dtype=torch.int32), None])
def test_shapes_dtypes_and_none(other: torch.Tensor | None) -> None:
    def body(group: Any) -> None:
        x = other if group.rank() == 2 else torch.zeros(3, 4)
        check_replicated({"a": torch.ones(2), "x": x}, group, group.rank(), 3)

    with pytest.raises(
        RuntimeError, match=r"identical x .* rank \[2\] differ.*its shape or dtype, or whether it is given, differs"
    ):
        kpool_testing.replay(body, 3)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])),
        (torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1, 0]), torch.tensor([0, 1])),
    ],
)
def test_order_and_signed_zero_count(left: torch.Tensor, right: torch.Tensor) -> None:
    def body(group: Any) -> None:
        check_replicated({"x": right if group.rank() else left}, group, group.rank(), 2)

    with pytest.raises(RuntimeError, match="identical x"):
        kpool_testing.replay(body, 2)


def test_equal_values_in_another_layout_are_equal() -> None:
    def body(group: Any) -> None:
        x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
        x = x.t().contiguous().t() if group.rank() else x
        check_replicated({"x": x, "nan": torch.tensor(torch.nan), "none": torch.empty(0, 3)}, group, group.rank(), 2)

    kpool_testing.replay(body, 2)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kpool import replication

    x = torch.randn(9, 4)
    whole = replication._row_checksums(x)
    monkeypatch.setattr(replication, "_PIECE_ELEMENTS", 5)
    assert torch.equal(whole, replication._row_checksums(x))


@pytest.mark.parametrize(("rows", "tokens"), [(0, 5), (4, 0), (0, 0)])
def test_empty_inputs(rows: int, tokens: int) -> None:
    call = exact_call(0, "window", rows=rows, tokens=tokens)
    run = kpool_testing.replay(lambda group: sharded(call, group), 3)
    assert all(torch.equal(tokens, call.run()) for tokens in run.results)


def test_no_default_device_is_assumed() -> None:
    """Arguments left out are None; what stands for them lies where the others lie."""
    with torch.device("meta"):
        run = kpool_testing.replay(lambda group: sharded(CALL, group), 2)
    assert all(torch.equal(tokens, CALL.run()) for tokens in run.results)
