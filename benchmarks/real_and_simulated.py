"""What does one multi-rank test take on real gloo processes, on simulated ranks ("fake"), and replayed? JSON on stdout.

    python benchmarks/real_and_simulated.py --ranks 2,4,8

One test: every rank selects its share of the rows of a small call, the shares are gathered, and the result is returned.
A real run starts a process a rank, as `run_ranks(fn, size, backend="gloo")` does in a test; what it takes from the call
to the last result counts, so most of it is starting Python and torch. Each way runs in turn; medians. Refuses to report
(exit code 1) unless every way returns the same bits on every rank, and these are the unsharded call's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kpool.captures import CapturedCall
from kpool.cli import bench, measure
from kpool.ops import fused_qk_topk_kpool
from kpool_testing import run_ranks

SMALL = {"heads": 4, "dim": 32, "pool": 4, "topk": 64, "seed": 0, "layout": "causal", "documents": 1}


def share(call: CapturedCall) -> Callable[[Any], Tensor]:
    """The test."""
    options = {**call.arguments(), "return_index_scores": False, "impl": "torch"}
    return lambda group: fused_qk_topk_kpool(**options, query_shard_group=group)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ranks", default="2,4,8")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    call = measure.bench_call(argparse.Namespace(**SMALL, tokens=args.tokens))
    want = measure.kpool_call(call, "score")
    machine = bench.machine(argparse.Namespace(threads=torch.get_num_threads()))
    found = []
    for size in map(int, args.ranks.split(",")):
        times: dict[str, list[float]] = {"replay": [], "fake": [], "gloo": []}
        for _ in range(args.repeats):
            for backend, seconds in times.items():
                began = time.perf_counter()
                results = run_ranks(share(call), size, backend=backend).results
                seconds.append(time.perf_counter() - began)
                if not all(torch.equal(result, want) for result in results):
                    print(f"{backend} differs on {size} ranks; nothing is reported", file=sys.stderr)
                    return 1
        medians = {backend: statistics.median(seconds) for backend, seconds in times.items()}
        ratios = {f"gloo / {name}": medians["gloo"] / medians[name] for name in ("replay", "fake")}
        found.append({"ranks": size, "seconds": medians, "ratios": ratios})
    report = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "machine": machine, "tokens": args.tokens}
    print(json.dumps({**report, "repeats": args.repeats, "ranks": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
