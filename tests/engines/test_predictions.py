"""What the plan says of a run's memory, and what it takes: one case of tests/predictions.py, which has them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import predictions
from tests.predictions import WORST_ERROR, Comparison, measure

NAME = "zero2 resnet18 fp32"


def test_a_runs_memory_is_predicted(tmp_path: Path) -> None:
    (row,) = measure([NAME], tmp_path, steps=3)
    assert abs(row.error) < WORST_ERROR


@pytest.mark.parametrize(("memory", "good"), [(1.24, False), (1.09, True), (1.26, False)])
def test_the_command_fails_where_an_error_is_too_large(
    memory: float, good: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Comparison(NAME, 1e8, 1e8 * memory, 1e8)]
    monkeypatch.setattr(predictions, "measure", lambda *_, **__: iter(rows))
    monkeypatch.setattr("sys.argv", ["predictions", NAME])
    assert predictions.main() == (0 if good else 1)
    assert f"{memory - 1:+.0%}" in capsys.readouterr().out
