"""Curves of the benchmark: what is drawn, taken from measured results, and how, as SVG files kept with the pages.

A file begins with a digest of what it shows, so that it is drawn anew only where the data are new: two versions of
matplotlib draw the same curves in different words.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

Row = dict[str, Any]
_DIGEST = "<!-- shows {} -->\n"


@dataclass(frozen=True)
class Curve:
    """Points of one line; ``dashed`` for what is computed and not measured."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A picture of curves with logarithmic axes."""

    scale: ClassVar[str] = "log"
    title: str
    x: str
    y: str
    curves: tuple[Curve, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Calibration(Chart):
    """A picture of curves with plain axes."""

    scale: ClassVar[str] = "linear"


def _curve(name: str, rows: Iterable[Row], x: str, y: str, dashed: bool = False) -> Curve:
    """What is not measured, or is nothing, is no point of a logarithmic axis."""
    found = sorted((row["config"][x], row[y]) for row in rows if row.get(y))
    return Curve(name, tuple((float(a), float(b)) for a, b in found), dashed)


def _chart(results: Sequence[Row], sweep: str, x: str, y: str, *words: str, least: bool = True) -> Chart:
    rows = [row for result in results if result["goal"]["sweep"] == sweep for row in result["results"]]
    names = dict.fromkeys(row["contender"] for row in rows)
    curves = [_curve(name, (r for r in rows if r["contender"] == name), x, y) for name in names]
    if least:
        curves.append(_curve("least, by the model", rows, x, "floor", dashed=True))
    return Chart(*words, tuple(c for c in curves if c.points))


#: Name of a figure -> what it shows, of the results of goals.
CHARTS: dict[str, Callable[[Sequence[Row]], Chart]] = {
    "points": lambda results: _chart(
        results, "points", "n", "seconds", "Gaussian sum, D = 3", "points (M = N)", "seconds"
    ),
    "dimensions": lambda results: _chart(
        results, "dimensions", "d", "seconds", f"Gaussian sum, {_sizes(results)} points", "D", "seconds"
    ),
    "memory": lambda results: _chart(
        results, "points", "n", "peak_bytes", "Gaussian sum, D = 3", "points (M = N)", "bytes beside the inputs",
        least=False,
    ),
}  # fmt: skip


def _sizes(results: Sequence[Row]) -> str:
    sizes = {r["results"][0]["config"]["n"] for r in results if r["goal"]["sweep"] == "dimensions"}
    return ", ".join(f"{n:,}" for n in sorted(sizes))


def shows(text: str, chart: Chart) -> bool:
    """Whether a file shows these very data."""
    return text.startswith(_DIGEST.format(chart.digest))


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def svg(chart: Chart) -> str:
    """The chart as SVG text, the same for the same data and matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "kernops", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes = figure.add_subplot(title=chart.title, xlabel=chart.x, ylabel=chart.y)
        axes.set(xscale=chart.scale, yscale=chart.scale)
        for curve in chart.curves:
            style = {"linestyle": "--", "color": "gray"} if curve.dashed else {"marker": "o", "markersize": 3.5}
            axes.plot(*zip(*curve.points), label=curve.name, linewidth=1.2, **style)
        axes.grid(True, linewidth=0.3)
        axes.legend(frameon=False)
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None})
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return _DIGEST.format(chart.digest) + "\n".join(lines[lines.index(next(x for x in lines if "<svg" in x)) :]) + "\n"
