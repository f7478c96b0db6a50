"""Evaluations of programs whose batches are not rows of tensors: the plain loop's figures on any engine, ranks and micro-batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.evaluated import ENGINES, MICRO_BATCHES, TASKS, by_hand
from tests.processes import python, run_ranks, warm

SETUPS = [("single", 1), *((engine, ranks) for engine in ENGINES for ranks in (1, 2, 3) if engine != "single")]
QUICK = {("single", 1), ("ddp", 3), ("horovod", 2), ("fsdp", 2), ("zero1", 2), ("zero3", 3)}


@pytest.mark.parametrize(
    ("engine", "ranks"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.long) for one in SETUPS]
)
def test_it_is_the_plain_loop(engine: str, ranks: int, tmp_path: Path) -> None:
    words = ["-m", "tests.engines.evaluated", str(tmp_path / "report.json"), engine]
    run_ranks(warm(ranks, words) if ranks > 1 else python(words), timeout_seconds=100).check()
    report = json.loads((tmp_path / "report.json").read_text())
    noisy = report.pop("Noisy")
    assert noisy.pop("said") == []
    for size in noisy:
        assert noisy[size] == pytest.approx({"loss": 2.318078}, rel=1e-6), size
    for name, found in report.items():
        expected = by_hand(name)
        for size in MICRO_BATCHES:
            assert found[str(size)] == pytest.approx(expected, rel=2e-6), (name, size)
        (line,) = found["said"] or [""]
        assert ("a detector has no loss in evaluation mode" in line) == (name == "Boxes")
    assert set(TASKS) == {*report, "Noisy"}
