"""The plain floor: every simulated rank in one process, one after the other, gathers answered with what all ranks sent.

    run = replay(lambda group: my_sharded_op(x, group), size=3)
    assert_replicated(run.results)

How it works. `fn(FakeGroup(rank, size))` runs for rank 0, 1, ... with `torch.distributed.all_gather_into_tensor` and
`all_gather_single` replaced. At its first gather a rank hands in its tensor and is stopped. When every rank has done so
the first gather is known, and the next pass answers it from all ranks' tensors and stops at the second; and so on until
all return. K gathers take K + 1 passes, so fn must do the same thing each time it runs: replay checks that it does.

Only the attributes of the `torch.distributed` module are replaced: call `torch.distributed.all_gather_single(...)`,
because a name bound earlier by `from torch.distributed import ...` keeps the original. No process group, no thread and
nothing private of torch is involved. `simulate` knows every other collective.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed

from kpool_testing.bits import has_data, poison, same_bits
from kpool_testing.errors import (
    AsyncError,
    CollectiveError,
    DeadlockError,
    MismatchError,
    RefusedError,
    rank_error,
)
from kpool_testing.record.call import Call, user_site
from kpool_testing.record.trace import Run, Trace
from kpool_testing.replays.group import FakeGroup

_NAMES = ("all_gather_into_tensor", "all_gather_single")
_KIND = "all_gather_single"

# What gloo and NCCL both carry.
_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def replay(fn: Callable[[FakeGroup], Any], size: int) -> Run:
    """Run `fn(group)` once per rank of a group of `size`, and answer its all-gathers from what every rank sent.

    Args:
        fn: takes a `FakeGroup`; must do the same on each of its runs (torch, python and numpy random state are rewound
            before every one, to where they stand at this call: every rank starts with the same state).
        size: number of ranks, at least 1.

    Returns:
        A `Run`: `results[r]` is what fn returned on rank r, `trace` holds every gather.

    Raises:
        RankError: fn raised; `__cause__` is the exception.
        RefusedError: tensors that gloo or NCCL would refuse, or a group that is not this rank's.
        MismatchError: ranks disagree on shape, dtype or device, or a rank does not repeat what it did.
        AsyncError: an input changed before `wait()`, or a gather nobody waited for.
        DeadlockError: some ranks wait in a gather that others never join.
        RuntimeError: called inside another replay.
        ValueError: size < 1.
    """
    __tracebackhide__ = True
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    state = _Replay(fn, size)
    with _installed(state), _random_state() as rewind:
        while True:
            outcomes = [state.run_rank(rank, rewind) for rank in range(size)]
            if state.advance(outcomes):
                return Run([outcome.result for outcome in outcomes], state.trace())


class _Pause(BaseException):
    """Stops a rank whose next gather is not known yet."""


@dataclass
class _Sent:
    """What one rank handed to one gather."""

    payload: torch.Tensor
    site: str

    def __str__(self) -> str:
        dtype = str(self.payload.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.payload.shape)} on {self.payload.device.type} at {self.site}"


@dataclass
class _Outcome:
    """How one rank's run ended: paused at its first unknown gather, raised, or returned."""

    calls: int = 0
    paused: _Sent | None = None
    error: Exception | None = None
    result: Any = None
    pending: list[_Work] = field(default_factory=list)


class _Replay:
    def __init__(self, fn: Callable[[FakeGroup], Any], size: int) -> None:
        self.fn, self.size = fn, size
        self.known: list[list[_Sent]] = []
        self.rank = -1
        self.outcome = _Outcome()

    def run_rank(self, rank: int, rewind: Callable[[], None]) -> _Outcome:
        self.rank, self.outcome = rank, _Outcome()
        rewind()
        try:
            self.outcome.result = self.fn(FakeGroup(rank, self.size))
            for work in self.outcome.pending:
                work.must_be_done()
        except _Pause:
            pass
        except Exception as error:
            self.outcome.error = error
        # Code that catches the pause and goes on is still a rank that waits.
        if self.outcome.paused is not None:
            self.outcome.error = None
        return self.outcome

    def gather(self, output: Any, given: Any, group: Any, async_op: bool) -> _Work | None:
        if self.outcome.paused is not None:
            raise _Pause
        site = user_site()
        self.check(output, given, group, site)
        number = self.outcome.calls
        if number == len(self.known):
            self.outcome.paused = _Sent(given.detach().clone(), site)
            raise _Pause
        self.outcome.calls += 1
        before = self.known[number][self.rank]
        if not same_bits(before.payload, given.detach()):
            raise self.failure(
                MismatchError,
                f"rank {self.rank} is not repeatable: {_KIND}#{number} at {site} sent "
                f"{_Sent(given, site)} with other values than in an earlier pass ({before})",
            )
        work = _Work(self, number, output, given)
        if async_op:
            work.poison()
            self.outcome.pending.append(work)
            return work
        work.wait()
        return None

    def check(self, output: Any, given: Any, group: Any, site: str) -> None:
        problem = _refusal(output, given, self.size) or self.group_problem(group)
        if problem is not None:
            number = self.outcome.calls
            raise self.failure(RefusedError, f"rank {self.rank}: {_KIND}#{number} at {site}: {problem}")

    def group_problem(self, group: Any) -> str | None:
        if not isinstance(group, FakeGroup):
            return f"expected the FakeGroup that replay handed to fn, got group={group!r}"
        if (group.rank(), group.size()) != (self.rank, self.size):
            return f"expected the group of rank {self.rank} of {self.size}, got {group!r}"
        return None

    def answer(self, number: int) -> torch.Tensor:
        return torch.cat([sent.payload for sent in self.known[number]])

    def advance(self, outcomes: list[_Outcome]) -> bool:
        """Learn one more gather; True if all ranks have returned instead."""
        __tracebackhide__ = True
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome.error, CollectiveError):
                raise outcome.error
            if outcome.error is not None:
                headline = f"rank {rank} raised {type(outcome.error).__name__}: {outcome.error}"
                raise self.failure(partial(rank_error, cause=outcome.error), headline, outcomes) from outcome.error
        for rank, outcome in enumerate(outcomes):
            if outcome.paused is None and outcome.calls < len(self.known):
                raise self.failure(
                    MismatchError,
                    f"rank {rank} is not repeatable: it made {outcome.calls} gathers in this pass and "
                    f"{len(self.known)} in an earlier one",
                )
        if all(outcome.paused is None for outcome in outcomes):
            return True
        sent = [outcome.paused for outcome in outcomes if outcome.paused is not None]
        if len(sent) < self.size:
            raise self.failure(DeadlockError, "no rank can make progress:", outcomes)
        self.agree(sent)
        self.known.append(sent)
        return False

    def agree(self, sent: list[_Sent]) -> None:
        seen = {(one.payload.shape, one.payload.dtype, one.payload.device.type) for one in sent}
        if len(seen) > 1:
            lines = [f"  rank {rank}: sends {one}" for rank, one in enumerate(sent)]
            headline = f"ranks disagree on {_KIND}#{len(self.known)}:"
            raise self.failure(MismatchError, "\n".join([headline, *lines]))

    def failure(
        self, kind: Callable[[str], CollectiveError], headline: str, outcomes: list[_Outcome] | None = None
    ) -> CollectiveError:
        lines = [headline]
        outcomes = outcomes or []
        missing = [rank for rank, outcome in enumerate(outcomes) if outcome.paused is None]
        for rank, outcome in enumerate(outcomes):
            if outcome.paused is not None:
                where = f"{_KIND}#{len(self.known)} on group world at {outcome.paused.site}"
                lines.append(f"  rank {rank}: waits in {where}; missing ranks {missing}")
            elif outcome.error is not None:
                lines.append(f"  rank {rank}: ended with {type(outcome.error).__name__} - will never join")
            else:
                lines.append(f"  rank {rank}: returned after {outcome.calls} gathers - will never join")
        error = kind("\n".join(lines))
        error.trace = self.trace(outcomes)
        return error

    def trace(self, outcomes: list[_Outcome] | None = None) -> Trace:
        trace = Trace(size=self.size)
        for number, row in enumerate(self.known):
            for rank, sent in enumerate(row):
                trace.append(self.call(rank, number, sent))
        for rank, outcome in enumerate(outcomes or []):
            if outcome.paused is not None:
                trace.append(self.call(rank, len(self.known), outcome.paused))
        return trace

    def call(self, rank: int, number: int, sent: _Sent) -> Call:
        tensor = sent.payload
        return Call(
            rank=rank,
            kind=_KIND,
            group="world",
            ranks=tuple(range(self.size)),
            seq=number,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            bytes=tensor.numel() * tensor.element_size(),
            site=sent.site,
        )


class _Work:
    """A posted gather: the result arrives at `wait()`, the output is poisoned until then."""

    def __init__(self, state: _Replay, number: int, output: torch.Tensor, given: torch.Tensor) -> None:
        self._state, self._number, self._output, self._given = state, number, output, given
        self._done = False

    def poison(self) -> None:
        """Spoil the output; a rank that is alone has its result at once, as in `simulate`."""
        if not has_data(self._output):
            return
        if self._state.size == 1:
            self._arrive()
        else:
            poison(self._output, self._state.rank)
        # An input that is a slot of the output is still what the rank sends.
        sent = self._state.known[self._number][self._state.rank].payload
        with torch.no_grad():
            self._given.detach().copy_(sent)

    def _arrive(self) -> None:
        with torch.no_grad():
            self._output.copy_(self._state.answer(self._number))

    def wait(self, timeout: Any = None) -> bool:
        """Write the result; raises AsyncError if the input was changed since the call."""
        if self._done:
            return True
        self._done = True
        sent = self._state.known[self._number][self._state.rank]
        if not same_bits(sent.payload, self._given.detach()):
            message = f"rank {self._state.rank}: the input of {_KIND}#{self._number} at {sent.site} "
            raise self._state.failure(AsyncError, message + "was changed before wait()")
        if has_data(self._output):
            self._arrive()
        return True

    def is_completed(self) -> bool:
        """True once `wait()` has returned."""
        return self._done

    def must_be_done(self) -> None:
        if not self._done:
            site = self._state.known[self._number][self._state.rank].site
            message = f"rank {self._state.rank}: {_KIND}#{self._number} at {site} was never waited for"
            raise self._state.failure(AsyncError, message)


def _refusal(output: Any, given: Any, size: int) -> str | None:
    """Why gloo or NCCL would refuse these tensors, or None."""
    for name, value in (("input_tensor", given), ("output_tensor", output)):
        if not isinstance(value, torch.Tensor):
            return f"expected {name} to be a tensor, got {type(value).__name__}"
        if not value.is_contiguous():
            return f"expected {name} to be contiguous, got shape {list(value.shape)} with strides {value.stride()}"
    if given.dtype not in _DTYPES:
        return f"dtype {given.dtype} is not carried by both gloo and NCCL"
    if output.dtype != given.dtype:
        return f"expected output_tensor of dtype {given.dtype}, got {output.dtype}"
    if output.device != given.device:
        return f"expected output_tensor on {given.device}, got {output.device}"
    if given.dim() == 0:
        return "expected input_tensor with at least one dimension (gloo refuses 0-dim tensors), got shape []"
    wanted = [size * given.shape[0], *given.shape[1:]]
    if list(output.shape) != wanted:
        return (
            f"expected output_tensor of shape {wanted} ({size} inputs of {list(given.shape)} concatenated on "
            f"dim 0, the one form every backend takes), got {list(output.shape)}"
        )
    if given.requires_grad and torch.is_grad_enabled():
        return "input_tensor requires grad (gloo refuses it): detach it or call under no_grad"
    return None


_active: list[_Replay] = []


@contextmanager
def _installed(state: _Replay) -> Iterator[None]:
    """Replace the gathers of `torch.distributed`, and put the originals back."""
    if _active:
        raise RuntimeError("replay was called inside another replay: nested simulations are refused")
    originals = {name: getattr(torch.distributed, name) for name in _NAMES if hasattr(torch.distributed, name)}
    if not originals:
        raise RuntimeError("this build of torch has no torch.distributed.all_gather_into_tensor to replace")

    def gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False) -> _Work | None:
        return state.gather(output_tensor, input_tensor, group, async_op)

    _active.append(state)
    try:
        for name in originals:
            setattr(torch.distributed, name, gather)
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.distributed, name, original)
        _active.clear()


@contextmanager
def _random_state() -> Iterator[Callable[[], None]]:
    """Yield a function that rewinds torch, python and numpy random state to now; rewind once more at the end."""
    numpy = sys.modules.get("numpy")
    python, cpu = random.getstate(), torch.get_rng_state()
    array = numpy.random.get_state() if numpy is not None else None
    live = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if live else []

    def rewind() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy is not None:
            numpy.random.set_state(array)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)

    try:
        yield rewind
    finally:
        rewind()
