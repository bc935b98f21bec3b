"""A whole GPTModel with the k-pool indexer in every layer, and its checkpoint."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from kpool.integrations.megatron import KPoolLocalSpecProvider, kpool_dsa_module_spec
from kpool_testing import assert_replicated
from tests.megatron.support import INDEX_DIM, POOL, Case, check_gathers, kpool_options, model_config, run

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
]
LAYERS, VOCABULARY = 2, 64


@pytest.fixture(autouse=True)
def _megatron_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sequence parallelism Megatron warns about this variable, and forks a CUDA generator (no dropout here)."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(CudaRNGStatesTracker, "fork", lambda self, name=None: contextlib.nullcontext())


def build_model(case: Case) -> Any:
    """A small GPT of Megatron's own parts."""
    config = model_config(case, num_layers=LAYERS, normalization="LayerNorm", attention_dropout=0.0, hidden_dropout=0.0)
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    norm = KPoolLocalSpecProvider().layer_norm()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
    spec.submodules.self_attention = kpool_dsa_module_spec(config, kpool=kpool_options(case, config))
    torch.manual_seed(1)
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * LAYERS, layer_norm=norm),
        VOCABULARY,
        case.tokens,
        position_embedding_type="none",
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return model


def train(world: Any, case: Case) -> dict[str, Any]:
    """One loss and its gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel_state.initialize_model_parallel(case.tp, create_gloo_process_groups=False)
        try:
            model = build_model(case)
            make = torch.Generator().manual_seed(2)
            ids = torch.randint(0, VOCABULARY, (case.batch, case.tokens), generator=make)
            positions = torch.arange(case.tokens).expand(case.batch, -1)
            loss = model(ids, positions, None, labels=ids.roll(-1, 1))
            loss.mean().backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
            state = model.sharded_state_dict()
            return {"loss": loss.detach(), "grads": grads, "frozen": frozen, "state": sorted(state)}
        finally:
            parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_trains(tp: int) -> None:
    case = Case(tp=tp, sp=tp > 1, batch=2)
    isolate = ("megatron.core.parallel_state",)
    cases = case.with_flag(False), case.with_flag(True)
    off, on = (run(lambda world, c=c: train(world, c), tp, isolate=isolate) for c in cases)
    check_gathers(off, cases[0])
    check_gathers(on, cases[1], calls=LAYERS)
    for before, after in zip(off.results, on.results, strict=True):
        assert_replicated([before, after], "flag off and on")
    found = on.results[0]
    indexers = [name for name in found["frozen"] if ".indexer." in name]
    assert len(indexers) == LAYERS * 7 and indexers == found["frozen"]
    assert not any(".indexer." in name for name in found["grads"]) and found["grads"]


def test_the_indexer_is_in_the_checkpoint() -> None:
    case = Case(tp=2, sp=True)

    def save(world: Any) -> dict[str, Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel_state.initialize_model_parallel(case.tp, create_gloo_process_groups=False)
            try:
                state = build_model(case).sharded_state_dict()
                return {k: (v.local_shape, v.global_shape, v.dtype) for k, v in state.items() if k.endswith("_ape")}
            finally:
                parallel_state.destroy_model_parallel()

    found = run(save, 2, isolate=("megatron.core.parallel_state",)).results
    assert_replicated(found)
    (shapes,) = {tuple(entry) for entry in found[0].values()}
    assert shapes[0] == (POOL, INDEX_DIM) and shapes[2] is torch.float32
