"""One rank of the real arm: runs the conformance cases on gloo and appends one pickled outcome a case to a file.

Called as `python gloo_arm.py RANK DIRECTORY FIRST`, by two processes at a time: FIRST is the number of the case to
begin with. Every case has a group of its own, so that a case that breaks its connections spoils no other.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIMEOUT = timedelta(seconds=10)


def main(rank: int, directory: Path, first: int) -> None:
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(HERE.parents[1]))
    from tests.testing.conformance_cases import CASES, outcome_of

    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / f"store{first}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    with (directory / f"outcomes{rank}").open("ab") as out:
        for number, case in list(enumerate(CASES.values()))[first:]:
            group = dist.new_group([0, 1], timeout=TIMEOUT)
            outcome = outcome_of(case, rank, group)
            pickle.dump((number, case.name, outcome), out)
            out.flush()
    out.close()
    os._exit(0)  # Leaving groups whose connections a case has broken may hang.


def run_all(names: list[str]) -> list[dict[str, Any]]:
    """Outcomes by case name, one dict a rank; a case in which a process died is ("died", exit codes)."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found: list[dict[str, Any]] = [{}, {}]
        first = 0
        while first < len(names):
            codes = _run_pair(directory, first)
            for rank in range(2):
                found[rank] |= _read(directory / f"outcomes{rank}")
            done = min(len(found[0]), len(found[1]))
            if done >= len(names):
                break
            for rank in range(2):
                found[rank][names[done]] = ("died", codes)
            first = done + 1
        return found


def _run_pair(directory: Path, first: int) -> list[int | None]:
    command = [sys.executable, str(Path(__file__).resolve())]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    pair = [subprocess.Popen([*command, str(rank), str(directory), str(first)], env=environment) for rank in range(2)]
    codes: list[int | None] = []
    for process in pair:
        try:
            codes.append(process.wait(timeout=120))
        except subprocess.TimeoutExpired:
            codes.append(None)
        if codes[-1] != 0:
            break
    for process in pair:
        if process.poll() is None:
            process.kill()
        process.wait()
    return codes


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with path.open("rb") as stream:
        while True:
            try:
                _, name, outcome = pickle.load(stream)
            except EOFError:
                return found
            found[name] = outcome


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
