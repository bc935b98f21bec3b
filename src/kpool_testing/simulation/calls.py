"""How a rank's collective is made: recorded, matched with the calls of the other ranks, kept until it is waited for.

`Calls` is the table of open calls that all ranks of a run share, and remembers which groups a time-out has broken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kpool_testing.bits import poison
from kpool_testing.errors import BrokenGroupError, MismatchError
from kpool_testing.record.call import Call, caller, user_site
from kpool_testing.rules.arguments import dtype_name
from kpool_testing.rules.request import Request
from kpool_testing.simulation.context import Context
from kpool_testing.simulation.futures import Completer
from kpool_testing.simulation.injection import Faults
from kpool_testing.simulation.isolation.refused import refuse_in_compiled_autograd
from kpool_testing.simulation.matching import Answer, Slot, snapshot
from kpool_testing.simulation.works import SimWork, SlotWork


@dataclass(frozen=True)
class Member:
    """One rank's place in one group.

    Attributes:
        key: the name by which all members know the group; label: how reports call it.
        ranks: global ranks of the members, in group order; place: the rank's own number among them.
        timeout: seconds, where the group was made with a time-out of its own.
    """

    key: str
    label: str
    ranks: tuple[int, ...]
    place: int
    timeout: float | None = None

    @property
    def rank(self) -> int:
        """The member's global rank."""
        return self.ranks[self.place]


class Calls:
    """The calls of one run that have not met yet."""

    def __init__(self, context: Context, faults: Faults) -> None:
        self.context, self.turns, self.faults = context, context.turns, faults
        self.open: dict[tuple[str, int], Slot] = {}
        self._completers = [Completer(context, rank) for rank in range(context.settings.size)]
        self._counts: dict[tuple[str, int, bool], int] = {}
        self._groups: dict[str, tuple[tuple[int, ...], set[int]]] = {}  # members, and who of them has created it
        self._broken: dict[str, int] = {}  # group -> the rank whose time-out broke it
        self.on_break: list[Callable[[str, Exception], None]] = []

    def post(
        self,
        member: Member,
        kind: str,
        fingerprint: tuple[tuple[str, Any], ...],
        sent: Any,
        outputs: Sequence[Tensor],
        compute: Callable[[list[Any]], Answer],
        *,
        inputs: Sequence[Tensor] = (),
        spoiled: Sequence[Tensor] | None = None,
        agree: Callable[[Sequence[Request]], str | None] | None = None,
        async_op: bool = False,
        detail: str = "",
    ) -> SlotWork:
        """Make one rank's part of a collective; block until it is complete unless `async_op`.

        Args:
            sent: what this rank sends; `compute` gets the list of all ranks' in group order.
            outputs: tensors that receive this rank's part of what `compute` returns.
            inputs: tensors that are only read.
            spoiled: outputs to poison while in flight; all of them by default. A rank that is alone waits for nobody:
                its result is there at once, so that a program which reads too early is right on one rank and wrong on
                more, and a comparison of the two says so.
        """
        self.turns.me()
        site, by_torch = caller()
        rank, seq = member.rank, self.number(member)
        what = f"{kind}#{seq} on group {member.label} at {site}"
        sent = self.begin(member, kind, seq, what, sent, outputs, site, detail)
        request = Request(rank, member.place, kind, fingerprint, sent, outputs, site)
        slot = self.open.get((member.key, seq))
        if slot is None:
            slot = self.open[member.key, seq] = Slot(member.label, member.ranks, seq, compute, agree)
        work = SlotWork(self.context, what, slot, request)
        self.give_time(work, member)
        if async_op:
            self._send_off(work, request, outputs if spoiled is None else spoiled, by_torch)
        if slot.add(request):
            del self.open[member.key, seq]
            slot.finish(self.turns)
        if not async_op:
            work.wait()
        elif len(member.ranks) == 1:
            work.arrive()
            work.watch([("input", tensor) for tensor in inputs] + [("output", tensor) for tensor in outputs], [])
        else:
            poisoned = outputs if spoiled is None else spoiled
            left = [("output", tensor) for tensor in outputs] if spoiled is not None and not spoiled else []
            work.watch([("input", tensor) for tensor in inputs] + left, poisoned)
        return work

    def _send_off(self, work: SimWork, request: Request, spoiled: Sequence[Tensor], by_torch: bool) -> None:
        request.sent = snapshot(request.sent)
        for output in spoiled:
            poison(output, request.rank)
        if not by_torch:
            self.expect_wait(work)

    def expect_wait(self, work: SimWork) -> None:
        """The user's code has made this work, and has to wait for it."""
        work.future = self._completers[work.rank].future
        self.context.unwaited.add(work.rank, work)

    def begin(
        self,
        member: Member,
        kind: str,
        seq: int,
        what: str,
        sent: Any,
        outputs: Sequence[Tensor],
        site: str,
        detail: str,
    ) -> Any:
        """Record a call, let an injected fault happen, refuse a broken group; returns what the rank really sends."""
        tensors = list(_tensors(sent)) or list(outputs)
        shape = tuple(tensors[0].shape) if tensors else ()
        dtype = dtype_name(tensors[0]) if tensors else ""
        size = 0 if kind == "recv" else sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        rank = member.rank
        self.context.trace.append(Call(rank, kind, member.label, member.ranks, seq, shape, dtype, size, site, detail))
        sent = self.faults.apply(self.turns, rank, what, sent)
        self._refuse_broken(member, what)
        if len(member.ranks) > 1:
            refuse_in_compiled_autograd(what)
        return sent

    def made(self, member: Member) -> int:
        """How many collectives this rank has made on the group."""
        return self._counts.get((member.key, member.rank, False), 0)

    def number(self, member: Member, message: bool = False) -> int:
        """The number of this rank's next collective, or message, on the group."""
        key = (member.key, member.rank, message)
        number = self._counts.get(key, 0)
        self._counts[key] = number + 1
        return number

    # -- groups

    def meet_group(self, name: str, ranks: tuple[int, ...], creator: int) -> None:
        """A rank has created a group; raises MismatchError if another rank means other members by the same name."""
        known, creators = self._groups.setdefault(name, (ranks, set()))
        creators.add(creator)
        if known != ranks:
            raise MismatchError(
                f"ranks disagree on group {name}: rank {creator} creates it for ranks {list(ranks)} "
                f"at {user_site()}, another rank for {list(known)}; every rank must call new_group for every group, "
                "in the same order"
            )

    def give_time(self, work: SimWork, member: Member) -> None:
        """Let a work wait as long as its group allows, and break the group once that is over."""
        work.timeout = member.timeout
        work.on_timeout = lambda: self.break_group(member)

    def break_group(self, member: Member) -> None:
        """A time-out on this rank has closed its connections: every open and later call on the group fails."""
        self._broken.setdefault(member.key, member.rank)
        error = BrokenGroupError(self._broken_by(member))
        for key in [key for key in self.open if key[0] == member.key]:
            self.open.pop(key).fail(self.turns, error)
        for listener in self.on_break:
            listener(member.key, error)

    def _refuse_broken(self, member: Member, what: str) -> None:
        if member.key in self._broken:
            raise BrokenGroupError(f"{what}: {self._broken_by(member)}")

    def _broken_by(self, member: Member) -> str:
        return f"connection closed: a time-out on rank {self._broken[member.key]} has broken group {member.label}"

    # -- seen from outside

    def check_groups(self) -> None:
        """Raise MismatchError for a group that some of its members have not created: gloo would wait for them."""
        for name, (ranks, creators) in self._groups.items():
            missing = sorted(set(ranks) - creators)
            if missing and self.context.settings.dialect != "nccl":
                raise MismatchError(
                    f"group {name} of ranks {list(ranks)} was never created by ranks {missing}: the others would wait "
                    "for them in new_group; every member must call it, in the same order (under "
                    "use_local_synchronization after equally many groups of its own)"
                )

    def rested(self, rank: int) -> None:
        """The rank's threads wait outside of the scheduler, perhaps for a future."""
        self._completers[rank].rested()

    def awaits_future(self, rank: int) -> bool:
        """Whether the rank has taken a future that is not complete."""
        return self._completers[rank].pending

    def raise_mismatches(self) -> bool:
        """End the open calls on which ranks disagree already; True if somebody waited in one."""
        woken = False
        for key, slot in list(self.open.items()):
            if slot.differs:
                del self.open[key]
                woken = woken or bool(slot.waiting)
                slot.fail(self.turns, slot.mismatch())
        return woken


def _tensors(sent: Any) -> Sequence[Tensor]:
    if isinstance(sent, Tensor):
        return (sent,)
    if isinstance(sent, (list, tuple)):
        return [tensor for part in sent for tensor in _tensors(part)]
    return ()
