"""`KPoolIndexer`: parameters, checkpoints, layouts, padding, packed documents, incremental decoding."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kpool_testing
from kpool.config import KPoolConfig
from kpool.indexer import IndexerCache, KPoolIndexer
from kpool.linear import row_linear
from kpool.ops import fused_qk_topk_kpool

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "q_lora_rank": 24,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 24,
    "index_kpool": 4,
}
NAMES = {
    "wq_b.weight",
    "wk.weight",
    "k_norm.weight",
    "k_norm.bias",
    "weights_proj.weight",
    "index_kpool_compress_ape",
    "index_kpool_compress_gate",
}


def make(numerics: str = "megatron", dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> KPoolIndexer:
    """A random indexer whose slot bias and gate matter; sizes may be overridden through `options`."""
    sizes = {name: options.pop(name) for name in list(options) if name in KPoolConfig.__dataclass_fields__}
    module = KPoolIndexer(KPoolConfig(**{**SIZES, **sizes}), numerics, **options)
    gen = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        scale = 1.0 if value.dim() == 1 or "ape" in name else value.shape[1] ** -0.5
        value.data = torch.randn(value.shape, generator=gen) * scale
    return module.to(dtype)


def draw(module: KPoolIndexer, batch: int, rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """hidden_states `[B, S, hidden]` and q_resid `[B, S, q_lora]` in the dtype of the module."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, rows, module.config.hidden_size, generator=gen)
    r = torch.randn(batch, rows, module.config.q_lora_rank, generator=gen)
    return x.to(module.wk.weight.dtype), r.to(module.wk.weight.dtype)


def step_through(
    module: KPoolIndexer, x: Tensor, r: Tensor, mask: Tensor | None, steps: list[int]
) -> tuple[Tensor, IndexerCache]:
    """The rows of all steps, one call each, with a cache."""
    cache, parts, done = IndexerCache(), [], 0
    for step in steps:
        new = slice(done, done + step)
        done += step
        parts.append(module(x[:, new], r[:, new], None if mask is None else mask[:, new], cache))
    return torch.cat(parts, dim=1), cache


class TestParameters:
    def test_names_are_those_of_the_checkpoint(self) -> None:
        assert set(make().state_dict()) == NAMES

    @pytest.mark.hf
    @pytest.mark.parametrize("numerics", ["megatron", "hf"])
    def test_loads_hugging_face_strictly(self, numerics: str) -> None:
        from tests import glm5

        theirs = glm5.hf_indexer(glm5.text_config())
        ours = KPoolIndexer(KPoolConfig.from_hf(theirs.config), numerics)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        for name, value in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], value)

    def test_frozen(self) -> None:
        module = make()
        assert not any(p.requires_grad for p in module.parameters())
        x, r = draw(module, 1, 9)
        module.requires_grad_(True)
        assert not module(x.requires_grad_(), r.requires_grad_()).requires_grad

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_slot_bias_stays_fp32_under_a_cast(self, dtype: torch.dtype) -> None:
        module = make("megatron")
        before = module.index_kpool_compress_ape.detach().clone()
        holder = torch.nn.Sequential(module).to(dtype)
        assert module.wk.weight.dtype is dtype
        assert module.index_kpool_compress_ape.dtype is torch.float32
        assert torch.equal(module.index_kpool_compress_ape, before)
        assert holder.half()[0].index_kpool_compress_ape.dtype is torch.float32
        assert module.bfloat16()(*draw(module, 1, 9)).shape == (1, 9, 27)

    def test_slot_bias_is_cast_as_hugging_face_does(self) -> None:
        assert make("hf").to(torch.bfloat16).index_kpool_compress_ape.dtype is torch.bfloat16

    def test_moves_to_meta_and_back(self) -> None:
        module = make().to("meta")
        assert module.index_kpool_compress_ape.device.type == "meta"
        assert module.to_empty(device="cpu").index_kpool_compress_ape.dtype is torch.float32

    def test_deepcopy_selects_the_same(self) -> None:
        module = make()
        assert torch.equal(module(*draw(module, 2, 40)), copy.deepcopy(module)(*draw(module, 2, 40)))


class TestAgainstTheOperation:
    """The module is projections plus the operation: written out once more, with plain torch."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("numerics", ["megatron", "hf"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_same_rows(self, numerics: str, dtype: torch.dtype, packed: bool) -> None:
        module = make(numerics, dtype, order="score")
        x, r = draw(module, 2, 100)
        cu = torch.tensor([0, 37, 37, 40, 97], dtype=torch.int32) if packed else None
        linear = torch.nn.functional.linear
        if numerics == "hf":
            weights = linear(x, module.weights_proj.weight).float() * 8**-0.5
        else:
            weights = linear(x.float(), module.weights_proj.weight.float()) * (8**-0.5 * 16**-0.5)
        rows = torch.arange(100, dtype=torch.int32)
        bounds = {} if packed else {"varlen_starts": torch.zeros_like(rows), "varlen_ends": rows + 1}
        _, expected = fused_qk_topk_kpool(
            linear(r, module.wq_b.weight).unflatten(-1, (8, 16)).transpose(0, 1),
            module.k_norm(linear(x, module.wk.weight)).transpose(0, 1),
            weights.transpose(0, 1),
            24,
            4,
            linear(x, module.index_kpool_compress_gate).transpose(0, 1),
            module.index_kpool_compress_ape,
            cu_seqlens_kv=cu,
            return_index_scores=False,
            numerics=numerics,
            **bounds,
        )
        assert torch.equal(module(x, r, cu_seqlens=cu), expected)

    def test_the_two_numerics_differ_somewhere(self) -> None:
        """Otherwise the switch would be decoration."""
        a, b = make("megatron"), make("hf")
        assert not torch.equal(a(*draw(a, 2, 400)), b(*draw(b, 2, 400)))


class TestLayouts:
    @pytest.mark.parametrize("numerics", ["megatron", "hf"])
    def test_sequence_first_is_batch_first_transposed(self, numerics: str) -> None:
        module, turned = make(numerics), make(numerics, batch_first=False)
        x, r = draw(module, 3, 70)
        mask = torch.arange(70) >= torch.tensor([0, 3, 50])[:, None]
        expected = module(x, r, mask)
        assert torch.equal(turned(x.transpose(0, 1), r.transpose(0, 1), mask), expected)
        assert torch.equal(turned(x.transpose(0, 1), r.transpose(0, 1)), module(x, r))

    @pytest.mark.parametrize("tail, width", [(True, 27), (False, 24)])
    @pytest.mark.parametrize("rows", [0, 1, 3, 4, 50])
    def test_width_never_changes(self, tail: bool, width: int, rows: int) -> None:
        module = make(index_kpool_always_select_tail=tail)
        assert module(*draw(module, 2, rows)).shape == (2, rows, width)
        wide = make(index_kpool_always_select_tail=tail, width_multiple=64)
        assert wide(*draw(wide, 2, rows)).shape == (2, rows, 64)

    def test_orders_hold_the_same_sets(self) -> None:
        a, b = make(order="score"), make(order="position")
        x, r = draw(a, 2, 300)
        assert torch.equal(a(x, r).sort(-1).values, b(x, r).sort(-1).values)
        assert not torch.equal(a(x, r), b(x, r))

    @given(st.lists(st.integers(0, 60), min_size=1, max_size=3), st.integers(1, 60))
    @settings(max_examples=8)
    def test_left_padding_is_a_shift(self, pads: list[int], rows: int) -> None:
        """Each padded row holds what the unpadded sequence selects, moved by the padding; padded rows hold nothing."""
        module = make()
        total = rows + max(pads)
        x, r = draw(module, len(pads), total)
        mask = torch.arange(total) >= torch.tensor(pads)[:, None]
        got = module(x, r, mask)
        for b, pad in enumerate(pads):
            alone = module(x[b : b + 1, pad:], r[b : b + 1, pad:])[0]
            assert torch.equal(got[b, pad:], torch.where(alone >= 0, alone + pad, -1))
            assert bool((got[b, :pad] == -1).all())

    @given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 3))
    @settings(max_examples=8)
    def test_packed_documents_are_calls_of_their_own(self, lengths: list[int], padding: int) -> None:
        module = make()
        cu = torch.tensor([0, *lengths]).cumsum(0)
        total = sum(lengths) + padding
        x, r = draw(module, 1, total)
        got = module(x, r, cu_seqlens=cu)
        for begin, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
            alone = module(x[:, begin:end], r[:, begin:end])
            assert torch.equal(got[:, begin:end], torch.where(alone >= 0, alone + begin, -1))
        assert bool((got[:, total - padding :] == -1).all())

    @pytest.mark.parametrize("numerics", ["megatron", "hf"])
    @pytest.mark.parametrize("row_tile", [64, None])
    @pytest.mark.parametrize("grad", [False, True])
    def test_autocast_rounds_nothing(self, numerics: str, row_tile: int | None, grad: bool) -> None:
        """Scores are fp32 sums; bf16 head weights or queries would select other tokens."""
        module = make(numerics, row_tile=row_tile).requires_grad_(grad)
        x, r = (t.transpose(0, 1) for t in draw(module, 2, 70))
        plain = (*module.project_queries(x, r), *module.project_keys(x))
        with torch.autocast("cpu", torch.bfloat16):
            cast = (*module.project_queries(x, r), *module.project_keys(x))
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(plain, cast, strict=True))

    def test_no_default_device_is_assumed(self) -> None:
        module = make()
        x, r = draw(module, 2, 70)
        mask = torch.arange(70) >= torch.tensor([0, 9])[:, None]
        whole = module(x, r, mask)
        with torch.device("meta"):
            assert torch.equal(module(x, r, mask), whole)


class TestDecoding:
    @given(
        st.lists(st.integers(1, 40) | st.just(1), min_size=1, max_size=12),
        st.lists(st.integers(0, 30), min_size=1, max_size=3),
        st.sampled_from([1, 2, 4, 16]),
        st.sampled_from(["megatron", "hf"]),
        st.booleans(),
        st.booleans(),
    )
    @settings(max_examples=16)
    def test_steps_equal_one_call_to_the_bit(
        self, steps: list[int], pads: list[int], pool_size: int, numerics: str, bf16: bool, masked: bool
    ) -> None:
        """Any split of the tokens into calls gives the rows of one call, with and without left padding."""
        dtype = torch.bfloat16 if bf16 else torch.float32
        module = make(numerics, dtype, index_kpool=pool_size, index_topk=6 * pool_size)
        total = sum(steps)
        x, r = draw(module, len(pads), total)
        mask = torch.arange(total) >= torch.tensor(pads)[:, None] if masked else None
        rows, cache = step_through(module, x, r, mask, steps)
        assert torch.equal(rows, module(x, r, mask))
        assert cache.length == total

    @pytest.mark.slow
    def test_projections_of_the_released_size(self) -> None:
        """hidden 4096, H=32, D=128: one row at a time has the bits of a prompt (a plain product has not)."""
        module = make(hidden_size=4096, q_lora_rank=1536, index_n_heads=32, index_head_dim=128, index_topk=16)
        x, r = draw(module, 1, 70)
        rows, _ = step_through(module, x, r, None, [66, 1, 1, 2])
        assert torch.equal(rows, module(x, r))
        plain = torch.nn.functional.linear
        assert not torch.equal(plain(x[:, :1], module.wk.weight), plain(x, module.wk.weight)[:, :1])
        x, r = x[0][:, None], r[0][:, None]  # sequence first
        for row in (0, 33, 69):  # the selection above could forgive a last bit; the projections must not differ in one
            alone = slice(row, row + 1)
            pairs = [*zip(module.project_keys(x[alone]), module.project_keys(x), strict=True)]
            pairs += zip(module.project_queries(x[alone], r[alone]), module.project_queries(x, r), strict=True)
            assert all(torch.equal(one, many[alone]) for one, many in pairs)

    def test_cache_holds_pooled_keys_and_the_open_pool(self) -> None:
        """Memory per token is D / P elements, not 2 D: no raw key outlives its pool."""
        module = make()
        x, r = draw(module, 2, 403)
        _, cache = step_through(module, x, r, None, [400, 1, 1, 1])
        kept = sum(t.numel() for t in vars(cache).values() if isinstance(t, Tensor))
        assert kept < 2 * (403 // 4 + 110) * 16 + 2 * 2 * 3 * 16 + 8  # doubling leaves room for one more prompt
        assert cache.valid().shape == (2, 403)

    def test_reset_forgets(self) -> None:
        module = make()
        x, r = draw(module, 1, 30)
        _, cache = step_through(module, x, r, None, [30])
        cache.reset()
        assert torch.equal(module(x, r, None, cache), module(x, r))

    def test_reorder_follows_beams(self) -> None:
        module = make()
        x, r = draw(module, 3, 50)
        mask = torch.arange(50) >= torch.tensor([0, 5, 11])[:, None]
        _, cache = step_through(module, x[:, :49], r[:, :49], mask[:, :49], [40, 9])
        beams = torch.tensor([2, 2, 0])
        cache.reorder(beams)
        assert torch.equal(module(x[beams, 49:], r[beams, 49:], None, cache), module(x, r, mask)[beams, 49:])

    def test_a_mask_may_come_late_or_stop(self) -> None:
        """None after a padded prompt means the new tokens are valid."""
        module = make()
        x, r = draw(module, 2, 40)
        mask = torch.arange(40) >= torch.tensor([0, 7])[:, None]
        cache = IndexerCache()
        rows = [module(x[:, :30], r[:, :30], mask[:, :30], cache)]
        rows += [module(x[:, 30:], r[:, 30:], None, cache)]
        assert torch.equal(torch.cat(rows, 1), module(x, r, mask))

    def test_holes_are_refused(self) -> None:
        module = make()
        x, r = draw(module, 2, 12)
        mask = torch.ones(2, 12, dtype=torch.bool)
        mask[1, 5] = False
        with pytest.raises(ValueError, match="got a hole in row 1"):
            module(x, r, mask)
        cache = IndexerCache()
        module(x[:, :6], r[:, :6], mask[:, :6], cache)
        with pytest.raises(ValueError, match="got a hole in row 1"):
            module(x[:, 6:], r[:, 6:], mask[:, 6:], cache)

    def test_a_batch_cannot_change_its_size(self) -> None:
        module = make()
        x, r = draw(module, 2, 12)
        _, cache = step_through(module, x, r, None, [12])
        with pytest.raises(ValueError, match="cache: expected batch 2"):
            module(x[:1], r[:1], None, cache)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (make(index_kpool=2), "cache: expected pool size 4 as in earlier calls, got 2"),
            (make(index_head_dim=8), "cache: expected index_head_dim 16 as in earlier calls, got 8"),
            (make("hf"), "cache: expected pooled keys of torch.bfloat16 as in earlier calls, got torch.float32"),
            (make(dtype=torch.bfloat16), "cache: expected keys of torch.float32 as in earlier calls, got torch.bf"),
        ],
    )
    def test_a_cache_belongs_to_one_layer(self, other: KPoolIndexer, message: str) -> None:
        module, cache = make(), IndexerCache()
        module(*draw(module, 1, 9), None, cache)
        with pytest.raises(ValueError, match=message):
            other(*draw(other, 1, 1), None, cache)
        assert cache.length == 9


class TestSharding:
    @pytest.mark.parametrize("plan", ["contiguous", "block_cyclic"])
    @pytest.mark.parametrize("kind", ["plain", "padded", "packed", "decode"])
    def test_every_rank_returns_the_unsharded_rows(self, kind: str, plan: str) -> None:
        whole, module = make(), make(shard_plan=plan)
        x, r = draw(module, 2, 90)
        mask = torch.arange(90) >= torch.tensor([0, 13])[:, None] if kind == "padded" else None
        cu = torch.tensor([0, 50, 90]) if kind == "packed" else None
        expected = whole(x, r, mask, cu_seqlens=cu)

        def rank(group: Any) -> Tensor:
            if kind != "decode":
                return module(x, r, mask, cu_seqlens=cu, query_shard_group=group)
            cache = IndexerCache()
            parts = [module(x[:, :86], r[:, :86], None, cache, query_shard_group=group)]
            parts += [
                module(x[:, s : s + 1], r[:, s : s + 1], None, cache, query_shard_group=group) for s in range(86, 90)
            ]
            return torch.cat(parts, 1)

        for result in kpool_testing.replay(rank, 3).results:
            assert torch.equal(result, expected)

    def test_check_replicated_every_n_calls(self) -> None:
        module = make(check_replicated=2)
        x, r = draw(module, 1, 20)

        def rank(group: Any) -> None:
            mine = copy.deepcopy(module)
            for call in range(2):
                mine(x + 1 if group.rank() == 1 and call == bad else x, r, query_shard_group=group)

        bad = 1
        kpool_testing.simulate(rank, 3)
        bad = 0
        with pytest.raises(Exception, match=r"rank \[1\] differ"):
            kpool_testing.simulate(rank, 3)

    def test_check_replicated_covers_mask_and_documents(self) -> None:
        """They reach neither q nor the pooled keys, but decide what a row may select and which tail it gets."""
        module = make(check_replicated=1)
        x, r = draw(module, 2, 23)
        whole, short = torch.ones(2, 23, dtype=torch.bool), torch.ones(2, 23, dtype=torch.bool)
        short[1, 22] = False  # three tokens of no pool, or two: the pools are the same

        def masked(group: Any) -> Tensor:
            return module(x, r, short if group.rank() == 1 else whole, query_shard_group=group)

        def packed(group: Any) -> Tensor:
            documents = torch.tensor([0, 8, 22 if group.rank() == 2 else 23])
            return module(x, r, cu_seqlens=documents, query_shard_group=group)

        with pytest.raises(Exception, match=r"identical end of visible slots .* rank \[1\] differ.* dim 0\): 22"):
            kpool_testing.replay(masked, 3)
        with pytest.raises(Exception, match=r"identical first visible slot .* rank \[2\] differ.* dim 0\): 22"):
            kpool_testing.replay(packed, 3)


class TestArguments:
    def test_constructor(self) -> None:
        config = KPoolConfig(**SIZES)
        with pytest.raises(TypeError, match="config: expected a KPoolConfig"):
            KPoolIndexer(SIZES)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="numerics: expected one of"):
            KPoolIndexer(config, "fp8")
        for option in ("order", "impl", "shard_plan"):
            with pytest.raises(ValueError, match=f"{option}: expected one of"):
                KPoolIndexer(config, **{option: "random"})
        with pytest.raises(ValueError, match="width_multiple: expected a positive int, got 0"):
            KPoolIndexer(config, width_multiple=0)
        assert "topk=24, pool=4" in repr(KPoolIndexer(config))

    @pytest.mark.parametrize(
        "change, error, text",
        [
            ({"hidden_states": torch.zeros(2, 9, 47)}, ValueError, r"hidden_states: expected \[B, S, 48\]"),
            ({"hidden_states": torch.zeros(9, 48)}, ValueError, "hidden_states: expected"),
            ({"hidden_states": torch.zeros(2, 9, 48).half()}, TypeError, "hidden_states: expected torch.float32"),
            ({"q_resid": torch.zeros(2, 8, 24)}, ValueError, "q_resid: expected leading shape"),
            ({"attention_mask": torch.ones(2, 9)}, TypeError, "attention_mask: expected torch.bool"),
            ({"attention_mask": torch.ones(2, 8).bool()}, ValueError, r"expected \[B, S\] = \[2, 9\]"),
            ({"attention_mask": torch.ones(2, 9).bool(), "cu_seqlens": torch.tensor([0, 9])}, ValueError, "cu_seqlens"),
            ({"cache": IndexerCache(), "cu_seqlens": torch.tensor([0, 9])}, ValueError, "cu_seqlens"),
            ({"cu_seqlens": torch.tensor([0, 10])}, ValueError, "cu_seqlens"),
        ],
    )
    def test_forward(self, change: dict[str, Any], error: type[Exception], text: str) -> None:
        arguments: dict[str, Any] = {"hidden_states": torch.zeros(2, 9, 48), "q_resid": torch.zeros(2, 9, 24)}
        with pytest.raises(error, match=text):
            make()(**{**arguments, **change})

    def test_empty_cache_has_no_slots(self) -> None:
        with pytest.raises(ValueError, match="got an empty cache"):
            IndexerCache().valid()
        IndexerCache().reorder(torch.tensor([0]))  # nothing to reorder is no error

    def test_row_tile(self) -> None:
        with pytest.raises(ValueError, match="tile: expected at least 1"):
            row_linear(torch.zeros(2, 3), torch.zeros(4, 3), tile=0)

    def test_row_linear_has_the_gradient_of_linear(self) -> None:
        x = torch.randn(2, 35, 8, dtype=torch.float64, requires_grad=True)
        w = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(5, dtype=torch.float64)
        mine = torch.autograd.grad(row_linear(x, w, bias, tile=16).square().sum(), (x, w))
        plain = torch.autograd.grad(torch.nn.functional.linear(x, w, bias).square().sum(), (x, w))
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a, b)
        with torch.no_grad():
            torch.testing.assert_close(row_linear(x, w, bias, tile=16), torch.nn.functional.linear(x, w, bias))


class TestCheckpoint:
    """`from_pretrained` on directories as `save_pretrained` leaves them."""

    @staticmethod
    def write(folder: Path, files: int, index: bool, dtype: torch.dtype = torch.bfloat16) -> dict[int, KPoolIndexer]:
        """Two layers with an indexer, among other tensors, spread over `files` files."""
        from safetensors.torch import save_file

        layers = {layer: make(seed=layer).to(dtype) for layer in (3, 13)}
        tensors: dict[str, Tensor] = {"model.layers.3.self_attn.q_a_proj.weight": torch.zeros(2, 2)}
        for layer, module in layers.items():
            for name, value in module.state_dict().items():
                tensors[f"model.language_model.layers.{layer}.self_attn.indexer.{name}"] = value.to(dtype)
        names, weight_map = sorted(tensors), {}
        for file in range(files):
            name = "model.safetensors" if files == 1 else f"model-{file + 1:05d}-of-{files:05d}.safetensors"
            save_file({key: tensors[key] for key in names[file::files]}, folder / name)
            weight_map.update(dict.fromkeys(names[file::files], name))
        if index:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (folder / "config.json").write_text(json.dumps({"model_type": "glm5_next", "text_config": SIZES}))
        return layers

    @pytest.mark.parametrize("files, index", [(1, False), (1, True), (3, False), (3, True)])
    def test_reads_one_layer(self, tmp_path: Path, files: int, index: bool) -> None:
        layers = self.write(tmp_path, files, index)
        for layer, original in layers.items():
            module = KPoolIndexer.from_pretrained(tmp_path, layer)
            assert module.wk.weight.dtype is torch.bfloat16
            assert module.index_kpool_compress_ape.dtype is torch.float32
            for name, value in original.state_dict().items():
                assert torch.equal(module.state_dict()[name], value.bfloat16().to(module.state_dict()[name].dtype))
            assert not module.training

    def test_options_arrive(self, tmp_path: Path) -> None:
        self.write(tmp_path, 1, False)
        module = KPoolIndexer.from_pretrained(str(tmp_path), 3, numerics="hf", batch_first=False, order="position")
        assert (module.numerics, module.batch_first, module.order) == ("hf", False, "position")
        assert module.index_kpool_compress_ape.dtype is torch.bfloat16
        (tmp_path / "config.json").unlink()
        config = KPoolConfig(**SIZES)
        assert KPoolIndexer.from_pretrained(tmp_path, 3, config=config).config is config

    def test_only_the_files_that_hold_the_layer_are_opened(self, tmp_path: Path) -> None:
        self.write(tmp_path, 1, True)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        index["weight_map"]["model.layers.0.mlp.weight"] = "not-downloaded.safetensors"
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        KPoolIndexer.from_pretrained(tmp_path, 13)

    def test_errors_say_what_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no such directory"):
            KPoolIndexer.from_pretrained(tmp_path / "nowhere", 3)
        with pytest.raises(FileNotFoundError, match=r"no \*.safetensors file"):
            KPoolIndexer.from_pretrained(tmp_path, 3)
        self.write(tmp_path, 2, True)
        with pytest.raises(ValueError, match="layer 4 has no indexer; layers that have one: 3, 13"):
            KPoolIndexer.from_pretrained(tmp_path, 4)
        with pytest.raises(ValueError, match="does not fit the configuration"):
            KPoolIndexer.from_pretrained(tmp_path, 3, config=KPoolConfig(**{**SIZES, "index_n_heads": 4}))
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match="the index names this file"):
            KPoolIndexer.from_pretrained(tmp_path, 3)
        (tmp_path / "config.json").write_text("{")
        with pytest.raises(ValueError, match="not JSON"):
            from kpool.checkpoint import read_config

            read_config(tmp_path)
        (tmp_path / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match="pass config="):
            read_config(tmp_path)

    def test_a_tensor_too_many_or_too_few_is_an_error(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file, save_file

        self.write(tmp_path, 1, False)
        tensors = load_file(tmp_path / "model.safetensors")
        prefix = "model.language_model.layers.3.self_attn.indexer."
        save_file({**tensors, prefix + "wk.weight_scale_inv": torch.ones(1)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="weight_scale_inv"):
            KPoolIndexer.from_pretrained(tmp_path, 3)
        del tensors[prefix + "k_norm.bias"]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"k_norm\.bias"):
            KPoolIndexer.from_pretrained(tmp_path, 3)
