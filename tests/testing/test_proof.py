"""The proof tools go red for what they are there to catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kpool_testing import (
    FakeGroup,
    Run,
    Trace,
    assert_matches_unsharded,
    assert_replicated,
    expect_collectives,
    layouts,
    replay,
    with_layout,
)
from kpool_testing.proof import LAYOUTS

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def float_of(bits: int) -> torch.Tensor:
    return torch.tensor([0, bits], dtype=torch.int32).view(torch.float32)


def sharded_double(group: Any, rows: int, split: Callable[[int, int], int] = lambda n, g: -(-n // g)) -> torch.Tensor:
    """2 * arange(rows), each rank working on its share."""
    share = split(rows, group.size())
    mine = torch.full((share,), -1)
    own = torch.arange(rows)[group.rank() * share :][:share]
    mine[: len(own)] = 2 * own
    if group.size() == 1:
        return mine[:rows]
    output = mine.new_empty(group.size() * share)
    getattr(dist, GATHER)(output, mine, group=group)
    return output[:rows]


class TestReplicated:
    def test_equal_results_pass(self) -> None:
        value = {"a": [torch.arange(3), (torch.tensor(float("nan")), "x")], "b": float("nan")}
        assert_replicated([value, {"a": [torch.arange(3), (torch.tensor(float("nan")), "x")], "b": float("nan")}])
        assert_replicated(Run([torch.zeros(0), torch.zeros(0)]))

    def test_the_ranks_and_the_first_index_are_named(self) -> None:
        other = torch.arange(6).reshape(2, 3)
        other[1, 1:] = 9
        with pytest.raises(AssertionError) as caught:
            assert_replicated([torch.arange(6).reshape(2, 3)] * 2 + [other], "tokens")
        message = str(caught.value)
        assert "tokens is not replicated: ranks [2] differ from rank 0" in message
        assert "rank 2: tokens[1, 1] is 9, expected 4 (2 of 6 elements differ)" in message

    @pytest.mark.parametrize(
        ("left", "right"),
        [
            (float_of(0x7FC00000), float_of(0x7FC00001)),
            (torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0])),
        ],
    )
    def test_bits_count_where_values_compare_equal(self, left: torch.Tensor, right: torch.Tensor) -> None:
        with pytest.raises(AssertionError, match=r"rank 1: result\[1\] is bits [0-9a-f]{8}, expected [0-9a-f]{8}"):
            assert_replicated([left, right])

    @pytest.mark.parametrize(
        ("right", "message"),
        [
            (torch.zeros(2, 1), r"has shape \[2, 1\], expected \[2\]"),
            (torch.zeros(2, dtype=torch.float64), "has dtype torch.float64, expected torch.float32"),
            (None, "is NoneType, expected Tensor"),
            (torch.zeros(2, device="meta"), "has no values on one of the two"),
        ],
    )
    def test_other_differences_are_named(self, right: Any, message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            assert_replicated([torch.zeros(2), right])

    @pytest.mark.parametrize(
        ("left", "right", "message"),
        [
            ({"a": 1}, {"b": 1}, r"has keys \['b'\], expected \['a'\]"),
            ([1, 2], [1], "has 1 entries, expected 2"),
            ([1, (2, 3)], [1, (2, 4)], r"result\[1\]\[1\] is 4, expected 3"),
        ],
    )
    def test_nests_name_the_path(self, left: Any, right: Any, message: str) -> None:
        with pytest.raises(AssertionError, match=message):
            assert_replicated([left, right])

    def test_no_results_prove_nothing(self) -> None:
        with pytest.raises(ValueError, match="at least one rank"):
            assert_replicated([])
        with pytest.raises(ValueError, match="expected a result to compare, got None from every rank"):
            assert_replicated(replay(lambda group: None, 2))


class TestUnsharded:
    def test_a_right_program_passes_and_the_comparisons_are_counted(self) -> None:
        made = assert_matches_unsharded(sharded_double, (2, 3), cases=range(7), runner=replay)
        assert made == 7 * (2 + 3)

    def test_a_floor_split_is_caught(self) -> None:
        def floored(group: FakeGroup, rows: int) -> torch.Tensor:
            return sharded_double(group, rows, lambda n, g: n // g)

        with pytest.raises(AssertionError, match=r"size 3, case 4, rank 0: result has shape \[3\], expected \[4\]"):
            assert_matches_unsharded(floored, (2, 3), cases=[2, 4], runner=replay)

    def test_skipping_the_gather_when_empty_is_caught(self) -> None:
        def skips(group: FakeGroup, rows: int) -> torch.Tensor:
            if group.rank() * -(-rows // group.size()) >= rows:
                return 2 * torch.arange(rows)
            return sharded_double(group, rows)

        with pytest.raises(AssertionError, match=r"size 3, case 1: DeadlockError: .*\n.*missing ranks \[1, 2\]"):
            assert_matches_unsharded(skips, (3,), cases=[3, 1], runner=replay)

    def test_swapped_calls_are_caught_though_all_ranks_agree(self) -> None:
        def pair(group: FakeGroup, swap: bool) -> tuple[torch.Tensor, torch.Tensor]:
            rank, size = group.rank(), group.size()
            sent = [torch.tensor([rank]), torch.tensor([rank + size])]
            if swap and rank == 1:
                sent.reverse()
            got = [torch.empty(size, dtype=torch.int64) for _ in sent]
            for output, given in zip(got, sent, strict=True):
                getattr(dist, GATHER)(output, given, group=group)
            return tuple(int(output.sum()) - sum(range(size)) - i * size**2 for i, output in enumerate(got))

        assert_replicated(replay(lambda group: pair(group, True), 2))
        assert_matches_unsharded(lambda group: pair(group, False), (2, 3), runner=replay)
        with pytest.raises(AssertionError, match=r"size 2, rank 0: result\[0\] is 2, expected 0"):
            assert_matches_unsharded(lambda group: pair(group, True), (2,), runner=replay)

    def test_shards_are_combined(self) -> None:
        def shard(group: FakeGroup) -> torch.Tensor:
            return torch.arange(7).tensor_split(group.size())[group.rank()]

        assert assert_matches_unsharded(shard, (2, 3), combine=torch.cat, runner=replay) == 2

    def test_a_tolerance_applies_to_values_only_where_given(self) -> None:
        def rounded(group: FakeGroup) -> torch.Tensor:
            return torch.tensor([1.0]) + (group.size() - 1) * 1e-6

        assert_matches_unsharded(rounded, (2,), runner=replay, rtol=1e-5)
        with pytest.raises(AssertionError, match=r"size 2, rank 0: result\[0\] is 1\.0"):
            assert_matches_unsharded(rounded, (2,), runner=replay)
        with pytest.raises(AssertionError, match="size 2, rank 0"):
            assert_matches_unsharded(rounded, (2,), runner=replay, rtol=1e-8)

    def test_an_empty_sweep_proves_nothing(self) -> None:
        with pytest.raises(AssertionError, match="nothing was compared"):
            assert_matches_unsharded(sharded_double, (2,), cases=[], runner=replay)
        with pytest.raises(AssertionError, match="nothing was compared"):
            assert_matches_unsharded(lambda group: 1, (), runner=replay)

    def test_a_function_that_returns_nothing_proves_nothing(self) -> None:
        with pytest.raises(ValueError, match="fn: expected a result to compare, got None in a group of one, case 4"):
            assert_matches_unsharded(lambda group, case: None, (2,), cases=[4], runner=replay)

    def test_the_default_runner_simulates(self) -> None:
        def reduced(group: Any) -> torch.Tensor:
            total = torch.tensor([float(sum(range(12)[group.rank() :: group.size()]))])
            dist.all_reduce(total, group=group)
            return total

        assert assert_matches_unsharded(reduced, (2, 3)) == 5


class TestExpectCollectives:
    run = staticmethod(lambda: replay(lambda group: sharded_double(group, 8), 2))

    def test_counts_orders_and_old_names(self) -> None:
        run = self.run()
        expect_collectives(run, {"all_gather_into_tensor": 1, "all_reduce": 0})
        expect_collectives(run.trace, ["all_gather_single"], max_bytes=32)
        expect_collectives(replay(lambda group: None, 2), {})

    @pytest.mark.parametrize("expected", [{}, {"all_gather_single": 2}, ["all_reduce"], []])
    def test_anything_else_is_an_error_with_lanes(self, expected: Any) -> None:
        with pytest.raises(AssertionError, match=r"(?s)rank 0: expected .*made .*all_gather_single i64\[4\]"):
            expect_collectives(self.run(), expected)

    def test_a_missing_call_is_an_error(self) -> None:
        with pytest.raises(AssertionError, match="rank 1: expected"):
            expect_collectives(replay(lambda group: None, 2), {"all_reduce": 1})

    def test_bytes_are_bounded(self) -> None:
        with pytest.raises(AssertionError, match="rank 1: sent 32 bytes, expected at most 31"):
            expect_collectives(self.run(), {"all_gather_single": 1}, max_bytes=31)

    @pytest.mark.parametrize("expected", [{}, {"all_reduce": 1}])
    def test_an_empty_trace_proves_nothing(self, expected: dict[str, int]) -> None:
        with pytest.raises(AssertionError, match="no rank has run"):
            expect_collectives(Trace(), expected)

    def test_one_rank_alone(self) -> None:
        expect_collectives(self.run(), ["all_gather_single"], rank=1)


class TestLayouts:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool, torch.complex64, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(2, 3), (4,), (), (0, 3), (2, 3, 4)])
    def test_values_stay_and_memory_changes(self, layout: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        source = torch.randint(0, 2, shape).to(dtype)
        made = with_layout(source, layout)
        assert torch.equal(made, source) and made.dtype == dtype and made.shape == source.shape
        if source.numel() > 1 and (layout == "strided" or (layout == "transposed" and source.dim() > 1)):
            assert not made.is_contiguous()
        if layout == "offset":
            assert made.storage_offset() == 3

    def test_gaps_are_poisoned(self) -> None:
        made = with_layout(torch.zeros(3), "strided")
        assert torch.as_strided(made, (6,), (1,)).isnan().sum() == 3

    def test_nests_and_gradients(self) -> None:
        leaf = torch.ones(2, 2, requires_grad=True)
        tree = {"a": [leaf, 3], "b": (torch.zeros(2, 2),)}
        made = with_layout(tree, "transposed")
        assert made["a"][0].requires_grad and made["a"][1] == 3 and isinstance(made["b"], tuple)

    def test_all_of_them(self) -> None:
        assert [name for name, _ in layouts(torch.zeros(2, 2))] == list(LAYOUTS)

    def test_code_that_assumes_contiguity_is_caught(self) -> None:
        def flat_first(x: torch.Tensor) -> float:
            return float(torch.as_strided(x, (2,), (1,), x.storage_offset())[1])

        x = torch.arange(4.0).reshape(2, 2)
        answers = {name: flat_first(y) for name, y in layouts(x)}
        assert answers["offset"] == flat_first(x) and answers["transposed"] != flat_first(x)

    def test_an_unknown_layout_is_refused(self) -> None:
        with pytest.raises(ValueError, match="unknown layout 'diagonal'"):
            with_layout(torch.zeros(2), "diagonal")


def test_one_bug_is_told_in_full_once() -> None:
    """The other failing runs get a line each: their text is the same story with other numbers."""

    def rank_0_skips(group: Any, case: int) -> float:
        if group.size() > 1 and group.rank() == 0:
            return 0.0
        x = torch.tensor([float(case)])
        dist.all_reduce(x)
        return float(x)

    with pytest.raises(AssertionError) as caught:
        assert_matches_unsharded(rank_0_skips, (2, 3), cases=(5, 6))
    lines = str(caught.value).splitlines()
    assert lines[0] == "f(G) differs from f(1) in 4 runs:"
    assert lines[1].startswith("  size 2, case 5: DeadlockError: ") and "missing ranks [0]" in str(caught.value)
    assert [line.partition(": ")[0] for line in lines[-3:]] == [
        "  size 3, case 5", "  size 2, case 6", "  size 3, case 6"
    ]  # fmt: skip
    assert len(lines) < 12


def test_what_fails_on_one_rank_alone_says_so() -> None:
    def divide(group: Any, case: int) -> float:
        return 1 / case

    with pytest.raises(ZeroDivisionError) as caught:
        assert_matches_unsharded(divide, (2,), cases=(1, 0))
    assert any("f(1), which the others are compared with, failed, case 0" in note for note in caught.value.__notes__)
