"""Calls of the Triton path's `select` and `scores`, each with what the definition says.

Values are small whole numbers and powers of two, so that every order of summation gives the same score: results are
compared with the reference bit for bit, ties included.

Shapes: `S` rows, `T` keys, `B` batch, `H` heads, `D` dimensions, `P` pool size, `N` pools, `M` budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kpool import naive
from kpool.sharding import RowBlocks
from kpool.visibility import Visibility

VALUES = ("ints", "equal", "zeros", "signed", "special", "denormal")
LAYOUTS = ("causal", "packed", "window", "mask", "mask_batched", "left_padded", "unlimited")


@dataclass(frozen=True)
class Case:
    """A call in words; `build` makes the tensors."""

    name: str
    heads: int = 2
    dim: int = 16
    pool_size: int = 4
    tokens: int = 48
    rows: int = 12
    batch: int = 1
    budget: int = 4
    layout: str = "causal"
    values: str = "ints"
    order: str = "score"
    use_relu: bool = True
    dot_scale: float = 1.0
    transform: str = "none"
    weights: torch.dtype = torch.float32
    strided: bool = False
    chunk_bytes: int = 1 << 28
    seed: int = 0


@dataclass(frozen=True)
class Built:
    """The tensors of a case, and its two calls."""

    case: Case
    tensors: tuple[Tensor, ...]
    mask: Tensor | None

    def kwargs(self) -> dict[str, Any]:
        case = self.case
        return {
            "pool_size": case.pool_size,
            "use_relu": case.use_relu,
            "dot_scale": case.dot_scale,
            "transform": case.transform,
        }

    def select(self, implementation: Any, rows: RowBlocks | None = None, chunk_bytes: int | None = None) -> Tensor:
        """`[B, rows.count, M]` of `implementation`, on the CPU."""
        case = self.case
        ids: Tensor = implementation.select(
            *self.tensors,
            self.mask,
            budget=case.budget,
            rows=RowBlocks.all(case.rows) if rows is None else rows,
            order=case.order,
            chunk_bytes=case.chunk_bytes if chunk_bytes is None else chunk_bytes,
            **self.kwargs(),
        )
        return ids.cpu()

    def scores(self, implementation: Any) -> Tensor:
        """`[B, S, N]` of `implementation`, on the CPU."""
        scores: Tensor = implementation.scores(*self.tensors, self.mask, **self.kwargs())
        return scores.cpu()

    def expected(self) -> Tensor:
        """What the definition says, `[B, S, M]`."""
        return self.select(naive)


def build(case: Case, device: torch.device) -> Built:
    """The tensors of `case` on `device`."""
    rng = torch.Generator().manual_seed(case.seed)

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=rng).float()

    q = whole(-2, 2, case.rows, case.batch, case.heads, case.dim)
    keys = whole(-2, 2, case.tokens // case.pool_size, case.batch, case.dim)
    weights = whole(-2, 2, case.rows, case.batch, case.heads) / 2
    q, keys, weights = _valued(case.values, q, keys, weights)
    windows = _visibility(case, rng).windows(
        rows=case.rows, tokens=case.tokens, batch=case.batch, pool_size=case.pool_size
    )
    tensors = [q.bfloat16(), keys.bfloat16(), weights.to(case.weights)]
    if case.strided:  # the same values behind other strides, the last dimension's included
        tensors = [torch.stack([t, torch.full_like(t, float("nan"))], dim=-1)[..., 0] for t in tensors]
    tensors += [windows.pool_lo, windows.pool_hi]
    mask = None if windows.mask is None else windows.mask.to(device)
    return Built(case, tuple(t.to(device) for t in tensors), mask)


def _valued(values: str, q: Tensor, keys: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if values == "equal":  # every pool has the same positive score
        return q.fill_(1), keys.fill_(1), weights.fill_(1)
    if values == "zeros":  # scores are 0.0 and -0.0: ReLU zeros under weights of either sign
        return q.fill_(1), keys.fill_(-1), weights
    if values == "signed":  # without ReLU: -(d) - (-d) is 0.0 where d is not zero, -0.0 where it is
        q[:, :, ::2], q[:, :, 1::2] = 1, -1
        keys[::3] = 0
        return q, keys, weights.fill_(-1)
    if values == "denormal":
        return q * 2.0**-100, keys * 2.0**-35, weights
    if values == "special":  # pools of NaN, of both infinities, and huge ones, between ordinary ones
        for pool in range(keys.shape[0]):
            if pool % 3 == 1:
                keys[pool] = (float("nan"), float("inf"), -float("inf"), 2.0**120)[pool // 3 % 4]
    return q, keys, weights


def _visibility(case: Case, rng: torch.Generator) -> Visibility:
    rows, tokens = case.rows, case.tokens
    if case.layout == "packed":
        cuts = torch.randint(0, tokens + 1, (3,), generator=rng).sort().values
        edges = torch.cat([torch.tensor([0]), cuts, cuts[-1:], torch.tensor([tokens])])
        positions = torch.linspace(0, tokens - 1, rows).round().to(torch.int64)
        return Visibility.packed(edges, positions)
    if case.layout == "window":
        starts = torch.randint(0, tokens, (rows,), generator=rng)
        lengths = torch.randint(0, tokens, (rows,), generator=rng)
        return Visibility.bounds(starts, (starts + lengths).clamp(max=tokens))
    if case.layout in ("mask", "mask_batched"):
        batch = case.batch if case.layout == "mask_batched" else 1
        hidden = torch.rand(batch, rows, tokens, generator=rng) < 0.15
        hidden[:, ::5] = True
        return Visibility.from_mask(torch.zeros(batch, rows, tokens).masked_fill(hidden, -float("inf")))
    if case.layout == "left_padded":
        first = torch.randint(0, tokens // 2, (case.batch, 1), generator=rng)
        return Visibility.left_padded(torch.arange(tokens) >= first, queries=rows)
    if case.layout == "unlimited":
        return Visibility.unlimited()
    return Visibility.causal(rows, first=tokens - rows)


# The least set that reaches every line of every kernel; `test_triton_branches.py` holds it to that.
BRANCHES = (
    Case("score order", rows=3),
    Case("position order", order="position", budget=2, tokens=40, rows=2),
    Case("mask", layout="mask", pool_size=2, rows=2, tokens=24, budget=2),
    Case("identity, scaled, zeros of both signs", use_relu=False, dot_scale=0.25, rows=1, values="signed"),
    Case("three heads, special", heads=3, dim=8, values="special", rows=2, tokens=72),
    Case("transformed", transform="hadamard", rows=2, values="zeros"),
    Case("pruned", tokens=240, pool_size=2, budget=3, rows=1, heads=1),
)
