"""replay: right answers from what every rank really sent, named errors otherwise, and nothing left behind."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import kpool_testing
from kpool_testing import (
    AsyncError,
    CollectiveError,
    DeadlockError,
    FakeGroup,
    MismatchError,
    RankError,
    RefusedError,
    assert_replicated,
    expect_collectives,
    replay,
)

NAMES = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]


def gathered(tensor: torch.Tensor, group: FakeGroup, name: str = NAMES[0]) -> torch.Tensor:
    output = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    getattr(dist, name)(output, tensor, group=group)
    return output


def mine(group: FakeGroup) -> torch.Tensor:
    return torch.tensor([10 * group.rank(), 10 * group.rank() + 1])


@pytest.fixture(autouse=True)
def nothing_stays_patched() -> Any:
    before = {name: getattr(dist, name) for name in NAMES}
    yield
    assert {name: getattr(dist, name) for name in NAMES} == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_every_rank_gets_what_every_rank_sent(name: str, size: int) -> None:
    run = replay(lambda group: gathered(mine(group), group, name), size)
    whole = [value for rank in range(size) for value in (10 * rank, 10 * rank + 1)]
    assert [result.tolist() for result in run.results] == [whole] * size
    expect_collectives(run, {"all_gather_single": 1}, max_bytes=16)


def test_later_gathers_see_the_answers_of_earlier_ones() -> None:
    def chain(group: FakeGroup) -> list[int]:
        value = torch.tensor([group.rank() + 1])
        for _ in range(4):
            value = gathered(value, group).sum().reshape(1) + group.rank()
        return [int(value)]

    def expected(size: int) -> list[list[int]]:
        values = [rank + 1 for rank in range(size)]
        for _ in range(4):
            values = [sum(values) + rank for rank in range(size)]
        return [[value] for value in values]

    for size in (2, 3):
        assert replay(chain, size).results == expected(size)


def test_a_gather_inside_backward() -> None:
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, group: FakeGroup) -> torch.Tensor:
            ctx.group = group
            return gathered(x.detach(), group)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            everyone = gathered(grad[None], ctx.group).sum(0)
            share = everyone.shape[0] // ctx.group.size()
            return everyone[ctx.group.rank() * share :][:share], None

    def step(group: FakeGroup) -> torch.Tensor:
        x = torch.ones(2, 3, requires_grad=True)
        (Gather.apply(x, group) * (group.rank() + 1)).sum().backward()
        assert x.grad is not None
        return x.grad

    for result in replay(step, 3).results:
        assert torch.equal(result, torch.full((2, 3), 6.0))


def test_the_trace_names_calls_bytes_and_lines() -> None:
    run = replay(lambda group: gathered(gathered(mine(group), group), group), 2)
    assert [(call.rank, call.seq, call.shape, call.bytes) for call in run.trace] == [
        (0, 0, (2,), 16),
        (1, 0, (2,), 16),
        (0, 1, (4,), 32),
        (1, 1, (4,), 32),
    ]
    assert all("test_replay.py:" in call.site for call in run.trace)


def test_a_rank_that_skips_a_call_is_named() -> None:
    def skip(group: FakeGroup) -> Any:
        gathered(mine(group), group)
        return None if group.rank() == 1 else gathered(mine(group), group)

    with pytest.raises(DeadlockError) as caught:
        replay(skip, 3)
    lines = str(caught.value).splitlines()
    assert "rank 0: waits in all_gather_single#1" in lines[1] and "missing ranks [1]" in lines[1]
    assert "test_replay.py:" in lines[1]
    assert "rank 1: returned after 1 gathers" in lines[2]
    assert "rank 2: waits" in lines[3]
    assert len(caught.value.trace) == 5


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda rank: torch.zeros(2 - rank, 3), ["[2, 3]", "[1, 3]"]),
        (lambda rank: torch.zeros(2, 3, dtype=torch.float32 if rank else torch.float64), ["float32", "float64"]),
    ],
)
def test_ranks_that_disagree_are_shown_side_by_side(tensor: Callable[[int], torch.Tensor], words: list[str]) -> None:
    with pytest.raises(MismatchError) as caught:
        replay(lambda group: gathered(tensor(group.rank()), group), 2)
    for word in ["rank 0", "rank 1", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("output", "given", "message"),
    [
        (torch.zeros(2, 2, 3), torch.zeros(2, 3), r"expected output_tensor of shape \[4, 3\].*got \[2, 2, 3\]"),
        (torch.zeros(12), torch.zeros(2, 3), r"shape \[4, 3\].*got \[12\]"),
        (torch.zeros(2, 6), torch.zeros(2, 3), r"shape \[4, 3\].*got \[2, 6\]"),
        (torch.zeros(3, 3), torch.zeros(2, 3), r"shape \[4, 3\].*got \[3, 3\]"),
        (torch.zeros(4, 3, dtype=torch.int64), torch.zeros(2, 3), "dtype torch.float32, got torch.int64"),
        (torch.zeros(3, 4).t(), torch.zeros(2, 3), "output_tensor to be contiguous"),
        (torch.zeros(4, 3), torch.zeros(3, 2).t(), "input_tensor to be contiguous"),
        (torch.zeros(2), torch.tensor(1.0), "at least one dimension"),
        (torch.zeros(4, dtype=torch.int16), torch.zeros(2, dtype=torch.int16), "torch.int16 is not carried"),
        (torch.zeros(4), torch.zeros(2, requires_grad=True), "requires grad"),
        (torch.zeros(4), [1, 2], "input_tensor to be a tensor, got list"),
        (torch.zeros(4, device="meta"), torch.zeros(2), "expected output_tensor on cpu, got meta"),
    ],
)
def test_what_a_backend_would_refuse_is_refused(output: Any, given: Any, message: str) -> None:
    with pytest.raises(RefusedError, match=rf"rank 0: all_gather_single#0 at .*test_replay.py:\d+: .*{message}"):
        replay(lambda group: getattr(dist, NAMES[0])(output, given, group=group), 2)


@pytest.mark.parametrize("group", [None, "tp", FakeGroup(1, 2), FakeGroup(0, 3)])
def test_another_group_is_refused(group: Any) -> None:
    with pytest.raises(RefusedError, match=r"rank 0: .*expected the"):
        replay(lambda _: getattr(dist, NAMES[0])(torch.zeros(4), torch.zeros(2), group=group), 2)


def test_an_exception_of_a_rank_is_the_cause_and_its_type() -> None:
    def fail(group: FakeGroup) -> torch.Tensor:
        if group.rank() == 1:
            raise ValueError("boom")
        return gathered(mine(group), group)

    with pytest.raises(RankError, match=r"^rank 1 raised ValueError: boom\n  rank 0: waits in .*\n  rank 1") as caught:
        replay(fail, 2)
    assert isinstance(caught.value.__cause__, ValueError)
    assert isinstance(caught.value, ValueError)
    assert_replicated(replay(lambda group: gathered(mine(group), group), 2))


def test_originals_are_back_after_an_interrupt() -> None:
    def interrupted(group: FakeGroup) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(interrupted, 2)


def test_nested_replays_are_refused_and_leave_the_outer_one_working() -> None:
    def outer(group: FakeGroup) -> torch.Tensor:
        with pytest.raises(RuntimeError, match="nested simulations are refused"):
            replay(lambda inner: None, 2)
        return gathered(mine(group), group)

    assert replay(outer, 2).results[0].tolist() == [0, 1, 10, 11]


def test_a_rank_that_does_not_repeat_itself_is_told_so() -> None:
    runs = iter(range(100))
    with pytest.raises(MismatchError, match=r"rank 0 is not repeatable: all_gather_single#0 .* other values"):
        replay(lambda group: gathered(torch.tensor([next(runs)]), group), 2)
    seen: set[int] = set()

    def once(group: FakeGroup) -> None:
        if group.rank() not in seen:
            seen.add(group.rank())
            gathered(mine(group), group)

    with pytest.raises(MismatchError, match="rank 0 is not repeatable: it made 0 gathers in this pass and 1"):
        replay(once, 2)


def test_random_numbers_are_repeatable_and_the_callers_state_is_kept() -> None:
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate()
    run = replay(lambda group: (gathered(torch.randn(2), group), random.random()), 3)
    assert_replicated(run)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_code_that_swallows_everything_still_waits() -> None:
    def stubborn(group: FakeGroup) -> Any:
        try:
            return gathered(mine(group), group)
        except BaseException:
            return gathered(mine(group), group)

    assert replay(stubborn, 2).results[1].tolist() == [0, 1, 10, 11]


def test_code_that_turns_everything_into_its_own_error_still_waits() -> None:
    def relabel(group: FakeGroup) -> torch.Tensor:
        try:
            return gathered(mine(group), group)
        except BaseException as error:
            raise ValueError("lost") from error

    assert replay(relabel, 2).results[1].tolist() == [0, 1, 10, 11]


def test_a_buffer_that_ranks_share_does_not_mix_what_they_sent() -> None:
    scratch = torch.zeros(2, dtype=torch.int64)
    run = replay(lambda group: gathered(scratch.copy_(mine(group)), group).tolist(), 3)
    assert run.results == [[0, 1, 10, 11, 20, 21]] * 3


def post(group: FakeGroup) -> tuple[Any, torch.Tensor, torch.Tensor]:
    given = torch.full((2,), float(group.rank()))
    output = torch.zeros(2 * group.size())
    return getattr(dist, NAMES[0])(output, given, group=group, async_op=True), output, given


def test_an_async_gather_is_poisoned_until_wait() -> None:
    def early(group: FakeGroup) -> tuple[bool, bool, list[float]]:
        work, output, _ = post(group)
        early = bool(output.isnan().all())
        assert not work.is_completed()
        work.wait()
        return early, work.is_completed(), output.tolist()

    assert replay(early, 2).results == [(True, True, [0.0, 0.0, 1.0, 1.0])] * 2


def test_a_rank_that_is_alone_has_its_gather_at_once() -> None:
    """A program that reads too early is then right on one rank and wrong on more, which a comparison shows."""

    def early(group: FakeGroup) -> tuple[list[float], list[float]]:
        work, output, _ = post(group)
        early = output.tolist()
        work.wait()
        return early, output.tolist()

    assert replay(early, 1).results == [([0.0, 0.0], [0.0, 0.0])]
    assert str(replay(early, 2).results[1]) == "([nan, nan, nan, nan], [0.0, 0.0, 1.0, 1.0])"


def test_an_async_gather_nobody_waits_for_is_an_error() -> None:
    with pytest.raises(AsyncError, match=r"rank 0: all_gather_single#0 at .* was never waited for"):
        replay(lambda group: post(group) and None, 2)


def test_an_input_changed_in_flight_is_an_error() -> None:
    def change(group: FakeGroup) -> None:
        work, _, given = post(group)
        given.add_(1)
        work.wait()

    with pytest.raises(AsyncError, match=r"rank 0: the input of all_gather_single#0 .* was changed before wait"):
        replay(change, 2)


def test_an_input_that_is_a_slot_of_the_output() -> None:
    def slot(group: FakeGroup) -> list[float]:
        output = torch.zeros(4)
        given = output[2 * group.rank() :][:2]
        given.fill_(group.rank() + 1)
        work = getattr(dist, NAMES[0])(output, given, group=group, async_op=True)
        work.wait()
        return output.tolist()

    assert replay(slot, 2).results == [[1.0, 1.0, 2.0, 2.0]] * 2


def test_tensors_without_values_keep_their_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake(group: FakeGroup) -> tuple[list[int], str]:
        with FakeTensorMode():
            result = gathered(torch.empty(2, 3, device="cuda"), group)
            return list(result.shape), result.device.type

    assert replay(fake, 2).results == [([4, 3], "cuda")] * 2
    meta = replay(lambda group: gathered(torch.empty(2, 3, device="meta"), group), 2)
    assert meta.results[0].is_meta


def test_ranks_without_rows_join() -> None:
    assert replay(lambda group: list(gathered(torch.zeros(0, 3), group).shape), 3).results == [[0, 3]] * 3


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        replay(lambda group: None, 0)


def test_errors_share_a_base() -> None:
    for kind in (AsyncError, DeadlockError, MismatchError, RankError, RefusedError):
        assert issubclass(kind, CollectiveError)


def sources(start: str) -> dict[str, ast.Module]:
    """The module and everything of this package that it imports, at any depth of nesting."""
    home = Path(kpool_testing.__file__).parent
    found: dict[str, ast.Module] = {}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = ast.parse((home / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8"))
        for node in ast.walk(found[name]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kpool_testing."):
                waiting += _modules(home, node)
    return found


def _modules(home: Path, node: ast.ImportFrom) -> list[str]:
    """The modules of this package that an import statement loads."""
    module = (node.module or "").removeprefix("kpool_testing.")
    inside = [f"{module}.{alias.name}" for alias in node.names]
    return [name for name in [module, *inside] if (home / f"{name.replace('.', '/')}.py").exists()]


def private_uses(tree: ast.Module) -> list[str]:
    """Underscore attributes reached from torch, and imports of them; threads; init_process_group."""
    bad: list[str] = []
    torch_names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            torch_names |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("torch")}
            bad += [name for name in names if name in ("threading", "_thread") or "._" in name]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            bad += [module] if module in ("threading", "_thread", "concurrent.futures") else []
            if module.startswith("torch"):
                bad += [f"{module}.{alias.name}" for alias in node.names if "._" in f"{module}.{alias.name}"]
                torch_names |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                path.append(base.attr)
                base = base.value
            if (
                isinstance(base, ast.Name)
                and base.id in torch_names
                and any(p.startswith("_") and not p.endswith("__") for p in path)
            ):
                bad.append(ast.unparse(node))
        if "init_process_group" in (getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "value", "")):
            bad.append("init_process_group")
    return bad


def test_replay_is_built_on_the_public_api_alone() -> None:
    found = sources("replays.run")
    assert {"bits", "errors", "replays.group", "record.trace", "record.lanes", "record.flight"} <= found.keys()
    assert not [name for name in found if name.startswith(("simulation", "launch", "rules"))]
    assert {name: private_uses(tree) for name, tree in found.items() if private_uses(tree)} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C.x()",
        "from torch._subclasses import fake_tensor",
        "import torch.distributed as d\nd.distributed_c10d._world",
        "import torch\ntorch.distributed.init_process_group('gloo')",
        "import threading",
    ],
)
def test_the_check_for_private_names_sees_them(code: str) -> None:
    assert private_uses(ast.parse(code))
