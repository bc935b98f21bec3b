"""How long does selection take on this GPU, whole and as each rank of 8, and how far is that from the matrix units?

    PYTHONPATH=src python benchmarks/gpu_selection.py --out results          on a GPU, under 6 minutes
    PYTHONPATH=src python benchmarks/gpu_selection.py --interpret            no GPU: checks that the script runs

Needs torch, triton, numpy and this checkout. The measurement is `kpool.cli.bench_gpu`, also behind
`kpool bench --device cuda`. Writes gpu_selection.json and gpu_selection.png.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kpool.cli import bench_gpu, png
from kpool.cli.exits import CommandError


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="run in Triton's interpreter on the CPU")
    parser.add_argument("--tokens", type=int, nargs="*", help="sequence lengths (default 64k 256k 512k 1M)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=330.0, help="leave out lengths that would end after this")
    parser.add_argument("--order", choices=("score", "position"), default="score")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for gpu_selection.json and .png")
    args = parser.parse_args()
    lengths = tuple(args.tokens or ([256] if args.interpret else bench_gpu.LENGTHS))
    options = bench_gpu.Options(lengths, args.ranks, args.repeats, args.order, args.seconds)
    if args.interpret:
        few = {"ranks": min(args.ranks, 2), "repeats": 1, "heads": 4, "dim": 32, "topk": 32}
        options = replace(options, interpret=True, **few)
    args.out.mkdir(parents=True, exist_ok=True)

    def keep(result: dict[str, Any]) -> None:
        (args.out / "gpu_selection.json").write_text(json.dumps(result, indent=1) + "\n")
        png.write_bars(args.out / "gpu_selection.png", result)

    try:
        bench_gpu.run(options, lambda line: print(line, flush=True), keep)
    except CommandError as error:
        print(f"gpu_selection: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
