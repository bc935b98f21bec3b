"""From megatron-core, flags, configuration and environment to the module that is built."""

from __future__ import annotations

import argparse
import copy
import functools
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_layout, dsa_masking
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from kpool import KPoolConfig
from kpool.config import SHARD_QUERIES_ENV
from kpool.integrations.megatron import (
    KPoolDSAIndexer,
    KPoolDSAttention,
    KPoolLocalSpecProvider,
    add_kpool_args,
    capability,
    kpool_config,
    kpool_dsa_module_spec,
    with_kpool,
)
from kpool.integrations.megatron.capability import missing_hooks, require_hooks
from kpool.integrations.megatron.settings import resolve
from tests.megatron.support import HIDDEN, LORA, TOPK, Case, Mesh, build_attention, gathers, inputs, model_config, run

SIZES = ("hidden_size", "q_lora_rank", "index_n_heads", "index_head_dim", "index_topk")

pytestmark = pytest.mark.megatron

MODULES = {
    "dsa": dsa,
    "dsa_layout": dsa_layout,
    "dsa_masking": dsa_masking,
    "module": SimpleNamespace(MegatronModule=MegatronModule),
    "spec_utils": SimpleNamespace(build_module=build_module),
}


class TestCapability:
    def test_this_version_has_every_hook(self) -> None:
        assert missing_hooks() == []
        assert missing_hooks(MODULES) == []

    @pytest.mark.parametrize("name", ["_get_index_share_topk_holder", "_get_index_share_topk_length_holder"])
    def test_a_missing_method_is_named(self, name: str) -> None:
        without = type("DSAttention", (), {k: v for k, v in vars(dsa.DSAttention).items() if k != name})
        found = missing_hooks({**MODULES, "dsa": SimpleNamespace(**{**vars(dsa), "DSAttention": without})})
        assert found == [f"dsa.DSAttention.{name}"]

    def test_a_missing_function_and_a_missing_module_are_named(self) -> None:
        layout = copy.copy(vars(dsa_layout))
        del layout["get_packed_qk_cu_seqlens"]
        modules: dict[str, Any] = {**MODULES, "dsa_layout": SimpleNamespace(**layout)}
        assert missing_hooks(modules) == ["dsa_layout.get_packed_qk_cu_seqlens"]
        del modules["dsa_masking"]
        masking = "module megatron.core.transformer.experimental_attention_variant.dsa_masking"
        assert missing_hooks(modules) == [masking, "dsa_layout.get_packed_qk_cu_seqlens"]

    def test_without_megatron_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ImportError, match=r"megatron-core 0\.19\.2 lacks module megatron\.core"):
            require_hooks({})
        monkeypatch.setattr(capability.metadata, "version", mock.Mock(side_effect=PackageNotFoundError))
        with pytest.raises(ModuleNotFoundError, match=r'pip install "kpool\[megatron\]"'):
            require_hooks({})

    def test_a_missing_parameter_is_named(self) -> None:
        def forward(self: Any, query: Any, key: Any, value: Any, attention_mask: Any, x: Any, qr: Any) -> None:
            return self.skip_topk, self.source_layer, self.index_share, self._get_index_share_topk_holder

        older = type("DSAttention", (dsa.DSAttention,), {"forward": forward})
        found = missing_hooks({**MODULES, "dsa": SimpleNamespace(**{**vars(dsa), "DSAttention": older})})
        assert "dsa.DSAttention.forward(position_ids)" in found and len(found) == 5

    def test_a_missing_branch_is_named_and_the_import_refused(self) -> None:
        def forward(
            self: Any, query: Any, key: Any, value: Any, attention_mask: Any, x: Any, qr: Any, position_ids: Any,
            attn_mask_type: Any, attention_bias: Any, packed_seq_params: Any, up_v_weight: Any,
        ) -> None:  # fmt: skip
            """No layer shares a selection here."""

        older = type("DSAttention", (dsa.DSAttention,), {"forward": forward})
        modules = {**MODULES, "dsa": SimpleNamespace(**{**vars(dsa), "DSAttention": older})}
        with pytest.raises(ImportError, match=r"megatron-core 0\.19\.2 lacks .*the branch that reads another layer's"):
            require_hooks(modules)

    def test_an_attention_that_ignores_the_selection_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attention = build_attention(Case())
        monkeypatch.setattr(dsa.DSAttention, "forward", lambda self, query, *args, **kwargs: query)
        with pytest.raises(RuntimeError, match="did not read the selection handed to it"):
            attention(**inputs(Case()), attention_mask=None, attn_mask_type=AttnMaskType.causal)


class TestSettings:
    def test_sizes_come_from_the_model(self) -> None:
        found = kpool_config(model_config(Case()), environ={})
        assert (found.hidden_size, found.q_lora_rank, found.index_topk) == (HIDDEN, LORA, TOPK)
        assert found.index_kpool == 4 and found.index_kpool_always_select_tail
        assert found.dsa_indexer_kpool_shard_queries_across_tp is False

    def test_without_low_rank_queries_they_come_from_the_hidden_states(self) -> None:
        assert kpool_config(model_config(Case(), q_lora_rank=None), environ={}).q_lora_rank == HIDDEN

    def test_a_size_the_model_lacks_is_named(self) -> None:
        with pytest.raises(ValueError, match="dsa_indexer_topk: expected a size"):
            kpool_config(model_config(Case(), dsa_indexer_topk=None))

    @pytest.mark.parametrize(
        ("explicit", "flag", "attribute", "environment", "expected"),
        [
            (None, None, None, None, False),
            (None, None, None, "1", True),
            (None, None, False, "1", False),
            (None, None, True, "0", True),
            (None, "--no-", True, "1", False),
            (None, "--", False, "0", True),
            (False, "--", True, "1", False),
            (True, "--no-", False, "0", True),
        ],
    )
    def test_who_decides(
        self, explicit: bool | None, flag: str | None, attribute: bool | None, environment: str | None, expected: bool
    ) -> None:
        name = "dsa_indexer_kpool_shard_queries_across_tp"
        parser = argparse.ArgumentParser()
        add_kpool_args(parser)
        args = parser.parse_args([] if flag is None else [f"{flag}dsa-indexer-kpool-shard-queries-across-tp"])
        config = model_config(Case())
        if attribute is not None:
            setattr(config, name, attribute)
        environ = {} if environment is None else {SHARD_QUERIES_ENV: environment}
        chosen = {} if explicit is None else {name: explicit}
        assert kpool_config(config, args=args, environ=environ, **chosen).shard_queries_across_tp is expected

    @pytest.mark.parametrize("environment", ["1", "0", ""])
    @pytest.mark.parametrize("said", [None, True, False])
    def test_the_module_reads_the_environment_once_and_only_if_nothing_was_said(
        self, environment: str, said: bool | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(SHARD_QUERIES_ENV, environment)

        def select(world: Any) -> None:
            case = Case(tp=2)
            mesh, config = Mesh.of(world, case), model_config(case)
            sizes = {"hidden_size": HIDDEN, "q_lora_rank": LORA, "index_topk": TOPK}
            sizes |= {"index_n_heads": config.dsa_indexer_n_heads, "index_head_dim": config.dsa_indexer_head_dim}
            options = KPoolConfig(**sizes, dsa_indexer_kpool_shard_queries_across_tp=said)
            for kpool in [options] if said is not None else [options, None]:
                core = kpool_dsa_module_spec(config, kpool=kpool).submodules.core_attention
                torch.manual_seed(0)
                groups = SimpleNamespace(tp=mesh.tp, cp=mesh.cp)
                indexer = build_module(core.submodules.indexer, config=config, pg_collection=groups)
                indexer(inputs(case)["x"], inputs(case)["qr"])

        on = said if said is not None else environment == "1"
        assert len(gathers(run(select, 2))) == (0 if not on else 2 if said is not None else 4)

    @pytest.mark.parametrize("attribute", [True, False])
    def test_an_attribute_of_the_config_fills_what_the_options_leave_open(self, attribute: bool) -> None:
        config = model_config(Case())
        options = KPoolConfig(**{name: getattr(kpool_config(config), name) for name in SIZES})
        config.dsa_indexer_kpool_shard_queries_across_tp = attribute
        assert resolve(config, options).shard_queries_across_tp is attribute
        said = options.replace(dsa_indexer_kpool_shard_queries_across_tp=not attribute)
        assert resolve(config, said).shard_queries_across_tp is not attribute

    def test_unknown_values_are_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SHARD_QUERIES_ENV, "maybe")
        with pytest.raises(ValueError, match=SHARD_QUERIES_ENV):
            kpool_config(model_config(Case()))

    def test_options_that_do_not_fit_the_model_are_refused(self) -> None:
        config = model_config(Case())
        groups = SimpleNamespace(tp=None, cp=None)
        for kpool, error, message in [
            (
                KPoolConfig(),
                ValueError,
                r"kpool\.hidden_size: expected 32 as hidden_size of the model's config, got 4096",
            ),
            ({"index_topk": 16}, TypeError, "kpool: expected a KPoolConfig or None, got dict"),
        ]:
            core = kpool_dsa_module_spec(config, kpool=kpool).submodules.core_attention  # type: ignore[arg-type]
            with pytest.raises(error, match=message):
                build_module(core.submodules.indexer, config=config, pg_collection=groups)


class TestSpec:
    def test_two_modules_are_exchanged_and_the_original_is_left_alone(self) -> None:
        config = model_config(Case())
        theirs = get_dsa_module_spec_for_backend(config=config, backend=KPoolLocalSpecProvider())
        kpool = kpool_config(config)
        ours = with_kpool(theirs, kpool=kpool, order="position")
        core = ours.submodules.core_attention
        assert core.module is KPoolDSAttention
        assert core.submodules.indexer.module is KPoolDSAIndexer
        assert core.submodules.indexer.params == {"kpool": kpool, "order": "position"}
        assert core.submodules.indexer.submodules == theirs.submodules.core_attention.submodules.indexer.submodules
        assert theirs.submodules.core_attention.module is dsa.DSAttention
        assert theirs.submodules.core_attention.submodules.indexer.module is dsa.DSAIndexer

    def test_whole_blocks(self) -> None:
        attention = get_dsa_module_spec_for_backend(config=model_config(Case()), backend=KPoolLocalSpecProvider())
        layers = [ModuleSpec(module=IdentityOp, submodules=TransformerLayerSubmodules(self_attention=attention))]
        block = with_kpool(TransformerBlockSubmodules(layer_specs=layers * 2 + [ModuleSpec(module=IdentityOp)]))
        for layer in block.layer_specs[:2]:
            assert layer.submodules.self_attention.submodules.core_attention.module is KPoolDSAttention

    def test_submodules_bound_to_a_class(self) -> None:
        attention = get_dsa_module_spec_for_backend(config=model_config(Case()), backend=KPoolLocalSpecProvider())
        layer = functools.partial(IdentityOp, submodules=TransformerLayerSubmodules(self_attention=attention))
        found = with_kpool(TransformerBlockSubmodules(layer_specs=[layer])).layer_specs[0].keywords["submodules"]
        assert found.self_attention.submodules.core_attention.module is KPoolDSAttention
        assert attention.submodules.core_attention.module is dsa.DSAttention

    def test_a_spec_without_sparse_attention_is_refused(self) -> None:
        with pytest.raises(ValueError, match="spec: expected a DSAttention in it, got none in ModuleSpec"):
            with_kpool(ModuleSpec(module=IdentityOp))

    def test_the_local_backend_refuses_what_it_cannot(self) -> None:
        config = model_config(Case())
        linear = KPoolLocalSpecProvider().linear()
        for wrong in ({"bias": True}, {"parallel_mode": "column"}):
            with pytest.raises(ValueError, match="DuplicatedLinear: expected no bias"):
                linear(4, 4, config=config, init_method=config.init_method, **wrong)
        config.layernorm_zero_centered_gamma = True
        with pytest.raises(ValueError, match="layernorm_zero_centered_gamma"):
            KPoolLocalSpecProvider().layer_norm(for_qk=True)(config, 8)
        assert KPoolLocalSpecProvider().layer_norm(rms_norm=True) is not None
