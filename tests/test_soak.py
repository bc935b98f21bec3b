"""Many random small calls against the reference: `tox -e soak` makes 200,000, plain pytest the first few hundred.

    KPOOL_SOAK_CALLS=2000 KPOOL_SOAK_SEED=7 pytest -m soak        another amount, another start

Every call is told by its seed: a failure names it, and `random_call(seed)` is the call.
"""

from __future__ import annotations

import os

import pytest

from tests.support.calls import random_call
from tests.support.properties import agrees_with_reference, same_when_chunked, same_when_sharded, sound

CALLS, FIRST = int(os.environ.get("KPOOL_SOAK_CALLS", "200000")), int(os.environ.get("KPOOL_SOAK_SEED", "1000000"))


def check(seed: int) -> int:
    """One call: legal rows, the reference wherever it decides, and one of the invariances in turn; rows compared."""
    call = random_call(seed)
    try:
        compared = sound(call) + agrees_with_reference(call)
        if seed % 4 == 0:
            compared += same_when_sharded(call, sizes=(2 + seed // 4 % 4,), plans=("contiguous", "block_cyclic"))
        elif seed % 4 == 1:
            compared += same_when_chunked(call, budgets=(1, 4096))
    except Exception as error:
        raise AssertionError(f"random_call({seed}): {type(error).__name__}: {error}") from error
    return compared


def test_a_few() -> None:
    once_wrong = (
        1016250,
        1056778,
    )  # the reference's bounds, not the selection: a drifting sum, an uncertain rotated key
    compared = sum(check(seed) for seed in (*range(12), *once_wrong))
    assert compared > 200


@pytest.mark.soak
def test_very_many() -> None:
    compared = sum(check(seed) for seed in range(FIRST, FIRST + CALLS))
    print(f"{CALLS:,} calls from seed {FIRST}, {compared:,} rows compared")  # noqa: T201
    assert compared > 10 * CALLS
