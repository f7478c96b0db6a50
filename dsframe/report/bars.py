"""Bars beside each other as SVG text: a name, a length, and the single values that it stands for as dots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from dsframe.report.marks import COLOURS, LETTER, cut, number, opening
from dsframe.report.svg import WIDTH

_ROW, _TOP, _BOTTOM = 30, 60, 26
_NAME, _SAID = 0.3, 0.4
"""Most of the width that names, and what is said behind the bars, may take."""


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
    part: float | None = None
    """How much of it is filled; the rest is light. None: all."""


def bars(title: str, label: str, rows: Sequence[Bar], *, limit: float | None = None, width: int = WIDTH) -> str:
    """An ``<svg>`` element, as high as its rows need. All values from zero on.

    ``label``: what is measured, with its unit. ``limit``: where a rule is drawn through all rows.
    """
    height = _TOP + _ROW * len(rows) + _BOTTOM
    left = 12 + min(width * _NAME, max(len(row.name) for row in rows) * LETTER + 14)
    right = width - 8 - min(width * _SAID, max(len(row.said) for row in rows) * LETTER + 14)
    most = max((value for row in rows for value in (row.value, *row.dots)), default=0.0)
    most = max(most, limit or 0.0) or 1.0
    scale = (right - left) / most
    parts = [opening(title, width, height), f'<text class="soft" x="12" y="42" fill="#555">{escape(label)}</text>']
    bottom = _TOP + _ROW * len(rows)
    for place, row in enumerate(rows):
        parts += _row(row, left, _TOP + _ROW * place, scale, width)
    parts.append(f'<line class="soft" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP - 4}" y2="{bottom}" stroke="#555"/>')
    if limit:
        at = left + limit * scale
        parts.append(
            f'<line class="soft" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP - 4}" y2="{bottom}" stroke="#555" stroke-dasharray="2 3"/>'
        )
    for value in (0.0, limit or most):
        at = left + value * scale
        parts.append(
            f'<text class="soft" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555">{number(_round(value))}</text>'
        )
    return "".join([*parts, "</svg>"])


def _row(row: Bar, left: float, top: float, scale: float, width: int) -> list[str]:
    colour, name = COLOURS[row.series % len(COLOURS)], f"f{row.series % len(COLOURS)}"
    middle = top + _ROW / 2
    length = row.value * scale
    parts = [
        f'<text class="ink" x="{left - 8:.1f}" y="{middle + 4:.1f}" text-anchor="end" fill="#111">'
        f"{escape(cut(row.name, left - 20))}</text>"
    ]
    boxes = [(length, 1.0)] if row.part is None else [(length, 0.3), (min(row.part, row.value) * scale, 1.0)]
    for size, opacity in boxes:
        parts.append(
            f'<rect class="{name}" x="{left:.1f}" y="{middle - 8:.1f}" width="{max(size, 0.5):.1f}" height="16" fill="{colour}" '
            f'fill-opacity="{opacity:g}"/>'
        )
    ends = [length, *(value * scale for value in row.dots)]
    if len(row.dots) > 1:
        first, last = left + min(row.dots) * scale, left + max(row.dots) * scale
        parts.append(
            f'<line class="ink-line" x1="{first:.1f}" x2="{last:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" stroke="#111"/>'
        )
        parts += [
            f'<circle class="dot" cx="{left + value * scale:.1f}" cy="{middle:.1f}" r="3" fill="#ffffff" stroke="#111">'
            f"<title>{value:,.6g}</title></circle>"
            for value in row.dots
        ]
    parts.append(
        f'<text class="ink" x="{left + max(ends) + 9:.1f}" y="{middle + 4:.1f}" fill="#111">'
        f"{escape(cut(row.said, width - left - max(ends) - 12))}</text>"
    )
    return parts


def _round(value: float) -> float:
    return float(f"{value:.3g}")
