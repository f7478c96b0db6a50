"""Charts by matplotlib, as inline SVG.

The colours, by Okabe and Ito (2008), are distinct for any colour vision; every line also has its own marker.
"""

from __future__ import annotations

import importlib.util
import io
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

MISSING = 'no pictures, because matplotlib is not installed: pip install "dsframe[plots]"'
_BLACK = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", _BLACK, "#E69F00", "#56B4E9", "#8C6D31")
"""The last is a brown instead of their yellow, which is invisible on white."""
_MARKERS = "os^vDPX*"
_GRID = "#dddddd"
_SETTINGS: Any = {"font.size": 9.0, "svg.fonttype": "none", "svg.hashsalt": "dsframe"}
"""Text stays searchable text; the same picture always gives the same file."""


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    points: Sequence[tuple[float, float]]
    """Finite numbers."""
    series: int
    """Selects colour and marker."""
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines in one coordinate system."""

    title: str
    label: str
    """What the lines show, with its unit."""
    lines: Sequence[Line]
    log: bool = False
    across: str = "optimizer step"


def available() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def inline(chart: Chart) -> str:
    """Returns an ``<svg>`` element with the page's text colour for black, and a transparent background."""
    text = io.StringIO()
    figure(chart).savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    head = f'<svg role="img" aria-label="{escape(chart.title, quote=True)}" '
    picture = re.sub(r".*?<svg ", lambda _: head, text.getvalue(), count=1, flags=re.DOTALL)
    return picture.replace(_BLACK, "currentColor").replace(_GRID, "var(--rule)")


def ink(series: int) -> str:
    """Returns a line's colour for the page's style."""
    return COLOURS[series % len(COLOURS)].replace(_BLACK, "currentColor")


def figure(chart: Chart) -> Any:
    """Returns a matplotlib figure."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    matplotlib.rcParams.update(_SETTINGS)
    drawn = Figure(figsize=(7.6, 3.6), layout="constrained")
    axes: Any = drawn.subplots()
    axes.set_title(chart.title, loc="left", fontsize=11, fontweight="bold")
    for index, line in enumerate(line for line in chart.lines if line.points):
        across, up = zip(*line.points, strict=True)
        axes.plot(
            across,
            up,
            label=line.name[-34:],
            linestyle="--" if line.dashed else "-",
            color=COLOURS[line.series % len(COLOURS)],
            marker=_MARKERS[line.series % len(_MARKERS)],
            markersize=5,
            markevery=max(1, len(across) // 12),
            # Earlier lines are wider, so that equal curves are both visible.
            linewidth=1.3 if line.dashed else 1.3 + 3.2 * (1 - (index + 1) / len(chart.lines)),
        )
    if chart.log:
        axes.set_yscale("log")
    if chart.across == Chart.across:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # no fractional steps
    axes.set_xlabel(chart.across)
    axes.set_ylabel("\n".join(textwrap.wrap(chart.label, 36)))
    axes.grid(color=_GRID, linewidth=0.6)
    if len(axes.get_lines()) > 1:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)
    return drawn
