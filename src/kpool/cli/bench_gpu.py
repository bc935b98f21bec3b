"""`kpool bench --device cuda`: how long selection takes on this GPU, whole and as each rank, and what limits it.

Causal prefill, GLM-5.3-Flash's geometry by default. Pooling, scoring, selecting, the gather and the expansion to tokens
are timed apart with device events: medians, for ranks the slowest rank; the whole call as users make it, too. Before
anything is timed, sampled rows are compared with float64. The gather runs on as many GPUs as there are, up to
``ranks``; with one it is not timed, and its bytes are reported all the same.

Needs torch, triton and numpy alone. Without a GPU the same code runs in Triton's interpreter on a few rows, with gloo
processes for the gather, so that it cannot rot.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from kpool import reference
from kpool.captures import CapturedCall
from kpool.cli.exits import UNAVAILABLE, CommandError
from kpool.cli.measure import plain_call
from kpool.ops import fused_qk_topk_kpool
from kpool.ranking import Ranking
from kpool.selection import expand
from kpool.sharding import RowBlocks, ShardPlan, all_gather
from kpool.visibility import Visibility

LENGTHS = (1 << 16, 1 << 18, 1 << 19, 1 << 20)
PLAIN_TOKENS = 1 << 16  # the plain algorithm is measured up to here
_CHUNK_BYTES = 256 << 20
_CHECKED_ROWS = 8
_INTERPRETED_ROWS = 16  # the last ones; the interpreter takes seconds for them


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        lengths: tokens.
        ranks: size of the simulated tensor-parallel group.
        repeats: runs behind each median.
        order: ``"score"`` or ``"position"``.
        seconds: a length is left out if, at four times the time of one of half its size, it would end after this.
        interpret: run in Triton's interpreter on the CPU, a few rows alone.
        heads, dim, pool_size, topk: ``H``, ``D``, ``P`` and ``K``.
    """

    lengths: tuple[int, ...] = LENGTHS
    ranks: int = 8
    repeats: int = 5
    order: str = "score"
    seconds: float = 330.0
    interpret: bool = False
    heads: int = 32
    dim: int = 128
    pool_size: int = 4
    topk: int = 2048


class Clock:
    """Seconds of what runs between two marks: device events on a GPU, the wall clock elsewhere."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.gpu, self.repeats = device.type == "cuda", repeats

    def mark(self) -> Any:
        """A point in the stream of work."""
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one mark to another; both must have been passed."""
        return float(first.elapsed_time(last)) / 1e3 if self.gpu else last - first

    def finish(self) -> None:
        """Wait until all marks have been passed."""
        if self.gpu:
            torch.cuda.synchronize()

    def __call__(self, call: Callable[[], Any]) -> float:
        """Warm up once, then the median of ``repeats``."""
        call()
        return statistics.median(self._once(call) for _ in range(self.repeats))

    def _once(self, call: Callable[[], Any]) -> float:
        self.finish()
        first = self.mark()
        call()
        last = self.mark()
        self.finish()
        return self.between(first, last)


class Workload:
    """Inputs of one sequence length, and the calls that are timed."""

    def __init__(self, tokens: int, options: Options, device: torch.device) -> None:
        self.tokens, self.order, self.device = tokens, options.order, device
        self.heads, self.dim, self.pool_size = options.heads, options.dim, options.pool_size
        self.budget = options.topk // options.pool_size
        self.rows = min(tokens, _INTERPRETED_ROWS) if options.interpret else tokens
        rng = torch.Generator(device).manual_seed(tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, device=device, dtype=torch.bfloat16)

        self.k, self.gate = normal(tokens, 1, self.dim), normal(tokens, 1, self.dim)
        self.ape = normal(self.pool_size, self.dim).float()
        self.q = normal(self.rows, 1, self.heads, self.dim)
        self.weights = normal(self.rows, 1, self.heads).float()
        self.windows = Visibility.causal(self.rows, first=tokens - self.rows).windows(
            rows=self.rows, tokens=tokens, batch=1, pool_size=self.pool_size, device=device
        )
        self.lo, self.hi = self.windows.pool_lo, self.windows.pool_hi
        self.call = CapturedCall(
            q=self.q, k=self.k, weights=self.weights, gate_score=self.gate, ape=self.ape, index_topk=options.topk,
            pool_size=self.pool_size, varlen_starts=self.windows.start[0], varlen_ends=self.windows.end[0],
        )  # fmt: skip
        self.pools = tokens // self.pool_size
        self.starts = torch.arange(self.pools, device=device, dtype=torch.int32) * self.pool_size
        self.keys = self.pool()

    def pool(self) -> Tensor:
        """Pooled keys."""
        from kpool.triton import launch

        return launch.pool(self.k, self.gate, self.ape, self.starts, self.pool_size, "megatron")

    def select(self, rows: RowBlocks) -> Tensor:
        """The pools of ``rows``."""
        from kpool.triton import launch

        return launch.select(
            self.q, self.keys, self.weights, self.lo, self.hi, None, pool_size=self.pool_size, budget=self.budget,
            rows=rows, use_relu=True, dot_scale=1.0, transform="none", order=self.order, chunk_bytes=_CHUNK_BYTES,
        )  # fmt: skip

    def expand(self, ids: Tensor) -> Tensor:
        """The tokens of ``ids [1, S, M]``, with tails."""
        return expand(ids, self.starts, self.windows, pool_size=self.pool_size)

    def fused(self) -> Tensor:
        """Tokens of the whole call, from keys that are not pooled yet."""
        options: dict[str, Any] = {"order": self.order, "return_index_scores": False, "score_chunk_bytes": _CHUNK_BYTES}
        return fused_qk_topk_kpool(**self.call.arguments(), **options)[1]

    def parts(self, rows: RowBlocks, clock: Clock) -> tuple[float, float]:
        """Seconds of scoring and of selecting ``rows``, medians over runs of the sums over pieces."""
        from kpool.triton.launch import Selection
        from kpool.triton.pieces import ScoreCall

        call = ScoreCall.of(self.q, self.keys, self.weights, self.lo, self.hi, None, self.pool_size, True, 1.0)
        work = Selection(call, self.budget, rows, order=self.order, transform="none", chunk_bytes=_CHUNK_BYTES)
        runs = []
        for _ in range(clock.repeats):
            marks = []
            for first, piece in work.pieces():
                marks.append(clock.mark())
                work.score(piece)
                marks.append(clock.mark())
                work.pick(first, piece)
            marks.append(clock.mark())
            clock.finish()
            steps = [clock.between(*pair) for pair in pairwise(marks)]
            runs.append((sum(steps[0::2]), sum(steps[1::2])))
        scores, picks = zip(*runs, strict=True)
        return statistics.median(scores), statistics.median(picks)

    def flops(self) -> tuple[int, int]:
        """Matrix operations of every (row, pool), and of the visible ones alone."""
        per_pair = 2 * self.heads * self.dim
        first = self.tokens - self.rows
        visible = sum((first + row + 1) // self.pool_size for row in range(self.rows))
        return per_pair * self.rows * self.pools, per_pair * visible

    def check(self) -> int:
        """Compare sampled rows with float64 wherever rounding cannot decide; returns how many were compared.

        Raises:
            CommandError: a row is wrong.
        """
        ids = self.select(RowBlocks.all(self.rows))[0].cpu()
        keys, compared = self.keys[:, 0].double(), 0
        for row in torch.linspace(0, self.rows - 1, _CHECKED_ROWS).long().tolist():
            one = slice(row, row + 1)
            score, error = (t.cpu() for t in reference.score_rows(self.q[one, 0], keys, self.weights[one, 0]))
            ranking = Ranking(score, error, torch.arange(self.pools)[None] < int(self.hi[0, row]))
            if bool(ranking.decided(self.budget)):
                if set(ids[row].tolist()) != set(ranking.best(self.budget)[0].tolist()):
                    raise CommandError(f"{self.tokens:,} tokens, row {row}: wrong, so no speed is reported", 1)
                compared += 1
        return compared

    def peak(self) -> int:
        """Bytes of one whole call above its inputs, its output and the pool ids, on a GPU."""
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        tokens = self.fused()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        return int(peak - before - 4 * (tokens.numel() + self.rows * self.budget))


def measure(work: Workload, options: Options, clock: Clock, rate: float) -> list[dict[str, Any]]:
    """One record for the whole call and one a shard plan."""
    whole = RowBlocks.all(work.rows)
    full, visible = work.flops()
    common = {
        "tokens": work.tokens, "rows": work.rows, "rows_checked": work.check(), "pool_s": clock(work.pool),
        "flops_all": full, "flops_visible": visible,
    }  # fmt: skip
    plans: dict[str, list[RowBlocks]] = {"whole": [whole]}
    for kind in ("contiguous", "block_cyclic"):
        plan = ShardPlan.of(kind, work.rows, options.ranks)
        plans[kind] = [plan.blocks(rank) for rank in range(options.ranks)]
    gather = gather_seconds(options, -(-work.rows // options.ranks), work.budget)
    records = []
    for name, ranks in plans.items():
        totals = [clock(lambda rows=rows: work.select(rows)) for rows in ranks]  # type: ignore[misc]
        mean, total = statistics.mean(totals), max(totals)
        score, select = work.parts(ranks[totals.index(total)], clock)
        record = {
            **common, "plan": name, "ranks": len(ranks), "total_s": total, "mean_rank_s": mean, "score_s": score,
            "select_s": select, "select_share": select / (score + select),
            "visible_rate": visible / len(ranks) / mean,
            "fraction_of_matrix_rate": visible / len(ranks) / mean / rate,
        }  # fmt: skip
        if name != "whole":
            record |= _way_back(ShardPlan.of(name, work.rows, options.ranks), work, clock) | gather
        else:
            record |= _whole_call(work, clock)
        records.append(record)
    return records


def _whole_call(work: Workload, clock: Clock) -> dict[str, Any]:
    """The call as users make it, its expansion alone, its memory, and the plain algorithm where that is short."""
    expand_ids = partial(work.expand, work.select(RowBlocks.all(work.rows)))
    found: dict[str, Any] = {"expand_s": clock(expand_ids), "fused_s": clock(work.fused)}
    del expand_ids  # and the ids it holds, before memory is looked at
    if clock.gpu:
        found["peak_bytes_above_inputs_ids_and_output"] = work.peak()
    if work.tokens <= PLAIN_TOKENS:
        found["plain_s"] = clock(partial(plain_call, work.call))
    return found


def _way_back(plan: ShardPlan, work: Workload, clock: Clock) -> dict[str, Any]:
    """What follows the gather: seconds of putting the rows back in order, and the bytes each rank sends."""
    gathered = torch.zeros(plan.size, plan.rows_per_rank, work.budget, dtype=torch.int32, device=work.device)
    seconds = clock(lambda: plan.ungather(gathered))
    return {"ungather_s": seconds, "gather_bytes_per_rank": plan.rows_per_rank * work.budget * 4}


def gather_seconds(options: Options, rows: int, budget: int) -> dict[str, Any]:
    """Seconds of the all-gather of int32 ``[rows, budget]`` on the GPUs that are there, the slowest rank."""
    size = 2 if options.interpret else min(options.ranks, torch.cuda.device_count())
    if size < 2:
        return {"gather_s": None, "gather_ranks": size, "gather_note": "not timed: needs two GPUs"}
    with tempfile.TemporaryDirectory() as folder:
        spawn(_gather_rank, (size, folder, rows, budget, options), nprocs=size)  # type: ignore[no-untyped-call]
        return {"gather_s": float((Path(folder) / "seconds").read_text()), "gather_ranks": size}


def _gather_rank(rank: int, size: int, folder: str, rows: int, budget: int, options: Options) -> None:
    """One process of ``gather_seconds``."""
    backend, device = ("gloo", "cpu") if options.interpret else ("nccl", f"cuda:{rank}")
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        group, ids = dist.group.WORLD, torch.zeros(1, rows, budget, dtype=torch.int32, device=device)
        assert group is not None
        seconds = torch.tensor(Clock(ids.device, options.repeats)(lambda: all_gather(ids, group, size)), device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if rank == 0:
            (Path(folder) / "seconds").write_text(str(float(seconds)))
    finally:
        dist.destroy_process_group()


def run(
    options: Options, say: Callable[[str], None], keep: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Check and measure every length.

    Args:
        say: gets a line for people now and then.
        keep: gets what is known so far after every length, so that a run which is ended leaves its figures.

    Raises:
        CommandError: there is no GPU, or a result is wrong.
    """
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
    elif not torch.cuda.is_available():
        raise CommandError("no CUDA device; see `kpool info`", UNAVAILABLE)
    import triton

    began = time.monotonic()
    device = torch.device("cpu" if options.interpret else "cuda")
    name = platform.processor() or "cpu" if options.interpret else torch.cuda.get_device_name()
    clock = Clock(device, options.repeats)
    rate = _matrix_rate(clock, device, 128 if options.interpret else 8192)
    say(f"{name}, torch {torch.__version__}, triton {triton.__version__}: bf16 product {rate / 1e12:.3g} TFLOP/s")
    result: dict[str, Any] = {
        "device": name, "interpreted": options.interpret, "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__, "triton": triton.__version__, "matrix_flops_per_s": rate, "order": options.order,
        "repeats": options.repeats, "left_out": [], "records": [],
    }  # fmt: skip
    last = 0.0  # seconds of the length before over its square: what the next takes grows with that
    for tokens in options.lengths:
        started = time.monotonic()
        if started - began + last * tokens**2 > options.seconds:
            result["left_out"].append(tokens)
            continue
        found = measure(Workload(tokens, options, device), options, clock, rate)
        last = (time.monotonic() - started) / tokens**2
        result["records"] += found
        result["seconds"] = time.monotonic() - began
        for record in found:
            say(line(record))
        if keep is not None:
            keep(result)
    return result


def _matrix_rate(clock: Clock, device: torch.device, size: int) -> float:
    """FLOP/s of a large bf16 product by the vendor's library on this device."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / clock(lambda: a @ a)


def line(record: dict[str, Any]) -> str:
    """A record in one line."""
    told = {name: f"{record[f'{name}_s'] * 1e3:.2f} ms" for name in ("pool", "score", "select", "total")}
    out = f"{record['tokens']:>9,} tokens  {record['plan']:12}"
    out += "".join(f"  {name} {value:>11}" for name, value in told.items())
    out += f"  {record['fraction_of_matrix_rate']:6.1%} of the matrix rate"
    if record.get("gather_s") is not None:
        out += f"  gather {record['gather_s'] * 1e3:.2f} ms on {record['gather_ranks']} ranks"
    if "fused_s" in record:
        out += f"  whole call {record['fused_s'] * 1e3:.2f} ms"
    if "plain_s" in record:
        out += f"  plain {record['plain_s'] * 1e3:.1f} ms, {record['plain_s'] / record['fused_s']:.1f}x"
    return out
