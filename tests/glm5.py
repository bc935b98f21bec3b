"""What the tests know about the Hugging Face `glm5_next` model: random modules, and when two selections must agree.

Two implementations that round differently may pick different pools where two scores are nearly equal. `Verdict` says
for every row whether that is possible. With HF's own inputs in float64 as the exact scores, and

    A[n]     = D**-0.5 * sum_h |w_h| * sum_d |q_hd| |p_nd|                      size of what is summed
    e[n]     = gamma * A[n] + measured[n],   gamma = m u / (1 - m u),  m = D + H + 4,  u = 2**-24
    measured = the change of the score when our q, w and pooled keys replace theirs, to first order and beyond

every fp32 evaluation of score `n` by either side lies within `e[n]` of exact. A row is *decided* if the `M` best exact
scores, each lowered by its `e`, all exceed every other one raised by its `e`: then both sides must select that set.
The measured part is itself bounded (`check_inputs`): a few units in the last place of the dtype, never more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kpool.config import KPoolConfig
from kpool.indexer import IndexerCache, KPoolIndexer

UNIT = 2.0**-24


def text_config(**changes: Any) -> Any:
    """A `Glm5NextTextConfig` small enough for a test; every field can be changed."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    fields: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 24,
        "q_lora_rank": 32,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "index_topk": 16,
        "index_head_dim": 16,
        "index_n_heads": 8,
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "pad_token_id": 0,
        "max_position_embeddings": 4096,
    }
    return Glm5NextTextConfig(**{**fields, **changes})


def hf_indexer(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A `Glm5NextTextIndexer` with random weights, gates and slot bias that matter."""
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

    module = Glm5NextTextIndexer(config, layer_idx=0)
    randomize(module, seed)
    return module.to(dtype).eval().requires_grad_(False)


def randomize(indexer: Any, seed: int) -> None:
    """Random slot bias, gate and norm: the defaults (zeros and ones) would hide what they do."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in indexer.named_parameters():
            noise = torch.randn(value.shape, generator=gen, dtype=torch.float32)
            if name == "k_norm.weight":
                value.copy_(1 + 0.2 * noise)
            elif name in ("index_kpool_compress_ape", "k_norm.bias"):
                value.copy_(noise)
            else:
                value.copy_(noise * value.shape[1] ** -0.5)


def kpool_indexer(theirs: Any, **options: Any) -> KPoolIndexer:
    """Our indexer with the weights of theirs, loaded strictly."""
    ours = KPoolIndexer(KPoolConfig.from_hf(theirs.config), numerics="hf", **options)
    ours.to(theirs.wk.weight.dtype)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours.eval()


def inputs(config: Any, batch: int, rows: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """hidden_states `[B, S, hidden]` and q_resid `[B, S, q_lora]`."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, rows, config.hidden_size, generator=gen)
    r = torch.randn(batch, rows, config.q_lora_rank, generator=gen)
    return x.to(dtype), r.to(dtype)


@dataclass(frozen=True)
class Scored:
    """What one side scores with: q `[B, S, H, D]`, head weights `[B, S, H]`, pooled keys `[B, N, D]`, all float64."""

    q: Tensor
    weights: Tensor
    pooled: Tensor


def their_inputs(theirs: Any, x: Tensor, q_resid: Tensor, states: Tensor) -> Scored:
    """HF's numbers for the rows `x`; `states` are its packed states of all tokens so far, `[B, T, 2 D + 1]`."""
    with torch.no_grad():
        q = theirs.wq_b(q_resid).unflatten(-1, (theirs.n_heads, theirs.head_dim))
        weights = theirs.weights_proj(x).float() * theirs.n_heads**-0.5
        pooled = theirs.get_pooled_states(states)[0]
    return Scored(q.double(), weights.double(), pooled.double())


def packed_states(theirs: Any, x: Tensor, mask: Tensor) -> Tensor:
    """HF's packed key, gate and validity of the tokens `x`, `[B, S, 2 D + 1]`."""
    with torch.no_grad():
        k = theirs.k_norm(theirs.wk(x))
        gate = torch.nn.functional.linear(x, theirs.index_kpool_compress_gate)
    return torch.cat([k, gate, mask.to(k.dtype)[..., None]], dim=-1)


def our_inputs(ours: KPoolIndexer, x: Tensor, q_resid: Tensor, all_x: Tensor, all_mask: Tensor) -> Scored:
    """Our numbers for the rows `x`, with keys pooled over all tokens so far."""
    with torch.no_grad():
        q, weights = ours.project_queries(x.transpose(0, 1), q_resid.transpose(0, 1))
        k, gate = ours.project_keys(all_x.transpose(0, 1))
        size = ours.config.index_kpool
        pooled = IndexerCache().append(
            k, gate, ours.index_kpool_compress_ape, all_mask, pool_size=size, numerics=ours.numerics
        )
    return Scored(q.transpose(0, 1).double(), weights.transpose(0, 1).double(), pooled.keys.transpose(0, 1).double())


def check_inputs(theirs: Scored, ours: Scored, complete: Tensor, dtype: torch.dtype, depth: int) -> Scored:
    """Both sides' inputs may differ by rounding only. Returns ours, cut to HF's pools.

    `complete` bool `[B, N]`: pools that are real. A projection sums `depth` fp32 products, then rounds to `dtype`.
    """
    pools = theirs.pooled.shape[1]
    ours = Scored(ours.q, ours.weights, ours.pooled[:, :pools])
    slack = 4 * depth**0.5 * UNIT + (2.0**-7 if dtype is torch.bfloat16 else 0.0)
    for name in ("q", "weights", "pooled"):
        a, b = getattr(theirs, name), getattr(ours, name)
        difference = (a - b).abs()
        if name == "pooled":
            difference = difference.masked_fill(~complete[:, :pools, None], 0)
        # relative to the element, or to the typical size where cancellation left little of it
        limit = slack * a.abs().clamp_min(float(a.abs().mean()) if a.numel() else 0.0) * 4
        assert bool((difference <= limit).all()), f"{name}: {float((difference / limit.clamp_min(1e-30)).max())}"
    return ours


@dataclass(frozen=True)
class Verdict:
    """Exact scores `[B, S, N]`, their error bounds, and which rows are decided, bool `[B, S]`."""

    scores: Tensor
    error: Tensor
    decided: Tensor

    @staticmethod
    def of(theirs: Scored, ours: Scored, visible: Tensor, budget: int) -> Verdict:
        """Judge all rows; `visible` bool `[B, S, N]`, `budget` M."""
        heads, dim = theirs.q.shape[2:]
        scale = dim**-0.5

        def exact(side: Scored) -> Tensor:
            dots = torch.einsum("bshd,bnd->bshn", side.q, side.pooled) * scale
            return torch.einsum("bsh,bshn->bsn", side.weights, dots.relu())

        sizes = torch.einsum("bshd,bnd->bshn", theirs.q.abs(), theirs.pooled.abs()) * scale
        size = torch.einsum("bsh,bshn->bsn", theirs.weights.abs(), sizes)
        terms = (dim + heads + 4) * UNIT
        scores = exact(theirs)
        error = terms / (1 - terms) * size * 1.01 + (exact(ours) - scores).abs()
        if scores.shape[2] <= budget:
            return Verdict(scores, error, torch.ones(scores.shape[:2], dtype=torch.bool))
        low = (scores - error).masked_fill(~visible, float("-inf"))
        high = (scores + error).masked_fill(~visible, float("-inf"))
        best = scores.masked_fill(~visible, float("-inf")).topk(budget, dim=-1).indices
        chosen = torch.zeros_like(visible).scatter(-1, best, True)
        least = low.masked_fill(~chosen, float("inf")).amin(-1)
        most = high.masked_fill(chosen, float("-inf")).amax(-1)
        return Verdict(scores, error, (visible.sum(-1) <= budget) | (least > most))


@dataclass
class Count:
    """Rows compared, and rows whose margin lies under the rounding bound."""

    rows: int = 0
    under: int = 0
    differing: int = 0

    @property
    def share(self) -> float:
        """Share of rows under the bound."""
        return self.under / max(1, self.rows)


def compare(
    theirs: Tensor, ours: Tensor, verdict: Verdict, first: Tensor, *, pool_size: int, budget: int, count: Count
) -> None:
    """Assert that two selections `[B, S, W]` agree as far as rounding allows, and count.

    `first` int64 `[B]` is the key slot of each batch row's first token.
    """
    kept = min(budget, verdict.scores.shape[2]) * pool_size
    for b in range(theirs.shape[0]):
        for s in range(theirs.shape[1]):
            a, c = theirs[b, s], ours[b, s]
            assert _tokens(a[kept:]) == _tokens(c[budget * pool_size :]), f"tail of row {b, s}"
            count.rows += 1
            one, two = _tokens(a[:kept]), _tokens(c[: budget * pool_size])
            if bool(verdict.decided[b, s]):
                assert one == two, f"row {b, s}: {one ^ two}"
                continue
            count.under += 1
            count.differing += one != two
            x, y = (_pools(tokens, int(first[b]), pool_size) for tokens in (one, two))
            assert len(x) == len(y)
            scores, error = verdict.scores[b, s], verdict.error[b, s]
            gap = (scores[x].sort().values - scores[y].sort().values).abs()
            assert bool((gap <= 2 * error[list({*x, *y})].max()).all()), f"row {b, s}: scores {gap}"


def _tokens(ids: Tensor) -> set[int]:
    return {t for t in ids.tolist() if t >= 0}


def _pools(tokens: set[int], first: int, pool_size: int) -> list[int]:
    return sorted({(t - first) // pool_size for t in tokens})
