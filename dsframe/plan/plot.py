"""A plan over the number of processes, as two charts in one SVG: memory of a rank, and seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence

from dsframe.plan.choose import Strategy
from dsframe.plan.hardware import Hardware
from dsframe.report.svg import Axis, Line, chart

MOST = 7
"""Strategies that are drawn, beside the file itself: more cannot be told apart."""


def draw(found: Sequence[tuple[int, Strategy, Sequence[Strategy]]], hardware: Hardware) -> str:
    """One SVG. ``found``: processes, the file as written, the strategies, best first."""
    names = {strategy.name: 0 for _, _, others in found for strategy in others}
    for _, _, others in found:
        for rank, strategy in enumerate(others):
            names[strategy.name] += max(0, 100 - rank)
    best = sorted(names, key=lambda name: -names[name])[:MOST]
    chosen = {"as written": [(count, own) for count, own, _ in found]}
    for name in best:
        chosen[name] = [(count, one) for count, _, others in found for one in others if one.name == name]
    across = Axis("processes", log=len(found) > 1, whole=True)
    held = [Line(n, [(c, s.prediction.memory.total / 1e9) for c, s in points]) for n, points in chosen.items()]
    times = [Line(n, [(c, s.prediction.seconds.step) for c, s in points]) for n, points in chosen.items()]
    limit = (f"{hardware.name}: {hardware.memory_bytes / 1e9:g} GB", hardware.memory_bytes / 1e9)
    upper = chart("Memory of the fullest rank", across, Axis("GB", log=True), held, limit=limit)
    lower = chart("Time of a step, predicted", across, Axis("seconds", log=True), times)
    return stack([upper, lower])


def stack(charts: Sequence[str], width: int = 760, height: int = 400) -> str:
    """Charts below each other in one SVG."""
    inner = "".join(f'<g transform="translate(0 {height * row})">{one}</g>' for row, one in enumerate(charts))
    whole = height * len(charts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {whole}" width="{width}" height="{whole}">{inner}</svg>\n'
