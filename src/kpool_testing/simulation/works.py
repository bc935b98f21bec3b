"""The Work objects of simulated calls: a call is posted when it is made and its result arrives at `wait()`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.utils._pytree import tree_leaves

from kpool_testing.errors import RefusedError, TimedOutError
from kpool_testing.rules.request import Request
from kpool_testing.simulation.context import Context
from kpool_testing.simulation.matching import Slot, Watched, deliver, raise_own

_NO_TIMEOUT = timedelta(0)


class SimWork(Work):
    """One rank's handle on a posted call.

    Attributes:
        timeout: seconds that a `wait()` without a limit of its own waits; None is for ever.
        on_timeout: called when that time is over; raises.
        future: takes the work and returns its future; None for a work that torch's C++ code waits for.
        held: what the future holds, where that is not the outputs.
    """

    def __init__(self, context: Context, rank: int, what: str, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._context, self.rank, self._what, self._outputs = context, rank, what, list(outputs)
        self._watched: Watched | None = None
        self._delivered = False
        self.timeout: float | None = None
        self.on_timeout: Callable[[], None] | None = None
        self.future: Callable[[SimWork], Any] | None = None
        self.held: Sequence[Tensor] | None = None

    def watch(self, kept: Sequence[tuple[str, Tensor]], poisoned: Sequence[Tensor]) -> None:
        """From now on, a write to these before `wait()` is an error; see `Watched`."""
        self._watched = Watched(kept, poisoned, self.rank)

    @property
    def ready(self) -> bool:
        """Whether every other rank has made the call."""
        raise NotImplementedError

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this once the work is ready."""
        raise NotImplementedError

    def _block(self, timeout: float | None) -> bool:
        raise NotImplementedError

    def _take(self) -> None:
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until every other rank has made the call, then write the result to the outputs.

        Raises:
            MismatchError: the ranks disagree.
            AsyncError: a tensor of the call was changed in flight.
            TimedOutError: no rank can make progress within `timeout`; without one, within the group's own time-out.
        """
        if self._delivered:
            return True
        limited = timeout is not None and timeout > _NO_TIMEOUT
        seconds = timeout.total_seconds() if limited and timeout is not None else self.timeout
        while not self.ready:
            if not self._block(seconds):
                self._timed_out(limited, seconds or 0.0)
        self._complete()
        return True

    def _timed_out(self, limited: bool, seconds: float) -> None:
        self.settle()
        if self.on_timeout is not None and not limited:
            self.on_timeout()
        raise TimedOutError(f"Operation timed out! {self._what} did not complete within {seconds:g} s")

    def _complete(self) -> None:
        self._delivered = True
        self.settle()
        if self._watched is not None:
            watched, self._watched = self._watched, None
            watched.check(self._what)
        self._take()

    def settle(self) -> None:
        """Nobody has to wait for the work any more."""
        self._context.unwaited.settle(self.rank, self)

    def is_completed(self) -> bool:
        """True once all ranks have made the call; lets the others run first if they have not.

        In dialect "gloo" the result is there then, as with gloo; elsewhere it takes `wait()`.
        """
        if self._delivered:
            return True
        if not self.ready:
            self._context.turns.poll(PollWait(self._what), len(self._context.trace))
        if self.ready and self._context.settings.dialect == "gloo":
            self._complete()
        return self._delivered or self.ready

    def _wait_once(self) -> None:
        if not self._delivered:
            self.wait()

    def is_success(self) -> bool:
        """True once the call is complete."""
        return self.is_completed()

    def exception(self) -> None:
        """None: errors are raised by `wait()`."""

    def synchronize(self) -> None:
        """The same as `wait()`."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as `wait()`: there are no streams here."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The output tensors, complete."""
        self._wait_once()
        return self._outputs

    def value(self) -> list[Tensor]:
        """What the work's future holds, once it is complete."""
        self._wait_once()
        return self._outputs if self.held is None else list(self.held)

    def get_future(self) -> Any:
        """A future of the output tensors, which completes when it is waited for; see `SimFuture`."""
        if self.future is None:
            self._wait_once()  # C++ code waits without giving the turn away
        return (self.future or _completed)(self)

    def __str__(self) -> str:
        return self._what


class SlotWork(SimWork):
    """Handle on a collective."""

    def __init__(self, context: Context, what: str, slot: Slot, request: Request) -> None:
        super().__init__(context, request.rank, what, request.outputs)
        self.slot, self._request = slot, request

    @property
    def ready(self) -> bool:
        """Whether every other rank has made the call."""
        return self.slot.done

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this once the work is ready."""
        self.slot.listeners.append(listener)

    def _block(self, timeout: float | None) -> bool:
        me = self._context.turns.me()
        self.slot.waiting.append(me)
        if self._context.turns.block(SlotWait(self.slot, self._request), timeout):
            return True
        self.slot.waiting.remove(me)
        return self.slot.done

    def _take(self) -> None:
        raise_own(self.slot.error)
        answers = self.slot.answers
        if answers is not None and self._outputs:
            deliver(self._outputs, answers[self._request.place], self.rank)

    def arrive(self) -> None:
        """Write the result ahead of `wait()`; the call is complete."""
        self._take()


class JoinedWork(SimWork):
    """Handle on several works at once, as coalescing returns it."""

    def __init__(self, context: Context, rank: int, works: Sequence[SimWork]) -> None:
        super().__init__(context, rank, "coalesced calls", [out for work in works for out in work._outputs])
        self._works = list(works)

    @property
    def ready(self) -> bool:
        """Whether all works are."""
        return all(work.ready for work in self._works)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this whenever one of the works is ready."""
        for work in self._works:
            work.listen(listener)

    def _block(self, timeout: float | None) -> bool:
        self._take()
        return True

    def _take(self) -> None:
        for work in self._works:
            work._wait_once()


class PeerWork(SimWork):
    """Handle on a send or a receive; `source` is the sender's rank in the group, once known."""

    def __init__(self, context: Context, rank: int, what: str, missing: str) -> None:
        super().__init__(context, rank, what, ())
        self._missing = missing
        self._done, self._source = False, -1
        self._error: Exception | None = None
        self._payload: Sequence[Tensor] | None = None
        self._waiting: list[Any] = []
        self._listeners: list[Callable[[], None]] = []

    @property
    def ready(self) -> bool:
        """Whether the other half of the message is there."""
        return self._done

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this once the work is ready."""
        self._listeners.append(listener)

    def fills(self, tensors: Sequence[Tensor]) -> None:
        """The tensors that a receive fills."""
        self._outputs = list(tensors)

    def meet(self, error: Exception | None, payload: Sequence[Tensor] | None = None, source: int = -1) -> None:
        """The other half of the message is there, or it failed."""
        self._done, self._error, self._payload, self._source = True, error, payload, source
        waiting, self._waiting = self._waiting, []
        for thread in waiting:
            self._context.turns.wake(thread)
        for listener in self._listeners:
            listener()

    def describe(self) -> str:
        """What the rank waits for, for the report."""
        return f"waits in {self._what}; {self._missing}"

    def _block(self, timeout: float | None) -> bool:
        me = self._context.turns.me()
        self._waiting.append(me)
        if self._context.turns.block(self, timeout):
            return True
        self._waiting.remove(me)
        return self._done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As `SimWork.wait`; a second time only where the dialect is NCCL's, gloo would not come back."""
        if self._delivered and self._context.settings.dialect != "nccl":
            raise RefusedError(f"{self._what} was waited for already: gloo waits for ever the second time")
        return super().wait(timeout)

    def is_completed(self) -> bool:
        """As `SimWork.is_completed`; with gloo a message is not complete before somebody has waited for it."""
        if self._delivered or self._context.settings.dialect == "nccl":
            return super().is_completed()
        never = "which gloo never reports complete before wait()"
        self._context.turns.poll(PollWait(self._what, never), len(self._context.trace))
        return False

    def _timed_out(self, limited: bool, seconds: float) -> None:
        if self.on_timeout is not None:  # gloo closes the connection, whoever set the limit
            self.on_timeout()
        super()._timed_out(limited, seconds)

    def _take(self) -> None:
        raise_own(self._error)
        if self._payload is not None:
            deliver(self._outputs, self._payload, self.rank)

    def source_rank(self) -> int:
        """The sender's rank in the group."""
        return self._source

    _source_rank = source_rank


class SlotWait:
    """A rank waits for the others to join a collective."""

    __slots__ = ("request", "slot")

    def __init__(self, slot: Slot, request: Request) -> None:
        self.slot, self.request = slot, request

    def describe(self) -> str:
        """The call, where it was made, who is missing."""
        slot, request = self.slot, self.request
        call = f"{request.kind}#{slot.seq} on group {slot.group} at {request.site}"
        return f"waits in {call}; missing ranks {slot.missing()}"


class PollWait:
    """A rank polls a work that cannot complete."""

    def __init__(self, what: str, why: str = "which cannot complete") -> None:
        self.what, self.why = what, why

    def describe(self) -> str:
        """The call that is polled."""
        return f"polls {self.what}, {self.why}"


def _completed(work: SimWork) -> Any:
    from torch.futures import Future

    future: Any = Future()
    future.set_result(work.value())
    return future


def wait_for_results(value: Any) -> None:
    """Complete the functional collectives among what a rank returns: outside of the rank nobody could wait for them."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is None:
        return
    for leaf in tree_leaves(value):
        tensor = getattr(leaf, "_local_tensor", leaf)
        if isinstance(tensor, functional.AsyncCollectiveTensor):
            tensor.wait()
