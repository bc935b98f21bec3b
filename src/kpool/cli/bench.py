"""`kpool bench`: kpool against the plain algorithm and against the machine's limit, after showing that both are right.

Per length: the plain algorithm, kpool and the matrix products alone run in turn in this process, the median counts;
peak memory comes from fresh processes. While a result is wrong no speed is reported.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from kpool.captures import CapturedCall
from kpool.cli import measure, view
from kpool.cli.exits import DIFFERENT, OK, CommandError
from kpool.cli.verdict import compare_expected, judge, sample_rows
from kpool.cli.workload import add_geometry, positive
from kpool.selection import ORDERS
from kpool.sharding import ShardPlan

ENOUGH = 5  # runs behind a median that is called one
_BUSY = 0.15  # share of the processors that others may use on a machine called quiet


def add_parser(commands: Any) -> None:
    """Declare `kpool bench`."""
    parser = commands.add_parser(
        "bench",
        help="time and memory against the plain algorithm and the machine's limit",
        description="Exit 0: every length is right and was measured. 1: a result is wrong; no speed is given for it.",
    )
    parser.add_argument(
        "--lengths", metavar="N,N,...", help="tokens (default: 4096,8192; on a GPU 65536,262144,524288,1048576)"
    )
    parser.add_argument("--layout", choices=["causal", "packed"], default="causal")
    parser.add_argument("--documents", type=positive, default=8, help="documents of --layout packed (default: 8)")
    parser.add_argument("--order", choices=ORDERS, default="score")
    parser.add_argument("--repeats", type=positive, default=ENOUGH, help=f"runs of each (default: {ENOUGH})")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="default: as torch has it")
    parser.add_argument("--rows", type=positive, default=128, help="rows held against the reference (default: 128)")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain algorithm out (long inputs)")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory in fresh processes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the Triton kernels")
    parser.add_argument("--ranks", type=positive, default=8, help="simulated ranks of --device cuda (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="time and memory against length, png or svg")
    add_geometry(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure every length; 1 if a result was wrong."""
    if args.topk % args.pool:
        raise CommandError(f"--topk: expected a multiple of --pool {args.pool}, got {args.topk}")
    if args.device == "cuda":
        return _run_on_gpu(args)
    lengths = _lengths(args.lengths or "4096,8192")
    if args.plot:
        from kpool.cli import plot, plot_bench  # matplotlib, before any work

        plot.check(args.plot)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        report = {"machine": machine(args), "order": args.order, "layout": args.layout, "lengths": []}
        for tokens in lengths:
            found = bench_length(argparse.Namespace(**{**vars(args), "tokens": tokens}))
            report["lengths"].append(found)
            if not found["correct"]:
                break
    finally:
        torch.set_num_threads(before)
    if args.json:
        view.print_json(report)
    else:
        show(report)
    correct = all(found["correct"] for found in report["lengths"])
    if correct and args.plot:
        plot.save(plot_bench.picture(report), args.plot)
        view.wrote(args.plot)
    return OK if correct else DIFFERENT


def _run_on_gpu(args: argparse.Namespace) -> int:
    """Measure this GPU; see `bench_gpu`."""
    from kpool.cli import bench_gpu, png

    if args.layout != "causal":
        raise CommandError(f"--layout: --device cuda measures causal alone, got {args.layout!r}")
    if args.plot and (args.plot.suffix.lower() != ".png" or not args.plot.parent.is_dir()):
        raise CommandError(f"--plot: --device cuda writes .png into an existing folder, got {str(args.plot)!r}")
    lengths = tuple(_lengths(args.lengths)) if args.lengths else bench_gpu.LENGTHS
    geometry = {"heads": args.heads, "dim": args.dim, "pool_size": args.pool, "topk": args.topk}
    options = bench_gpu.Options(lengths, args.ranks, args.repeats, args.order, **geometry)
    report = bench_gpu.run(options, view.hint if args.json else view.say)
    if args.json:
        view.print_json(report)
    if args.plot:
        png.write_bars(args.plot, report)
        view.wrote(args.plot)
    return OK


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise CommandError(f"--lengths: expected numbers such as 4096,8192, got {text!r}")
    return lengths


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Where this ran, and whether others were using the processors."""
    import platform

    import psutil

    busy = psutil.cpu_percent(interval=0.5) / 100
    return {
        "processor": platform.processor() or platform.machine(),
        "cpus": psutil.cpu_count(),
        "threads": args.threads,
        "torch": torch.__version__,
        "busy_before": busy,
        "quiet": busy <= _BUSY,
    }


def bench_length(args: argparse.Namespace) -> dict[str, Any]:
    """Check one length, then measure it."""
    call = measure.bench_call(args)
    verdict = check(call, args)
    found: dict[str, Any] = {"tokens": args.tokens, **verdict}
    if not verdict["correct"]:
        return found
    gemm = measure.GemmOnly(call, args.order)
    runs = {"kpool": lambda: measure.kpool_call(call, args.order), "gemm": gemm.run}
    if not args.no_plain:
        runs["plain"] = lambda: measure.plain_call(call)
    times = measure.interleaved(runs, args.repeats)
    found["runs"] = args.repeats
    found["seconds"] = {name: statistics.median(values) for name, values in times.items()}
    found["spread"] = {name: [min(values), max(values)] for name, values in times.items()}
    found["gemm_flops"] = gemm.flops
    if not args.no_memory:
        wanted = [name for name in ("kpool", "plain") if name in runs]
        found["memory"] = {name: measure.memory_in_fresh_process(args, name) for name in wanted}
    return found


def check(call: CapturedCall, args: argparse.Namespace) -> dict[str, Any]:
    """kpool against the float64 reference on some rows, and the plain algorithm against kpool on all."""
    tokens = measure.kpool_call(call, args.order)
    rows = sample_rows(call, ShardPlan.contiguous(call.q.shape[0], 1), args.rows)
    if len(rows) > args.rows:
        rows = rows[:: -(-len(rows) // args.rows)]
    judged = judge(call, tokens, rows, lambda _: None)
    found: dict[str, Any] = {"checked_rows": judged.checked, "wrong_rows": judged.wrong + judged.wrong_keys}
    found["plain_differs"] = found["near_ties"] = 0
    if not args.no_plain:
        other = compare_expected(call, tokens, measure.plain_call(call))
        found["plain_differs"], found["near_ties"] = other.wrong, other.near_ties
    found["correct"] = not found["wrong_rows"] and not found["plain_differs"]
    return found


def ratio(found: dict[str, Any], above: str, below: str) -> float | None:
    """Seconds of one over seconds of another, None where one was not measured or took no time."""
    top, bottom = found["seconds"].get(above), found["seconds"].get(below)
    return top / bottom if top and bottom and bottom > 1e-5 else None


def show(report: dict[str, Any]) -> None:
    """One line a length, then what a reader must know to trust it."""
    where = report["machine"]
    title = f"kpool bench: {report['layout']}, order={report['order']}"
    out = Table(title=title, title_justify="left", padding=(0, 1, 0, 0))  # all columns fit a terminal
    names = ("tokens", "plain", "kpool", "plain / kpool", "GEMM alone", "kpool / GEMM", "memory plain", "memory kpool")
    measured = any(found.get("memory") for found in report["lengths"])
    for name in names if measured else names[:-2]:
        out.add_column(name, justify="right")
    for found in report["lengths"]:
        if not found["correct"]:
            view.OUT.print(
                f"{found['tokens']:,} tokens: wrong, so no speed is reported: {found['wrong_rows']} rows against the "
                f"float64 reference, {found['plain_differs']} rows against the plain algorithm"
            )
            continue
        times, memory = found["seconds"], found.get("memory", {})
        ratios = [ratio(found, *pair) for pair in (("plain", "kpool"), ("kpool", "gemm"))]
        cells = [view.duration(times[n]) if n in times else "-" for n in ("plain", "kpool", "gemm")]
        shown = [f"{value:.2f}" if value else "-" for value in ratios]
        sizes = [view.size(memory[n]["bytes"]) if n in memory else "-" for n in ("plain", "kpool")]
        row = (f"{found['tokens']:,}", cells[0], cells[1], shown[0], cells[2], shown[1], *sizes)
        out.add_row(*(row if measured else row[:-2]))
    view.OUT.print(out)
    view.say("plain: fp32 scores in chunks, then torch.topk. GEMM alone: the products of the tiles kpool scores.")
    for line in notes(report):
        view.say(line)
    view.say(f"{where['cpus']} processors, torch {where['torch']} on {where['threads']} of them")


def notes(report: dict[str, Any]) -> list[str]:
    """Reasons to read the figures with care."""
    lines = []
    if not report["machine"]["quiet"]:
        lines.append(f"The machine was not quiet: {report['machine']['busy_before']:.0%} busy before the first run.")
    few = {found["runs"] for found in report["lengths"] if found["correct"] and found["runs"] < ENOUGH}
    lines += [f"Medians of {runs} runs only; {ENOUGH} are wanted." for runs in sorted(few)]
    return lines
