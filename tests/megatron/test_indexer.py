"""KPoolDSAIndexer and KPoolDSAAttention in one process: numbers, refusals, casts, marks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa, dsa_kernels
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kpool import KPoolConfig, KPoolIndexer
from kpool.integrations.megatron import KPoolDSAIndexer, KPoolDSAttention, kpool_dsa_module_spec
from kpool_testing import assert_replicated
from tests.megatron.support import (
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    LORA,
    POOL,
    TOPK,
    VALUE_DIM,
    Case,
    build_attention,
    hidden_tokens,
    inputs,
    model_config,
    packed_params,
    run,
)

pytestmark = pytest.mark.megatron

NAMES = {"linear_wq_b": "wq_b", "linear_wk": "wk", "linear_weights_proj": "weights_proj"}


def plain_indexer(indexer: Any) -> KPoolIndexer:
    """kpool's own indexer with the weights of the adapter's."""
    config = KPoolConfig(HIDDEN, LORA, INDEX_HEADS, INDEX_DIM, TOPK, POOL)
    ours = KPoolIndexer(config, batch_first=False).to(indexer.linear_wk.weight.dtype)
    state = {}
    for name, tensor in indexer.state_dict().items():
        head, _, rest = name.partition(".")
        state[".".join(part for part in (NAMES.get(head, head), rest) if part)] = tensor
    ours.load_state_dict(state)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("docs", [(), (13, 0, 3, 32)])
def test_equals_the_indexer_of_kpool(dtype: torch.dtype, docs: tuple[int, ...]) -> None:
    case = Case(dtype=dtype, docs=docs)
    indexer, given = build_attention(case).indexer, inputs(case)
    params = packed_params(case)
    cu_seqlens = params.cu_seqlens_q if params is not None else None
    expected = plain_indexer(indexer)(given["x"], given["qr"], cu_seqlens=cu_seqlens)
    found = indexer(given["x"], given["qr"], None, params)
    assert_replicated([expected, found])
    assert indexer.forward_with_scores(given["x"], given["qr"], None, params)[0] is None


def test_packed_tensors_may_lack_the_batch_dimension() -> None:
    case = Case(docs=(20, 28))
    indexer, given, params = build_attention(case).indexer, inputs(case), packed_params(case)
    expected = indexer(given["x"], given["qr"], None, params)
    assert_replicated([expected, indexer(given["x"], given["qr"][:, 0], None, params)])
    assert_replicated([expected, indexer(given["x"][:, 0], given["qr"][:, 0], None, params)])


def test_the_tail_can_be_left_out() -> None:
    case = Case(options={"index_kpool_always_select_tail": False})
    given = inputs(case)
    tokens = build_attention(case).indexer(given["x"], given["qr"])
    assert tokens.shape == (1, case.tokens, TOPK)
    assert_replicated([build_attention(Case()).indexer(given["x"], given["qr"])[..., :TOPK].contiguous(), tokens])


def test_padded_lengths_win() -> None:
    padded, plain = Case(docs=(13, 3, 20), padded=(16, 4, 24)), Case(docs=(16, 4, 24))
    indexer, given = build_attention(plain).indexer, inputs(plain)
    expected = indexer(given["x"], given["qr"], None, packed_params(plain))
    assert_replicated([expected, indexer(given["x"], given["qr"], None, packed_params(padded))])
    assert bool((expected[:, 44:] == -1).all())


def test_positions_of_sequence_local_rows_are_honoured() -> None:
    case = Case(tp=2, sp=True)
    positions = torch.randperm(case.tokens // 2, generator=torch.Generator().manual_seed(0)) * 2

    def select(world: Any) -> torch.Tensor:
        given = {name: tensor.chunk(2)[world.rank()] for name, tensor in inputs(case).items()}
        indexer = build_attention(case, world, None).indexer
        tokens: torch.Tensor = indexer.select(
            given["x"], given["qr"], query_rows=positions.numel(), position_ids=positions[None]
        )
        return tokens

    for tokens in run(select, 2).results:
        # an even position is never the last of its pool, so it is in the tail
        assert torch.equal(tokens[0].amax(-1).long(), positions)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dsa_indexer_scoring_relu", False),
        ("dsa_indexer_rotate_activation", True),
        ("dsa_indexer_k_norm_epsilon", 10.0),
    ],
)
def test_fields_of_the_model_are_honoured(field: str, value: Any) -> None:
    case = Case(tokens=203, dtype=torch.bfloat16)
    given = inputs(case)
    changed = Case(tokens=203, dtype=torch.bfloat16, config={field: value})
    indexer, other = build_attention(case).indexer, build_attention(changed).indexer
    k, k_other = (part.project_keys(given["x"])[0] for part in (indexer, other))
    assert torch.equal(k, k_other) is (field != "dsa_indexer_k_norm_epsilon")
    assert not torch.equal(indexer(given["x"], given["qr"]), other(given["x"], given["qr"]))


def test_keys_can_be_normalised_in_fp32() -> None:
    case = Case(dtype=torch.bfloat16, config={"dsa_indexer_k_norm_fp32": True})
    indexer, given = build_attention(case).indexer, inputs(case)
    indexer.k_norm.float()
    raw, _ = indexer.linear_wk(given["x"])
    dtypes: list[torch.dtype] = []
    indexer.k_norm.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
    k, _ = indexer.project_keys(given["x"])
    assert dtypes == [torch.float32]
    assert k.dtype is torch.bfloat16
    assert_replicated([indexer.k_norm(raw.float()).bfloat16(), k])


def test_an_additive_mask_decides() -> None:
    case = Case()
    indexer, given = build_attention(case).indexer, inputs(case)
    causal = torch.zeros(case.tokens, case.tokens).masked_fill(
        torch.ones(case.tokens, case.tokens).triu(1) > 0, -torch.inf
    )
    assert_replicated([indexer(given["x"], given["qr"]), indexer(given["x"], given["qr"], causal)])
    with pytest.raises(ValueError, match="mask: expected none with packed_seq_params"):
        indexer(given["x"], given["qr"], causal, packed_params(Case(docs=(48,))))


def test_needs_no_gpu() -> None:
    """Nothing of kpool's asks for the current CUDA device, which Megatron's rotary embedding does."""
    with mock.patch("torch.cuda.current_device", side_effect=RuntimeError("no GPU")):
        with pytest.raises(RuntimeError, match="no GPU"):
            RotaryEmbedding(8, 1.0, cp_group=SimpleNamespace(size=lambda: 1))(4)
        case = Case(batch=2)
        options = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal}
        assert build_attention(case)(**inputs(case), **options).shape[:2] == (case.tokens, case.batch)


def test_no_gradient_reaches_the_inputs_of_the_indexer() -> None:
    case = Case()
    attention, given = build_attention(case), inputs(case)
    for tensor in given.values():
        tensor.requires_grad_()
    attention(**given, attention_mask=None, attn_mask_type=AttnMaskType.causal).sum().backward()
    assert given["x"].grad is None and given["qr"].grad is None
    assert given["query"].grad is not None and given["key"].grad is not None


def test_no_selection_is_kept_after_a_call() -> None:
    """At 512k tokens one is 4 GiB."""
    attention = build_attention(Case())
    options = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal}
    attention(**inputs(Case()), **options)
    assert not [name for name, value in vars(attention).items() if isinstance(value, torch.Tensor)]


def test_parameters_are_frozen_and_marked() -> None:
    indexer = build_attention(Case()).indexer
    names = dict(indexer.named_parameters())
    assert {"index_kpool_compress_ape", "index_kpool_compress_gate", "linear_wk.weight", "k_norm.bias"} <= set(names)
    for name, parameter in names.items():
        assert parameter.average_gradients_across_tp_domain, name
        assert not parameter.requires_grad, name


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_the_slot_bias_survives_the_cast_of_the_model(half: str) -> None:
    attention = build_attention(Case())
    before = attention.indexer.index_kpool_compress_ape.detach().clone()
    wrapped = Float16Module(
        SimpleNamespace(**{"bf16": False, "fp16": False, half: True}, virtual_pipeline_model_parallel_size=None),
        attention,
    )
    indexer = wrapped.module.indexer
    assert torch.equal(indexer.index_kpool_compress_ape, before)
    assert indexer.index_kpool_compress_ape.average_gradients_across_tp_domain
    dtype = torch.bfloat16 if half == "bf16" else torch.float16
    others = [p for name, p in indexer.named_parameters() if "ape" not in name]
    assert all(parameter.dtype is dtype for parameter in others)
    given = {name: tensor.to(dtype) for name, tensor in inputs(Case()).items()}
    output = attention(**given, attention_mask=None, attn_mask_type=AttnMaskType.causal)
    assert output.dtype is dtype


def test_the_width_suits_the_kernels() -> None:
    case = Case()
    config = model_config(case)
    config.dsa_kernel_backend = "tilelang"
    submodules = kpool_dsa_module_spec(config).submodules.core_attention.submodules.indexer.submodules
    groups = SimpleNamespace(tp=None, cp=None)
    given = inputs(case)
    for options, width in [({}, 64), ({"width_multiple": 1}, TOPK + POOL - 1)]:
        indexer = KPoolDSAIndexer(
            config, submodules, groups, kpool=KPoolConfig(HIDDEN, LORA, INDEX_HEADS, INDEX_DIM, TOPK, POOL), **options
        )
        tokens = indexer(given["x"], given["qr"])
        assert tokens.shape == (1, case.tokens, width)
        assert (tokens[..., TOPK + POOL - 1 :] == -1).all()


def test_fused_sparse_attention_is_kept_and_token_selection_is_not_entered() -> None:
    case = Case(config={"kv_lora_rank": 16})
    attention, given = build_attention(case), inputs(case)
    make = torch.Generator().manual_seed(0)
    given["query"] = torch.randn(case.tokens, 1, HEADS, 16, generator=make)
    given["key"] = torch.randn(case.tokens, 1, 1, 16, generator=make)
    given["value"] = None
    options = {"up_v_weight": torch.randn(HEADS, 8, 16, generator=make), "attention_mask": None}
    options["attn_mask_type"] = AttnMaskType.causal
    expected = attention(**given, **options)
    refused = mock.Mock(side_effect=AssertionError("token-level kernel entered"))
    with (
        mock.patch.object(dsa_kernels, "use_fused_dsa_kernels", return_value=True),
        mock.patch.object(dsa_kernels, "run_fused_dsa_attention", refused),
        mock.patch.object(dsa_kernels, "run_fused_qk_topk", refused),
        mock.patch.object(dsa_kernels, "run_fused_absorbed_sparse_attention", return_value=None) as fused,
    ):
        assert_replicated([expected, attention(**given, **options)])  # a kernel may decline; Megatron falls back
    assert fused.call_count == 1
    handed = fused.call_args.args[3]
    assert_replicated([handed, attention.indexer(given["x"], given["qr"])])


def call(case: Case, **changes: Any) -> torch.Tensor:
    """One attention call with some arguments changed."""
    options: dict[str, Any] = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal, **inputs(case)}
    output: torch.Tensor = build_attention(case)(**{**options, **changes})
    return output


def test_what_the_attention_would_ignore_is_refused() -> None:
    case = Case()
    holes = hidden_tokens(case)
    causal = torch.ones(1, 1, case.tokens, case.tokens, dtype=torch.bool).triu(1)
    packed = packed_params(Case(docs=(48,)))
    plain = call(case)
    for fits in ({"attention_mask": causal}, {"position_ids": torch.arange(48)[None]}):
        assert_replicated([plain, call(case, **fits)])
    refused: dict[str, dict[str, Any]] = {
        "attention_mask: expected the causal one": {"attention_mask": holes},
        "attention_mask: expected one": {"attn_mask_type": None},
        "attention_mask: expected none with packed": {
            "attn_mask_type": None,
            "attention_mask": holes,
            "packed_seq_params": packed,
        },
        r"attention_mask: expected \[B, 1, S, T\]": {"attn_mask_type": None, "attention_mask": holes[..., :8]},
        "attn_mask_type: expected causal": {"attn_mask_type": AttnMaskType.padding},
        "position_ids: expected 0": {"position_ids": (torch.arange(48) % 24)[None]},
        "attention_bias: expected None": {"attention_bias": torch.zeros(1)},
        "query: expected 48 rows": {"query": inputs(case)["query"][:7]},
        "qr: expected leading shape": {"qr": inputs(case)["qr"][:7]},
    }
    for message, changes in refused.items():
        with pytest.raises(ValueError, match=message):
            call(case, **changes)


def test_a_mask_with_holes_is_honoured() -> None:
    case = Case(batch=2)
    hidden = hidden_tokens(case)
    attention, given = build_attention(case), inputs(case)
    tokens = attention.indexer.select(given["x"], given["qr"], attn_mask_type=None, attention_mask=hidden).long()
    shown = (~hidden[:, 0]).gather(2, tokens.clamp_min(0))
    assert bool(shown[tokens >= 0].all())
    assert not torch.equal(call(case), call(case, attn_mask_type=None, attention_mask=hidden))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dsa_indexer_loss_coeff": 0.1}, "dsa_indexer_loss_coeff: expected 0 or None"),
        ({"qk_pos_emb_head_dim": 8}, "qk_pos_emb_head_dim: expected 0"),
    ],
)
def test_models_it_does_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_attention(Case(config=fields))


def test_a_loss_turned_on_later_is_refused() -> None:
    case = Case()
    attention = build_attention(case)
    attention.config.dsa_indexer_loss_coeff = 1.0
    with pytest.raises(ValueError, match="dsa_indexer_loss_coeff"):
        attention(**inputs(case), attention_mask=None, attn_mask_type=AttnMaskType.causal)


def test_halves_do_not_go_with_megatrons_own() -> None:
    config = model_config(Case())
    spec = kpool_dsa_module_spec(config).submodules.core_attention
    groups = SimpleNamespace(tp=None, cp=None)
    args = (config, spec.submodules, 1, AttnMaskType.causal, "self")
    mixed = dsa.DSAttention(*args, pg_collection=groups)
    case = Case()
    with pytest.raises(RuntimeError, match="expected KPoolDSAttention around it"):
        mixed(**inputs(case), attention_mask=None, attn_mask_type=AttnMaskType.causal)
    spec.submodules.indexer = ModuleSpec(module=SimpleIndexer)
    with pytest.raises(TypeError, match=r"submodules\.indexer: expected KPoolDSAIndexer, got SimpleIndexer"):
        KPoolDSAttention(*args, pg_collection=groups)


class SimpleIndexer(torch.nn.Module):
    """Any other indexer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()


@pytest.mark.parametrize("sp", [False, True])
def test_the_indexer_alone_shares_rows_too(sp: bool) -> None:
    from tests.megatron.support import check_gathers

    case = Case(tp=2, sp=sp, flag=True, batch=2)

    def select(world: Any) -> torch.Tensor:
        indexer = build_attention(case, world, None).indexer
        given = inputs(case)
        x, qr = ((t.chunk(2)[world.rank()] if sp else t) for t in (given["x"], given["qr"]))
        tokens: torch.Tensor = indexer(x, qr)
        return tokens

    found = run(select, 2)
    check_gathers(found, case)
    given = inputs(case)
    assert_replicated([build_attention(Case(batch=2)).indexer(given["x"], given["qr"]), *found.results])


@pytest.mark.parametrize("docs", [(), (20, 28)])
def test_no_value_is_read_back_to_the_host(docs: tuple[int, ...], device: torch.device) -> None:
    """Fake tensors have no values: whatever asks for one, as a stall of the GPU would, raises."""
    case = Case(docs=docs)
    attention, given, params = build_attention(case), inputs(case), packed_params(case)
    options = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal, "packed_seq_params": params}
    with FakeTensorMode():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)

        for module in attention.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, torch.nn.Parameter(fake(parameter), requires_grad=False))
        if params is not None:
            params.cu_seqlens_q = params.cu_seqlens_kv = fake(params.cu_seqlens_q)
        output = attention(**{name: fake(tensor) for name, tensor in given.items()}, **options)
        with pytest.raises(DataDependentOutputException):
            output.sum().item()
    assert output.device.type == device.type
    assert output.shape == (case.tokens, case.batch, HEADS * VALUE_DIM)
