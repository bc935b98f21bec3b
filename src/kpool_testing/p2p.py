"""Point-to-point calls: send, recv, isend, irecv and their batches.

Messages between two ranks meet in the order in which they were posted; on gloo, in that order among those of one tag. A
send is complete when its receive has been posted: two ranks that both send first are deadlocked, as on real gloo. The
portable dialect takes the stricter side of gloo and NCCL: messages with different tags may not overtake each other
(NCCL ignores tags), and there is no receive from any source (NCCL has none).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from kpool_testing import dialects
from kpool_testing.bits import poison
from kpool_testing.checks import MismatchError
from kpool_testing.trace import Call, user_site
from kpool_testing.works import PeerWork

if TYPE_CHECKING:
    from kpool_testing.world import Simulation


@dataclass
class Post:
    """One half of a message: who, to or from whom (None is anyone), and the handle of the rank that posted it."""

    source: int | None
    target: int
    tag: int
    tensors: list[Tensor]
    work: PeerWork

    def __str__(self) -> str:
        shapes = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in self.tensors)
        return f"{self.work} ({shapes}, tag {self.tag})"


@dataclass
class Mailbox:
    """The messages of one group that have not met yet, in posting order."""

    sends: list[Post] = field(default_factory=list)
    receives: list[Post] = field(default_factory=list)

    def pair(self, dialect: str) -> tuple[Post, Post] | None:
        """Remove and return the first receive that a send fits, with that send."""
        for receive in self.receives:
            for send in self.sends:
                if send.target != receive.target or receive.source not in (None, send.source):
                    continue
                if dialect == "gloo" and send.tag != receive.tag:
                    continue
                self.sends.remove(send)
                self.receives.remove(receive)
                return send, receive
        return None


class PointToPoint:
    """The point-to-point methods of a simulated group; mixed into `SimGroup`."""

    _simulation: Simulation
    _place: int
    ranks: tuple[int, ...]
    key: str

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> PeerWork:
        """Post a message to a rank of the group; complete when the receive is there."""
        simulation = self._simulation
        dialects.check(
            simulation.dialect, "send", size=len(self.ranks), place=self._place, tensors=tensors, peer=target
        )
        work = self._peer_work("send", f"to {self.ranks[target]}", target, tag, tensors)
        sent = simulation.faults.apply(simulation, simulation.seat(), str(work), list(tensors))
        post = Post(self._place, target, tag, [tensor.detach().clone() for tensor in sent], work)
        simulation.mailbox(self.key).sends.append(post)
        work.watch(tensors)
        self._meet()
        return work

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> PeerWork:
        """Post a receive from a rank of the group."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> PeerWork:
        """Post a receive from whoever sends first; only gloo has it."""
        dialects.check(self._simulation.dialect, "recv_anysource")
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], source: int | None, tag: int) -> PeerWork:
        simulation = self._simulation
        dialects.check(
            simulation.dialect, "recv", size=len(self.ranks), place=self._place, tensors=tensors, peer=source
        )
        whom = "from any" if source is None else f"from {self.ranks[source]}"
        work = self._peer_work("recv", whom, source, tag, tensors)
        work.outputs_arrive(tensors)
        simulation.faults.apply(simulation, simulation.seat(), str(work), None)
        simulation.mailbox(self.key).receives.append(Post(source, self._place, tag, list(tensors), work))
        for tensor in tensors:
            poison(tensor, self.ranks[self._place])
        work.watch([])
        self._meet()
        return work

    def _peer_work(self, kind: str, whom: str, peer: int | None, tag: int, tensors: list[Tensor]) -> PeerWork:
        simulation, site = self._simulation, user_site()
        seat = simulation.seat()
        simulation.baton.check(seat)
        label = self.label()  # type: ignore[attr-defined]
        seq = simulation.next_message(self.key, seat.rank)
        tensor = tensors[0]
        size = sum(part.numel() * part.element_size() for part in tensors) if kind == "send" else 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        detail = f"{whom} tag {tag}"
        call = Call(seat.rank, kind, label, self.ranks, seq, tuple(tensor.shape), dtype, size, site, detail)
        simulation.trace.append(call)
        missing = f"missing ranks {[self.ranks[peer]] if peer is not None else 'any'}"
        work = PeerWork(simulation, f"{kind}#{seq} {whom} on group {label} at {site}", missing)
        simulation.pending[seat.rank][work] = None
        return work

    def _meet(self) -> None:
        """Complete every message whose two halves are there."""
        simulation = self._simulation
        while (pair := simulation.mailbox(self.key).pair(simulation.dialect)) is not None:
            send, receive = pair
            complaint = _complaint(send, receive, simulation.dialect)
            for post in pair:
                post.work.done = True
                if complaint is not None:
                    post.work.error = MismatchError(complaint)
                simulation.baton.wake(post.work.owner)
            receive.work.payload = send.tensors
            receive.work.source = send.source if send.source is not None else -1


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
