"""The fused call under `torch.compile`: one graph, without a break, and the bits of the call that is not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kpool import fused_qk_topk_kpool
from tests.support.calls import LAYOUTS, Call, exact_call, noisy
from tests.support.properties import same_rows

# the compiler instantiates what torch says not to, when it meets an autograd function
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "position": {"order": "position", "score_chunk_bytes": 1},
    "hf": {"numerics": "hf", "use_relu": False},
    "fp8": {"fp8_indexer": True},
    "no-tail": {"always_select_tail": False, "width_multiple": 8, "rotate_activation_enabled": True},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Graphs of one test do not count against the limit of another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call: Call) -> Tensor:
    """The tokens of `call`, traced into a single graph; tracing fails where a value would have to be read."""

    def run(q: Tensor, k: Tensor, weights: Tensor, gate_score: Tensor, visibility: dict[str, Tensor]) -> Tensor:
        options = {"return_index_scores": False, **call.options}
        ape, pool_size = call.ape, call.pool_size
        return fused_qk_topk_kpool(q, k, weights, call.topk, pool_size, gate_score, ape, **visibility, **options)[1]

    whole = torch.compile(run, backend="eager", fullgraph=True)
    tokens: Tensor = whole(call.q, call.k, call.weights, call.gate_score, call.visibility)
    return tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bits_of_the_plain_call_for_every_layout(layout: str, device: torch.device) -> None:
    call = noisy(exact_call(11, layout, rows=40, batch=2, dim=8, pool_size=4)).to(device)
    assert same_rows(call.run(), compiled(call), layout) == 80


@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_of_the_plain_call_for_every_option(name: str, device: torch.device) -> None:
    call = noisy(exact_call(12, "causal", rows=70, dim=16, pool_size=4, budget=5, **OPTIONS[name])).to(device)
    assert same_rows(call.run(), compiled(call), name) == 70
