"""`kpool verify`: every rank of a group against the unsharded call, and that call against the float64 reference.

    1. the unsharded call                                     tokens [B, S, W]
    2. the same call on every rank of a simulated or real group, each compared with 1 bit for bit
    3. 1 against the float64 reference on at least 1,024 rows, wherever the margin exceeds the rounding bound
    4. 1 against another system's selection of the same call (`--expect`)

Ranks compare where they run and report a verdict, so nothing here holds one result per rank.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kpool.captures import CapturedCall, read_safetensors
from kpool.cli import report, view
from kpool.cli.exits import DIFFERENT, CommandError
from kpool.cli.outcome import Outcome, RankReport
from kpool.cli.verdict import compare_expected, judge, sample_rows
from kpool.cli.workload import LAYOUTS, SEEDED, add_geometry, positive, seeded_call, visibility_of, with_layout
from kpool.ops import fused_qk_topk_kpool
from kpool.selection import ORDERS
from kpool.sharding import PLANS, ShardPlan
from kpool.validation import IMPLS, NUMERICS
from kpool.windows import RowWindows
from kpool_testing import CollectiveError, Run
from kpool_testing import run_ranks as launch

BACKENDS = ("replay", "fake", "gloo", "nccl")
_BACKENDS_HELP = (
    "replay: one after the other in this process (default); fake: a simulated process group, all collectives; "
    "gloo, nccl: a process a rank"
)
_REAL = {"gloo": {"timeout": 600.0}, "nccl": {"timeout": 600.0}}
Made = TypeVar("Made")


def add_parser(commands: Any) -> None:
    """Declare `kpool verify`."""
    parser = commands.add_parser(
        "verify",
        help="show that every rank returns the unsharded selection, and that it is the right one",
        description="Exit 0: every rank bit-identical, and equal to the float64 reference. 1: a difference. "
        "2: no difference, but more than 1 % of the sampled rows are too close to a tie to be decided. "
        "64: the command line or a file cannot be used.",
    )
    parser.add_argument("--ranks", type=positive, default=8, help="ranks that share the rows (default: 8)")
    parser.add_argument("--tokens", type=positive, default=SEEDED["tokens"], help="query rows and keys (default: 4096)")
    parser.add_argument("--batch", type=positive, default=1)
    parser.add_argument("--layout", choices=LAYOUTS, help="what rows see (default: causal, or what --input says)")
    parser.add_argument("--backend", choices=BACKENDS, default="replay", help=_BACKENDS_HELP)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--impl", choices=IMPLS, default="auto")
    parser.add_argument("--shard-plan", choices=PLANS, default="contiguous")
    parser.add_argument("--order", choices=ORDERS, default="score")
    parser.add_argument("--numerics", choices=NUMERICS, help="default: megatron, or what --input says")
    parser.add_argument("--chunk-bytes", type=positive, metavar="BYTES", help="score buffer (default: by device)")
    parser.add_argument(
        "--rows", type=positive, default=1024, help="rows to hold against the reference (default: 1024)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", type=Path, metavar="FILE", help="a captured call instead of seeded tensors")
    parser.add_argument("--expect", type=Path, metavar="FILE", help="another system's selection: `tokens` [B, S, W]")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write one self-contained HTML page")
    add_geometry(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do the four steps, print what came out, return the exit code."""
    if args.report:
        report.check(args.report)
    try:
        outcome = verify(args)
    except CommandError as error:
        if args.report and isinstance(error.__cause__, CollectiveError):
            report.write(args.report, report.failure_page(args, error.__cause__))
            view.wrote(args.report)
        raise
    if args.report:
        report.write(args.report, report.page(outcome))
    if args.json:
        view.print_json(outcome.as_json())
    else:
        outcome.show()
    if args.report:
        view.wrote(args.report)
    return outcome.code


def verify(args: argparse.Namespace) -> Outcome:
    """The four steps, with progress on stderr."""
    device = check_device(args)
    call = load_call(args).to(device)
    given = None if args.expect is None else load_expected(args.expect, call)
    plan = ShardPlan.of(args.shard_plan, call.q.shape[0], args.ranks)
    with view.progress() as progress:
        task = progress.add_task("unsharded call", total=4)
        began = time.perf_counter()
        tokens = select(call, args)
        seconds = time.perf_counter() - began
        progress.update(task, completed=1, description=f"{args.ranks} ranks on {args.backend}")
        ran = run_ranks(call, tokens, args)
        ranks = rank_reports(ran, windows_of(call), plan)
        progress.update(task, completed=2, description="float64 reference")
        rows = sample_rows(call, plan, args.rows)
        reference = judge(call, tokens, rows, lambda done: progress.update(task, completed=2 + done))
        progress.update(task, completed=3, description="expected selection")
        expected = None if given is None else compare_expected(call, tokens, given)
    return Outcome(args, call, seconds, ranks, reference, expected, tokens, ran.trace)


def checked(make: Callable[[], Made]) -> Made:
    """Run `make`; what the user gave and cannot be used ends the command with one line."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error


def load_call(args: argparse.Namespace) -> CapturedCall:
    """The call to verify, from `--input` or from the seed."""
    if args.input is None:
        args.layout = args.layout or "causal"
        call = seeded_call(args)
    else:
        said = [f"--{name}" for name, default in SEEDED.items() if getattr(args, name, default) != default]
        if said:
            raise CommandError(f"{' '.join(said)}: --input already says that, leave out one of the two")
        call = checked(lambda: CapturedCall.load(args.input))
        if args.layout is not None:
            call = with_layout(call, args.layout, args.seed)
    return call if args.numerics is None else replace(call, numerics=args.numerics)


def load_expected(path: Path, call: CapturedCall) -> Tensor:
    """`tokens` int32 or int64 `[B, S, W]` of another system."""
    tensors, _ = checked(lambda: read_safetensors(path))
    if "tokens" not in tensors:
        raise CommandError(f"{path}: incomplete, missing tensor tokens [B, S, W]")
    tokens = tensors["tokens"]
    rows, batch = call.q.shape[:2]
    if tokens.dtype not in (torch.int32, torch.int64):
        raise CommandError(f"{path}: tokens: expected int32 or int64, got {tokens.dtype}")
    if tokens.dim() != 3 or tuple(tokens.shape[:2]) != (batch, rows):
        raise CommandError(f"{path}: tokens: expected [B, S, W] = [{batch}, {rows}, *], got {list(tokens.shape)}")
    return tokens.to(call.q.device)


def check_device(args: argparse.Namespace) -> torch.device:
    """The device of `--device`, which must be here."""
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise CommandError(f"--device: expected a device such as cpu or cuda, got {args.device!r}") from None
    if args.backend == "nccl" and device.type != "cuda":
        raise CommandError(f"--backend nccl: expected --device cuda, got {args.device}")
    wanted, found = args.ranks if args.backend == "nccl" else 1, torch.cuda.device_count()
    if device.type == "cuda" and found < wanted:
        raise CommandError(f"--device {args.device}: expected {wanted} CUDA device(s), torch sees {found}")
    return device


def windows_of(call: CapturedCall) -> RowWindows:
    """The row windows of a call."""
    sizes = {"rows": call.q.shape[0], "batch": call.q.shape[1], "tokens": call.k.shape[0]}
    return visibility_of(call).windows(**sizes, pool_size=call.pool_size, device=call.q.device)


def select(call: CapturedCall, args: argparse.Namespace, group: Any = None) -> Tensor:
    """Tokens int32 `[B, S, W]` of a call, finished."""
    options = {
        "impl": args.impl,
        "order": args.order,
        "score_chunk_bytes": args.chunk_bytes,
        "shard_plan": args.shard_plan,
    }
    arguments = {**call.arguments(), **options, "return_index_scores": False, "query_shard_group": group}
    if group is None:
        tokens = checked(lambda: fused_qk_topk_kpool(**arguments)[1])
    else:
        tokens = fused_qk_topk_kpool(**arguments)[1]
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return tokens


def run_ranks(call: CapturedCall, tokens: Tensor, args: argparse.Namespace) -> Run:
    """Run the sharded call on every rank; each returns its seconds, how many rows are not `tokens`, and the first."""
    clock = time.thread_time if args.backend == "fake" and call.q.device.type == "cpu" else time.perf_counter
    device_each = args.backend == "nccl"
    options = argparse.Namespace(**{name: value for name, value in vars(args).items() if name != "run"})

    def body(group: Any) -> tuple[float, int, list[int] | None]:
        device = torch.device("cuda", group.rank()) if device_each else call.q.device
        mine, whole = call.to(device), tokens.to(device)
        began = clock()
        got = select(mine, options, group)
        seconds = clock() - began
        if got.shape != whole.shape or got.dtype != whole.dtype:
            return seconds, whole.shape[0] * whole.shape[1], [0, 0]
        differing = (got != whole).any(-1)
        count = int(differing.sum())
        return seconds, count, differing.nonzero()[0].tolist() if count else None

    try:
        return launch(body, args.ranks, backend=args.backend, **_REAL.get(args.backend, {}))
    except CollectiveError as error:
        raise CommandError(f"the ranks did not finish: {error}", DIFFERENT) from error


def rank_reports(run: Run, windows: RowWindows, plan: ShardPlan) -> list[RankReport]:
    """Join what the ranks found and sent with what the plan says about each."""
    work = (windows.pool_hi - windows.pool_lo).to(torch.int64).sum(0).cpu()
    total = max(1, int(work.sum()))
    sent = [run.trace.total_bytes(rank) for rank in range(plan.size)]
    reports = []
    for rank, (seconds, count, first) in enumerate(run.results):
        rows = plan.rows(rank)
        share = int(work[rows].sum()) / total
        reports.append(RankReport(rank, len(rows), share, seconds, sent[rank], sum(sent), count, first))
    return reports
