"""Calls of `fused_qk_topk_kpool` as values: built from a seed, cut into rows, permuted, moved to a device.

`exact_call` holds small whole numbers (and powers of two), so that every correct implementation computes the same
score, ties included: such calls are compared with the reference bit for bit. `random_call` holds random numbers.

Shapes: `S` rows, `T` keys, `B` batch, `H` heads, `D` dimensions, `P` pool size, `M` pool budget.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kpool import fused_qk_topk_kpool, reference

LAYOUTS = ("causal", "window", "positions", "packed", "packed_bounds", "mask", "mask_batched", "nothing")
ROW_ARGUMENTS = ("varlen_starts", "varlen_ends")


@dataclass(frozen=True)
class Call:
    """Everything one call needs.

    Attributes:
        q, k, weights, gate_score, ape: the tensors, as the call takes them.
        pool_size, budget: `P`, `M`.
        visibility: mask, varlen_starts, varlen_ends, key_positions, cu_seqlens_kv, as far as given.
        options: keywords that change the result: use_relu, order, numerics, ...
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    gate_score: Tensor | None
    ape: Tensor | None
    pool_size: int
    budget: int
    visibility: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def batch(self) -> int:
        return self.q.shape[1]

    @property
    def tokens(self) -> int:
        return self.k.shape[0]

    @property
    def topk(self) -> int:
        return self.budget * self.pool_size

    @property
    def positional(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.weights, self.topk, self.pool_size, self.gate_score, self.ape)

    def run(self, **changes: Any) -> Tensor:
        """The tokens `[B, S, W]`; scores are neither returned nor computed as a whole unless asked for."""
        options = {"return_index_scores": False, **self.options, **changes}
        return fused_qk_topk_kpool(*self.positional, **self.visibility, **options)[1]

    def scores(self, **changes: Any) -> Tensor:
        """The scores `[B, S, N]`."""
        scores = fused_qk_topk_kpool(*self.positional, **self.visibility, **{**self.options, **changes})[0]
        assert scores is not None
        return scores

    def by_definition(self) -> Tensor:
        """What the reference says, tokens `[B, S, W]` on the CPU."""
        return reference.fused_qk_topk_kpool(*self.positional, **self.visibility, **self.options)[1]

    def prepared(self) -> reference.Reference:
        """The reference of this call, for scores, error bounds and single rows."""
        names = ("use_relu", "fp8_indexer", "rotate_activation_enabled", "numerics")
        options = {name: self.options[name] for name in names if name in self.options}
        return reference.prepare(*self.positional, **self.visibility, **options)

    def to(self, device: torch.device) -> Call:
        """The same call on another device."""
        moved = {
            name: None if (tensor := getattr(self, name)) is None else tensor.to(device)
            for name in ("q", "k", "weights", "gate_score", "ape")
        }
        return replace(self, **moved, visibility={name: t.to(device) for name, t in self.visibility.items()})

    def explicit(self) -> Call:
        """The same windows said row by row, so that rows can be taken out. Without visibility there is no such form."""
        if "mask" in self.visibility or "varlen_starts" in self.visibility:
            return self
        assert self.visibility, "the tail of a call without visibility follows the row number"
        cu = self.visibility["cu_seqlens_kv"]
        edges = cu.tolist()
        starts, ends = [0] * self.rows, [0] * self.rows
        for begin, end in itertools.pairwise(edges):
            for row in range(begin, end):
                starts[row], ends[row] = begin, row + 1
        bounds = (torch.tensor(values, dtype=cu.dtype, device=cu.device) for values in (starts, ends))
        return replace(self, visibility=dict(zip(ROW_ARGUMENTS, bounds, strict=True)) | {"cu_seqlens_kv": cu})

    def take(self, rows: Sequence[int] | Tensor) -> Call:
        """Only these rows, in this order."""
        whole = self.explicit()
        index = torch.as_tensor(rows, dtype=torch.int64).to(self.q.device)
        visibility = dict(whole.visibility)
        for name in ROW_ARGUMENTS:
            if name in visibility:
                visibility[name] = visibility[name][index]
        if "mask" in visibility:
            visibility["mask"] = visibility["mask"][..., index, :]
        return replace(self, q=self.q[index], weights=self.weights[index], visibility=visibility)

    def with_options(self, **options: Any) -> Call:
        return replace(self, options={**self.options, **options})


def visibility_of(layout: str, rng: random.Random, rows: int, tokens: int, batch: int) -> dict[str, Tensor]:
    """Random visibility arguments of a kind; `packed` needs `rows == tokens`."""
    index = rng.choice([torch.int32, torch.int64])

    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=index)

    if layout == "nothing":
        return {}
    if layout == "causal":
        shift = rng.choice([0, tokens - rows])
        ends = [min(max(i + 1 + shift, 0), tokens) for i in range(rows)]
        return {"varlen_starts": integers([0] * rows), "varlen_ends": integers(ends)}
    if layout in ("window", "positions"):
        scale = 1 if layout == "window" else 2
        starts = [scale * rng.randrange(-3, tokens + 3) for _ in range(rows)]
        ends = [start + scale * rng.choice([0, 1, rng.randrange(30), tokens]) for start in starts]
        visibility = {"varlen_starts": integers(starts), "varlen_ends": integers(ends)}
        if layout == "positions":
            steps, position = [rng.randrange(4) for _ in range(tokens)], 0
            visibility["key_positions"] = integers([position := position + step for step in steps])
        return visibility
    if layout in ("packed", "packed_bounds"):
        edges = [0, *sorted(rng.randrange(tokens + 1) for _ in range(rng.randrange(4)))]
        visibility = {"cu_seqlens_kv": integers(edges)}
        if layout == "packed_bounds":
            windows = []
            documents = list(itertools.pairwise(edges)) or [(0, 0)]
            for _ in range(rows):
                begin, end = rng.choice(documents)
                start = rng.choice([begin, rng.randint(begin, end)])
                windows.append((start, rng.randint(start, end)))
            visibility |= {"varlen_starts": integers([s for s, _ in windows])}
            visibility |= {"varlen_ends": integers([e for _, e in windows])}
        return visibility
    shape = (rows, tokens) if layout == "mask" else (batch, rows, tokens)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    hidden = torch.rand(shape, generator=generator) < rng.choice([0.02, 0.1, 0.4, 0.9])
    if rng.random() < 0.5:
        hidden |= torch.ones(rows, tokens, dtype=torch.bool).triu(1 + tokens - rows)
    return {"mask": torch.zeros(shape).masked_fill(hidden, -torch.inf)}


def exact_call(
    seed: int,
    layout: str = "causal",
    *,
    rows: int = 24,
    tokens: int | None = None,
    batch: int = 1,
    heads: int = 2,
    dim: int = 4,
    pool_size: int = 2,
    budget: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Call:
    """A call of small whole numbers, `P` a power of two: no implementation rounds anything, and ties are common."""
    assert pool_size in (1, 2, 4, 8), "probabilities of 1 / P must be exact"
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens = rows if tokens is None else tokens

    def integers(bound: int, *shape: int) -> Tensor:
        return torch.randint(-bound, bound + 1, shape, generator=generator)

    return Call(
        q=integers(2, rows, batch, heads, dim).to(dtype),
        k=integers(4, tokens, batch, dim).to(dtype),
        weights=integers(3, rows, batch, heads).float() / 4,
        gate_score=None,
        ape=None,
        pool_size=pool_size,
        budget=budget,
        visibility=visibility_of(layout, rng, rows, tokens, batch),
        options=options,
    )


def random_call(seed: int, layout: str | None = None, **options: Any) -> Call:
    """A small call with everything random: layout, sizes, dtypes, gate, slot bias, options. The seed says all."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    layout = rng.choice(LAYOUTS) if layout is None else layout
    batch, heads = rng.choice([1, 2]), rng.choice([1, 2, 3, 8])
    dim, pool_size = rng.choice([1, 2, 8, 16, 24, 64]), rng.choice([1, 2, 3, 4, 5])
    tokens, budget = rng.randrange(60), rng.choice([1, 2, 5, 20])
    rows = tokens if layout == "packed" else rng.choice([tokens, rng.randrange(40)])
    dtype = rng.choice([torch.bfloat16, torch.float32, torch.float16])

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, weights = normal(rows, batch, heads, dim), normal(tokens, batch, dim), 0.1 * normal(rows, batch, heads)
    if rng.random() < 0.3:  # many ties
        q, k, weights = q.round(), k.round(), torch.ones_like(weights)
    gate = rng.choice([None, normal(tokens, batch, dim)])
    drawn: dict[str, Any] = {
        "use_relu": rng.random() < 0.8,
        "always_select_tail": rng.random() < 0.8,
        "order": rng.choice(["score", "position"]),
        "numerics": rng.choice(["megatron", "hf"]),
        "width_multiple": rng.choice([1, 8]),
    }
    if dim & (dim - 1) == 0:
        drawn |= rng.choice([{}, {}, {"fp8_indexer": True}, {"rotate_activation_enabled": True}])
    return Call(
        q=q.to(dtype),
        k=k.to(dtype),
        weights=weights.to(rng.choice([torch.float32, torch.bfloat16])),
        gate_score=gate if gate is None else gate.to(rng.choice([dtype, torch.float32])),
        ape=rng.choice([None, normal(pool_size, dim), normal(pool_size, dim).to(torch.bfloat16)]),
        pool_size=pool_size,
        budget=budget,
        visibility=visibility_of(layout, rng, rows, tokens, batch),
        options={**drawn, **options},
    )


def listed(
    keys: Sequence[float] | Sequence[Sequence[float]],
    *,
    pool_size: int,
    topk: int,
    rows: int | None = None,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    cu: Sequence[int] | None = None,
    query: float = 1.0,
    gate: Sequence[float] | None = None,
    ape: Sequence[float] | None = None,
    **options: Any,
) -> Call:
    """The shorthand of fault reports: one head, one dimension, q and weights 1, bounds causal, keys listed by slot.

    A list of lists is a batch. With `cu`, causality is inside each document and no bounds are passed.
    """
    k = torch.tensor(keys, dtype=torch.float32)
    k = k.t()[..., None] if k.dim() == 2 else k[:, None, None]
    tokens, batch = k.shape[:2]
    rows = tokens if rows is None else rows
    visibility = {}
    if cu is not None:
        visibility["cu_seqlens_kv"] = torch.tensor(cu, dtype=torch.int32)
    else:
        starts = [0] * rows if starts is None else starts
        ends = range(1, rows + 1) if ends is None else ends
        visibility["varlen_starts"] = torch.tensor(list(starts), dtype=torch.int32)
        visibility["varlen_ends"] = torch.tensor(list(ends), dtype=torch.int32)
    return Call(
        q=torch.full((rows, batch, 1, 1), query, dtype=torch.bfloat16),
        k=k.to(torch.bfloat16),
        weights=torch.ones(rows, batch, 1),
        gate_score=None if gate is None else torch.tensor(gate)[:, None, None],
        ape=None if ape is None else torch.tensor(ape)[:, None],
        pool_size=pool_size,
        budget=topk // pool_size,
        visibility=visibility,
        options=options,
    )


def noisy(call: Call, seed: int = 0) -> Call:
    """The same shapes and windows with random numbers: every product and sum rounds."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    return replace(
        call,
        q=normal(call.q),
        k=normal(call.k),
        weights=normal(call.weights),
        gate_score=normal(call.k),
        ape=torch.randn(call.pool_size, call.k.shape[2], generator=generator),
    )
