"""Megatron's own MLA module around the adapter, with sequence parallelism, forward and backward."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module

from kpool.integrations.megatron import kpool_dsa_module_spec
from kpool_testing import Run, assert_replicated
from tests.megatron.support import HIDDEN, Case, check_gathers, kpool_options, model_config, packed_params, run

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),  # Megatron's own calls
]

CASES = {
    "plain": Case(batch=2),
    "packed": Case(docs=(13, 0, 35)),
    "packed, padded": Case(docs=(13, 3, 20), padded=(16, 4, 28)),
    "rows that do not divide by the pool": Case(tokens=50),
    "bf16": Case(dtype=torch.bfloat16),
}


@pytest.fixture(autouse=True)
def _quiet_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron warns about this variable with sequence parallelism."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def layer(world: Any, case: Case) -> dict[str, Any]:
    """One attention layer on one rank: forward, backward, what it selected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(case.tp, create_gloo_process_groups=False)
    try:
        config = model_config(case)
        spec = kpool_dsa_module_spec(config, kpool=kpool_options(case, config))
        groups = ProcessGroupCollection.use_mpu_process_groups()
        attention = build_module(spec, config=config, layer_number=1, cp_comm_type="allgather", pg_collection=groups)
        for number, (name, parameter) in enumerate(sorted(attention.named_parameters())):
            sharded = "core_attention" not in name
            make = torch.Generator().manual_seed(100 * number + world.rank() * sharded)
            with torch.no_grad():
                drawn = torch.randn(parameter.shape, generator=make) * (0.2 if parameter.dim() > 1 else 1.0)
                parameter.copy_(drawn)
        selections: list[torch.Tensor] = []
        select = attention.core_attention.indexer.select

        def keep(*args: Any, **kwargs: Any) -> torch.Tensor:
            selections.append(select(*args, **kwargs))
            return selections[-1]

        attention.core_attention.indexer.select = keep
        make = torch.Generator().manual_seed(3)
        x = torch.randn(case.tokens, case.batch, HIDDEN, generator=make).to(case.dtype)
        x = x.chunk(case.tp)[groups.tp.rank()].clone().requires_grad_()
        output, _ = attention(x, None, packed_seq_params=packed_params(case))
        (output * torch.randn(output.shape, generator=make).to(output.dtype)).sum().backward()
        grads = {name: p.grad for name, p in attention.named_parameters() if p.grad is not None}
        assert not any("indexer" in name for name in grads)
        return {"output": output.detach(), "dx": x.grad, "grads": grads, "selections": selections}
    finally:
        parallel_state.destroy_model_parallel()


def layers(case: Case, backend: str) -> Run:
    """The layer on all ranks."""
    options = {"isolate": ("megatron.core.parallel_state",)} if backend == "fake" else {}
    return run(lambda world: layer(world, case), case.tp, backend, **options)


def compare(case: Case, backend: str) -> None:
    off, on = (layers(case.with_flag(flag), backend) for flag in (False, True))
    check_gathers(off, case.with_flag(False))
    check_gathers(on, case.with_flag(True))
    for before, after in zip(off.results, on.results, strict=True):
        assert_replicated([before, after], "flag off and on")
    assert_replicated([result["selections"] for result in on.results], "selection")
    assert on.results[0]["dx"].abs().sum() > 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_simulated(case: Case, tp: int) -> None:
    if case.tokens % tp:
        case = Case(**{**vars(case), "tokens": case.tokens + 2})
    compare(Case(**{**vars(case), "tp": tp, "sp": tp > 1}), "fake")


def test_real_processes() -> None:
    for case in (CASES["plain"], CASES["packed"]):
        compare(Case(**{**vars(case), "tp": 2, "sp": True}), "gloo")
