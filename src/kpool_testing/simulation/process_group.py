"""The process group that `simulate` hands to each rank: a torch ProcessGroup whose calls meet in one process.

Python callers reach its methods directly, functional collectives and DDP through torch's C++ trampoline; both spell
some calls differently, and older torch releases too, so most methods have several names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kpool_testing.bits import own_nan
from kpool_testing.errors import TimedOutError
from kpool_testing.rules import collectives, dialects
from kpool_testing.rules.arguments import (
    Pairs,
    as_list,
    describe,
    dtype_name,
    first_list,
    reduce_op,
    root_of,
    single,
)
from kpool_testing.rules.request import entries_match, shapes_match, splits_match
from kpool_testing.simulation.calls import Calls, Member
from kpool_testing.simulation.matching import UNDEFINED, Answer, Slot
from kpool_testing.simulation.messages import Messages
from kpool_testing.simulation.works import JoinedWork, SimWork, SlotWork

# Typed as Any: torch's stub wants a store, and names arguments differently from release to release.
_Base: Any = dist.ProcessGroup

_DEFAULT_TIMEOUT = 1800.0  # seconds, as real groups have


class SimGroup(_Base):  # type: ignore[misc]
    """One rank's handle on one simulated group."""

    def __init__(self, calls: Calls, messages: Messages, member: Member) -> None:
        super().__init__(member.place, len(member.ranks))
        self._calls, self._messages, self._member = calls, messages, member
        self.ranks, self._place = member.ranks, member.place
        self._name, self._desc = member.key, "undefined"
        self._coalescing: list[SimWork] | None = None
        calls.meet_group(member.key, member.ranks, member.rank)

    # -- what torch asks a group about itself

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._place

    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    getRank, getSize = rank, size

    def name(self) -> str:
        """The backend that the group claims to be."""
        return self._calls.context.settings.backend

    def getBackendName(self) -> str:
        """What C++ code is told: not the claimed name, by which DDP would look for that backend's own object."""
        return "kpool"

    @property
    def group_name(self) -> str:
        """The name under which torch has registered the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The description given to `new_group`."""
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> SimGroup:
        """Itself, for every device: torch 2.14 asks the backend what it can do. It does not coalesce sends."""
        del device
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return self._calls.made(self._member)

    def shutdown(self) -> None:
        """Nothing to close."""

    def abort(self) -> None:
        """Nothing to close."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Calls on the group wait this long from now on, where no rank can make progress before."""
        self._member = replace(self._member, timeout=timeout.total_seconds())

    def __repr__(self) -> str:
        return f"SimGroup({self._member.label}, rank={self._place}, size={len(self.ranks)})"

    # -- how a collective is made

    def _post(
        self, kind: str, fingerprint: Pairs, sent: Any, outputs: Sequence[Tensor], compute: Any, opts: Any, **more: Any
    ) -> SimWork:
        coalescing = self._coalescing
        asynchronous = coalescing is not None or opts is None or bool(getattr(opts, "asyncOp", True))
        work = self._calls.post(self._member, kind, fingerprint, sent, outputs, compute, async_op=asynchronous, **more)
        if coalescing is not None:
            coalescing.append(work)
        return work

    def _start_coalescing(self, device: Any) -> None:
        self._check("coalescing")
        self._coalescing = []

    def _end_coalescing(self, device: Any) -> SimWork:
        works, self._coalescing = self._coalescing or [], None
        return JoinedWork(self._calls.context, self._member.rank, works)

    def _check(self, kind: str, **arguments: Any) -> None:
        dialect = self._calls.context.settings.dialect
        dialects.check(dialect, kind, size=len(self.ranks), place=self._place, **arguments)

    # -- gathers

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SimWork:
        """Concatenate all ranks' [d0, ...] to [G * d0, ...]."""
        self._check("all_gather_single", output=output, input=input)

        def compute(sent: list[Tensor]) -> list[list[Tensor]]:
            gathered = collectives.all_gather_single(sent)
            return [[gathered]] * len(sent)

        work = self._post("all_gather_single", describe(input), input, [output], compute, opts, inputs=[input])
        if self._calls.context.settings.dialect == "gloo":
            work.held = output.detach().chunk(len(self.ranks))
        return work

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimWork:
        """Several all_gather_single in one call."""
        for output, source in zip(outputs, inputs, strict=True):
            self._check("all_gather_single", output=output, input=source)

        def compute(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            gathered = [collectives.all_gather_single(column) for column in zip(*sent, strict=True)]
            return [gathered] * len(sent)

        kind = "all_gather_single_coalesced"
        return self._post(kind, describe(*inputs), list(inputs), outputs, compute, opts, inputs=inputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimWork:
        """Fill a list with every rank's tensor."""
        targets, source = first_list(outputs), single(inputs)
        self._check("all_gather", outputs=targets, input=source)

        def compute(sent: list[Tensor]) -> list[list[Tensor]]:
            gathered = collectives.all_gather(sent)
            return [gathered] * len(sent)

        uneven = dialects.allows_uneven_lists(self._calls.context.settings.dialect)
        fingerprint = (("dtype", dtype_name(source)),) if uneven else describe(source)
        agree = entries_match if uneven else None
        return self._post("all_gather", fingerprint, source, targets, compute, opts, inputs=[source], agree=agree)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimWork:
        """Several all_gather of lists in one call: `outputs[rank][i]` receives that rank's i-th tensor."""
        flat = [tensor for per_rank in outputs for tensor in per_rank]

        def compute(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            gathered = [tensor.detach().clone() for per_rank in sent for tensor in per_rank]
            return [gathered] * len(sent)

        return self._post("all_gather_coalesced", describe(*inputs), list(inputs), flat, compute, opts, inputs=inputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> SimWork:
        """Fill the root's list with every rank's tensor."""
        source, root = single(inputs), root_of(opts)
        targets = first_list(outputs) if self._place == root else []
        self._check("gather", outputs=targets, input=source, root=root)

        def compute(sent: list[Tensor]) -> list[list[Tensor]]:
            gathered = collectives.all_gather(sent)
            return [gathered if place == root else [] for place in range(len(sent))]

        fingerprint = (("root", self.ranks[root]), *describe(source))
        return self._post("gather", fingerprint, source, targets, compute, opts, inputs=[source], detail=self._to(root))

    # -- reductions

    def allreduce(self, tensors: Any, opts: Any = None, *rest: Any, op: Any = None) -> SimWork:
        """Reduce in place on every rank."""
        return self._all_reduce("all_reduce", as_list(tensors), opts if op is None else op)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SimWork:
        """Several all_reduce in one call."""
        return self._all_reduce("all_reduce_coalesced", list(tensors), opts)

    def _all_reduce(self, kind: str, tensors: list[Tensor], opts: Any) -> SimWork:
        op = reduce_op(opts)
        self._check("all_reduce", tensors=tensors, op=op)

        def compute(sent: list[list[Tensor]]) -> Answer:
            columns = [
                self._own(kind, op, column, [collectives.reduce(column, op)] * len(sent))
                for column in zip(*sent, strict=True)
            ]
            return [list(parts) for parts in zip(*columns, strict=True)]

        return self._post(kind, (("op", op), *describe(*tensors)), tensors, tensors, compute, opts, detail=op)

    def _own(self, kind: str, op: str, sent: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """Every rank's part of a reduction of `sent`; what no two backends agree on is poison, each rank's its own."""
        if dialects.check_values(self._calls.context.settings.dialect, kind, op, sent):
            return list(parts)
        return [own_nan(part, rank) for part, rank in zip(parts, self.ranks, strict=True)]

    def reduce(self, tensors: Any, opts: Any = None, *rest: Any) -> SimWork:
        """Reduce in place on the root; elsewhere gloo leaves partial sums in the tensor, which is poisoned here."""
        tensor, op, root = single(tensors), reduce_op(opts), root_of(opts)
        self._check("reduce", tensors=[tensor], op=op, root=root)

        elsewhere = None if self._calls.context.settings.dialect == "nccl" else UNDEFINED

        def compute(sent: list[Tensor]) -> Answer:
            reduced = self._own("reduce", op, sent, [collectives.reduce(sent, op)] * len(sent))
            return [[reduced[place] if place == root else elsewhere] for place in range(len(sent))]

        fingerprint = (("op", op), ("root", self.ranks[root]), *describe(tensor))
        spoiled = [tensor] if self._place == root or elsewhere is not None else []
        detail = f"{op} {self._to(root)}"
        return self._post("reduce", fingerprint, tensor, [tensor], compute, opts, spoiled=spoiled, detail=detail)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> SimWork:
        """Reduce [G * d0, ...] and keep this rank's [d0, ...]."""
        op = reduce_op(opts)
        self._check("reduce_scatter_single", output=output, input=input, op=op)

        def compute(sent: list[Tensor]) -> Answer:
            parts = collectives.reduce_scatter_single(sent, op)
            return [[part] for part in self._own("reduce_scatter_single", op, sent, parts)]

        fingerprint = (("op", op), *describe(input))
        work = self._post(
            "reduce_scatter_single", fingerprint, input, [output], compute, opts, inputs=[input], detail=op
        )
        return self._without_future(work)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimWork:
        """Several reduce_scatter_single in one call."""
        op = reduce_op(opts)
        for output, source in zip(outputs, inputs, strict=True):
            self._check("reduce_scatter_single", output=output, input=source, op=op)

        kind = "reduce_scatter_single_coalesced"

        def compute(sent: list[list[Tensor]]) -> Answer:
            columns = [
                self._own(kind, op, column, collectives.reduce_scatter_single(column, op))
                for column in zip(*sent, strict=True)
            ]
            return [list(parts) for parts in zip(*columns, strict=True)]

        fingerprint = (("op", op), *describe(*inputs))
        work = self._post(kind, fingerprint, list(inputs), outputs, compute, opts, inputs=inputs, detail=op)
        return self._without_future(work)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> SimWork:
        """Reduce a list of one tensor per rank and keep this rank's."""
        op, target, sources = reduce_op(opts), single(outputs), first_list(inputs)
        self._check("reduce_scatter", output=target, inputs=sources, op=op)

        def compute(sent: list[list[Tensor]]) -> Answer:
            parts = collectives.reduce_scatter(sent, op)
            return [[part] for part in self._own("reduce_scatter", op, [t for each in sent for t in each], parts)]

        fingerprint = (("op", op), *describe(*sources))
        work = self._post("reduce_scatter", fingerprint, sources, [target], compute, opts, inputs=sources, detail=op)
        return self._without_future(work)

    def _without_future(self, work: SimWork) -> SimWork:
        """Gloo's reduce-scatter has no future."""
        dialect = self._calls.context.settings.dialect
        if dialect != "nccl" and work.future is not None:
            work.future = lambda work: dialects.refuse_future(dialect, str(work))
        return work

    # -- one to all, all to all

    def broadcast(self, tensors: Any, opts: Any = None, *rest: Any, root: int | None = None) -> SimWork:
        """Copy the root's tensors to every rank."""
        targets, root = as_list(tensors), root_of(opts if root is None else root)
        self._check("broadcast", tensors=targets, root=root)

        def compute(sent: list[list[Tensor]]) -> Answer:
            copies: list[Tensor | None] = [tensor.detach().clone() for tensor in sent[root]]
            return [[None] * len(copies) if place == root else copies for place in range(len(sent))]

        fingerprint = (("root", self.ranks[root]), *describe(*targets))
        spoiled = [] if self._place == root else targets
        detail = f"from {self.ranks[root]}"
        return self._post("broadcast", fingerprint, targets, targets, compute, opts, spoiled=spoiled, detail=detail)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *rest: Any) -> SimWork:
        """Give every rank its tensor of the root's list."""
        target, root = single(outputs), root_of(opts)
        sources = first_list(inputs) if self._place == root else []
        self._check("scatter", output=target, inputs=sources, root=root)

        def compute(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return [[tensor.detach().clone()] for tensor in sent[root]]

        fingerprint = (("root", self.ranks[root]), *describe(target))
        detail = f"from {self.ranks[root]}"
        return self._post("scatter", fingerprint, sources, [target], compute, opts, inputs=sources, detail=detail)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any = None, input_splits: Any = None, opts: Any = None
    ) -> SimWork:
        """Exchange pieces of dim 0; splits give the pieces' lengths, equal ones by default."""
        self._check(
            "all_to_all_single",
            output=output,
            input=input,
            received=list(output_splits or []),
            cut=list(input_splits or []),
        )
        received = list(output_splits or []) or [output.shape[0] // len(self.ranks)] * len(self.ranks)
        cut = list(input_splits or []) or [input.shape[0] // len(self.ranks)] * len(self.ranks)

        def compute(sent: list[tuple[Tensor, list[int], list[int]]]) -> list[list[Tensor]]:
            tensors, pieces = [part[0] for part in sent], [part[1] for part in sent]
            return [[tensor] for tensor in collectives.all_to_all_single(tensors, pieces)]

        fingerprint = (("dtype", dtype_name(input)), ("trailing shape", list(input.shape[1:])))
        return self._post(
            "all_to_all_single",
            fingerprint,
            (input, cut, received),
            [output],
            compute,
            opts,
            inputs=[input],
            agree=splits_match,
            detail=f"splits {cut}",
        )

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimWork:
        """Exchange lists of tensors: this rank's r-th goes to rank r."""
        self._check("all_to_all", outputs=outputs, inputs=inputs)

        def compute(sent: list[list[Tensor]]) -> list[list[Tensor]]:
            return collectives.all_to_all(sent)

        fingerprint = (("dtypes", sorted({dtype_name(tensor) for tensor in inputs})),)
        return self._post(
            "all_to_all", fingerprint, list(inputs), outputs, compute, opts, inputs=inputs, agree=shapes_match
        )

    def barrier(self, opts: Any = None) -> SimWork:
        """Wait for every rank."""
        return self._post("barrier", (), None, [], lambda sent: [[] for _ in sent], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for every rank; where one is missing, the others raise, and the group is broken.

        Raises:
            TimedOutError: on the first rank that waits, naming those that are missing.
            BrokenGroupError: on the others.
        """
        self._check("monitored_barrier")
        seconds = timeout.total_seconds() if timeout else self._member.timeout or _DEFAULT_TIMEOUT
        no_opts = None
        work = self._post("monitored_barrier", (), None, [], lambda sent: [[] for _ in sent], no_opts)
        assert isinstance(work, SlotWork)
        work.timeout, work.on_timeout = seconds, lambda: self._barrier_timed_out(work.slot, seconds)
        work.wait()

    def _barrier_timed_out(self, slot: Slot, seconds: float) -> None:
        missing = ", ".join(map(str, slot.missing()))
        self._calls.break_group(self._member)
        raise TimedOutError(
            f"[Rank {self._member.rank}]: Rank {missing} failed to pass monitoredBarrier in {seconds * 1000:g} ms"
        )

    # -- messages

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> SimWork:
        """Post a message to a rank of the group; complete when the receive is there."""
        return self._messages.send(self._member, tensors, target, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> SimWork:
        """Post a receive from a rank of the group."""
        return self._messages.receive(self._member, tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> SimWork:
        """Post a receive from whoever sends first; only gloo has it."""
        return self._messages.receive(self._member, tensors, None, tag)

    def _to(self, root: int) -> str:
        return f"to {self.ranks[root]}"
