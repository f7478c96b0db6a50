"""Line charts as SVG text: no library, readable on any screen, the same for people who confuse colours.

Colours are Okabe and Ito's (2008), every line has a marker of its own beside its colour and its name at its end. Lines that lie
on each other are drawn as dashes of their colours in turn: none hides another. Classes are there for a page's dark colours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from xml.sax.saxutils import escape

from dsframe.report.marks import COLOURS, LETTER, cut, marker, number, opening

WIDTH, HEIGHT = 640, 340
_LEFT, _TOP, _BOTTOM, _LABEL = 62, 56, 50, 17
_TICKS = 9
_NEAR, _DASH = 1.5, 8.0
"""Pixels: lines that are this near to each other share their place, in dashes of this length."""


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
    floor: float | None = None
    """With ``log``: a power of ten, where everything below it is drawn, zero too; its tick reads 0."""


class Place(NamedTuple):
    """A point of a line, in pixels and as it was."""

    across: float
    up: float
    value: tuple[float, float]


class End(NamedTuple):
    """Where a line ends: its height, whether it reaches the right edge, its series (-1: none) and its name."""

    up: float
    at_edge: bool
    series: int
    name: str


def chart(
    title: str,
    x: Axis,
    y: Axis,
    lines: Sequence[Line],
    *,
    limit: tuple[str, float] | None = None,
    room: int = 0,
    width: int = WIDTH,
) -> str:
    """An ``<svg>`` element. ``limit``: a name and a height at which a horizontal rule is drawn.

    ``room``: letters for which there is to be room behind the lines at least, so that charts below each other have one axis.
    On logarithmic axes points that are not above zero are left out, unless the axis has a floor. Without any point it says so.
    """
    kept = [replace(line, points=[(a, b) for a, b in line.points if _can(a, x) and _can(b, y)]) for line in lines]
    numbers = [place if line.series is None else line.series for place, line in enumerate(kept)]
    shown = [(number, line) for number, line in zip(numbers, kept, strict=True) if line.points]
    parts = [opening(title, width, HEIGHT)]
    if not shown:
        return "".join([*parts, f'<text class="soft" x="12" y="{_TOP}" fill="#555">nothing to show</text></svg>'])
    names = [line.name for _, line in shown] + ([limit[0]] if limit else [])
    alone = len(names) == 1 and not room  # the title says what it is
    right = 24 if alone else min(width * 0.4, max(room, *map(len, names)) * LETTER + 38)
    across = _Scale(x, [a for _, line in shown for a, _ in line.points], _LEFT, width - right)
    values = [b for _, line in shown for _, b in line.points] + ([limit[1]] if limit else [])
    up = _Scale(y, values, HEIGHT - _BOTTOM, _TOP)
    parts += _grid(across, up, x, y)
    if limit:
        parts.append(
            _rule(across.low, up(limit[1]), across.high, up(limit[1]), "soft", "#555", ' stroke-dasharray="2 3"')
        )
    drawn = [[Place(across(a), up(b), (a, b)) for a, b in line.points] for _, line in shown]
    parts += _curves(shown, drawn)
    ends = [
        End(places[-1].up, places[-1].across > across.high - 1, number, line.name)
        for (number, line), places in zip(shown, drawn, strict=True)
    ]
    if limit:
        ends.append(End(up(limit[1]), True, -1, limit[0]))
    if not alone:
        parts += _names(ends, across.high, width, HEIGHT - _BOTTOM)
    return "".join([*parts, "</svg>"])


def _can(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log or axis.floor is not None)


class _Scale:
    """From a value to a place, with its ticks and what they read."""

    def __init__(self, axis: Axis, values: Sequence[float], low: float, high: float) -> None:
        self.low, self.high, self._log, self._floor = low, high, axis.log, axis.floor
        first, last = min(values), max(values)
        if axis.log and axis.floor is not None:
            first, last = axis.floor, max(last, 10 * axis.floor)
        if axis.log:
            self.ticks = _powers_of_two(first, last) if axis.whole else _powers_of_ten(first, last)
            self._from, self._to = math.log(min(first, self.ticks[0])), math.log(max(last, self.ticks[-1]))
        else:
            if 0 < first < 0.5 * last and not axis.whole:
                first = 0.0
            if last - first < 1e-4 * abs(last):  # constant: ticks that differ by less would read the same
                first, last = first - 0.05 * abs(last), last + 0.05 * abs(last)
            step = _step(max(last - first, abs(last) * 1e-6, 1e-12) / 6, axis.whole)
            bottom, top = math.floor(first / step + 1e-9) * step, math.ceil(last / step - 1e-9) * step
            top = max(top, bottom + step)
            self.ticks = [bottom + step * n for n in range(round((top - bottom) / step) + 1)]
            self._from, self._to = bottom, top

    def __call__(self, value: float) -> float:
        at = math.log(max(value, self._floor or 0.0)) if self._log else value
        return self.low + (self.high - self.low) * (at - self._from) / (self._to - self._from)

    def read(self, tick: float) -> str:
        """What stands beside ``tick``."""
        return "0" if tick == self._floor else number(tick)


def _powers_of_two(first: float, last: float) -> list[float]:
    powers = range(math.floor(math.log2(first) + 1e-9), math.ceil(math.log2(last) - 1e-9) + 1)
    ticks = [2.0**power for power in powers] if len(powers) > 1 else [first, 2 * first]
    return ticks[:: math.ceil(len(ticks) / _TICKS)]


def _powers_of_ten(first: float, last: float) -> list[float]:
    """From below ``first`` to above ``last``: at 1, 2 and 5 where these are few, else at powers of ten, else at each n-th."""
    powers = range(math.floor(math.log10(first)) - 1, math.ceil(math.log10(last)) + 2)
    for steps, every in (((1, 2, 5), 1), *(((1,), every) for every in range(1, 400))):
        all_of_them = [float(f"{step}e{power}") for power in powers[::every] for step in steps]
        if every > 1:  # each n-th from the first one that is needed
            begin = math.floor(math.log10(first) + 1e-9)
            all_of_them = [float(f"1e{power}") for power in range(begin, powers[-1] + every, every)]
        low = max(tick for tick in all_of_them if tick <= first * (1 + 1e-9))
        high = min(tick for tick in all_of_them if tick > low and tick >= last * (1 - 1e-9))
        ticks = [tick for tick in all_of_them if low <= tick <= high]
        if len(ticks) <= _TICKS:
            break
    return ticks


def _step(rough: float, whole: bool) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    return max(1.0, step) if whole else step


def _rule(x1: float, y1: float, x2: float, y2: float, name: str, colour: str, more: str = "") -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{more}/>'


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    parts = [f'<text class="soft" x="12" y="42" fill="#555">{escape(y.label)}</text>']
    for tick in across.ticks:
        at = across(tick)
        parts.append(_rule(at, up.low, at, up.high, "rule", "#e6e6e6"))
        parts.append(
            f'<text class="ink" x="{at:.1f}" y="{up.low + 17:.1f}" text-anchor="middle" fill="#111">{across.read(tick)}</text>'
        )
    for tick in up.ticks:
        at = up(tick)
        parts.append(_rule(across.low, at, across.high, at, "rule", "#e6e6e6"))
        parts.append(
            f'<text class="ink" x="{across.low - 7:.1f}" y="{at + 4:.1f}" text-anchor="end" fill="#111">{up.read(tick)}</text>'
        )
    middle = (across.low + across.high) / 2
    parts.append(
        f'<text class="soft" x="{middle:.1f}" y="{up.low + 38:.1f}" text-anchor="middle" fill="#555">{escape(x.label)}</text>'
    )
    return parts


def _curves(shown: Sequence[tuple[int, Line]], drawn: Sequence[Sequence[Place]]) -> list[str]:
    """Lines, and markers over all of them."""
    spans = [_columns(places) for places in drawn]
    parts: list[str] = []
    markers: list[str] = []
    for index, ((series, line), places) in enumerate(zip(shown, drawn, strict=True)):

        def beside(*columns: int, index: int = index) -> tuple[int, ...]:
            """The lines that are where this one is, it too."""
            return tuple(
                other
                for other, span in enumerate(spans)
                if other == index
                or (not shown[other][1].dashed and not shown[index][1].dashed and _near(spans[index], span, columns))
            )

        parts += _segments(_thinned(places), beside, index, series, dashed=line.dashed)
        stride = max(1, len(places) // 12)  # a marker on each of hundreds of points would hide the line
        for turn, place in enumerate(places[::-stride][::-1]):
            sharing = beside(_column(place))
            if sharing[turn % len(sharing)] == index or len(places) == 1:
                said = f"{line.name}: {place.value[1]:,.6g} at {place.value[0]:,.6g}"
                markers.append(marker(place.across, place.up, series, said))
    return parts + markers


def _segments(
    places: Sequence[Place], beside: Callable[..., tuple[int, ...]], index: int, series: int, *, dashed: bool
) -> list[str]:
    """One line as a polyline for each stretch in which it has the same neighbours."""
    stretches: list[tuple[tuple[int, ...], list[Place]]] = []
    for one, other in itertools.pairwise(places):
        sharing = beside(_column(one), _column(other))
        if not stretches or stretches[-1][0] != sharing:
            stretches.append((sharing, [one]))
        stretches[-1][1].append(other)
    parts = []
    for sharing, stretch in stretches:
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        if len(sharing) > 1:
            gap, offset = _DASH * (len(sharing) - 1), _DASH * (len(sharing) - sharing.index(index))
            dash = f' stroke-dasharray="{_DASH:g} {gap:g}" stroke-dashoffset="{offset:g}"'
        path = " ".join(f"{place.across:.1f},{place.up:.1f}" for place in stretch)
        colour = COLOURS[series % len(COLOURS)]
        parts.append(
            f'<polyline class="s{series % len(COLOURS)}" points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
            f'stroke-linejoin="round"{dash}/>'
        )
    return parts


def _column(place: Place) -> int:
    return round(place.across)


def _columns(places: Sequence[Place]) -> dict[int, tuple[float, float]]:
    """By column of pixels, the highest and the lowest place."""
    spans: dict[int, tuple[float, float]] = {}
    for place in places:
        low, high = spans.get(_column(place), (place.up, place.up))
        spans[_column(place)] = min(low, place.up), max(high, place.up)
    return spans


def _near(one: dict[int, tuple[float, float]], other: dict[int, tuple[float, float]], columns: Sequence[int]) -> bool:
    return all(
        column in other and all(abs(a - b) < _NEAR for a, b in zip(one[column], other[column], strict=True))
        for column in columns
    )


def _thinned(places: Sequence[Place]) -> list[Place]:
    """Of each column of pixels the first, the highest, the lowest and the last place: more cannot be seen."""
    if len(places) < 2 * WIDTH:
        return list(places)
    columns: dict[int, list[Place]] = {}
    for place in places:
        columns.setdefault(_column(place), []).append(place)
    return [
        place
        for found in columns.values()
        for place in sorted(
            {found[0], min(found, key=lambda one: one.up), max(found, key=lambda one: one.up), found[-1]}
        )
    ]


def _names(ends: list[End], at: float, width: float, lowest: float) -> list[str]:
    """A name beside the end of each line, moved apart where they would overlap, and joined to it where it was moved."""
    ends = sorted(ends, key=lambda end: (round(end.up), end.series))
    places = [end.up for end in ends]
    for index in range(1, len(places)):
        places[index] = max(places[index], places[index - 1] + _LABEL)
    overhang = max(0.0, places[-1] - lowest)
    for index in range(len(places) - 1, -1, -1):
        ceiling = places[index + 1] - _LABEL if index + 1 < len(places) else places[index] - overhang
        places[index] = min(places[index], ceiling)
    parts = []
    for place, end in zip(places, ends, strict=True):
        if end.at_edge and abs(place - end.up) > _NEAR:
            parts.append(_rule(at + 2, end.up, at + 10, place, "soft", "#555", ' stroke-width="0.6"'))
        if end.series >= 0:
            parts.append(marker(at + 15, place, end.series))
        name = escape(cut(end.name, width - at - 28))
        parts.append(f'<text class="ink" x="{at + 25:.1f}" y="{place + 4:.1f}" fill="#111">{name}</text>')
    return parts
