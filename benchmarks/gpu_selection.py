"""How long does selection take on this GPU, whole and as each rank of 8, and how far is that from the matrix units?

    PYTHONPATH=src python benchmarks/gpu_selection.py --out results          on a GPU, under 6 minutes
    PYTHONPATH=src python benchmarks/gpu_selection.py --interpret --tokens 256   no GPU: checks that the script runs

Needs torch, triton, numpy and this checkout. Causal prefill of GLM-5.3-Flash's geometry (H 32, D 128, P 4, M 512);
pooling, scoring, selection and the un-permuting after the gather are timed apart with device events. Times are medians,
for ranks the slowest rank. Before anything is timed, sampled rows are compared with float64. Writes gpu_selection.json
and gpu_selection.png.

Score is timed by launching the score kernels alone over the same pieces; select is the whole call less that. The
all-gather itself needs several GPUs and is not timed here; the bytes it moves are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def options() -> argparse.Namespace:
    """The command line; small defaults under the interpreter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="run in Triton's interpreter on the CPU")
    parser.add_argument("--tokens", type=int, nargs="*", help="sequence lengths (default 64k 256k 512k 1M)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=330.0, help="start no further measurement after this long")
    parser.add_argument("--order", choices=("score", "position"), default="score")
    parser.add_argument("--out", type=Path, default=Path(), help="folder for gpu_selection.json and .png")
    chosen = parser.parse_args()
    if chosen.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        chosen.tokens = chosen.tokens or [256]
        chosen.ranks, chosen.repeats = min(chosen.ranks, 2), 1
    chosen.tokens = chosen.tokens or [1 << 16, 1 << 18, 1 << 19, 1 << 20]
    return chosen


class Workload:
    """Inputs of one sequence length, and the calls that are timed."""

    def __init__(self, tokens: int, args: argparse.Namespace) -> None:
        import torch

        from kpool.visibility import Visibility

        self.tokens, self.order = tokens, args.order
        small = args.interpret
        self.heads, self.dim, self.pool_size, self.budget = (4, 32, 4, 8) if small else (32, 128, 4, 512)
        self.rows = min(tokens, 16) if small else tokens
        self.device = torch.device("cpu" if small else "cuda")
        rng = torch.Generator(self.device).manual_seed(tokens)

        def normal(*shape: int) -> Any:
            return torch.randn(shape, generator=rng, device=self.device, dtype=torch.bfloat16)

        self.k, self.gate = normal(tokens, 1, self.dim), normal(tokens, 1, self.dim)
        self.ape = normal(self.pool_size, self.dim).float()
        self.q = normal(self.rows, 1, self.heads, self.dim)
        self.weights = normal(self.rows, 1, self.heads).float()
        windows = Visibility.causal(self.rows, first=tokens - self.rows).windows(
            rows=self.rows, tokens=tokens, batch=1, pool_size=self.pool_size, device=self.device
        )
        self.lo, self.hi = windows.pool_lo, windows.pool_hi
        self.pools = tokens // self.pool_size
        self.starts = torch.arange(self.pools, device=self.device, dtype=torch.int32) * self.pool_size
        self.keys = self.pool()
        self.chunk_bytes = 256 << 20

    def pool(self) -> Any:
        """Pooled keys."""
        from kpool.triton import launch

        return launch.pool(self.k, self.gate, self.ape, self.starts, self.pool_size, "megatron")

    def select(self, rows: Any) -> Any:
        """The pools of `rows`."""
        from kpool.triton import launch

        return launch.select(
            self.q, self.keys, self.weights, self.lo, self.hi, None, pool_size=self.pool_size, budget=self.budget,
            rows=rows, use_relu=True, dot_scale=1.0, transform="none", order=self.order, chunk_bytes=self.chunk_bytes,
        )  # fmt: skip

    def score(self, rows: Any) -> None:
        """The score kernels of `rows` alone."""
        import torch

        from kpool.triton.pieces import ScoreCall, pieces

        call = ScoreCall.of(self.q, self.keys, self.weights, self.lo, self.hi, None, self.pool_size, True, 1.0)
        by_score = self.order == "score"
        chunk = call.chunk_rows(self.chunk_bytes, self.budget if by_score else 0, "none")
        held = min(chunk, rows.count)
        ranks = torch.empty(held * call.ld, dtype=torch.int32, device=self.device)
        best = torch.empty(held * call.groups_ld, dtype=torch.int32, device=self.device)
        for _, piece in pieces(rows, chunk, call.tile.rows):
            call.score(ranks, best, piece, skip=-1 if by_score else self.budget, transform="none")

    def flops(self) -> tuple[int, int]:
        """Matrix operations of every (row, pool), and of the visible ones alone."""
        per_pair = 2 * self.heads * self.dim
        first = self.tokens - self.rows
        visible = sum((first + row + 1) // self.pool_size for row in range(self.rows))
        return per_pair * self.rows * self.pools, per_pair * visible

    def plain(self, rows: int) -> None:
        """The public algorithm on the first `rows` rows: every pool scored, masked, `topk`; at most 2 GiB at a time."""
        import torch

        step = max(1, (2 << 30) // (4 * self.heads * self.pools))
        keys = self.keys[:, 0].t()
        ids = torch.arange(self.pools, device=self.device)
        for row in range(0, rows, step):
            part = slice(row, min(row + step, rows))
            dots = (self.q[part, 0] @ keys).float().relu_()
            scores = torch.einsum("shn,sh->sn", dots, self.weights[part, 0])
            scores.masked_fill_(ids >= self.hi[0, part, None], float("-inf"))
            torch.topk(scores, min(self.budget, self.pools), dim=-1)


def check(work: Workload, rows: Any) -> int:
    """Compare sampled rows with float64 wherever rounding cannot decide; returns how many were compared."""
    import torch

    from kpool import reference
    from kpool.ranking import Ranking

    ids = work.select(rows)[0].cpu()
    sample = torch.linspace(0, work.rows - 1, 8).long().tolist()
    keys = work.keys[:, 0].cpu()
    compared = 0
    for row in sample:
        score, error = reference.score_rows(work.q[row : row + 1, 0].cpu(), keys, work.weights[row : row + 1, 0].cpu())
        visible = torch.arange(work.pools)[None] < int(work.hi[0, row])
        kth = min(work.budget, int(visible.sum()))
        ordered = score[visible].sort(descending=True)
        gap = ordered.values[kth - 1] - ordered.values[kth] if kth < int(visible.sum()) else torch.tensor(1.0)
        if gap > 2 * error.max():
            assert set(ids[row].tolist()) - {-1} == set(
                Ranking(score, error, visible).best(work.budget)[0].tolist()
            ) - {-1}
            compared += 1
    return compared


class Clock:
    """Median seconds of a call, by device events on a GPU."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.gpu, self.repeats = not args.interpret, args.repeats

    def __call__(self, call: Callable[[], Any]) -> float:
        """Warm up once, then the median of `repeats`."""
        call()
        return statistics.median(self._once(call) for _ in range(self.repeats))

    def _once(self, call: Callable[[], Any]) -> float:
        import torch

        if not self.gpu:
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def matrix_rate(clock: Clock, interpret: bool) -> float:
    """FLOP/s of a large bf16 product by the vendor's library on this device."""
    import torch

    size = 128 if interpret else 8192
    a = torch.randn(size, size, device="cpu" if interpret else "cuda", dtype=torch.bfloat16)
    return 2 * size**3 / clock(lambda: a @ a)


def measure(work: Workload, args: argparse.Namespace, clock: Clock, rate: float) -> list[dict[str, Any]]:
    """One record for the whole call and one a shard plan."""
    import torch

    from kpool.sharding import RowBlocks, ShardPlan

    whole = RowBlocks.all(work.rows)
    full, visible = work.flops()
    compared = check(work, whole)
    pool = clock(work.pool)
    plans: dict[str, list[Any]] = {"whole": [whole]}
    for kind in ("contiguous", "block_cyclic"):
        plan = ShardPlan.of(kind, work.rows, args.ranks)
        plans[kind] = [plan.blocks(rank) for rank in range(args.ranks)]
    records = []
    for name, ranks in plans.items():
        totals = [clock(lambda rows=rows: work.select(rows)) for rows in ranks]
        slowest = ranks[totals.index(max(totals))]
        score, total = clock(lambda rows=slowest: work.score(rows)), max(totals)
        record = {
            "tokens": work.tokens, "plan": name, "ranks": len(ranks), "rows": work.rows, "pool_s": pool,
            "score_s": score, "select_s": max(total - score, 0.0), "total_s": total,
            "mean_rank_s": statistics.mean(totals),
            "select_share": max(total - score, 0.0) / total, "flops_all": full, "flops_visible": visible,
            "visible_rate": visible / len(ranks) / statistics.mean(totals),
            "fraction_of_matrix_rate": visible / len(ranks) / statistics.mean(totals) / rate, "rows_checked": compared,
        }  # fmt: skip
        if name != "whole":
            plan = ShardPlan.of(name, work.rows, args.ranks)
            gathered = torch.zeros(args.ranks, plan.rows_per_rank, work.budget, dtype=torch.int32, device=work.device)
            record["ungather_s"] = clock(lambda plan=plan, ids=gathered: plan.ungather(ids))
            record["gather_bytes_per_rank"] = plan.rows_per_rank * work.budget * 4
            del gathered
        elif clock.gpu:
            record["peak_bytes_above_inputs_and_output"] = _peak(work, whole)
        if name == "whole" and (work.tokens <= 1 << 16):
            record["plain_s"] = clock(lambda: work.plain(work.rows))
        records.append(record)
        line = f"{work.tokens:>8} tokens  {name:12}  score {score * 1e3:9.2f} ms"
        line += f"  select {record['select_s'] * 1e3:8.2f} ms"
        line += f"  total {total * 1e3:9.2f} ms  {record['fraction_of_matrix_rate']:6.1%} of the matrix rate"
        line += f"  plain {record['plain_s'] * 1e3:.1f} ms" if "plain_s" in record else ""
        print(line, flush=True)
    return records


def _peak(work: Workload, rows: Any) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids = work.select(rows)
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before - ids.numel() * 4)


def write_png(path: Path, records: list[dict[str, Any]]) -> None:
    """A bar a record, height log10 of the total time: score dark, select light. Plain PNG, no plotting package."""
    import numpy as np

    height, bar, gap = 240, 28, 10
    image = np.full((height + 20, gap + len(records) * (bar + gap), 3), 255, np.uint8)
    longest = max(r["total_s"] for r in records)
    shortest = min(r["total_s"] for r in records) / 3
    for n, r in enumerate(records):
        tall = int(height * np.log(r["total_s"] / shortest) / np.log(longest / shortest))
        dark = int(tall * r["score_s"] / max(r["total_s"], r["score_s"]))
        x = gap + n * (bar + gap)
        image[height - tall + 10 : height + 10, x : x + bar] = (240, 170, 60)
        image[height - dark + 10 : height + 10, x : x + bar] = (40, 90, 160)
    rows = b"".join(b"\0" + line.tobytes() for line in image)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def main() -> int:
    """Measure, print, write."""
    args = options()
    import torch
    import triton

    if not args.interpret and not torch.cuda.is_available():
        print("gpu_selection: no CUDA device; --interpret --tokens 256 checks the script without one", file=sys.stderr)
        return 3
    began = time.monotonic()
    clock = Clock(args)
    rate = matrix_rate(clock, args.interpret)
    device = platform.processor() or "cpu" if args.interpret else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}: bf16 product {rate / 1e12:.3g} TFLOP/s")
    records: list[dict[str, Any]] = []
    left_out = []
    for tokens in args.tokens:
        if time.monotonic() - began > args.seconds * 0.6:  # the next length takes at least twice the last
            left_out.append(tokens)
            continue
        records += measure(Workload(tokens, args), args, clock, rate)
    args.out.mkdir(parents=True, exist_ok=True)
    result = {
        "device": device, "interpreted": args.interpret, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__,
        "triton": triton.__version__, "matrix_flops_per_s": rate, "order": args.order, "left_out": left_out,
        "seconds": time.monotonic() - began, "records": records,
    }  # fmt: skip
    (args.out / "gpu_selection.json").write_text(json.dumps(result, indent=1) + "\n")
    write_png(args.out / "gpu_selection.png", records)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
