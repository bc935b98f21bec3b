"""The call that a command works on: seeded tensors in a named layout, or a captured call from a file.

Layouts:
    causal  row i sees tokens [0, i + 1), on the plain grid
    packed  documents of uneven length, an empty one among them, each with its own grid
    mask    an explicit mask: causal, the first tokens hidden from later rows, and holes
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from kpool.captures import CapturedCall
from kpool.cli.exits import CommandError
from kpool.visibility import Visibility

LAYOUTS = ("causal", "packed", "mask")


def positive(text: str) -> int:
    """An argparse type: a whole number, at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


SEEDED = {"tokens": 4096, "batch": 1, "heads": 32, "dim": 128, "pool": 4, "topk": 2048}
"""Shapes of a seeded call, by default; a captured call brings its own."""


def add_geometry(parser: argparse.ArgumentParser) -> None:
    """`--heads --dim --pool --topk`, GLM-5.3-Flash by default."""
    group = parser.add_argument_group("geometry (GLM-5.3-Flash by default)")
    group.add_argument("--heads", type=positive, default=32, metavar="H", help="index heads (default: 32)")
    group.add_argument("--dim", type=positive, default=128, metavar="D", help="index head dim (default: 128)")
    group.add_argument("--pool", type=positive, default=4, metavar="P", help="tokens per pool (default: 4)")
    group.add_argument("--topk", type=positive, default=2048, metavar="K", help="selected tokens (default: 2048)")


def seeded_call(args: argparse.Namespace) -> CapturedCall:
    """Random bf16 tensors of the geometry in `args`, the same for the same seed.

    Scores spread like those of a trained indexer only roughly; what matters here is that every rank has work.
    """
    tokens, batch, heads, dim, pool = args.tokens, args.batch, args.heads, args.dim, args.pool
    generator = torch.Generator().manual_seed(args.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q = normal(tokens, batch, heads, dim).to(torch.bfloat16)
    k, gate = normal(tokens, batch, dim).to(torch.bfloat16), normal(tokens, batch, dim).to(torch.bfloat16)
    weights = normal(tokens, batch, heads) * (heads**-0.5 * dim**-0.5)
    call = CapturedCall(
        q=q,
        k=k,
        weights=weights,
        gate_score=gate,
        ape=normal(pool, dim) * 0.1,
        index_topk=args.topk,
        pool_size=pool,
        notes={"source": f"seed {args.seed}"},
    )
    return with_layout(call, args.layout, args.seed)


def with_layout(call: CapturedCall, layout: str, seed: int) -> CapturedCall:
    """The same tensors, seen through another layout."""
    from dataclasses import replace

    rows, tokens = call.q.shape[0], call.k.shape[0]
    if rows != tokens:
        raise CommandError(f"--layout needs as many rows as keys, this call has {rows} rows and {tokens} keys")
    bare = {"mask": None, "varlen_starts": None, "varlen_ends": None, "key_positions": None, "cu_seqlens_kv": None}
    seen: dict[str, Tensor]
    if layout == "causal":
        ends = torch.arange(1, rows + 1, dtype=torch.int32)
        seen = {"varlen_starts": torch.zeros_like(ends), "varlen_ends": ends}
    elif layout == "packed":
        seen = {"cu_seqlens_kv": document_edges(tokens, seed)}
    else:
        seen = {"mask": mask_with_holes(rows, seed)}
    return replace(call, **{**bare, **seen})  # type: ignore[arg-type]


def document_edges(tokens: int, seed: int) -> Tensor:
    """int32 `[docs + 1]` from 0 to `tokens`: lognormal lengths, one document empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        spread = float(torch.randn((), generator=generator))
        lengths.append(max(1, min(int(tokens / 6 * 2.0**spread), tokens - sum(lengths))))
    lengths.insert(1, 0)
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def mask_with_holes(rows: int, seed: int) -> Tensor:
    """fp32 `[S, S]`: causal; later rows do not see the first tokens; every 50th token or so is hidden from all."""
    generator = torch.Generator().manual_seed(seed)
    position = torch.arange(rows)
    hidden = position[None] > position[:, None]
    hidden |= position[None] < (position[:, None] // 16)
    hidden |= (torch.rand(rows, generator=generator) < 0.02)[None]
    return torch.zeros(rows, rows).masked_fill_(hidden, float("-inf"))


def visibility_of(call: CapturedCall) -> Visibility:
    """What the rows of a call may see, as the room `visibility` says it.

    Raises:
        ValueError, TypeError: the call's tensors contradict each other.
    """
    if call.mask is not None:
        return Visibility.from_mask(call.mask)
    if call.varlen_starts is not None and call.varlen_ends is not None:
        return Visibility.bounds(call.varlen_starts, call.varlen_ends, call.key_positions, call.cu_seqlens_kv)
    if call.cu_seqlens_kv is not None:
        return Visibility.packed(call.cu_seqlens_kv)
    return Visibility.unlimited()
