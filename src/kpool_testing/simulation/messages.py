"""Point-to-point calls: send, recv, isend, irecv and their batches.

Messages between two ranks meet in the order in which they were posted; on gloo, in that order among those of one tag. A
send is complete when its receive has been posted: two ranks that both send first are deadlocked, as on real gloo. The
portable dialect takes the stricter side of gloo and NCCL: messages with different tags may not overtake each other
(NCCL ignores tags), and there is no receive from any source (NCCL has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from kpool_testing.bits import poison
from kpool_testing.errors import MismatchError
from kpool_testing.record.call import caller
from kpool_testing.rules import dialects
from kpool_testing.rules.arguments import dtype_name
from kpool_testing.simulation.calls import Calls, Member
from kpool_testing.simulation.works import PeerWork


@dataclass(eq=False)
class Post:
    """One half of a message: who, to or from whom (None is anyone), and the handle of the rank that posted it."""

    source: int | None
    target: int
    tag: int
    tensors: list[Tensor]
    work: PeerWork

    def __str__(self) -> str:
        shapes = ", ".join(f"{dtype_name(tensor)}{list(tensor.shape)}" for tensor in self.tensors)
        return f"{self.work} ({shapes}, tag {self.tag})"


@dataclass
class Mailbox:
    """The messages of one group that have not met yet, in posting order."""

    sends: list[Post] = field(default_factory=list)
    receives: list[Post] = field(default_factory=list)

    def pair(self, by_tag: bool) -> tuple[Post, Post] | None:
        """Remove and return the first receive that a send fits, with that send."""
        for receive in self.receives:
            for send in self.sends:
                if send.target != receive.target or receive.source not in (None, send.source):
                    continue
                if by_tag and send.tag != receive.tag:
                    continue
                self.sends.remove(send)
                self.receives.remove(receive)
                return send, receive
        return None


class Messages:
    """The messages of a run that are under way."""

    def __init__(self, calls: Calls) -> None:
        self.calls, self.context = calls, calls.context
        self._boxes: dict[str, Mailbox] = {}
        calls.on_break.append(self._fail)

    def send(self, member: Member, tensors: list[Tensor], target: int, tag: int) -> PeerWork:
        """Post a message to a rank of the group; complete when the receive is there."""
        self._check(member, "send", tensors, target)
        work, sent = self._begin(member, "send", f"to {member.ranks[target]}", target, tag, tensors)
        post = Post(member.place, target, tag, [tensor.detach().clone() for tensor in sent], work)
        self._box(member).sends.append(post)
        work.watch([("input", tensor) for tensor in tensors], [])
        self._meet(member)
        return work

    def receive(self, member: Member, tensors: list[Tensor], source: int | None, tag: int) -> PeerWork:
        """Post a receive from a rank of the group, or from whoever sends first (None; only gloo has it)."""
        dialect = self.context.settings.dialect
        if source is None:
            dialects.check(dialect, "recv_anysource", tensors=tensors)
        self._check(member, "recv", tensors, source)
        whom = "from any" if source is None else f"from {member.ranks[source]}"
        work, _ = self._begin(member, "recv", whom, source, tag, tensors)
        work.fills(tensors)
        self._box(member).receives.append(Post(source, member.place, tag, list(tensors), work))
        for tensor in tensors:
            poison(tensor, member.rank)
        work.watch([], tensors)
        self._meet(member)
        return work

    def _check(self, member: Member, kind: str, tensors: list[Tensor], peer: int | None) -> None:
        dialect, size = self.context.settings.dialect, len(member.ranks)
        dialects.check(dialect, kind, size=size, place=member.place, tensors=tensors, peer=peer)

    def _begin(
        self, member: Member, kind: str, whom: str, peer: int | None, tag: int, tensors: list[Tensor]
    ) -> tuple[PeerWork, Sequence[Tensor]]:
        self.context.turns.me()
        site, by_torch = caller()
        seq = self.calls.number(member, message=True)
        what = f"{kind}#{seq} {whom} on group {member.label} at {site}"
        detail = f"{whom} tag {tag}"
        sent = self.calls.begin(member, kind, seq, what, list(tensors) if kind == "send" else [], tensors, site, detail)
        missing = f"missing ranks {[member.ranks[peer]] if peer is not None else 'any'}"
        work = PeerWork(self.context, member.rank, what, missing)
        self.calls.give_time(work, member)
        if not by_torch:
            self.calls.expect_wait(work)
        return work, sent

    def _box(self, member: Member) -> Mailbox:
        return self._boxes.setdefault(member.key, Mailbox())

    def _fail(self, group: str, error: Exception) -> None:
        box = self._boxes.pop(group, Mailbox())
        for post in [*box.sends, *box.receives]:
            post.work.meet(error)

    def _meet(self, member: Member) -> None:
        """Complete every message whose two halves are there."""
        dialect = self.context.settings.dialect
        while (pair := self._box(member).pair(dialect == "gloo")) is not None:
            send, receive = pair
            complaint = _complaint(send, receive, dialect)
            error = None if complaint is None else MismatchError(complaint)
            send.work.meet(error)
            receive.work.meet(error, send.tensors, send.source if send.source is not None else -1)


def _complaint(send: Post, receive: Post, dialect: str) -> str | None:
    """Why the two halves do not fit: size, dtype, or a tag that overtakes another."""
    reason = None
    if len(send.tensors) != len(receive.tensors):
        reason = "different numbers of tensors"
    elif any(a.numel() != b.numel() for a, b in zip(send.tensors, receive.tensors, strict=True)):
        reason = "different numbers of elements"
    elif any(a.dtype != b.dtype for a, b in zip(send.tensors, receive.tensors, strict=True)):
        reason = "different dtypes"
    elif send.tag != receive.tag and dialect == "portable":
        reason = "tags out of order, which NCCL ignores"
    if reason is None:
        return None
    return f"a message does not fit its receive ({reason}):\n  {send}\n  {receive}"
