"""The specification that runs: naive, readable, in float64 unless asked otherwise.

Everything is recomputed from its definition, one document, one row, one token at a time where that is clearer; nothing
is shared with the fast paths. ``fused_qk_topk_kpool`` is the whole call; the smaller functions are its sentences. The
last part says how far a correct fp32 implementation may be from this one: ``Ranking`` holds scores with their error
bounds, and ``Ranking.decided`` marks the rows whose selection no rounding can change.

Shapes: ``S`` rows, ``T`` keys, ``B`` batch, ``H`` heads, ``D`` dimensions, ``P`` pool size, ``N`` pools, ``K`` tokens,
``M`` pool budget, ``r`` the rows asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kpool.ranking import Ranking

UNIT_ROUNDOFF = 2.0**-24  # of fp32, round to nearest
# The error of a sum of n rounded terms is modelled as a random walk (Higham and Mary 2019, "A new approach to
# probabilistic rounding error analysis") over partial sums that wander by ||terms|| and drift to the sum:
# u * sqrt(n * (||terms||^2 + sum^2)). What is observed stays under this many times it.
CONFIDENCE = 2.5


# -- visibility
# ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """What one row sees: key slots ``[start, end)`` on a grid of pools that begins at ``origin``."""

    start: int
    end: int
    origin: int
    hidden: frozenset[int] = frozenset()

    def head_and_tail(self, pool_size: int) -> tuple[list[int], list[int]]:
        """Tokens before the first and after the last grid boundary in the window; -1 where the mask hides one."""
        boundary = self.origin + (self.end - self.origin) // pool_size * pool_size
        tail = range(max(self.start, boundary), self.end)
        first = self.origin + math.ceil((self.start - self.origin) / pool_size) * pool_size
        head = range(self.start, min(first, tail.start))
        return [self._shown(t) for t in head], [self._shown(t) for t in tail]

    def sees(self, pool_starts: Tensor, pool_size: int) -> Tensor:
        """Of which pools ``[N]`` every token is visible, bool ``[N]``."""
        inside = (pool_starts >= self.start) & (pool_starts + pool_size <= self.end) & (pool_starts >= 0)
        for token in self.hidden:
            inside &= (pool_starts > token) | (pool_starts + pool_size <= token)
        return inside

    def _shown(self, token: int) -> int:
        return -1 if token in self.hidden else token


def pool_starts(tokens: int, pool_size: int, cu_seqlens: Sequence[int] | None = None) -> list[int]:
    """First token of each of the ``N = T // P`` pools; -1 for slots past the last pool."""
    documents = [(0, tokens)] if cu_seqlens is None else list(itertools.pairwise(cu_seqlens))
    starts = [s for begin, end in documents for s in range(begin, end - pool_size + 1, pool_size)]
    return starts + [-1] * (tokens // pool_size - len(starts))


def row_windows(
    rows: int,
    tokens: int,
    *,
    mask: Tensor | None = None,
    starts: Sequence[int] | None = None,
    ends: Sequence[int] | None = None,
    key_positions: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
) -> list[Window]:
    """The window of each row. ``mask``: ``[S, T]``, that of one batch entry. Nothing given: the prefix ``i + 1``."""
    documents = [(0, tokens)] if cu_seqlens is None else list(itertools.pairwise(cu_seqlens))
    stored = range(tokens) if cu_seqlens is None else range(cu_seqlens[-1])

    def window(seen: Sequence[int], hidden: frozenset[int] = frozenset()) -> Window:
        if not seen:
            return Window(0, 0, 0)
        origin = next(begin for begin, end in documents if begin <= seen[-1] < end)
        return Window(seen[0], seen[-1] + 1, origin, hidden)

    if mask is not None:
        finite = torch.isfinite(mask)
        visible = [finite[i].nonzero()[:, 0].tolist() for i in range(rows)]
        holes = [frozenset(range(v[0], v[-1] + 1)) - frozenset(v) if v else frozenset() for v in visible]
        return [window(v, h) for v, h in zip(visible, holes, strict=True)]
    if starts is not None and ends is not None:
        position = list(range(tokens)) if key_positions is None else list(key_positions)
        return [window([t for t in stored if s <= position[t] < e]) for s, e in zip(starts, ends, strict=True)]
    if cu_seqlens is not None:
        of = {t: begin for begin, end in documents for t in range(begin, end)}
        return [window(range(of[i], i + 1)) if i in of else window(()) for i in range(rows)]
    return [window(range(min(i + 1, tokens))) for i in range(rows)]


# -- pooling
# ------------------------------------------------------------------------------------------------------------


def pool_keys(
    k: Tensor,
    gate_score: Tensor | None,
    ape: Tensor | None,
    pool_size: int,
    starts: Sequence[int],
    numerics: str = "megatron",
) -> tuple[Tensor, Tensor]:
    """Pooled keys and a bound of their rounding error, float64 ``[N, B, D]`` each.

    The bound is zero wherever fp32 arithmetic must round to the same value, so nearly everywhere for bf16 results.
    """
    tokens, batch, dim = k.shape
    index = torch.tensor(starts, dtype=torch.int64).view(-1, 1).clamp_min(0) + torch.arange(pool_size)
    keys = k.cpu()[index.flatten()].view(*index.shape, batch, dim).double() if tokens else k.new_zeros(0).double()
    if not len(starts) or not tokens:
        empty = torch.zeros(len(starts), batch, dim, dtype=torch.float64)
        return empty, empty
    gate = torch.zeros_like(keys) if gate_score is None else gate_score.cpu()[index.flatten()].view_as(keys).double()
    bias = torch.zeros(pool_size, dim) if ape is None else ape.detach().cpu()
    probability = torch.softmax((gate.float() + bias.float()[:, None]).double(), dim=1)
    # fp32 error of a probability: a few roundings in exp, sum and division, and the argument's own error through exp
    slack = UNIT_ROUNDOFF * (pool_size + 8) * probability
    exists = (torch.tensor(starts) >= 0).view(-1, 1, 1)
    if numerics == "megatron":
        exact = (probability * keys).sum(1)
        spread = (slack * keys.abs()).sum(1) + UNIT_ROUNDOFF * pool_size * (probability * keys.abs()).sum(1)
        low, value, high = ((exact + s * spread).to(torch.bfloat16).double() for s in (-1, 0, 1))
        error = torch.maximum((high - value).abs(), (value - low).abs())
    else:
        value, error = _pool_in_key_dtype(keys, probability, slack, k.dtype)
    return value.masked_fill(~exists, 0), error.masked_fill(~exists, 0)


def _pool_in_key_dtype(keys: Tensor, probability: Tensor, slack: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    low, mid, high = ((probability + s * slack).to(dtype).double() for s in (-1, 0, 1))
    moved = torch.maximum(high - mid, mid - low)
    products = (keys * mid).to(dtype).double()
    exact = products.sum(1)
    eps = torch.finfo(dtype).eps
    spread = (moved * keys.abs() * (1 + eps)).sum(1) + UNIT_ROUNDOFF * keys.shape[1] * products.abs().sum(1)
    spread = spread + torch.where(moved > 0, eps * products.abs(), 0.0).sum(1)
    below, value, above = ((exact + s * spread).to(dtype).double() for s in (-1, 0, 1))
    return value, torch.maximum((above - value).abs(), (value - below).abs())


# -- input transforms
# ---------------------------------------------------------------------------------------------------


def transform(x: Tensor, name: str) -> Tensor:
    """Hadamard rotation and FP8 rounding of ``x [..., D]`` from their definitions; values as the fast paths' bf16."""
    if name == "none":
        return x
    dim = x.shape[-1]
    rotated: Tensor = (_walsh(x.float()) * dim**-0.5).to(torch.bfloat16)
    if name == "hadamard":
        return rotated
    vectors = rotated.double()
    amax = vectors.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    # the smallest power of two that brings amax within 448; the quotient is an fp32 number, as the definition has it
    scale = torch.exp2(torch.ceil(torch.log2((amax.float() / 448.0).double())))
    rounded: Tensor = (vectors / scale).float().to(torch.float8_e4m3fn).double() * scale
    return rounded


def _transformed_error(x: Tensor, error: Tensor, name: str) -> Tensor:
    """Bound of the error of ``transform(x)``, where ``x [..., D]`` is known within ``error``.

    An uncertain element moves its whole rotated vector, each element by at most ``sum(error) / sqrt(D)``; then the same
    number of steps of the result's format may be rounded away on both sides.
    """
    moved = error.sum(-1, keepdim=True) * x.shape[-1] ** -0.5
    largest = transform(x, name).double().abs().amax(-1, keepdim=True) + moved
    if name == "hadamard":
        bound = moved + 2.0**-7 * largest
    else:  # a scale may double; below the least amax the format's subnormal step is all that counts
        bound = moved + 2.0**-3 * largest + 2.0**-9 * 1e-4 / 224
    return torch.where(error.any(-1, keepdim=True), bound, 0.0).expand_as(error)


def _walsh(x: Tensor) -> Tensor:
    """``[[W, W], [W, -W]] x`` of half the size on each half: Sylvester's construction."""
    if x.shape[-1] == 1:
        return x
    left, right = x.chunk(2, dim=-1)
    return torch.cat([_walsh(left + right), _walsh(left - right)], dim=-1)


# -- scores and their error
# ---------------------------------------------------------------------------------------------


def score_rows(
    q: Tensor,
    keys: Tensor,
    weights: Tensor,
    *,
    use_relu: bool = True,
    dot_scale: float = 1.0,
    key_error: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Scores of the rows of one batch entry, and the rounding bound of an fp32 implementation.

        dot_h = dot_scale * (q_h . key)        score = sum over h of w_h * f(dot_h)
        error(dot_h)^2 = (c * u)^2 * (D + 2) * (dot_h^2 + dot_scale^2 * sum over d of (q_hd * key_d)^2)
        error^2 = sum over live h of w_h^2 * error(dot_h)^2
                + (c * u)^2 * (H + 2) * (score^2 + sum over live h of (w_h * f(dot_h))^2)

    ``u`` is ``UNIT_ROUNDOFF``, ``c`` is ``CONFIDENCE``. A head is *live* if its dot product, error included, can be
    positive (always, without ReLU). ``key_error`` adds ``sum over live h of |w_h| * dot_scale * (|q_h| . key_error)``.

    Args:
        q: ``[r, H, D]``, transformed; ``keys [N, D]``, transformed; ``weights [r, H]``.
        use_relu: ReLU on the scaled dot products, else identity.
        dot_scale: multiplies a dot product before that.
        key_error: ``[N, D]``, bound of the error of each pooled key element.
        dtype: float64 or float32.

    Returns:
        ``(score, error)``, ``[r, N]`` each, in ``dtype``.
    """
    rows, heads, dim = q.shape
    q, keys, weights = (t.to(dtype) for t in (q, keys, weights))
    score = q.new_zeros(rows, keys.shape[0])
    variance, linear = torch.zeros_like(score), torch.zeros_like(score)
    unit = (CONFIDENCE * UNIT_ROUNDOFF) ** 2
    uncertain = None if key_error is None or not bool(key_error.any()) else key_error.to(dtype)
    for head in range(heads):
        weight = weights[:, head, None]
        dot = dot_scale * (q[:, head] @ keys.T)
        terms = dot_scale**2 * (q[:, head].square() @ keys.square().T)
        dot_variance = unit * (dim + 2) * (dot.square() + terms)
        reach = torch.zeros_like(dot) if uncertain is None else dot_scale * (q[:, head].abs() @ uncertain.T)
        value = dot.relu() if use_relu else dot
        live = (dot + dot_variance.sqrt() + reach > 0) if use_relu else torch.ones_like(dot, dtype=torch.bool)
        term = weight * value
        score = score + term
        variance += torch.where(live, weight.square() * dot_variance + unit * (heads + 2) * term.square(), 0.0)
        linear += torch.where(live, weight.abs() * reach, 0.0)
    variance += unit * (heads + 2) * score.square()
    return score, variance.sqrt() + linear


# -- the whole call
# -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """A call, prepared: pooled keys, windows, and what is needed to rank and expand any of its rows.

    Attributes:
        keys, key_error: ``[N, B, D]``, transformed pooled keys and the bound of their error.
        starts: first token of each pool.
        windows: ``[B][S]``, the window of each row.
        limited: False if nothing was given, so that every pool is visible.
    """

    q: Tensor
    weights: Tensor
    keys: Tensor
    key_error: Tensor
    starts: list[int]
    windows: list[list[Window]]
    limited: bool
    pool_size: int
    budget: int
    use_relu: bool
    dot_scale: float
    transform_name: str
    dtype: torch.dtype

    def rank(self, entry: int, rows: Sequence[int]) -> Ranking:
        """Scores, bounds and visibility of ``rows`` of batch entry ``entry``."""
        index = torch.tensor(list(rows), dtype=torch.int64)
        score, error = score_rows(
            transform(self.q[index, entry], self.transform_name),
            self.keys[:, entry],
            self.weights[index, entry],
            use_relu=self.use_relu,
            dot_scale=self.dot_scale,
            key_error=self.key_error[:, entry],
            dtype=self.dtype,
        )
        starts = torch.tensor(self.starts, dtype=torch.int64)
        visible = torch.zeros(score.shape, dtype=torch.bool)
        for i, row in enumerate(rows):
            window = self.windows[entry][row]
            visible[i] = window.sees(starts, self.pool_size) if self.limited else starts >= 0
        return Ranking(score, error, visible)

    def tokens(self, entry: int, row: int, pools: Sequence[int], always_select_tail: bool, width: int) -> list[int]:
        """The row of the result: pools, head, -1 up to ``K``, tail, -1 up to ``width``."""
        chosen = [self.starts[n] + slot for n in pools if n >= 0 for slot in range(self.pool_size)]
        head, tail = self.windows[entry][row].head_and_tail(self.pool_size)
        selected = self.budget * self.pool_size
        free = selected - len(chosen)
        body = chosen + (head if len(head) <= free else [])
        body += [-1] * (selected - len(body))
        if not self.limited and set(tail) & set(chosen):
            tail = []
        ends = [*tail, *[-1] * (self.pool_size - 1 - len(tail))] if always_select_tail else []
        return (body + ends + [-1] * width)[:width]


def prepare(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    pool_size: int,
    gate_score: Tensor | None,
    ape: Tensor | None,
    mask: Tensor | None = None,
    varlen_starts: Tensor | None = None,
    varlen_ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    use_relu: bool = True,
    *,
    fp8_indexer: bool = False,
    rotate_activation_enabled: bool = False,
    numerics: str = "megatron",
    dtype: torch.dtype = torch.float64,
    pooled_keys: Tensor | None = None,
) -> Reference:
    """Everything about a call that does not depend on the row; arguments as for ``kpool.fused_qk_topk_kpool``.

    Args:
        pooled_keys: ``[N, B, D]`` from the implementation under test. Every element must lie within the rounding error
            of the reference's; the ranking then starts from these, so that a key rounded the other way, as it may be,
            does not leave rows undecided.

    Raises:
        ValueError: an element of ``pooled_keys`` is further away than rounding explains.
    """
    q, k, weights = (t.detach().cpu() for t in (q, k, weights))
    name = "fp8" if fp8_indexer else "hadamard" if rotate_activation_enabled else "none"
    rows, batch, _, dim = q.shape
    tokens = k.shape[0]
    cu = None if cu_seqlens_kv is None else cu_seqlens_kv.tolist()
    starts = pool_starts(tokens, pool_size, cu)
    pooled, error = pool_keys(k, gate_score, ape, pool_size, starts, numerics)
    if pooled_keys is not None:
        pooled, error = _accept(pooled_keys.detach().cpu().double(), pooled, error)
    if name != "none" and bool(error.any()):
        error = _transformed_error(pooled, error, name)
    windows: list[list[Window]] = []
    for entry in range(batch):
        view = None if mask is None else (mask if mask.dim() == 2 else mask[min(entry, mask.shape[0] - 1)]).cpu()
        same = windows and (mask is None or mask.dim() == 2)
        bounds = [None if t is None else t.tolist() for t in (varlen_starts, varlen_ends, key_positions)]
        windows.append(
            windows[0]
            if same
            else row_windows(
                rows,
                tokens,
                mask=view,
                starts=bounds[0],
                ends=bounds[1],
                key_positions=bounds[2],
                cu_seqlens=cu,
            )
        )
    return Reference(
        q,
        weights,
        transform(pooled, name),
        error,
        starts,
        windows,
        limited=any(x is not None for x in (mask, varlen_starts, cu_seqlens_kv)),
        pool_size=pool_size,
        budget=index_topk // pool_size,
        use_relu=use_relu,
        dot_scale=dim**-0.5 if numerics == "hf" else 1.0,
        transform_name=name,
        dtype=dtype,
    )


def _accept(given: Tensor, pooled: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    if given.shape != pooled.shape:
        raise ValueError(f"pooled_keys: expected shape {list(pooled.shape)}, got {list(given.shape)}")
    wrong = ~((given - pooled).abs() <= error) & ~(given.isnan() & pooled.isnan())
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        near, slack = pooled[tuple(at)].item(), error[tuple(at)].item()
        raise ValueError(
            f"pooled_keys: expected {near} within {slack} at [pool, batch, dimension] = {at}, "
            f"got {given[tuple(at)].item()}; {int(wrong.sum())} elements differ by more than rounding explains"
        )
    return given, torch.zeros_like(error)


def fused_qk_topk_kpool(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    pool_size: int,
    gate_score: Tensor | None,
    ape: Tensor | None,
    mask: Tensor | None = None,
    varlen_starts: Tensor | None = None,
    varlen_ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    use_relu: bool = True,
    always_select_tail: bool = True,
    fp8_indexer: bool = False,
    rotate_activation_enabled: bool = False,
    return_index_scores: bool = True,
    *,
    order: str = "score",
    numerics: str = "megatron",
    width_multiple: int = 1,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor | None, Tensor]:
    """The call of the same name in ``kpool``, by definition: no sharding, no chunking, no haste.

    Scores come in ``dtype``.
    """
    call = prepare(
        q,
        k,
        weights,
        index_topk,
        pool_size,
        gate_score,
        ape,
        mask,
        varlen_starts,
        varlen_ends,
        key_positions,
        cu_seqlens_kv,
        use_relu,
        fp8_indexer=fp8_indexer,
        rotate_activation_enabled=rotate_activation_enabled,
        numerics=numerics,
        dtype=dtype,
    )
    rows, batch = q.shape[:2]
    width = index_topk + (pool_size - 1 if always_select_tail else 0)
    width = math.ceil(width / width_multiple) * width_multiple
    tokens = torch.full((batch, rows, width), -1, dtype=torch.int32)
    scores = torch.full((batch, rows, len(call.starts)), -math.inf, dtype=dtype)
    for entry in range(batch):
        ranking = call.rank(entry, range(rows))
        scores[entry] = ranking.score.masked_fill(~ranking.visible, -math.inf)
        for row, ids in enumerate(ranking.order()):
            pools = ids[: call.budget] if order == "score" else sorted(ids[: call.budget])
            tokens[entry, row] = torch.tensor(call.tokens(entry, row, pools, always_select_tail, width))
    return (scores if return_index_scores else None), tokens
