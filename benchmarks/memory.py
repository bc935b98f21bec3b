"""How much memory does one call need above its inputs and outputs? One fresh process per figure; JSON on stdout.

    python benchmarks/memory.py --lengths 8192,16384

Refuses to report (exit code 1) unless a call of this machine agrees with the float64 reference and the plain algorithm.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from kpool.cli import bench, measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="8192,16384")
    parser.add_argument("--order", choices=["score", "position"], default="score")
    parser.add_argument("--plain-up-to", type=int, default=8192, help="longest input of the plain algorithm")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    geometry = {"heads": 32, "dim": 128, "pool": 4, "topk": 2048, "seed": 0, "layout": "causal", "documents": 1}
    base = {**geometry, "order": args.order, "threads": args.threads}
    small = argparse.Namespace(**base, tokens=4096, rows=64, no_plain=False)
    verdict = bench.check(measure.bench_call(small), small)
    if not verdict["correct"]:
        print(f"wrong at 4,096 tokens, nothing is reported: {verdict}", file=sys.stderr)
        return 1
    found = []
    for tokens in map(int, args.lengths.split(",")):
        one = argparse.Namespace(**base, tokens=tokens)
        names = ["kpool", "plain"] if tokens <= args.plain_up_to else ["kpool"]
        found.append({"tokens": tokens, **{name: measure.memory_in_fresh_process(one, name) for name in names}})
    print(json.dumps({"check": verdict, "order": args.order, "lengths": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
