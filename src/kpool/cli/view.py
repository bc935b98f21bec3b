"""Where output goes: tables for people on stdout, progress on stderr, JSON alone when asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

OUT = Console(highlight=False)
ERR = Console(stderr=True, highlight=False)


def progress() -> Progress:
    """A progress display that leaves nothing behind and is silent where stderr is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal)


def print_json(data: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=2))  # noqa: T201


def say(line: str) -> None:
    """One line on stdout, in rich's markup; the terminal wraps it, a pipe does not."""
    OUT.print(line, soft_wrap=True)


def hint(line: str) -> None:
    """One line on stderr."""
    ERR.print(line, markup=False, soft_wrap=True)


def wrote(path: Path) -> None:
    """Say on stderr where a file went."""
    hint(f"wrote {path}")


def size(count: float) -> str:
    """Bytes for people: `34.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    """Seconds for people: `12.3 ms`, `123 ms`, `4.56 s`; three digits."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.09995 else f"{seconds * 1e3:.1f} ms"
