"""What the exit codes are, and the error that carries one."""

from __future__ import annotations

OK = 0
DIFFERENT = 1
UNDECIDED = 2
USAGE = 64
UNAVAILABLE = 69
INTERRUPTED = 130
BROKEN_PIPE = 141


class CommandError(Exception):
    """Ends the command with one line on stderr and an exit code."""

    def __init__(self, message: str, code: int = USAGE) -> None:
        super().__init__(message)
        self.code = code
