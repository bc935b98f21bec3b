"""Attention over selected tokens, a tile of rows at a time: two layouts of the same sum.

    plain      k_h = latent W_k,h^T, v_h = latent W_v,h^T for every token; a dense mask keeps the selected ones
    absorbed   q_h W_k,h meets the latent itself, gathered at the selected tokens; W_v,h is applied to the result

The plain layout is what the Hugging Face module computes; its work grows with all tokens. The absorbed layout touches
only the selected ones. Rows are dealt into tiles of a fixed size, so a row's bits do not depend on how many rows come
with it. (On its place in a tile they may, where a head is narrower than 12: a BLAS treats edge rows apart there.)
A row that selects nothing gives zeros.

Shapes: `S` rows, `T` tokens, `B` batch, `A` attention heads, `E` query dim, `V` value dim, `L` latent dim, `W` slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kpool.linear import ROW_TILE, row_linear

__all__ = ["LAYOUTS", "sparse_attention"]

LAYOUTS = ("absorbed", "plain")


def sparse_attention(
    q: Tensor,
    latent: Tensor,
    kv_weight: Tensor,
    tokens: Tensor,
    *,
    value_dim: int,
    layout: str = "absorbed",
    tile: int = ROW_TILE,
    recompute: bool = True,
) -> Tensor:
    """Softmax attention of each row over its selected tokens.

    Args:
        q: `[S, B, A, E]`.
        latent: `[T, B, L]`, normalised compressed keys and values.
        kv_weight: `[A * (E + V), L]`, per head the key rows, then the value rows.
        tokens: int32 or int64 `[B, S, W]` key slots, -1 unused; no slot twice in a row.
        value_dim: `V`.
        layout: "absorbed" or "plain".
        tile: rows worked on at a time.
        recompute: compute each tile again in the backward pass instead of keeping its scores.

    Returns:
        `[S, B, A, V]` in the dtype of q. Differentiable in q, latent and kv_weight.

    Raises:
        ValueError: an unknown layout, or shapes that do not fit.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")
    rows, batch, heads, dim = q.shape
    if tuple(tokens.shape[:2]) != (batch, rows):
        raise ValueError(f"tokens: expected [B, S, W] = [{batch}, {rows}, W], got shape {tuple(tokens.shape)}")
    if tuple(kv_weight.shape) != (heads * (dim + value_dim), latent.shape[2]):
        raise ValueError(
            f"kv_weight: expected [A * (E + V), L] = [{heads * (dim + value_dim)}, {latent.shape[2]}], "
            f"got shape {tuple(kv_weight.shape)}"
        )
    if rows == 0 or batch == 0:
        return q.new_zeros(rows, batch, heads, value_dim)
    padding = -rows % tile
    q = F.pad(q, (0, 0, 0, 0, 0, 0, 0, padding))
    tokens = F.pad(tokens.to(torch.int64), (0, 0, 0, padding), value=-1)
    one: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    if layout == "plain":
        expanded = row_linear(latent, kv_weight).view(*latent.shape[:2], heads, dim + value_dim)
        first, second = torch.split(expanded, [dim, value_dim], dim=-1)
        one = _plain
    else:
        per_head = kv_weight.view(heads, dim + value_dim, latent.shape[2])
        first, second = latent, per_head
        one = _absorbed
    again = recompute and torch.is_grad_enabled()
    tiles = []
    for row in range(0, rows, tile):
        arguments = (q[row : row + tile], first, second, tokens[:, row : row + tile])
        tiles.append(_again(one, *arguments) if again else one(*arguments))
    return torch.cat(tiles)[:rows]


def _again(one: Callable[..., Tensor], *arguments: Tensor) -> Tensor:
    """`one(*arguments)`, computed a second time in the backward pass."""
    out: Tensor = checkpoint(one, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


def _absorbed(q: Tensor, latent: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """One tile: q `[R, B, A, E]`, latent `[T, B, L]`, weight `[A, E + V, L]`, tokens `[B, R, W]`; `[R, B, A, V]`."""
    rows, batch, heads, dim = q.shape
    key_weight, value_weight = torch.split(weight, [dim, weight.shape[1] - dim], dim=1)
    query = torch.bmm(q.flatten(0, 1).transpose(0, 1), key_weight)  # [A, R * B, L]
    query = query.view(heads, rows, batch, -1).permute(2, 1, 0, 3)  # [B, R, A, L]
    valid = tokens >= 0
    index = tokens.clamp_min(0).flatten(1)[..., None].expand(-1, -1, latent.shape[2])
    chosen = latent.transpose(0, 1).gather(1, index).view(*tokens.shape, -1)  # [B, R, W, L]
    logits = torch.matmul(query, chosen.transpose(-1, -2)) * dim**-0.5  # [B, R, A, W]
    mixed = torch.matmul(_softmax(logits, valid[:, :, None]), chosen)  # [B, R, A, L]
    mixed = mixed.permute(2, 1, 0, 3).reshape(heads, rows * batch, -1)
    out = torch.bmm(mixed, value_weight.transpose(1, 2))  # [A, R * B, V]
    return out.view(heads, rows, batch, -1).permute(1, 2, 0, 3)


def _plain(q: Tensor, keys: Tensor, values: Tensor, tokens: Tensor) -> Tensor:
    """One tile: q `[R, B, A, E]`, keys `[T, B, A, E]`, values `[T, B, A, V]`, tokens `[B, R, W]`; `[R, B, A, V]`."""
    batch, rows, _ = tokens.shape
    count = keys.shape[0]
    seen = torch.zeros(batch, rows, count + 1, dtype=torch.bool, device=q.device)
    seen.scatter_(2, torch.where(tokens >= 0, tokens, count), True)
    logits = torch.matmul(q.permute(1, 2, 0, 3), keys.permute(1, 2, 3, 0)) * q.shape[3] ** -0.5  # [B, A, R, T]
    weights = _softmax(logits, seen[:, None, :, :count])
    return torch.matmul(weights, values.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)


def _softmax(logits: Tensor, valid: Tensor) -> Tensor:
    """Softmax in fp32 or better over the valid entries of the last dimension; zeros where there is none."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.masked_fill(~valid, torch.finfo(logits.dtype).min)
    return F.softmax(logits, dim=-1, dtype=wide).masked_fill(~valid, 0).to(logits.dtype)
