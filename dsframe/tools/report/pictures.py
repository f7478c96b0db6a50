"""Charts and bars by matplotlib, as SVG inside a page or as files of their own. Without matplotlib there are tables alone.

Colours are those of Okabe and Ito (2008), which people with any colour vision tell apart; every line has a marker of its own too.
"""

from __future__ import annotations

import importlib.util
import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from dsframe.errors import DataError

MISSING = 'no pictures, because matplotlib is not installed: pip install "dsframe[plots]"'
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C6D31")
"""The last is a brown in place of their yellow, which cannot be seen on white."""
_MARKERS = "os^vDPX*"
_WIDTH_INCHES, _CHART_INCHES, _ROW_INCHES, _FRAME_INCHES = 7.6, 3.6, 0.32, 1.2
_POINTS, _MARKS, _LETTERS = 1000, 12, 34
"""Of a line, at most; of its markers; of a name."""


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    """For what was not measured: predictions, ideals."""
    series: int | None = None
    """Colour and marker, where a line has the same ones in another chart; else by its place among the lines."""


@dataclass(frozen=True)
class Axis:
    """What an axis counts, with its unit."""

    label: str
    log: bool = False
    whole: bool = False
    """Ticks only at whole numbers; with ``log``, at the points' own."""
    floor: float | None = None
    """With ``log``: below it the axis is linear, so that zero has a place."""


@dataclass(frozen=True)
class Chart:
    """Lines over one axis."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]

    @property
    def inches(self) -> float:
        """Height."""
        return _CHART_INCHES

    def draw(self, axes: Any) -> None:
        """Draws itself."""
        for place, line in enumerate(self.lines):
            points = [(a, b) for a, b in line.points if _can(a, self.x) and _can(b, self.y)]
            if not points:
                continue
            series = place if line.series is None else line.series
            across, up = zip(*thinned(points), strict=True)
            axes.plot(
                across,
                up,
                "--" if line.dashed else "-",
                label=shortened(line.name),
                color=COLOURS[series % len(COLOURS)],
                marker=_MARKERS[series % len(_MARKERS)],
                markersize=5,
                markevery=max(1, len(across) // _MARKS),
                # Earlier lines are wider: where two are the same, both are seen.
                linewidth=1.3 + 3.2 * (1 - (place + 1) / len(self.lines)),
            )
        _scale(axes.xaxis, axes.set_xscale, self.x, sorted({a for line in self.lines for a, _ in line.points}))
        _scale(axes.yaxis, axes.set_yscale, self.y, ())
        axes.set_xlabel(self.x.label)
        axes.set_ylabel("\n".join(textwrap.wrap(self.y.label, 36)))
        axes.grid(color="#dddddd", linewidth=0.6)
        if len(axes.get_lines()) > 1:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)


@dataclass(frozen=True)
class Bar:
    """One row."""

    name: str
    value: float
    """How long it is."""
    said: str
    """What stands behind it."""
    series: int
    """Colour, the same as of its line in other charts."""
    dots: Sequence[float] = ()
    """Values that it sums up: repeats, or ranks."""


@dataclass(frozen=True)
class Bars:
    """Bars next to each other, from zero on."""

    title: str
    label: str
    rows: Sequence[Bar]

    @property
    def inches(self) -> float:
        """Height."""
        return _FRAME_INCHES + _ROW_INCHES * len(self.rows)

    def draw(self, axes: Any) -> None:
        """Draws itself."""
        for place, row in enumerate(self.rows):
            colour = COLOURS[row.series % len(COLOURS)]
            axes.barh(place, row.value, 0.6, color=colour)
            if row.dots:
                axes.plot(
                    row.dots, [place] * len(row.dots), "-o", color="#111111", markerfacecolor="white", markersize=5
                )
            end = max([row.value, *row.dots])
            axes.annotate(row.said, (end, place), (7, 0), textcoords="offset points", va="center", fontsize=9)
        most = max(value for row in self.rows for value in (row.value, *row.dots)) or 1.0
        letters = max(len(row.said) for row in self.rows)
        axes.set_xlim(0, most * (1.04 + 0.018 * letters))  # room for what stands behind the longest bar
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_yticks(range(len(self.rows)), [shortened(row.name) for row in self.rows])
        axes.set_xlabel(self.label)
        axes.spines[["top", "right"]].set_visible(False)


def available() -> bool:
    """Whether there can be pictures."""
    return importlib.util.find_spec("matplotlib") is not None


def inline(picture: Chart | Bars) -> str:
    """An ``<svg>`` element for a page."""
    text = io.StringIO()
    _figure([picture]).savefig(text, format="svg", metadata={"Date": None})
    name = escape(picture.title, quote=True)
    return re.sub(r".*?<svg ", f'<svg role="img" aria-label="{name}" ', text.getvalue(), count=1, flags=re.DOTALL)


def write(path: Path, pictures: Sequence[Chart | Bars]) -> None:
    """Pictures below each other in a file, of the kind that its name says. Raises DataError where that cannot be."""
    if not available():
        raise DataError(MISSING)
    try:
        _figure(pictures).savefig(path, dpi=150)
    except ValueError as error:  # a format that matplotlib does not know
        raise DataError(f"{path}: {error}") from None


def _figure(pictures: Sequence[Chart | Bars]) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["font.size"] = 9.0
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: it can be searched, and takes less room
    matplotlib.rcParams["svg.hashsalt"] = "dsframe"  # the same picture twice is the same file
    heights = [picture.inches for picture in pictures]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(heights)), layout="constrained")
    grid = figure.subplots(len(pictures), squeeze=False, height_ratios=heights)
    for picture, (axes,) in zip(pictures, grid, strict=True):
        axes.set_title(picture.title, loc="left", fontsize=11, fontweight="bold")
        picture.draw(axes)
    return figure


def _scale(side: Any, choose: Callable[..., None], axis: Axis, values: Sequence[float]) -> None:
    """The axis's scale and ticks."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

    if axis.log and axis.floor is not None:
        choose("symlog", linthresh=axis.floor)
    elif axis.log:
        choose("log", base=2 if axis.whole else 10)
        if axis.whole and values:
            side.set_ticks(values)
        if axis.whole:
            side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
            side.set_minor_locator(NullLocator())
    elif axis.whole:
        side.set_major_locator(MaxNLocator(integer=True))


def _can(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log or axis.floor is not None)


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """As many as can be seen: of each column the lowest and the highest, so that what stands out stays."""
    if len(points) <= _POINTS:
        return list(points)
    size = -(-len(points) // (_POINTS // 2))
    found: list[tuple[float, float]] = []
    for first in range(0, len(points), size):
        column = points[first : first + size]
        found += sorted({min(column, key=lambda one: one[1]), max(column, key=lambda one: one[1])})
    return found


def shortened(name: str) -> str:
    """``name``, without its middle where it is too long for a picture."""
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS // 2 - 1]}\u2026{name[-_LETTERS // 2 :]}"
