"""A plan as two pictures: memory of a rank, and seconds of a step; lines over the number of processes, else bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsframe.tools.plan.choose import Strategy
from dsframe.tools.plan.hardware import Hardware
from dsframe.tools.report.pictures import Axis, Bar, Bars, Chart, Line

MOST = 7
"""Strategies that are drawn, beside the file itself: more cannot be told apart."""


def pictures(found: Sequence[tuple[int, Strategy, Sequence[Strategy]]], hardware: Hardware) -> list[Chart] | list[Bars]:
    """``found``: processes, the file as written, the strategies, best first."""
    names = {strategy.name: 0 for _, _, others in found for strategy in others}
    for _, _, others in found:
        for rank, strategy in enumerate(others):
            names[strategy.name] += max(0, 100 - rank)
    best = sorted(names, key=lambda name: -names[name])[:MOST]
    chosen = {"as written": [(count, own) for count, own, _ in found]}
    for name in best:
        chosen[name] = [(count, one) for count, _, others in found for one in others if one.name == name]
    if len(found) == 1:
        return _at_one(found[0][0], {name: points[0][1] for name, points in chosen.items()}, hardware)
    across = Axis("processes", log=True, whole=True)
    held = [Line(n, [(c, s.prediction.memory.peak / 1e9) for c, s in points]) for n, points in chosen.items()]
    times = [Line(n, [(c, s.prediction.seconds.step) for c, s in points]) for n, points in chosen.items()]
    limit = (f"{hardware.name}: {hardware.memory_bytes / 1e9:g} GB", hardware.memory_bytes / 1e9)
    return [
        Chart("Memory of the fullest rank", across, Axis("GB", log=True), held, limit),
        Chart("Time of a step, predicted", across, Axis("seconds", log=True), times),
    ]


def _at_one(processes: int, chosen: Mapping[str, Strategy], hardware: Hardware) -> list[Bars]:
    """Bars, the same strategy in the same place of both pictures."""
    held, times = [], []
    for place, (name, strategy) in enumerate(chosen.items()):
        total, step = strategy.prediction.memory.peak / 1e9, strategy.prediction.seconds.step
        held.append(Bar(name, total, f"{total:,.3g} GB", place))
        times.append(Bar(name, step, f"{step:,.3g} s", place))
    many = f"{processes:,} process{'es' * (processes > 1)}"
    limit = hardware.memory_bytes / 1e9
    return [
        Bars(f"Memory of the fullest rank, {many}", f"GB; the rule is what {hardware.name} has", held, limit),
        Bars(f"Time of a step, {many}", "seconds, predicted", times),
    ]
