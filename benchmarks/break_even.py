"""From which length does sharding pay, on real processes? JSON on stdout.

    python benchmarks/break_even.py --lengths 64,256,1024,4096 --ranks 2

Real gloo processes, one thread each, all at work at the same time, as in tensor parallelism: either every rank selects
for all rows, or each for its share and one all-gather brings them together. The slowest rank counts; a barrier comes
before each run; the median is reported. Give it no more ranks than the machine has cores. Refuses to report (exit
code 1) unless both ways give the same bits on every rank, and these agree with the float64 reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from kpool.cli import bench, measure
from kpool.ops import fused_qk_topk_kpool
from kpool.sharding import PLANS
from kpool_testing import run_ranks

GEOMETRY = {"heads": 32, "dim": 128, "pool": 4, "topk": 2048, "seed": 0, "layout": "causal", "documents": 1}


def settings(tokens: int, order: str) -> argparse.Namespace:
    return argparse.Namespace(**GEOMETRY, tokens=tokens, order=order, threads=1, rows=64, no_plain=True)


def on_rank(group: Any, lengths: list[int], repeats: int, order: str) -> list[dict[str, list[float]]]:
    """Seconds of every run of every length on this rank, by name."""
    torch.set_num_threads(1)
    ways: dict[str, dict[str, Any]] = {"unsharded": {}}
    ways |= {kind: {"query_shard_group": group, "shard_plan": kind} for kind in PLANS}
    found = []
    for tokens in lengths:
        call = measure.bench_call(settings(tokens, order))
        options = {**call.arguments(), "order": order, "return_index_scores": False, "impl": "torch"}
        want = fused_qk_topk_kpool(**options)[1]
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, how in ways.items():
                dist.barrier(group)
                began = time.perf_counter()
                got = fused_qk_topk_kpool(**options, **how)[1]
                times[name].append(time.perf_counter() - began)
                if not torch.equal(got, want):
                    raise RuntimeError(f"{name} differs at {tokens} tokens; nothing is reported")
        found.append(times)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="64,128,256,512,1024,2048,4096")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--order", choices=["score", "position"], default="score")
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]
    longest = settings(max(lengths), args.order)
    verdict = bench.check(measure.bench_call(longest), longest)
    if not verdict["correct"]:
        print(f"wrong, nothing is reported: {verdict}", file=sys.stderr)
        return 1
    machine = bench.machine(argparse.Namespace(threads=1))
    run = run_ranks(
        lambda group: on_rank(group, lengths, args.repeats, args.order), args.ranks, backend="gloo", timeout=600.0
    )
    rows = []
    for place, tokens in enumerate(lengths):
        ranks = [result[place] for result in run.results]
        seconds = {
            name: statistics.median(max(each) for each in zip(*(rank[name] for rank in ranks), strict=True))
            for name in ranks[0]
        }
        rows.append({"tokens": tokens, "seconds": seconds})
    pays = {kind: break_even(rows, kind) for kind in PLANS}
    when = time.strftime("%Y-%m-%d", time.gmtime())
    report = {
        "check": verdict,
        "date": when,
        "machine": machine,
        **vars(args),
        "lengths": rows,
        "pays_from_tokens": pays,
    }
    print(json.dumps(report, indent=2))
    return 0


def break_even(rows: list[dict[str, Any]], kind: str) -> int | None:
    """The shortest measured length from which the plan was faster at every length measured; None if at none."""
    paid = None
    for row in sorted(rows, key=lambda row: row["tokens"], reverse=True):
        if row["seconds"][kind] >= row["seconds"]["unsharded"]:
            break
        paid = row["tokens"]
    return paid


if __name__ == "__main__":
    sys.exit(main())
