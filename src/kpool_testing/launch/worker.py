"""One process of the pool behind `run_ranks`: takes a job, joins a fresh group, runs the function, answers."""

from __future__ import annotations

import datetime
import faulthandler
import importlib.util
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from kpool_testing.record.call import Call
from kpool_testing.record.trace import Trace


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do; `payload` is the pickled function, `store` the path of the rendezvous file."""

    rank: int
    size: int
    backend: str
    store: str
    timeout: float
    payload: bytes
    path: tuple[str, ...]
    modules: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """What a worker says: the pickled result, or the pickled exception with its traceback as text."""

    rank: int
    ok: bool
    payload: bytes
    text: str = ""
    headline: str = ""
    when: float = 0.0
    calls: list[Call] = field(default_factory=list)


def serve(connection: Connection, log: str) -> None:
    """Say "ready", then answer jobs until the other end closes. Everything printed goes to the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable(file=descriptor)
    import torch

    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        if job is None:
            return
        # A rank that never comes back leaves its stack in the log before the parent ends it.
        faulthandler.dump_traceback_later(job.timeout + 1.0, file=descriptor)
        try:
            _work(job, connection)
        except (EOFError, OSError):
            return  # the parent is gone
        finally:
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.flush()
            sys.stderr.flush()


def _work(job: Job, connection: Connection) -> None:
    import torch.distributed as dist

    trace = Trace(size=job.size)
    try:
        _join(job)
        answer = _answer(job, trace)
    except BaseException as error:
        answer = _failure(job.rank, error, trace)
    faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(pickle.dumps(answer))
    # The group stays up until the parent knows how every rank fared: leaving early would break a peer's last call.
    connection.recv_bytes()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        traceback.print_exc()
    connection.send_bytes(b"free")


def _join(job: Job) -> None:
    import torch
    import torch.distributed as dist

    limit = datetime.timedelta(seconds=job.timeout)
    # new_group() does not inherit the limit of init_process_group(): it reads these.
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(dist.distributed_c10d, name, limit)
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.size))
    sys.path[:] = list(job.path)
    for name, file in job.modules.items():
        loaded = sys.modules.get(name)
        if loaded is not None and getattr(loaded, "__file__", None) != file:
            del sys.modules[name]
    if job.backend == "nccl":
        torch.cuda.set_device(job.rank)
    store = dist.FileStore(job.store, job.size)  # type: ignore[attr-defined]
    store.set_timeout(limit)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.size, timeout=limit)


def _answer(job: Job, trace: Trace) -> Answer:
    import cloudpickle
    import torch.distributed as dist

    from kpool_testing.record.recorder import recording

    fn = cloudpickle.loads(job.payload)
    with recording(trace):
        result = fn(dist.group.WORLD)
    return Answer(job.rank, True, cloudpickle.dumps(result), calls=trace.calls)


def _failure(rank: int, error: BaseException, trace: Trace) -> Answer:
    import cloudpickle

    try:
        payload = cloudpickle.dumps(error)
        cloudpickle.loads(payload)
    except Exception:
        payload = b""
    return Answer(
        rank=rank,
        ok=False,
        payload=payload,
        text="".join(traceback.format_exception(error)),
        headline=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        when=time.time(),
        calls=trace.calls,
    )


def importable(name: str, file: str | None) -> bool:
    """True if another process with the same `sys.path` would import module `name` from `file`."""
    try:
        found: Any = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return found is not None and found.origin == file
