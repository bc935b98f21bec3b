"""What does a simulated multi-rank test cost? Times of whole runs, and the overhead against calling fn in a loop.

    python benchmarks/toolkit_overhead.py [--repeat 5]

Prints one JSON object: wall time and CPU time, the limit that wall time is held to, and whether it is met. On a busy
machine read the CPU time: a simulated run hands over between threads, and waits for a core each time. Beside every
figure the results are checked against what one process computes; if a check fails there are no figures, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kpool_testing import DeadlockError, simulate

Times = tuple[float, float]  # wall, CPU


class WrongResultError(Exception):
    """A figure would be of a program that is wrong."""


def expect(condition: bool, what: str) -> None:
    """Raise WrongResultError unless the condition holds."""
    if not condition:
        raise WrongResultError(what)


def gather(group: Any) -> list[float]:
    """One all-gather of every rank's number."""
    out = torch.empty(group.size())
    dist.all_gather_single(out, torch.tensor([float(group.rank())]))
    return out.tolist()


def gathers(size: int) -> None:
    """A whole small test at this size."""
    results = simulate(gather, size).results
    expect(all(result == list(map(float, range(size))) for result in results), f"gather on {size} ranks")


def thousand_collectives() -> None:
    """1,000 all-reduces on 8 ranks."""

    def body(group: Any) -> float:
        x = torch.tensor([float(group.rank() == 3)], dtype=torch.float64)
        for _ in range(1000):
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x.item()

    expect(simulate(body, 8).results == [1.0] * 8, "1,000 all-reduces")


def deadlock() -> None:
    """A rank skips a call on 8 ranks: the time to the report."""

    def body(group: Any) -> None:
        if group.rank() != 5:
            dist.all_reduce(torch.ones(1))

    try:
        simulate(body, 8)
    except DeadlockError as error:
        expect(str(error).count("missing ranks [5]") == 7, "the deadlock report")
    else:
        raise WrongResultError("a deadlock that was not found")


def work(x: torch.Tensor, calls: int) -> torch.Tensor:
    """About 1 ms of matrix products per call."""
    for _ in range(calls):
        x = torch.tanh(x @ x)
    return x


def overhead(n: int, size: int = 8, calls: int = 40) -> Times:
    """Extra time of a simulated run with a collective after each step of work, as a share of the plain loop's."""
    start = torch.eye(n) * 0.5

    def body(group: Any) -> torch.Tensor:
        x, flag = start, torch.zeros(1)
        for _ in range(calls):
            x = work(x, 1)
            dist.all_reduce(flag)
        return x

    results: list[torch.Tensor] = []
    looped = _times(lambda: [work(start, calls) for _ in range(size)])
    whole = _times(lambda: results.extend(simulate(body, size).results))
    expected = work(start, calls)
    expect(all(torch.equal(result, expected) for result in results), "work on 8 ranks")
    return whole[0] / looped[0] - 1, whole[1] / looped[1] - 1


def size_of_a_millisecond() -> int:
    """The side of a square matrix whose step of work takes at least a millisecond."""
    for n in range(96, 1024, 16):
        x = torch.eye(n) * 0.5
        work(x, 5)
        if _times(lambda x=x: work(x, 20))[1] >= 0.02:  # type: ignore[misc]
            return n
    raise WrongResultError("a machine on which 1024 x 1024 products take less than a millisecond")


def _times(call: Callable[[], Any]) -> Times:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(repeat: int) -> dict[str, Any]:
    """Every figure, the median of `repeat` runs after one to warm up, with its limit."""
    questions: list[tuple[str, Callable[[], Any], float]] = [
        ("one 3-rank test, seconds", lambda: gathers(3), 0.005),
        ("64 ranks, seconds", lambda: gathers(64), 0.2),
        ("1000 collectives at 8 ranks, seconds", thousand_collectives, 1.0),
        ("deadlock report at 8 ranks, seconds", deadlock, 0.1),
    ]
    figures: dict[str, Any] = {}
    for name, call, limit in questions:
        call()
        figures[name] = _figure([_times(call) for _ in range(repeat)], limit)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        n = size_of_a_millisecond()
        overhead(n)
        figures["overhead at 1 ms of work a call, share"] = _figure([overhead(n) for _ in range(repeat)], 0.1)
    finally:
        torch.set_num_threads(threads)
    return figures


def _figure(samples: list[Times], limit: float) -> dict[str, Any]:
    wall, cpu = (statistics.median(sample[i] for sample in samples) for i in range(2))
    worst = max(sample[0] for sample in samples)
    return {"wall": round(wall, 5), "worst": round(worst, 5), "cpu": round(cpu, 5), "limit": limit, "met": wall < limit}


def main() -> int:
    """Print the figures; 1 if a result was wrong, 2 if a figure misses its limit."""
    parser = argparse.ArgumentParser(description="Times of simulated multi-rank runs, as JSON.")
    parser.add_argument("--repeat", type=int, default=5, help="runs per figure; the median counts")
    repeat = parser.parse_args().repeat
    try:
        figures = measure(repeat)
    except WrongResultError as error:
        print(f"no figures: wrong result in {error}", file=sys.stderr)
        return 1
    machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    print(json.dumps({"machine": machine, "repeat": repeat, "figures": figures}, indent=2))
    return 0 if all(figure["met"] for figure in figures.values()) else 2


if __name__ == "__main__":
    sys.exit(main())
