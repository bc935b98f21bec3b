"""Whether a thread is waiting in a place that the scheduler does not see: a lock, a queue, another thread's end, C++.

The operating system knows: a thread that sleeps, and whose count of context switches stands still for longer than the
interpreter lets a thread wait for its lock, waits for something else. Where it cannot be asked, a thread counts as
waiting if its Python frame does not move for a while.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

SETTLE = 0.006  # seconds; a thread that waits for the interpreter lock shows itself every 5 ms
_SETTLE_UNSEEN = 0.03
_TASKS = Path("/proc/self/task")
_SEEN = (_TASKS / str(threading.get_native_id()) / "schedstat").exists()

Mark = tuple[object, ...]

# Functions of the standard library that wait for another thread, and the variable that holds their time limit.
_UNTIMED = {
    ("threading.py", "wait"): "timeout",
    ("threading.py", "join"): "timeout",
    ("threading.py", "_wait_for_tstate_lock"): "timeout",
    ("queue.py", "get"): "timeout",
    ("queue.py", "put"): "timeout",
    ("_base.py", "result"): "timeout",
    ("_base.py", "exception"): "timeout",
}


def mark(thread: threading.Thread) -> Mark | None:
    """How far a sleeping thread has run, to be compared with a later mark; None for a thread that is running."""
    if not _SEEN:
        frame = sys._current_frames().get(thread.ident or 0)
        return None if frame is None else (id(frame), frame.f_lasti)
    try:
        folder = _TASKS / str(thread.native_id)
        state = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0]
        return ((folder / "schedstat").read_bytes(),) if state == b"S" else None
    except OSError:
        return None


def has_not_run_since(earlier: Mark, thread: threading.Thread) -> bool:
    """Whether a thread that was seen waiting has waited ever since; False where that cannot be known at once."""
    return _SEEN and mark(thread) == earlier


def settle_time() -> float:
    """Seconds between two marks that must be equal for the thread to count as waiting."""
    return SETTLE if _SEEN else _SETTLE_UNSEEN


def wakes_by_itself(thread: threading.Thread) -> bool:
    """Whether a waiting thread may go on without another thread of its rank: a sleep, a time limit, input or output."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return False
    name = frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    limit = _UNTIMED.get((name, frame.f_code.co_name))
    return limit is None or frame.f_locals.get(limit, None) not in (None, -1)
