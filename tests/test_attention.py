"""`KPoolSparseAttention`: equal to the Hugging Face layer on one rank, and to itself however the ranks divide the work.

On many ranks three things are shown for every way of dividing: the flag changes no bit of selection, output or
gradient; selections are those of one rank, bit for bit; and the call record holds the int32 gather of the selection if
and only if it should.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kpool.attention import AttentionShape, KPoolSparseAttention
from kpool.config import KPoolConfig
from kpool.indexer import IndexerCache, KPoolIndexer
from kpool.parallel import packed_order, zigzag_positions
from kpool.sparse import sparse_attention
from kpool_testing import assert_replicated, run_ranks, simulate
from tests import glm5

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "q_lora_rank": 24,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 16,
    "index_kpool": 4,
}
SHAPE = AttentionShape(num_heads=8, kv_lora_rank=16, qk_nope_head_dim=8, v_head_dim=8)
FLAG = "dsa_indexer_kpool_shard_queries_across_tp"


def state(seed: int = 0, **options: Any) -> dict[str, Tensor]:
    """Weights of a whole layer, random and far from their defaults."""
    gen = torch.Generator().manual_seed(seed)
    module = KPoolSparseAttention(KPoolConfig(**SIZES), SHAPE, **options)
    return {
        name: torch.randn(value.shape, generator=gen) * (value.shape[-1] ** -0.5 if value.dim() == 2 else 1.0)
        for name, value in module.state_dict().items()
    }


def hidden(rows: int, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(batch, rows, 48, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Divided:
    """One way of dividing a layer over `tp * cp` ranks."""

    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    local_query: bool = False
    documents: tuple[int, ...] | None = None
    rows: int = 64
    batch: int = 1

    def __str__(self) -> str:
        mode = "local" if self.local_query else "sp" if self.sequence_parallel else "tp"
        return f"tp{self.tp}-cp{self.cp}-{mode}-{'packed' if self.documents else 'plain'}-{self.rows}x{self.batch}"

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.documents is None else torch.tensor([0, *self.documents]).cumsum(0)

    def rows_of(self, tp_rank: int, cp_rank: int) -> Tensor:
        """Packed positions of the rows that a rank gets."""
        cu = torch.tensor([0, self.rows]) if self.cu_seqlens is None else self.cu_seqlens
        rows = zigzag_positions(self.rows // self.cp, cu, self.cp, cp_rank) if self.cp > 1 else torch.arange(self.rows)
        return rows.chunk(self.tp)[tp_rank] if self.sequence_parallel else rows

    @property
    def gathers_selection(self) -> bool:
        """Whether the flag should put a gather into the record."""
        return self.tp > 1 and not self.local_query


@dataclass
class Outcome:
    """What one rank returns."""

    rows: Tensor
    query_rows: Tensor
    output: Tensor
    tokens: Tensor
    input_gradient: Tensor
    gradients: dict[str, Tensor]

    def tensors(self) -> list[Tensor]:
        return [self.output, self.tokens, self.input_gradient, *self.gradients.values()]


def step(module: KPoolSparseAttention, x: Tensor, target: Tensor, cu: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward: output, selection, gradient of the input."""
    x = x.clone().requires_grad_()
    output, tokens = module(x, cu_seqlens=cu)
    (output * target).sum().backward()
    module.sum_replicated_gradients()
    assert x.grad is not None
    return output.detach(), tokens, x.grad


def run(how: Divided, flag: bool | None, *, sabotage: bool = False, backend: str = "fake", **options: Any) -> Any:
    """All ranks; returns the Run of `Outcome`s."""
    weights, x, target = state(), hidden(how.rows, how.batch), hidden(how.rows, how.batch, seed=2)

    def rank(group: Any) -> Outcome:
        me = group.rank()
        tp_rank, cp_rank = me % how.tp, me // how.tp
        tp_groups = [dist.new_group([c * how.tp + t for t in range(how.tp)]) for c in range(how.cp)]
        cp_groups = [dist.new_group([c * how.tp + t for c in range(how.cp)]) for t in range(how.tp)]
        module = KPoolSparseAttention(
            KPoolConfig(**SIZES, **{FLAG: flag}),
            SHAPE,
            tp_group=tp_groups[cp_rank],
            cp_group=cp_groups[tp_rank],
            sequence_parallel=how.sequence_parallel,
            sequence_parallel_query_is_local=how.local_query,
            **options,
        )
        if sabotage:
            module.shard_group = lambda: module.tp_group  # type: ignore[method-assign]
        module.load_full_state_dict(weights)
        rows = how.rows_of(tp_rank, cp_rank)
        query_rows = rows if how.local_query else Divided.rows_of(_whole_tp(how), 0, cp_rank)
        output, tokens, gradient = step(module, x[:, rows], target[:, rows], how.cu_seqlens)
        gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return Outcome(rows, query_rows, output, tokens, gradient, gradients)

    return run_ranks(rank, how.tp * how.cp, backend)


def _whole_tp(how: Divided) -> Divided:
    return Divided(how.tp, how.cp, False, False, how.documents, how.rows, how.batch)


def one_rank(how: Divided, **options: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """The same on one rank, without any group."""
    module = KPoolSparseAttention(KPoolConfig(**SIZES), SHAPE, **options)
    module.load_state_dict(state())
    out = step(module, hidden(how.rows, how.batch), hidden(how.rows, how.batch, seed=2), how.cu_seqlens)
    return (*out, {name: p.grad for name, p in module.named_parameters() if p.grad is not None})


def selection_gathers(run: Any) -> list[int]:
    """int32 all-gathers of each rank: only selections are int32 here."""
    ranks = len(run.results)
    return [
        sum(c.rank == r and c.kind.startswith("all_gather") and "int32" in str(c.dtype) for c in run.trace.calls)
        for r in range(ranks)
    ]


WAYS = [
    *(Divided(tp) for tp in (2, 4, 8)),
    *(Divided(tp, sequence_parallel=True) for tp in (2, 4, 8)),
    *(Divided(tp, sequence_parallel=True, local_query=True) for tp in (2, 4)),
    Divided(4, rows=50, batch=2),
    Divided(8, rows=5),
    Divided(2, documents=(21, 0, 3, 40)),
    Divided(4, sequence_parallel=True, documents=(21, 0, 3, 40)),
    Divided(4, sequence_parallel=True, local_query=True, documents=(21, 0, 3, 36)),
    Divided(1, 2),
    Divided(1, 2, documents=(16, 8, 32), batch=2),
    Divided(2, 2, batch=2),
    Divided(2, 2, documents=(16, 8, 0, 36)),
    Divided(2, 2, sequence_parallel=True),
    Divided(2, 2, sequence_parallel=True, documents=(16, 8, 36)),
    Divided(2, 2, sequence_parallel=True, local_query=True),
    Divided(2, 2, sequence_parallel=True, local_query=True, documents=(16, 8, 36)),
    Divided(2, 4, sequence_parallel=True, rows=96, documents=(16, 48, 24)),
]


class TestManyRanks:
    @pytest.mark.parametrize("how", WAYS, ids=str)
    def test_the_flag_changes_no_bit_and_one_collective(self, how: Divided) -> None:
        on, off = run(how, True), run(how, None)
        for a, b in zip(on.results, off.results, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(a.tensors(), b.tensors(), strict=True))
        ranks = how.tp * how.cp
        assert selection_gathers(off) == [0] * ranks
        assert selection_gathers(on) == [int(how.gathers_selection)] * ranks
        assert len(on.trace.calls) - len(off.trace.calls) == (ranks if how.gathers_selection else 0)
        self.check_against_one_rank(how, on.results)

    @staticmethod
    def check_against_one_rank(how: Divided, results: list[Outcome]) -> None:
        """Selections bit for bit. Outputs and gradients cross sums over ranks, so their last bits may differ."""
        output, tokens, gradient, gradients = one_rank(how)
        for outcome in results:
            assert torch.equal(outcome.tokens, tokens[:, outcome.query_rows])
            _close(outcome.output, output[:, outcome.rows])
            _close(outcome.input_gradient, gradient[:, outcome.rows])
            for name in ("q_a_proj.weight", "kv_a_proj_with_mqa.weight", "q_a_layernorm.weight"):
                _close(outcome.gradients[name], gradients[name])
        if how.tp > 1 and not how.local_query:
            parts = [outcome.gradients["o_proj.weight"] for outcome in results[: how.tp]]
            _close(torch.cat(parts, 1), gradients["o_proj.weight"])
            parts = [outcome.gradients["kv_b_proj.weight"] for outcome in results[: how.tp]]
            _close(torch.cat(parts, 0), gradients["kv_b_proj.weight"])
        else:
            _close(results[0].gradients["kv_b_proj.weight"], gradients["kv_b_proj.weight"])

    @pytest.mark.gloo
    @pytest.mark.parametrize("how", [way for way in WAYS if way.tp in (1, 2, 4) and way.tp * way.cp <= 4], ids=str)
    def test_real_processes_return_what_simulated_ranks_do(self, how: Divided) -> None:
        """gloo, flag on and off: the same bits as each other; selections the same bits as simulated ranks'."""
        on, off = run(how, True, backend="gloo"), run(how, None, backend="gloo")
        simulated = run(how, True)
        for a, b, c in zip(on.results, off.results, simulated.results, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(a.tensors(), b.tensors(), strict=True))
            assert torch.equal(a.tokens, c.tokens)
        self.check_against_one_rank(how, on.results)

    @pytest.mark.parametrize("how", [Divided(1, 2), Divided(1, 2, documents=(16, 8, 32))], ids=str)
    def test_context_parallel_output_is_one_ranks_bit_for_bit(self, how: Divided) -> None:
        """Without TP no sum over ranks is in the way of the output: not even the output changes a bit."""
        output = one_rank(how)[0]
        for outcome in run(how, True).results:
            assert torch.equal(outcome.output, output[:, outcome.rows])

    @pytest.mark.parametrize("plan", ["contiguous", "block_cyclic"])
    @pytest.mark.parametrize("layout", ["absorbed", "plain"])
    def test_other_layouts_and_plans(self, layout: str, plan: str) -> None:
        how = Divided(2, 2, sequence_parallel=True, documents=(16, 8, 36))
        on = run(how, True, layout=layout, shard_plan=plan)
        off = run(how, False, layout=layout, shard_plan=plan)
        for a, b in zip(on.results, off.results, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(a.tensors(), b.tensors(), strict=True))
        assert selection_gathers(on) == [1] * 4

    def test_tensor_parallel_ranks_agree(self) -> None:
        on = run(Divided(4), True)
        assert_replicated([outcome.tokens for outcome in on.results])
        assert_replicated([outcome.output for outcome in on.results])

    def test_passing_the_group_for_local_queries_is_wrong(self) -> None:
        """Negative control: the one case in which the group must not be passed. It goes wrong without an error."""
        how = Divided(2, sequence_parallel=True, local_query=True)
        tokens = one_rank(how)[1]
        good, bad = run(how, True), run(how, True, sabotage=True)
        assert all(torch.equal(o.tokens, tokens[:, o.rows]) for o in good.results)
        assert not all(torch.equal(o.tokens, tokens[:, o.rows]) for o in bad.results)

    @pytest.mark.parametrize("local", [False, True])
    def test_a_shared_layer_needs_no_collective_for_the_selection(self, local: bool) -> None:
        """A full layer selects, the next one takes its selection: as on one rank, with one gather for both layers."""
        weights = state()
        x = hidden(64)
        options: dict[str, Any] = {"sequence_parallel": True, "sequence_parallel_query_is_local": local}

        def layers(**options: Any) -> list[KPoolSparseAttention]:
            config = KPoolConfig(**SIZES, **{FLAG: True})
            return [KPoolSparseAttention(config, SHAPE, indexer_type=t, **options) for t in ("full", "shared")]

        def through(stack: list[KPoolSparseAttention], x: Tensor) -> Tensor:
            for layer in stack:
                kept = weights if layer.indexer else {n: w for n, w in weights.items() if not n.startswith("indexer.")}
                layer.load_full_state_dict(kept)
            out, tokens = stack[0](x)
            return stack[1](out, topk_indices=tokens)[0].detach()

        sharded = simulate(lambda group: through(layers(tp_group=group, **options), x.chunk(2, 1)[group.rank()]), 2)
        _close(torch.cat(sharded.results, dim=1), through(layers(), x))
        assert selection_gathers(sharded) == [0 if local else 1] * 2

    def test_the_flag_is_what_decides(self) -> None:
        """A plain constructor is off; the switch of the config, and nothing else, turns it on."""
        for flag, expected in ((None, 0), (False, 0), (True, 1)):
            assert selection_gathers(run(Divided(2), flag)) == [expected] * 2

    def test_recomputed_backward_repeats_no_collective_of_the_selection(self) -> None:
        """Under activation checkpointing of the whole layer the selection runs twice, and so does its gather."""
        weights, x = state(), hidden(64)

        def rank(group: Any) -> Tensor:
            module = KPoolSparseAttention(KPoolConfig(**SIZES, **{FLAG: True}), SHAPE, tp_group=group)
            module.load_full_state_dict(weights)
            mine = x.clone().requires_grad_()
            if again:
                out, _ = torch.utils.checkpoint.checkpoint(module, mine, use_reentrant=False)
            else:
                out, _ = module(mine)
            out.square().sum().backward()
            return mine.grad

        again = False
        once = simulate(rank, 2)
        again = True
        twice = simulate(rank, 2)
        assert selection_gathers(once) == [1, 1]
        assert selection_gathers(twice) == [2, 2]
        assert all(torch.equal(a, b) for a, b in zip(once.results, twice.results, strict=True))


def _close(a: Tensor, b: Tensor) -> None:
    """fp32 sums of some hundred terms of size one, added in another order: a few hundred units of 2**-24."""
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.hf
class TestAgainstHuggingFace:
    @staticmethod
    def pair(layout: str, kind: str = "full", **changes: Any) -> tuple[Any, KPoolSparseAttention]:
        """Their layer and ours with its weights."""
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention

        config = glm5.text_config(layer_types=["indexed_attention"] * 4, indexer_types=["full", kind] * 2, **changes)
        config._attn_implementation = "eager"
        torch.manual_seed(3)
        theirs = Glm5NextTextAttention(config, 1)
        if theirs.indexer is not None:
            glm5.randomize(theirs.indexer, 0)
        ours = KPoolSparseAttention.from_hf(config, 1, layout=layout, numerics="hf")
        ours.load_full_state_dict(theirs.state_dict())
        return theirs, ours

    @pytest.mark.parametrize("layout", ["absorbed", "plain"])
    @pytest.mark.parametrize("rows, pad", [(7, 0), (60, 0), (130, 0), (60, 13)])
    def test_output_and_gradients(self, rows: int, pad: int, layout: str) -> None:
        theirs, ours = self.pair(layout)
        x = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(rows))
        mask = torch.arange(rows) >= torch.tensor([0, pad])[:, None]
        weight = (
            torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(5)) * mask[..., None]
        )  # their padded rows average all values; ours are zero
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = theirs(a, mask)[0]
        got, tokens = ours(b, mask if pad else None)
        chosen = theirs.indexer(x, theirs.q_a_layernorm(theirs.q_a_proj(x)), mask, None)
        assert torch.equal(tokens.sort(-1).values, chosen.sort(-1).values)
        _close(got[mask], expected[mask])
        assert bool((got[~mask] == 0).all())
        (expected * weight).sum().backward()
        (got * weight).sum().backward()
        _close(b.grad, a.grad)
        mine = dict(ours.named_parameters())
        for name, value in theirs.named_parameters():
            if value.grad is not None:
                _close(mine[name].grad, value.grad)

    @pytest.mark.parametrize("layout", ["absorbed", "plain"])
    def test_a_shared_layer_takes_the_selection_it_is_given(self, layout: str) -> None:
        theirs, ours = self.pair(layout, kind="shared")
        assert ours.indexer is None
        x = torch.randn(1, 30, 64)
        causal = torch.arange(30)[:, None] >= torch.arange(30)
        tokens = torch.where(causal & (torch.rand(30, 30) < 0.4), torch.arange(30), -1)[None].int()
        mask = torch.ones(1, 30, dtype=torch.bool)
        rows = (tokens >= 0).any(-1)
        got, passed = ours(x, topk_indices=tokens)
        assert passed is tokens
        _close(got[rows], theirs(x, mask, prev_topk_indices=tokens)[0][rows])
        with pytest.raises(ValueError, match="topk_indices: expected the selection"):
            ours(x)

    def test_bias_and_bf16(self) -> None:
        theirs, ours = self.pair("plain", attention_bias=True)
        theirs, ours = theirs.bfloat16(), ours.bfloat16()
        x = torch.randn(1, 80, 64).bfloat16()
        mask = torch.ones(1, 80, dtype=torch.bool)
        # bf16 has 8 bits: two roundings of values of size one
        torch.testing.assert_close(ours(x)[0], theirs(x, mask)[0], rtol=2**-6, atol=2**-6)

    def test_sizes_come_from_the_configuration(self) -> None:
        config = glm5.text_config()
        shape = AttentionShape.from_hf(config)
        assert shape == AttentionShape.from_hf({"text_config": config.to_dict()})
        assert (shape.num_heads, shape.kv_lora_rank, shape.v_head_dim) == (4, 24, 16)


class TestSparseAttention:
    @staticmethod
    def inputs(rows: int = 37, count: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gen = torch.Generator().manual_seed(0)
        q = torch.randn(rows, 2, 4, 6, generator=gen, dtype=torch.float64)
        latent = torch.randn(count, 2, 8, generator=gen, dtype=torch.float64)
        weight = torch.randn(4 * 11, 8, generator=gen, dtype=torch.float64)
        keep = torch.rand(2, rows, count, generator=gen) < 0.3
        keep[0, min(5, rows - 1)] = False
        tokens = torch.where(keep, torch.arange(count), -1)
        return q, latent, weight, tokens

    @pytest.mark.parametrize("layout", ["absorbed", "plain"])
    @pytest.mark.parametrize("tile", [1, 8, 64])
    def test_is_attention_written_out(self, layout: str, tile: int) -> None:
        q, latent, weight, tokens = self.inputs()
        got = sparse_attention(q, latent, weight, tokens, value_dim=5, layout=layout, tile=tile)
        per_head = weight.view(4, 11, 8)
        for row, batch, head in ((0, 0, 0), (36, 1, 3), (20, 0, 2)):
            chosen = latent[tokens[batch, row][tokens[batch, row] >= 0], batch]
            p = ((chosen @ per_head[head, :6].T @ q[row, batch, head]) * 6**-0.5).softmax(0)
            torch.testing.assert_close(got[row, batch, head], p @ (chosen @ per_head[head, 6:].T))
        assert bool((got[5, 0] == 0).all())

    @pytest.mark.parametrize("layout", ["absorbed", "plain"])
    def test_gradients(self, layout: str) -> None:
        q, latent, weight, tokens = self.inputs(rows=3, count=6)
        leaves = [t.requires_grad_() for t in (q, latent, weight)]

        def call(*leaves: Tensor) -> Tensor:
            return sparse_attention(*leaves, tokens, value_dim=5, layout=layout, tile=2, recompute=False)

        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)

    def test_recompute_changes_no_bit(self) -> None:
        q, latent, weight, tokens = self.inputs()
        grads = []
        for recompute in (True, False):
            leaves = [t.clone().requires_grad_() for t in (q, latent, weight)]
            sparse_attention(*leaves, tokens, value_dim=5, recompute=recompute).square().sum().backward()
            grads.append([leaf.grad for leaf in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    @pytest.mark.parametrize("layout", ["absorbed", "plain"])
    def test_rows_do_not_depend_on_their_neighbours(self, layout: str) -> None:
        tokens = self.inputs(rows=150)[3]
        q, latent, weight = torch.randn(150, 2, 4, 16), torch.randn(50, 2, 24), torch.randn(4 * 32, 24)
        whole = sparse_attention(q, latent, weight, tokens, value_dim=16, layout=layout)
        for rows in (torch.arange(3), torch.arange(100, 150), torch.randperm(150)):
            part = sparse_attention(q[rows], latent, weight, tokens[:, rows], value_dim=16, layout=layout)
            assert torch.equal(part, whole[rows])

    def test_no_rows_and_errors(self) -> None:
        q, latent, weight, tokens = self.inputs()
        assert sparse_attention(q[:0], latent, weight, tokens[:, :0], value_dim=5).shape == (0, 2, 4, 5)
        with pytest.raises(ValueError, match="layout: expected one of"):
            sparse_attention(q, latent, weight, tokens, value_dim=5, layout="dense")
        with pytest.raises(ValueError, match="tokens: expected"):
            sparse_attention(q, latent, weight, tokens[:, 1:], value_dim=5)
        with pytest.raises(ValueError, match="kv_weight: expected"):
            sparse_attention(q, latent, weight[1:], tokens, value_dim=5)


@pytest.mark.parametrize("layout", ["absorbed", "plain"])
@pytest.mark.parametrize(("batch", "rows"), [(0, 9), (2, 0), (0, 0)])
def test_an_empty_batch_attends_to_nothing(layout: str, batch: int, rows: int) -> None:
    module = KPoolSparseAttention(KPoolConfig(**SIZES), SHAPE, layout=layout)
    out, selected = module(hidden(rows, batch))
    assert out.shape == (batch, rows, 48) and selected.shape == (batch, rows, 16 + 3)
    out.sum().backward()


class TestNoHostSync:
    """Fake tensors hold no values: reading one back to the host, as `.item()` does, would raise here."""

    @staticmethod
    def fake(module: torch.nn.Module, device: torch.device) -> Any:
        for part in module.modules():
            for name, value in part._parameters.items():
                if value is not None:
                    empty = torch.empty(value.shape, dtype=value.dtype, device=device)
                    part._parameters[name] = torch.nn.Parameter(empty, requires_grad=value.requires_grad)
        return module

    @pytest.mark.parametrize("layout", ["absorbed", "plain"])
    @pytest.mark.parametrize("kind", ["plain", "packed", "padded"])
    def test_attention_forward_and_backward(self, kind: str, layout: str, device: torch.device) -> None:
        with FakeTensorMode():
            module = self.fake(KPoolSparseAttention(KPoolConfig(**SIZES), SHAPE, layout=layout, impl="torch"), device)
            x = torch.empty(2, 70, 48, device=device, requires_grad=True)
            cu = torch.empty(4, dtype=torch.int32, device=device) if kind == "packed" else None
            mask = torch.empty(2, 70, dtype=torch.bool, device=device) if kind == "padded" else None
            out, tokens = module(x, mask, cu_seqlens=cu)
            out.sum().backward()
            assert out.shape == (2, 70, 48)
            assert tokens.shape == (2, 70, 19)
            assert x.grad is not None

    @pytest.mark.parametrize("numerics", ["megatron", "hf"])
    def test_decoding(self, numerics: str, device: torch.device) -> None:
        with FakeTensorMode():
            module = self.fake(KPoolIndexer(KPoolConfig(**SIZES), numerics, impl="torch"), device)
            cache = IndexerCache()
            for rows in (30, 1):
                x, r = torch.empty(2, rows, 48, device=device), torch.empty(2, rows, 24, device=device)
                mask = torch.empty(2, rows, dtype=torch.bool, device=device)
                assert module(x, r, mask, cache).shape == (2, rows, 19)

    def test_zigzag(self, device: torch.device) -> None:
        with FakeTensorMode():
            cu = torch.empty(4, dtype=torch.int32, device=device)
            assert packed_order(12, cu, 4).shape == (48,)


class TestZigzag:
    def test_example(self) -> None:
        cu = torch.tensor([0, 16, 24])
        assert zigzag_positions(12, cu, 2, 0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 22, 23]
        assert zigzag_positions(12, cu, 2, 1).tolist() == [*range(4, 12), *range(18, 22)]

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("lengths", [(), (24,), (24, 0, 48), (0, 24, 24)])
    @pytest.mark.parametrize("padding", [0, 2])
    def test_every_position_once(self, size: int, lengths: tuple[int, ...], padding: int) -> None:
        cu = torch.tensor([0, *lengths]).cumsum(0)
        rows = sum(lengths) // size + padding
        held = torch.cat([zigzag_positions(rows, cu, size, rank) for rank in range(size)])
        assert held.sort().values.tolist() == list(range(rows * size))
        assert held[packed_order(rows, cu, size)].tolist() == list(range(rows * size))

    def test_documents_that_do_not_divide(self) -> None:
        with pytest.raises(ValueError, match="multiple of 2 x 2 tokens for context parallelism, got one of 6"):
            zigzag_positions(6, torch.tensor([0, 6, 12]), 2, 0)
        with pytest.raises(ValueError, match="expected at most 8 tokens on 2 ranks, got 16"):
            zigzag_positions(4, torch.tensor([0, 16]), 2, 0)


class TestArguments:
    def test_constructor(self) -> None:
        config = KPoolConfig(**SIZES)
        with pytest.raises(ValueError, match="layout: expected one of"):
            KPoolSparseAttention(config, SHAPE, layout="dense")
        with pytest.raises(ValueError, match="indexer_type: expected one of"):
            KPoolSparseAttention(config, SHAPE, indexer_type="half")
        with pytest.raises(ValueError, match="sequence_parallel_query_is_local"):
            KPoolSparseAttention(config, SHAPE, sequence_parallel_query_is_local=True)

    def test_heads_must_divide(self) -> None:
        def rank(group: Any) -> None:
            KPoolSparseAttention(KPoolConfig(**SIZES), SHAPE, tp_group=group)

        with pytest.raises(Exception, match="num_heads: expected a multiple of 3 ranks, got 8"):
            simulate(rank, 3)

    def test_rows_must_divide(self) -> None:
        def rank(group: Any) -> None:
            from kpool.parallel import scatter_sum

            scatter_sum(torch.zeros(3, 1), group)

        with pytest.raises(Exception, match="divisible by 2 ranks, got 3"):
            simulate(rank, 2)

    def test_forward(self) -> None:
        module = KPoolSparseAttention(KPoolConfig(**SIZES), SHAPE)
        with pytest.raises(ValueError, match="hidden_states: expected"):
            module(torch.zeros(1, 5, 47))
        with pytest.raises(ValueError, match="attention_mask: expected None"):
            module(torch.zeros(1, 5, 48), torch.ones(1, 5).bool(), cu_seqlens=torch.tensor([0, 5]))

    def test_sequence_first(self) -> None:
        a = KPoolSparseAttention(KPoolConfig(**SIZES), SHAPE)
        b = KPoolSparseAttention(KPoolConfig(**SIZES), SHAPE, batch_first=False)
        a.load_state_dict(state())
        b.load_state_dict(state())
        x = hidden(40, 2)
        assert torch.equal(a(x)[0], b(x.transpose(0, 1))[0].transpose(0, 1))
        assert torch.equal(a(x)[1], b(x.transpose(0, 1))[1])
