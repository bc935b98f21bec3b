"""Random calls against the reference: every layout, dtype and option, small sizes; the seed of a call says all of it.

Plain pytest makes a few hundred; the marker `soak` makes 200,000 in numbered chunks, each from its own seeds: a run can
be cut short, spread over workers (`-n`), or repeated from a failing seed (`KPOOL_SOAK_CALLS`, `KPOOL_SOAK_SEED`).
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.calls import LAYOUTS, random_call
from tests.support.properties import agrees_with_reference

PLAIN_CALLS = 160
SOAK_CALLS = int(os.environ.get("KPOOL_SOAK_CALLS", "200000"))
SOAK_SEED = int(os.environ.get("KPOOL_SOAK_SEED", "1000000"))
SOAK_CHUNK = 1000


def compare(seeds: range, layout: str | None, device: torch.device) -> tuple[int, int]:
    """Rows of the calls, and rows whose selection was compared."""
    rows = compared = 0
    for seed in seeds:
        call = random_call(seed, layout)
        try:
            compared += agrees_with_reference(call.to(device))
        except Exception as error:
            error.add_note(f"random_call({seed}, {layout!r}): {call.options}, q {list(call.q.shape)}")
            raise
        rows += call.rows * call.batch
    return rows, compared


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_calls(layout: str, device: torch.device) -> None:
    rows, compared = compare(range(PLAIN_CALLS // len(LAYOUTS)), layout, device)
    assert rows > 300 and compared > 0.85 * rows, f"only {compared} of {rows} rows were decided"


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(-(-SOAK_CALLS // SOAK_CHUNK)))
def test_soak(chunk: int, device: torch.device) -> None:
    first = SOAK_SEED + chunk * SOAK_CHUNK
    count = min(SOAK_CHUNK, SOAK_CALLS - chunk * SOAK_CHUNK)
    rows, compared = compare(range(first, first + count), None, device)
    assert compared > 0.85 * rows, f"only {compared} of {rows} rows were decided"
