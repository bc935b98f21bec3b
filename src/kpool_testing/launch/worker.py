"""One process of the pool behind `run_ranks`, which forks a new one for every job.

Importing torch takes seconds, a fork milliseconds. What a job leaves behind (modules it imported, caches of torch that
name its group, switches, threads) ends with its process, so that the next job starts like a program just started.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import sysconfig
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from kpool_testing.record.call import Call
from kpool_testing.record.trace import Trace

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do.

    `payload` is the pickled function, `store` the path of the rendezvous file. `libraries` are the modules of installed
    packages that earlier jobs imported: a worker imports them before it forks, so that no job pays for them again.
    """

    rank: int
    size: int
    backend: str
    store: str
    timeout: float
    payload: bytes
    path: tuple[str, ...]
    libraries: tuple[str, ...]


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
    libraries: list[str] = field(default_factory=list)


def serve(connection: Connection, log: str) -> None:
    """Say "ready", then answer jobs until the other end closes. Everything printed goes to the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.enable(file=descriptor)
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    connection.send_bytes(b"ready")
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return
        _import_libraries(job)
        child = os.fork()
        if child == 0:
            _serve_one(job, connection, descriptor)
        status = os.waitpid(child, 0)[1]
        if status:
            _end_like(status)


def _import_libraries(job: Job) -> None:
    # Some read their rank while they are imported.
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank))
    sys.path[:] = list(job.path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in job.libraries:
            with contextlib.suppress(Exception):  # the job imports it again, and tells its user
                importlib.import_module(name)


def _loaded_libraries() -> list[str]:
    """Modules of python and of installed packages that are loaded, in the order of their import."""
    roots = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    return [
        name
        for name, module in list(sys.modules.items())
        if (getattr(module, "__file__", None) or "").startswith(roots) and not name.startswith("__")
    ]


def _serve_one(job: Job, connection: Connection, descriptor: int) -> NoReturn:
    """Do one job in the process just forked, which ends here."""
    import torch

    _die_with_parent()
    torch.default_generator.seed()  # python's own generator takes a new seed after a fork, torch's does not
    # A rank that never comes back leaves its stack in the log before the pool ends it.
    faulthandler.dump_traceback_later(job.timeout + 1.0, file=descriptor)
    code = 0
    try:
        _work(job, connection)
    except (EOFError, OSError):
        pass  # the pool is gone
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Ask Linux to end this process when the worker that forked it is ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_like(status: int) -> NoReturn:
    """End the worker as its child ended, so that the pool sees why."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        faulthandler.disable()  # the child has told its stack
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


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
    os.environ["WORLD_SIZE"] = str(job.size)
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
    return Answer(job.rank, True, cloudpickle.dumps(result), calls=trace.calls, libraries=_loaded_libraries())


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
