"""What all pictures share: colours and signs of the series, the paper, and how numbers and long names are written."""

from __future__ import annotations

from xml.sax.saxutils import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#8C6D31")
"""Okabe and Ito's (2008); the last is a brown in place of their yellow, which cannot be seen on white."""
FONT, LETTER = 12, 7.1
"""Pixels of the text, and of a letter of it, about: DejaVu's are the widest that a browser takes where Helvetica is missing."""


def opening(title: str, width: float, height: float) -> str:
    """An ``<svg>`` begun: its paper and its title."""
    name = escape(title, {'"': "&quot;"})
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{name}" font-family="Helvetica, Arial, sans-serif" font-size="{FONT}">'
        f'<rect class="paper" width="{width}" height="{height}" fill="#ffffff"/>'
        f'<text class="ink" x="12" y="22" font-size="15" font-weight="bold" fill="#111">{escape(title)}</text>'
    )


def marker(a: float, b: float, series: int, said: str = "") -> str:
    """The sign of a line at (``a``, ``b``); ``said`` is shown where a pointer rests on it."""
    colour, kind = COLOURS[series % len(COLOURS)], series % 4
    filled = colour if series % 8 < 4 else "#ffffff"
    classes = f"s{series % 8} {f'f{series % 8}' if series % 8 < 4 else 'paper'}"
    style = f'class="{classes}" fill="{filled}" stroke="{colour}" stroke-width="1.3"'
    title = f"<title>{escape(said)}</title>" if said else ""
    if kind == 0:
        return f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.6" {style}>{title}</circle>'
    if kind == 1:
        return f'<rect x="{a - 3.3:.1f}" y="{b - 3.3:.1f}" width="6.6" height="6.6" {style}>{title}</rect>'
    turn = 1 if kind == 2 else -1
    corners = f"{a:.1f},{b - 4.4 * turn:.1f} {a - 4.1:.1f},{b + 3.2 * turn:.1f} {a + 4.1:.1f},{b + 3.2 * turn:.1f}"
    return f'<polygon points="{corners}" {style}>{title}</polygon>'


def cut(name: str, room: float) -> str:
    """``name``, shortened in its middle where it is wider than ``room`` pixels."""
    most = max(3, int(room / LETTER))
    return name if len(name) <= most else f"{name[: (most - 1) // 2]}\u2026{name[-(most // 2) :]}"


def number(value: float) -> str:
    """``1200000`` as ``1.2M``, ``0.00002`` as ``2e-5``."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if letter == 'k' else unit):g}{letter}"
    if abs(value) >= 9.9e-5 or value == 0:
        return f"{value:,.6g}"
    digits, _, exponent = f"{value:.6g}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits
