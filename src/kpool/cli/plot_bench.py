"""The picture of `kpool bench --plot`: time and memory against length, all axes logarithmic, with the GEMM limit."""

from __future__ import annotations

from typing import Any

from kpool.cli.plot import BLACK, BLUE, VERMILLION, figure, length_axis

_LOOKS = {
    "plain": ("plain algorithm", VERMILLION, "s-"),
    "kpool": ("kpool", BLUE, "o-"),
    "gemm": ("limit: the matrix products alone", BLACK, "x--"),
}
_NOTHING = 1e-5  # seconds: less than this means that nothing had to be multiplied


def picture(report: dict[str, Any]) -> Any:
    """The figure of a report whose results are all correct, as `kpool bench --json` prints it."""
    drawn = figure(12, 5.2)
    left, right = drawn.subplots(1, 2)
    lengths = report["lengths"]
    timed = {n: [(f["tokens"], f["seconds"].get(n, 0.0)) for f in lengths] for n in _LOOKS}
    sized = {
        n: [(f["tokens"], f["memory"][n]["bytes"] / 2**20) for f in lengths if n in f.get("memory", {})] for n in _LOOKS
    }
    _lines(left, {name: [p for p in points if p[1] > _NOTHING] for name, points in timed.items()})
    _lines(right, {name: [p for p in points if p[1] > 0] for name, points in sized.items()})
    for axes, unit, title in (
        (left, "time per call (s)", "time, median"),
        (right, "peak above inputs and outputs (MiB)", "memory, one call in a fresh process"),
    ):
        length_axis(axes, sorted(found["tokens"] for found in lengths))
        axes.set(yscale="log", ylabel=unit, title=title)
        axes.grid(alpha=0.3, which="both")
        if axes.lines:
            axes.legend()
        else:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
    where = report["machine"]
    quiet = "" if where["quiet"] else ", NOT a quiet machine"
    drawn.suptitle(
        f"k-pool selection, {report['layout']}, order={report['order']}: {where['threads']} CPU threads, "
        f"torch {where['torch']}{quiet}"
    )
    return drawn


def _lines(axes: Any, points: dict[str, list[tuple[int, float]]]) -> None:
    for name, some in points.items():
        label, colour, style = _LOOKS[name]
        if not some:
            continue
        axes.plot(*zip(*sorted(some), strict=True), style, color=colour, label=label)
        at, value = max(some)
        text = f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
        below = name == "gemm"
        axes.annotate(
            text, (at, value), (6, -5 if below else 5), textcoords="offset points", fontsize=9,
            color=colour, va="top" if below else "bottom",
        )  # fmt: skip
    if any(points.values()):
        axes.margins(x=0.12, y=0.12)
