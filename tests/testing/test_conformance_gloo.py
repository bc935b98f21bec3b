"""The same calls on simulated ranks with dialect="gloo" and on two real gloo processes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kpool_testing import simulate
from tests.testing import gloo_arm
from tests.testing.conformance_cases import CASES, Case, outcome_of

# Texts that come from deep inside torch; type and acceptance are compared all the same.
OTHER_TEXT = {"reduce_scatter_single fewer dims"}


def simulated(case: Case, dialect: str = "gloo") -> list[Any]:
    """Outcomes of both ranks on the simulated arm."""

    def body(group: Any) -> Any:
        fresh = torch.distributed.new_group([0, 1])
        return outcome_of(case, group.rank(), fresh)

    return simulate(body, 2, dialect=dialect, limit=20, allow_unwaited=True).results


def same(left: Any, right: Any) -> bool:
    """Equality down to the bits of tensors."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def plain(text: str) -> str:
    """An error text without addresses, log prefixes and the name of the group's class."""
    text = re.sub(r"^\[rank\d\]:\[F[^]]*\] ", "", text)
    return re.sub(r"(group) \S.*$", r"\1", text)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 90


@pytest.mark.parametrize("name", CASES)
def test_portable_is_never_laxer_than_gloo(name: str) -> None:
    gloo = simulated(CASES[name])
    assert [outcome[0] != "skipped" for outcome in gloo] == [rank in CASES[name].ranks for rank in range(2)]
    if gloo[0][0] == "error" or gloo[1][0] == "error":
        portable = simulated(CASES[name], "portable")
        assert [outcome[0] for outcome in portable] == [outcome[0] for outcome in gloo]


@pytest.fixture(scope="module")
def real() -> list[dict[str, Any]]:
    """Outcomes of all cases on two real gloo processes, one dict a rank."""
    return gloo_arm.run_all(list(CASES))


@pytest.mark.gloo
@pytest.mark.parametrize("name", CASES)
def test_simulated_gloo_does_what_gloo_does(name: str, real: list[dict[str, Any]]) -> None:
    for rank, outcome in enumerate(simulated(CASES[name])):
        expected = real[rank][name]
        assert outcome[0] == expected[0], (rank, outcome, expected)
        if outcome[0] == "ok":
            assert same(outcome[1], expected[1]), (rank, outcome[1], expected[1])
        elif outcome[0] == "error":
            assert outcome[1] == expected[1], (rank, outcome, expected)
            if name not in OTHER_TEXT:
                assert plain(outcome[2]) == plain(expected[2])
