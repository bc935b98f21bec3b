"""The same function on real processes: `run_ranks(fn, 3, backend="gloo")`.

Workers are spawned once and kept for the next call. For each call every worker forks a process, so that a rank starts
like a program just started; the ranks join a new group over a file store in a fresh directory: nothing opens a port.
Every group, also one made by `new_group`, has the time limit. Functions travel by cloudpickle, closures included.
Results and exceptions come back by pickle.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import marshal
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections import ChainMap
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType
from typing import Any

from kpool_testing.errors import CollectiveError, DeadlockError, RankError, rank_error
from kpool_testing.launch.worker import Answer, Job, importable, serve
from kpool_testing.record.trace import Run, Trace

_START_LIMIT = 180.0
BACKENDS = ("fake", "replay", "gloo", "nccl", "world")


def run_ranks(
    fn: Callable[[Any], Any], size: int, backend: str = "fake", *, timeout: float | None = None, **options: Any
) -> Run:
    """Run `fn(group)` once on every rank of a group of `size` ranks, and return a `Run`.

    Args:
        fn: the body of a rank; gets the group of all ranks.
        size: number of ranks.
        backend: "fake" (`simulate`), "replay", "gloo" or "nccl" (one process a rank; nccl needs a GPU for each),
            "world" (this process is one rank of a group that a launcher such as torchrun started).
        timeout: seconds; the limit of every real group (30 if not given), and of a whole simulated run (60). Ranks that
            have not returned after twice that and 2 s more are ended.
        options: for `simulate` alone (dialect, seed, faults, ...); refused with any other backend.

    Raises:
        RankError: a rank raised (`__cause__` is its exception, of whose type it is too where Python allows it; a note
            holds the traceback) or its process died.
        DeadlockError: ranks wait for each other past the limit.
        ValueError: unknown backend, size < 1, more nccl ranks than GPUs, or a world of another size.
        NotImplementedError: real ranks on a platform without `os.fork`.
    """
    __tracebackhide__ = True
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}, expected one of {BACKENDS}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if backend == "fake":
        from kpool_testing.simulation.run import simulate

        if timeout is not None:
            options = {"limit": timeout, **options}
        return simulate(fn, size, **options)
    if options:
        raise ValueError(f"backend={backend!r} takes no {sorted(options)}: these are options of the simulation")
    if backend == "replay":
        from kpool_testing.replays.run import replay

        return replay(fn, size)
    limit = 30.0 if timeout is None else timeout
    if backend == "world":
        from kpool_testing.launch.torchrun import run_in_world

        return run_in_world(fn, size, limit)
    if not hasattr(os, "fork"):
        raise NotImplementedError(f'backend={backend!r} needs os.fork, {sys.platform} has none; use backend="fake"')
    _require_gpus(backend, size)
    return _pool.run(fn, size, backend, limit)


def close_pool() -> None:
    """End the worker processes now; the next real run starts new ones. Runs by itself when python exits."""
    _pool.close()


def _require_gpus(backend: str, size: int) -> None:
    if backend != "nccl":
        return
    import torch

    found = torch.cuda.device_count()
    if found < size:
        raise ValueError(
            f'backend="nccl" needs one GPU per rank: {size} ranks asked for, {found} GPUs visible '
            f'({size - found} short); use backend="gloo" or "fake", or fewer ranks'
        )


class _Worker:
    def __init__(self, directory: Path, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.log = directory / f"worker-{number}.log"
        self.seen = 0
        ours, theirs = context.Pipe()
        self.connection: Connection = ours
        self.process = context.Process(target=serve, args=(theirs, str(self.log)), daemon=True)
        self.process.start()
        theirs.close()

    def new_output(self) -> str:
        """What the worker has printed since the last call."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(self.seen)
                data = stream.read()
        except FileNotFoundError:
            return ""
        self.seen += len(data)
        return data.decode("utf-8", "replace")


class _Pool:
    def __init__(self) -> None:
        self.workers: list[_Worker] = []
        self.directory: Path | None = None
        self.runs = 0
        self.libraries: dict[str, None] = {}

    def run(self, fn: Callable[[Any], Any], size: int, backend: str, timeout: float) -> Run:
        __tracebackhide__ = True
        payload = _pickled(fn)
        workers = self._at_least(size)[:size]
        assert self.directory is not None
        self.runs += 1
        store = str(self.directory / f"store-{self.runs}")
        path = tuple(sys.path)
        for rank, worker in enumerate(workers):
            job = Job(rank, size, backend, store, timeout, payload, path, tuple(self.libraries))
            worker.connection.send_bytes(pickle.dumps(job))
        outcome = _Outcome(workers, size, timeout)
        try:
            outcome.collect()
        except BaseException:
            self.close()
            raise
        for answer in outcome.answers.values():
            self.libraries.update(dict.fromkeys(answer.libraries))
        if outcome.lost:
            self.close()
        return outcome.run()

    def _at_least(self, size: int) -> list[_Worker]:
        if self.directory is None:
            self.directory = Path(tempfile.mkdtemp(prefix="kpool-ranks-"))
        if any(not worker.process.is_alive() for worker in self.workers):
            self.close()
            return self._at_least(size)
        new = [_Worker(self.directory, number) for number in range(len(self.workers), size)]
        self.workers += new
        for worker in new:
            self._await_start(worker)
        return self.workers

    def _await_start(self, worker: _Worker) -> None:
        """Importing torch takes seconds, on a busy machine many; it does not count against the limit of a run."""
        try:
            if worker.connection.poll(_START_LIMIT):
                worker.connection.recv_bytes()
                return
        except (EOFError, OSError):
            pass
        output = worker.new_output()
        self.close()
        raise RuntimeError(f"a worker process did not start within {_START_LIMIT:.0f} s; its output:\n{output}")

    def close(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(OSError):
                worker.connection.close()
        for worker in self.workers:
            worker.process.join(0.2)
        for worker in self.workers:
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join(5)
            worker.process.close()
        self.workers = []
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None


class _Outcome:
    """Collects what the workers of one run answer."""

    def __init__(self, workers: list[_Worker], size: int, timeout: float) -> None:
        self.workers, self.size, self.timeout = workers, size, timeout
        self.answers: dict[int, Answer] = {}
        self.lost: dict[int, str] = {}
        self.output: dict[int, str] = {}
        self.released: set[int] = set()

    def collect(self) -> None:
        """Wait for every rank. The group is left when all have returned, or at once when one has failed."""
        limit = 2 * self.timeout + 2.0  # joining the group, and one collective that just made it
        deadline = time.monotonic() + limit
        while waiting := [r for r in range(self.size) if r not in self.answers and r not in self.lost]:
            connections = {self.workers[rank].connection: rank for rank in waiting}
            ready = wait(list(connections), max(0.0, deadline - time.monotonic()))
            for connection in ready:
                self._receive(connections[connection])  # type: ignore[index]
            if not ready:
                self.lost.update(dict.fromkeys(waiting, f"did not return within {limit:.0f} s, ended"))
            elif self.lost:
                # Peers of a dead process learn it from their connections, or not at all.
                deadline = min(deadline, time.monotonic() + 2.0)
            if any(not answer.ok for answer in self.answers.values()):
                self._release()
        if not self.lost:
            self._release()
            self._drain()
        for rank, worker in enumerate(self.workers):
            self.output[rank] = worker.new_output()
            for line in self.output[rank].splitlines():
                sys.stderr.write(f"[rank {rank}] {line}\n")

    def _receive(self, rank: int) -> None:
        try:
            self.answers[rank] = pickle.loads(self.workers[rank].connection.recv_bytes())
        except (EOFError, OSError):
            process = self.workers[rank].process
            process.join(1.0)
            self.lost[rank] = f"its process died with exit code {process.exitcode}"

    def _release(self) -> None:
        for rank in self.answers.keys() - self.released:
            self.released.add(rank)
            self.workers[rank].connection.send_bytes(b"leave")

    def _drain(self) -> None:
        for rank, worker in enumerate(self.workers):
            if not worker.connection.poll(self.timeout + 5.0):
                self.lost[rank] = "did not leave its group, ended"
                return
            try:
                worker.connection.recv_bytes()
            except (EOFError, OSError):
                self.lost[rank] = "its process died while leaving the group"
                return

    def trace(self) -> Trace:
        calls = [call for answer in self.answers.values() for call in answer.calls]
        return Trace(sorted(calls, key=lambda call: (call.seq, call.rank)), size=self.size)

    def run(self) -> Run:
        """The results, or the error that stands for all ranks."""
        __tracebackhide__ = True
        failed = sorted((a for a in self.answers.values() if not a.ok), key=lambda answer: answer.when)
        if not failed and not self.lost:
            return Run([pickle.loads(self.answers[rank].payload) for rank in range(self.size)], self.trace())
        lines = [f"  rank {rank}: {self._line(rank)}" for rank in range(self.size)]
        died = [rank for rank, reason in self.lost.items() if "died" in reason]
        cause: BaseException | None = None
        if died or not failed:
            rank = died[0] if died else min(self.lost)
            error: CollectiveError = (RankError if died else DeadlockError)(
                "\n".join([f"rank {rank}: {self.lost[rank]}", *lines])
            )
        else:
            cause = pickle.loads(failed[0].payload) if failed[0].payload else None
            error = _error("\n".join([f"rank {failed[0].rank} raised {failed[0].headline}", *lines]), failed[0], cause)
            error.add_note(f"traceback on rank {failed[0].rank}:\n{failed[0].text}")
        for rank in self.lost:
            if self.output.get(rank):
                error.add_note(f"last output of rank {rank}:\n{self.output[rank][-3000:]}")
        error.trace = self.trace()
        raise error from cause

    def _line(self, rank: int) -> str:
        if rank in self.lost:
            return self.lost[rank]
        answer = self.answers[rank]
        fate = "returned" if answer.ok else answer.headline
        if not answer.calls:
            return f"{fate}; made no collective call"
        last = answer.calls[-1]
        return f"{fate}; its last call: {last.kind}#{last.seq} on group {last.group} at {last.site}"


def _error(message: str, first: Answer, cause: BaseException | None) -> CollectiveError:
    """A time-out inside torch means that a peer never came; everything else is the rank's own."""
    text = f"{first.headline} {first.text.splitlines()[-1]}".lower()
    if ("timed out" in text or "timeout" in text) and "/torch/" in first.text.replace("\\", "/"):
        return DeadlockError(message)
    return rank_error(message, cause) if isinstance(cause, Exception) else RankError(message)


def _pickled(fn: Callable[[Any], Any]) -> bytes:
    """The function as bytes; its module goes along by value where a worker could not import it."""
    try:
        import cloudpickle
    except ImportError as error:
        raise ImportError("real ranks need cloudpickle: pip install cloudpickle") from error
    table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)
    pickler_type = type("_Pickler", (cloudpickle.Pickler,), {"dispatch_table": table})
    stream = io.BytesIO()
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    name = module.__name__ if module is not None else "__main__"
    if name == "__main__" or importable(name, getattr(module, "__file__", None)):
        pickler_type(stream).dump(fn)
        return stream.getvalue()
    cloudpickle.register_pickle_by_value(module)
    try:
        pickler_type(stream).dump(fn)
        return stream.getvalue()
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Code with its file name, which cloudpickle leaves out and every traceback and trace line needs."""
    return marshal.loads, (marshal.dumps(code),)


_pool = _Pool()
atexit.register(_pool.close)
