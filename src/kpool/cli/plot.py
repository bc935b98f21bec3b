"""What the pictures share: colours, the file they go to, and matplotlib, which only pictures need.

Colours are Okabe and Ito's, told apart with any colour vision; nothing is said by colour alone. The background is
white and opaque, so a picture reads the same on a light page and on a dark one.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kpool.cli.exits import UNAVAILABLE, CommandError

BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, BLACK = (
    "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#000000",
)  # fmt: skip
RANKS = (BLUE, ORANGE, GREEN, SKY, VERMILLION, PURPLE, YELLOW, BLACK)  # neighbours differ in lightness too
SUFFIXES = (".png", ".svg")


def check(path: Path) -> None:
    """Refuse a picture that could not be written, before any work is done for it.

    Raises:
        CommandError: matplotlib is missing, the name ends in something else, its folder does not exist, or it is a
            folder itself.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise CommandError(f"--plot: expected a name ending in .png or .svg, got {str(path)!r}")
    if not path.parent.is_dir():
        raise CommandError(f"--plot: expected an existing folder, got {str(path.parent)!r}")
    if path.is_dir():
        raise CommandError(f"--plot: expected a file, got the folder {str(path)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: python -m pip install 'kpool[plot]'", UNAVAILABLE)


def figure(width: float, height: float) -> Any:
    """An empty figure of so many inches; it belongs to no window and to no global list."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(drawn: Any, path: Path) -> None:
    """Write a figure; the same figure gives the same bytes.

    Raises:
        CommandError: the file cannot be written.
    """
    import matplotlib

    svg = path.suffix.lower() == ".svg"
    try:
        with matplotlib.rc_context({"svg.hashsalt": "kpool", "svg.fonttype": "path"}):
            drawn.savefig(path, dpi=150, metadata={"Date": None} if svg else None)
    except OSError as error:
        raise CommandError(f"--plot: cannot write {path}: {error.strerror or error}") from error


def length_axis(axes: Any, lengths: list[int]) -> None:
    """A logarithmic axis of tokens with a labelled tick at some of `lengths`, at most nine."""
    ticks = lengths[:: -(-len(lengths) // 9)] if lengths else []
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [token_label(tick) for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens")


def token_label(tokens: int) -> str:
    """`4k` and `1M` where these are exact powers' names, else the number."""
    if tokens >= 1 << 20 and tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}k" if tokens >= 1 << 10 and tokens % (1 << 10) == 0 else f"{tokens:,}"
