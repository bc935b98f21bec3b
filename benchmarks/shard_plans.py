"""What does each rank's share of the selection take under each shard plan, against the whole? JSON on stdout.

    python benchmarks/shard_plans.py --tokens 16384 --ranks 8

Each rank's rows are selected alone, one rank after another, interleaved with the whole. Refuses to report (exit code 1)
unless the shares together are the whole, bit for bit, and the whole agrees with the float64 reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kpool import tiled
from kpool.cli import bench, measure
from kpool.dispatch import chunk_bytes
from kpool.pooling import pool_keys
from kpool.sharding import PLANS, RowBlocks, ShardPlan


def timed(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    began = time.perf_counter()
    out = run()
    return time.perf_counter() - began, out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--order", choices=["score", "position"], default="score")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = {"heads": 32, "dim": 128, "pool": 4, "topk": 2048, "seed": 0, "layout": "causal", "documents": 1}
    settings = argparse.Namespace(**{**vars(args), **options}, rows=64, no_plain=True)
    call = measure.bench_call(settings)
    verdict = bench.check(call, settings)
    pooled, view = pool_keys(call.k, call.gate_score, call.ape, call.pool_size), measure.windows_of(call)

    limit = chunk_bytes(None, call.q.device)

    def select(rows: RowBlocks) -> Tensor:
        return tiled.select(
            call.q, pooled.keys, call.weights, view.pool_lo, view.pool_hi, None, pool_size=4, budget=512, rows=rows,
            use_relu=True, dot_scale=1.0, transform="none", order=args.order, chunk_bytes=limit,
        )  # fmt: skip

    whole: list[float] = []
    ranks: dict[str, list[list[float]]] = {kind: [[] for _ in range(args.ranks)] for kind in PLANS}
    for _ in range(args.repeats):
        seconds, want = timed(lambda: select(RowBlocks.all(args.tokens)))
        whole.append(seconds)
        for kind in PLANS:
            plan = ShardPlan.of(kind, args.tokens, args.ranks)
            parts = []
            for rank in range(args.ranks):
                seconds, part = timed(lambda plan=plan, rank=rank: select(plan.blocks(rank)))
                ranks[kind][rank].append(seconds)
                parts.append(part)
            verdict["correct"] &= torch.equal(plan.ungather(torch.cat(parts)), want)
    if not verdict["correct"]:
        print(f"wrong, nothing is reported: {verdict}", file=sys.stderr)
        return 1
    total = statistics.median(whole)
    report = {"check": verdict, "machine": bench.machine(args), **vars(args), "whole_seconds": total, "plans": {}}
    for kind, times in ranks.items():
        each = [statistics.median(rank) for rank in times]
        report["plans"][kind] = {"rank_seconds": each, "slowest_over_share": max(each) / (total / args.ranks)}
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
