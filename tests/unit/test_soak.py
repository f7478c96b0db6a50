"""What ``make soak`` takes for a run that gets slower or grows; the runs themselves are the command's."""

from __future__ import annotations

import pytest

from benchmarks.soak import ends

STEPS = 5000
STEADY = [100.0] * (STEPS // 20)


def memory(growth: float) -> list[tuple[int, float, float]]:
    """Bytes resident, growing by ``growth`` over the run; and 2 ms of a core for each step, at the end 3."""
    spent = 0.0
    found = []
    for step in range(0, STEPS + 1, 50):
        found.append((step, 400e6 + growth * step / STEPS, spent))
        spent += 50 * (0.002 if step < STEPS / 2 else 0.003)
    return found


def test_a_run_that_stays_as_it_is() -> None:
    noisy = [rate * (0.8 if number % 7 == 0 else 1.0) for number, rate in enumerate(STEADY)]
    assert ends(noisy, memory(5e6), STEPS).problems == []
    assert ends(noisy, memory(5e6), STEPS).processor == (pytest.approx(0.002), pytest.approx(0.003))
    assert ends([10.0] * 5 + STEADY[5:], memory(0), STEPS).problems == [], "the first windows do not count"


def test_a_run_that_gets_slower_or_grows() -> None:
    tired = [rate * (1 - 0.1 * number / len(STEADY)) for number, rate in enumerate(STEADY)]
    assert "slower by 8" in ends(tired, memory(0), STEPS).problems[0]
    assert "memory grows by 15" in ends(STEADY, memory(21e6), STEPS).problems[0]
    with pytest.raises(SystemExit, match="too few"):
        ends(STEADY[:6], memory(0), 120)
