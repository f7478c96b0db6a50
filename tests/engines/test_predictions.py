"""What the plan says beside a run: one case of tests/predictions.py, which has them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import predictions
from tests.predictions import WORST_MEMORY, Found, measure

NAME = "zero2 resnet18 fp32"


def test_a_runs_memory_and_seconds_are_predicted(tmp_path: Path) -> None:
    """Calibration, a training of two ranks, and what its summary holds. Seconds are compared where nothing else runs."""
    (found,) = measure([NAME], tmp_path, steps=3)
    assert abs(found.memory_error) < WORST_MEMORY
    predicted, measured = found.seconds
    assert predicted
    assert 0.2 < predicted / measured < 5


@pytest.mark.parametrize(
    ("memory", "seconds", "good"), [(1.24, 1.29, False), (1.09, 1.29, True), (1.09, 0.69, False), (1.26, None, False)]
)
def test_the_command_fails_where_an_error_is_too_large(
    memory: float,
    seconds: float | None,
    good: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [Found(NAME, 1e8, (1e8 * memory, 1e8), (seconds, 1.0))]
    monkeypatch.setattr(predictions, "measure", lambda *_, **__: iter(found))
    monkeypatch.setattr("sys.argv", ["predictions", NAME])
    assert predictions.main() == (0 if good else 1)
    assert f"{memory - 1:+.0%}" in capsys.readouterr().out
