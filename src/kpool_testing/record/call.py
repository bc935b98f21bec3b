"""One collective as one rank issued it, and the line of the user's code that issued it."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).resolve().parent.parent.as_posix() + "/"
_SKIPPED = ("/typing_extensions.py", "/contextlib.py", "/threading.py", "/concurrent/futures/thread.py")

# Parts of torch that carry out a collective on behalf of whoever called them.
_CARRIERS = (
    "/distributed/distributed_c10d.py",
    "/distributed/c10d_logger.py",
    "/distributed/_functional_collectives.py",
    "/distributed/nn/functional.py",
    "/autograd/function.py",
    "/utils/_contextlib.py",
    "/_ops.py",
)

# The names torch 2.13 uses; a trace always holds these, whichever spelling the code under test used.
_CANONICAL = {
    "all_gather_into_tensor": "all_gather_single",
    "_all_gather_base": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}

POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv"})


def canonical_kind(kind: str) -> str:
    """The name a trace uses for a collective: `all_gather_into_tensor` becomes `all_gather_single`."""
    return _CANONICAL.get(kind, kind)


@functools.cache
def is_user_file(filename: str) -> bool:
    """True for code that belongs neither to torch, nor to this package, nor to what wraps calls in between."""
    name = filename.replace("\\", "/")
    if name.startswith((_PACKAGE, "<frozen ")) or name.endswith(_SKIPPED):
        return False
    return not name.startswith(_torch_home())


@functools.cache
def _is_carrier(filename: str) -> bool:
    name = filename.replace("\\", "/")
    if name.startswith(_torch_home()):
        return name.endswith(_CARRIERS)
    return name.startswith(_PACKAGE) or name.endswith(_SKIPPED)


def _torch_home() -> str:
    torch = sys.modules.get("torch")
    return Path(torch.__file__).parent.as_posix() + "/" if torch is not None and torch.__file__ else "/torch/"


def user_site() -> str:
    """`file:line` of the innermost frame that belongs to the user's code (see `is_user_file`)."""
    return caller()[0]


def caller() -> tuple[str, bool]:
    """`user_site()`, and whether a part of torch, not the user's code, decided to make the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_carrier(frame.f_code.co_filename):
        frame = frame.f_back
    torch_decided = frame is not None and not is_user_file(frame.f_code.co_filename)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}".replace("\\", "/"), torch_decided
        frame = frame.f_back
    return "?", torch_decided


@dataclass(frozen=True)
class Call:
    """One collective as one rank issued it.

    Attributes:
        rank: global rank of the caller.
        kind: canonical name, such as "all_gather_single".
        group: name of the group the call was made on.
        ranks: global ranks of that group, in group order.
        seq: number of the call on that group, counted on this rank from 0.
        shape: shape of what the rank sent (or receives, where it sends nothing).
        dtype: dtype of the same, without "torch.".
        bytes: size of the same in bytes.
        site: `file:line` in the user's code.
        detail: what else tells calls apart: reduce op, root, peer.
    """

    rank: int
    kind: str
    group: str
    ranks: tuple[int, ...]
    seq: int
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    site: str
    detail: str = ""

    def __str__(self) -> str:
        extra = f" {self.detail}" if self.detail else ""
        return f"{self.kind}#{self.seq} {self.dtype}{list(self.shape)}{extra} on {self.group} at {self.site}"
