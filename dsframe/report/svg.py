"""Line charts as SVG text: no library, readable on any screen, the same for people who confuse colours.

Colours are Okabe and Ito's (2008), and every line has a marker of its own beside its colour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C6D31")
_LEFT, _TOP, _BOTTOM, _LABEL = 78, 44, 52, 15
_LETTER = 6.3
"""Width of a letter of 11 pixels, about."""


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
    """Ticks only at whole numbers; with ``log``, at powers of two."""


def chart(
    title: str, x: Axis, y: Axis, lines: Sequence[Line], *, limit: tuple[str, float] | None = None, width: int = 760
) -> str:
    """An ``<svg>`` element. ``limit``: a name and a height at which a horizontal rule is drawn.

    On logarithmic axes points that are not above zero are left out. Without any point it says so.
    """
    shown = [replace(line, points=[(a, b) for a, b in line.points if _can(a, x) and _can(b, y)]) for line in lines]
    shown = [line for line in shown if line.points]
    height = 400
    open_tag = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title, {chr(34): "&quot;"})}" font-family="Helvetica, Arial, sans-serif" font-size="11">'
    )
    parts = [open_tag, f'<rect width="{width}" height="{height}" fill="#ffffff"/>']
    parts.append(f'<text x="{_LEFT}" y="22" font-size="14" font-weight="bold">{escape(title)}</text>')
    if not shown:
        return "".join([*parts, f'<text x="{_LEFT}" y="60">nothing to show</text></svg>'])
    names = [line.name for line in shown] + ([limit[0]] if limit else [])
    right = min(width * 0.45, max(len(name) for name in names) * _LETTER + 34)
    across = _Scale(x, [a for line in shown for a, _ in line.points], _LEFT, width - right)
    values = [b for line in shown for _, b in line.points] + ([limit[1]] if limit else [])
    up = _Scale(y, values, height - _BOTTOM, _TOP)
    parts += _grid(across, up, x, y)
    if limit:
        at = up(limit[1])
        parts.append(
            f'<line x1="{across.low}" x2="{across.high}" y1="{at:.1f}" y2="{at:.1f}" stroke="#444" stroke-dasharray="2 3"/>'
        )
    ends = []
    for place, line in enumerate(shown):
        number = place if line.series is None else line.series
        parts += _curve(line, number, across, up, wider=len(shown) - 1 - place)
        ends.append((up(line.points[-1][1]), COLOURS[number % len(COLOURS)], line.name, number))
    if limit:
        ends.append((up(limit[1]), "#444", limit[0], -1))
    parts += _names(ends, across.high + 10, height - _BOTTOM)
    return "".join([*parts, "</svg>"])


def _can(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


class _Scale:
    """From a value to a place, with its ticks."""

    def __init__(self, axis: Axis, values: Sequence[float], low: float, high: float) -> None:
        self.low, self.high, self._log = low, high, axis.log
        first, last = min(values), max(values)
        if axis.log:
            if axis.whole:
                powers = range(math.floor(math.log2(first) + 1e-9), math.ceil(math.log2(last) - 1e-9) + 1)
                self.ticks = [2.0**power for power in powers] if len(powers) > 1 else [first, 2 * first]
                self.ticks = self.ticks[:: math.ceil(len(self.ticks) / 12)]
            else:
                powers = range(math.floor(math.log10(first)) - 1, math.ceil(math.log10(last)) + 2)
                steps = (1, 2, 5) if len(powers) < 7 else (1,)
                every = [step * 10.0**power for power in powers for step in steps]
                low_tick = max(tick for tick in every if tick <= first * (1 + 1e-9))
                high_tick = min(tick for tick in every if tick > low_tick and tick >= last * (1 - 1e-9))
                self.ticks = [tick for tick in every if low_tick <= tick <= high_tick]
            bottom, top = min(first, self.ticks[0]), max(last, self.ticks[-1])
            self._from, self._to = math.log(bottom), math.log(top)
        else:
            if 0 < first < 0.5 * last and not axis.whole:
                first = 0.0
            if last - first < 1e-4 * abs(last):  # constant: ticks that differ by less would read the same
                first, last = first - 0.05 * abs(last), last + 0.05 * abs(last)
            step = _step(max(last - first, abs(last) * 1e-6, 1e-12) / 6, axis.whole)
            bottom_value, top_value = math.floor(first / step + 1e-9) * step, math.ceil(last / step - 1e-9) * step
            top_value = max(top_value, bottom_value + step)
            self.ticks = [bottom_value + step * n for n in range(round((top_value - bottom_value) / step) + 1)]
            self._from, self._to = bottom_value, top_value

    def __call__(self, value: float) -> float:
        at = math.log(value) if self._log else value
        return self.low + (self.high - self.low) * (at - self._from) / (self._to - self._from)


def _step(rough: float, whole: bool) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    parts = []
    for tick in across.ticks:
        at = across(tick)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{up.low}" y2="{up.high}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{at:.1f}" y="{up.low + 17}" text-anchor="middle">{number(tick)}</text>')
    for tick in up.ticks:
        at = up(tick)
        parts.append(f'<line x1="{across.low}" x2="{across.high}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e6e6e6"/>')
        parts.append(f'<text x="{across.low - 7}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    middle_x, middle_y = (across.low + across.high) / 2, (up.low + up.high) / 2
    parts.append(f'<text x="{middle_x:.1f}" y="{up.low + 38}" text-anchor="middle">{escape(x.label)}</text>')
    parts.append(
        f'<text transform="translate(16 {middle_y:.1f}) rotate(-90)" text-anchor="middle">{escape(y.label)}</text>'
    )
    return parts


def _curve(line: Line, number: int, across: _Scale, up: _Scale, wider: int) -> list[str]:
    """``wider``: lines that are drawn over this one, which shows beside them where they are the same."""
    colour = COLOURS[number % len(COLOURS)]
    places = [(across(a), up(b)) for a, b in line.points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{1.8 + 1.7 * min(wider, 3):.1f}"{dash}/>'
    ]
    stride = max(1, len(places) // 12)  # a marker on each of hundreds of points would hide the line
    parts += [_marker(a, b, number, colour) for a, b in places[::-stride][::-1]]
    return parts


def _marker(a: float, b: float, number: int, colour: str) -> str:
    kind, filled = number % 4, colour if number % 8 < 4 else "#ffffff"
    style = f'fill="{filled}" stroke="{colour}" stroke-width="1.3"'
    if kind == 0:
        return f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.4" {style}/>'
    if kind == 1:
        return f'<rect x="{a - 3.1:.1f}" y="{b - 3.1:.1f}" width="6.2" height="6.2" {style}/>'
    turn = 1 if kind == 2 else -1
    corners = f"{a:.1f},{b - 4.2 * turn:.1f} {a - 3.9:.1f},{b + 3 * turn:.1f} {a + 3.9:.1f},{b + 3 * turn:.1f}"
    return f'<polygon points="{corners}" {style}/>'


def _names(ends: list[tuple[float, str, str, int]], at: float, lowest: float) -> list[str]:
    """A name beside the end of each line, moved apart where they would overlap."""
    ends = sorted(ends)
    places = [end[0] for end in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + _LABEL)
    overhang = max(0.0, places[-1] - lowest)
    for index in range(len(places) - 1, -1, -1):
        ceiling = places[index + 1] - _LABEL if index + 1 < len(places) else places[index] - overhang
        places[index] = min(places[index], ceiling)
    parts = []
    for place, (_, colour, name, number) in zip(places, ends, strict=True):
        if number >= 0:
            parts.append(_marker(at + 4, place, number, colour))
        parts.append(f'<text x="{at + 13:.1f}" y="{place + 4:.1f}" fill="#111">{escape(name)}</text>')
    return parts


def number(value: float) -> str:
    """``1200000`` as ``1.2M``, ``0.00002`` as ``2e-05``."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):g}{letter}"
    return f"{value:,.6g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.0e}"
