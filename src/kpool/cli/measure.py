"""What `kpool bench` compares, and how it counts time and memory.

    kpool   the whole call
    plain   the public algorithm as it is usually written: fp32 einsum over heads in chunks under 2 GiB, ReLU, weights,
            sum over heads, mask, torch.topk; no skipping
    gemm    the matrix products of exactly the tiles kpool scores, and nothing else: the limit of the tiled path

Memory is that of one call in a fresh process, above its inputs and outputs. Run as a module, this file is that process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kpool import tiled
from kpool.captures import CapturedCall
from kpool.cli.workload import seeded_call, visibility_of
from kpool.ops import fused_qk_topk_kpool
from kpool.pooling import pool_keys
from kpool.sharding import RowBlocks
from kpool.windows import RowWindows

PLAIN_CHUNK_BYTES = 2 << 30


def kpool_call(call: CapturedCall, order: str) -> Tensor:
    """Tokens int32 `[B, S, W]` of kpool."""
    return fused_qk_topk_kpool(**call.arguments(), order=order, return_index_scores=False, impl="torch")[1]


def windows_of(call: CapturedCall) -> RowWindows:
    """The row windows of a call."""
    rows, batch, tokens = call.q.shape[0], call.q.shape[1], call.k.shape[0]
    return visibility_of(call).windows(
        rows=rows, tokens=tokens, batch=batch, pool_size=call.pool_size, device=call.q.device
    )


def plain_call(call: CapturedCall) -> Tensor:
    """Tokens int32 `[B, S, K + P - 1]` of the plain algorithm; causal or packed calls with plain edges."""
    pooled = pool_keys(call.k, call.gate_score, call.ape, call.pool_size, call.cu_seqlens_kv)
    view, size, budget = windows_of(call), call.pool_size, call.index_topk // call.pool_size
    rows, batch, heads = call.q.shape[:3]
    pools = pooled.keys.shape[0]
    device = call.q.device
    slots = torch.arange(size, dtype=torch.int32, device=device)
    out = torch.full((batch, rows, call.index_topk + size - 1), -1, dtype=torch.int32, device=device)
    keys, ids = pooled.keys.float(), torch.arange(pools, device=device)
    piece = max(1, PLAIN_CHUNK_BYTES // max(1, 4 * batch * heads * pools))
    for row in range(0, rows if pools else 0, piece):
        part = slice(row, row + piece)
        scores = torch.einsum("sbhd,nbd->sbhn", call.q[part].float(), keys)
        scores = torch.relu(scores)
        scores = (scores * call.weights[part].float()[..., None]).sum(2).transpose(0, 1)  # [B, r, N]
        hidden = (ids < view.pool_lo[:, part, None]) | (ids >= view.pool_hi[:, part, None])
        value, chosen = torch.topk(scores.masked_fill(hidden, -torch.inf), min(budget, pools), dim=-1)
        tokens = pooled.starts[chosen][..., None] + slots
        tokens = tokens.masked_fill((value == -torch.inf)[..., None], -1).flatten(2)
        out[:, part, : tokens.shape[2]] = tokens
    tail = view.tail_start[..., None] + slots[: size - 1]
    out[..., call.index_topk :] = torch.where(tail < view.end[..., None], tail, -1)
    return out


class GemmOnly:
    """The matrix products of the tiles that kpool scores for a call."""

    def __init__(self, call: CapturedCall, order: str) -> None:
        view = windows_of(call)
        pooled = pool_keys(call.k, call.gate_score, call.ape, call.pool_size, call.cu_seqlens_kv)
        free = call.index_topk // call.pool_size if order == "position" and call.mask is None else None
        self.work = []
        for entry in range(call.q.shape[1]):
            side = min(entry, view.pool_lo.shape[0] - 1)
            inputs = (call.q[:, entry], pooled.keys[:, entry], call.weights[:, entry])
            scorer = tiled.Scorer(*inputs, call.use_relu, 1.0, "none")
            scorer.prepare()
            rows = RowBlocks.all(call.q.shape[0])
            self.work.append((scorer, tiled.Need.of(view.pool_lo[side], view.pool_hi[side], free, scorer, rows)))

    def run(self) -> None:
        """All products, no result."""
        for scorer, need in self.work:
            for tiles in need.tiles:
                for tile in range(*tiles):
                    scorer.multiply(scorer.keys[tile])

    @property
    def flops(self) -> float:
        """Floating-point operations of `run`."""
        total = 0.0
        for scorer, need in self.work:
            tiles = sum(last - first for first, last in need.tiles)
            total += 2.0 * tiles * scorer.tile.rows * scorer.tile.pools * scorer.heads * scorer.dim
        return total


def seconds(run: Callable[[], Any]) -> float:
    """Wall seconds of one run."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def interleaved(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Wall seconds of each run, taken in turn, so that a disturbance falls on all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return times


class PeakMemory:
    """Highest resident memory inside a `with` block, in bytes; `method` says how it was found.

    Linux keeps a high-water mark that a process may reset; elsewhere a thread samples every millisecond.
    """

    def __enter__(self) -> PeakMemory:
        import psutil

        self._process = psutil.Process()
        self.method = "high-water mark" if self._reset() else "sampled every millisecond"
        self.before = self.peak = int(self._process.memory_info().rss)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if self.method != "high-water mark":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.method == "high-water mark":
            lines = Path("/proc/self/status").read_text().splitlines()
            self.peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
            return
        self._stop.set()
        self._thread.join()

    def _reset(self) -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.peak = max(self.peak, int(self._process.memory_info().rss))


def memory_in_fresh_process(args: argparse.Namespace, what: str) -> dict[str, Any]:
    """Peak bytes above inputs and outputs of one call of `what` ("kpool" or "plain"), in a process of its own."""
    plain = {name: value for name, value in vars(args).items() if isinstance(value, str | int | float | bool)}
    command = [sys.executable, "-m", "kpool.cli.measure", json.dumps({**plain, "what": what})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bench_call(args: argparse.Namespace) -> CapturedCall:
    """The seeded call of one length; `packed` has `--documents` documents of equal length."""
    from dataclasses import replace

    layout = argparse.Namespace(**{**vars(args), "layout": "causal", "batch": 1})
    call = seeded_call(layout)
    if args.layout == "packed":
        edges = torch.arange(args.documents + 1) * args.tokens // args.documents
        call = replace(call, varlen_starts=None, varlen_ends=None, cu_seqlens_kv=edges.to(torch.int32))
    return call


def _measure_here(options: dict[str, Any]) -> dict[str, Any]:
    """One call in this process; a small one first, so that libraries are loaded and threads started."""
    args = argparse.Namespace(**options)
    torch.set_num_threads(args.threads)
    run = (lambda call: kpool_call(call, args.order)) if args.what == "kpool" else plain_call
    run(bench_call(argparse.Namespace(**{**options, "tokens": 64 * args.pool, "documents": 1})))
    call = bench_call(args)
    with PeakMemory() as memory:
        tokens = run(call)
    above = memory.peak - memory.before - tokens.numel() * tokens.element_size()
    return {"bytes": max(0, above), "method": memory.method}


if __name__ == "__main__":
    print(json.dumps(_measure_here(json.loads(sys.argv[1]))))  # noqa: T201
