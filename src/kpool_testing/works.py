"""The Work objects of simulated calls: a call is posted when it is made and its result arrives at `wait()`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from kpool_testing.matching import Watched, deliver

if TYPE_CHECKING:
    from kpool_testing.matching import Request, Slot
    from kpool_testing.world import Simulation


class SimWork(Work):
    """One rank's handle on a posted call."""

    def __init__(self, simulation: Simulation, what: str, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._simulation, self._what, self._outputs = simulation, what, list(outputs)
        self._watched: Watched | None = None
        self._delivered = False

    def watch(self, inputs: Sequence[Tensor]) -> None:
        """From now on, a write to the inputs or outputs before `wait()` is an error."""
        self._watched = Watched(inputs, self._outputs)

    def _ready(self) -> bool:
        raise NotImplementedError

    def _block(self) -> None:
        raise NotImplementedError

    def _take(self) -> None:
        raise NotImplementedError

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until every other rank has made the call, then write the result to the outputs.

        Raises MismatchError if the ranks disagree, AsyncError if a tensor of the call was changed in flight.
        """
        if self._delivered:
            return True
        while not self._ready():
            self._block()
        self._delivered = True
        self._simulation.forget(self)
        if self._watched is not None:
            watched, self._watched = self._watched, None
            watched.check(self._what)
        self._take()
        return True

    def is_completed(self) -> bool:
        """True once all ranks have made the call; lets the others run first if they have not."""
        if not self._delivered and not self._ready():
            self._simulation.poll(self._what)
        return self._delivered or self._ready()

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
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """A future that already holds the output tensors: asking for it waits for the call."""
        self.wait()
        future: Any = Future()
        future.set_result(self._outputs)
        return future

    def __str__(self) -> str:
        return self._what


class SlotWork(SimWork):
    """Handle on a collective."""

    def __init__(self, simulation: Simulation, slot: Slot, request: Request, what: str) -> None:
        super().__init__(simulation, what, request.outputs)
        self._slot, self._request = slot, request

    def _ready(self) -> bool:
        return self._slot.done

    def _block(self) -> None:
        self._simulation.block_on(self._slot, self._request)

    def _take(self) -> None:
        self._simulation.raise_if_failed(self._slot)
        answers = self._slot.answers
        if answers is not None and self._outputs:
            deliver(self._outputs, answers[self._request.place])

    def arrive(self) -> None:
        """Write the result ahead of `wait()`; the call is complete."""
        self._take()


class JoinedWork(SimWork):
    """Handle on several works at once, as coalescing returns it."""

    def __init__(self, simulation: Simulation, works: Sequence[SimWork]) -> None:
        super().__init__(simulation, "coalesced calls", [out for work in works for out in work._outputs])
        self._works = list(works)

    def _ready(self) -> bool:
        return all(work._delivered for work in self._works)

    def _block(self) -> None:
        for work in self._works:
            work.wait()

    def _take(self) -> None:
        return None


class PeerWork(SimWork):
    """Handle on a send or a receive; `source` is the sender's rank in the group, once known."""

    def __init__(self, simulation: Simulation, what: str, missing: str) -> None:
        super().__init__(simulation, what, ())
        self.done, self.source = False, -1
        self.error: Exception | None = None
        self.payload: list[Tensor] | None = None
        self._missing = missing
        self.owner = simulation.seat()

    def outputs_arrive(self, tensors: Sequence[Tensor]) -> None:
        """The tensors that a receive fills."""
        self._outputs = list(tensors)

    def describe(self) -> str:
        """What the rank waits for, for the report."""
        return f"waits in {self._what}; {self._missing}"

    def _ready(self) -> bool:
        return self.done

    def _block(self) -> None:
        self._simulation.baton.block(self._simulation.seat(), self)

    def _take(self) -> None:
        if self.error is not None:
            raise self.error
        if self.payload is not None:
            deliver(self._outputs, self.payload)

    def source_rank(self) -> int:
        """The sender's rank in the group."""
        return self.source

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

    def __init__(self, what: str) -> None:
        self.what = what

    def describe(self) -> str:
        """The call that is polled."""
        return f"polls {self.what}, which cannot complete"


def wait_for_results(value: Any) -> None:
    """Complete the functional collectives among what a rank returns: outside of the rank nobody could wait for them."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is None:
        return
    for leaf in tree_leaves(value):
        tensor = getattr(leaf, "_local_tensor", leaf)
        if isinstance(tensor, functional.AsyncCollectiveTensor):
            tensor.wait()
