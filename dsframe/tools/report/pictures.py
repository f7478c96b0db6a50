"""Charts by matplotlib, as SVG inside a page.

Colours are those of Okabe and Ito (2008), which people with any colour vision tell apart; every line
has a marker of its own too.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

MISSING = 'no pictures, because matplotlib is not installed: pip install "dsframe[plots]"'
_BLACK = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", _BLACK, "#E69F00", "#56B4E9", "#8C6D31")
"""The last is a brown in place of their yellow, which cannot be seen on white."""
_MARKERS = "os^vDPX*"
_GRID = "#dddddd"
_INCHES = (7.6, 3.6)
_POINTS, _MARKS, _LETTERS = 1000, 12, 34
"""Of a line, at most; of its markers; of a name."""


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]
    series: int | None = None
    """Its colour and marker; by default by its position among the lines."""
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis counts, with its unit."""

    label: str
    log: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over one axis."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]

    def draw(self, axes: Any) -> None:
        """Draws itself."""
        axes.set_title(self.title, loc="left", fontsize=11, fontweight="bold")
        for index, line in enumerate(self.lines):
            points = [(a, b) for a, b in line.points if _fits(a, self.x) and _fits(b, self.y)]
            if not points:
                continue
            series = index if line.series is None else line.series
            across, up = zip(*thinned(points), strict=True)
            axes.plot(
                across,
                up,
                label=line.name if len(line.name) <= _LETTERS else f"{line.name[: _LETTERS - 1]}\u2026",
                linestyle="--" if line.dashed else "-",
                color=COLOURS[series % len(COLOURS)],
                marker=_MARKERS[series % len(_MARKERS)],
                markersize=5,
                markevery=max(1, len(across) // _MARKS),
                # Earlier lines are wider: where two are the same, both are seen.
                linewidth=1.3 if line.dashed else 1.3 + 3.2 * (1 - (index + 1) / len(self.lines)),
            )
        for axis, set_scale in ((self.x, axes.set_xscale), (self.y, axes.set_yscale)):
            if axis.log:
                set_scale("log")
        if not self.x.log and all(float(a).is_integer() for line in self.lines for a, _ in line.points):
            axes.locator_params(axis="x", integer=True)  # there is no step 2.5
        axes.set_xlabel(self.x.label)
        axes.set_ylabel("\n".join(textwrap.wrap(self.y.label, 36)))
        axes.grid(color=_GRID, linewidth=0.6)
        if len([line for line in axes.get_lines() if not line.get_label().startswith("_")]) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)


def available() -> bool:
    """True if there can be pictures."""
    return importlib.util.find_spec("matplotlib") is not None


def inline(chart: Chart) -> str:
    """An ``<svg>`` element for a page: black is the page's ink, and its paper is seen through it."""
    text = io.StringIO()
    figure([chart]).savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    head = f'<svg role="img" aria-label="{escape(chart.title, quote=True)}" '
    picture = re.sub(r".*?<svg ", lambda _: head, text.getvalue(), count=1, flags=re.DOTALL)
    return picture.replace(_BLACK, "currentColor").replace(_GRID, "var(--rule)")


def ink(series: int) -> str:
    """A line's colour in a page's style."""
    return COLOURS[series % len(COLOURS)].replace(_BLACK, "currentColor")


def figure(charts: Sequence[Chart]) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text, which can be searched; the same picture twice is the same file.
    settings: Any = {"font.size": 9.0, "svg.fonttype": "none", "svg.hashsalt": "dsframe"}
    matplotlib.rcParams.update(settings)
    width, height = _INCHES
    drawn = Figure(figsize=(width, height * len(charts)), layout="constrained")
    for chart, (axes,) in zip(charts, drawn.subplots(len(charts), squeeze=False), strict=True):
        chart.draw(axes)
    return drawn


def _fits(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """As many as can be seen: of each column the lowest and the highest, so that peaks stay."""
    if len(points) <= _POINTS:
        return list(points)
    size = -(-len(points) // (_POINTS // 2))
    kept: list[tuple[float, float]] = []
    for first in range(0, len(points), size):
        column = sorted(points[first : first + size], key=lambda point: point[1])
        kept += sorted({column[0], column[-1]})
    return kept
