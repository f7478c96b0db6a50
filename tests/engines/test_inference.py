"""One checkpoint evaluated on every engine and on 1, 2 and 3 processes: the same figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsframe.run_dir.record import read_summary
from tests.processes import Finished, horovodrun, run_ranks, warm

TASK = '{"name": "tests.unit.test_inference:Plane"}'


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    words = ["--config", "zero3.json", "--engine", "ddp", "--run-dir", str(folder / "run")]
    words += ["--set", f"dsframe.task={TASK}", "--set", "dsframe.steps=5", "--set", "train_batch_size=16"]
    run_ranks(warm(2, ["-m", "dsframe.train", *words]), timeout_seconds=120).check()
    return folder / "run"


def on(launcher: Any, processes: int, *words: str, **more: Any) -> Finished:
    return run_ranks(launcher(processes, ["-m", "dsframe.tools.evaluate", *words]), timeout_seconds=150, **more)


def metrics(finished: Finished) -> dict[str, float]:
    finished.check()
    line = next(line for line in finished.output.splitlines() if '{"checkpoint"' in line)
    # mpirun's mark of an output may follow on the same line.
    found: dict[str, float] = json.JSONDecoder().raw_decode(line[line.index("{") :])[0]["metrics"]
    return found


def test_evaluations_are_those_of_the_run(trained: Path) -> None:
    last = read_summary(trained)["metrics"]
    assert metrics(on(warm, 2, str(trained))) == last  # the same engine and size: to the bit
    for launcher, processes, *engine in (
        (warm, 2, "--engine", "deepspeed"),
        (warm, 3, "--engine", "fsdp"),
        (horovodrun, 2, "--engine", "horovod"),
        (warm, 2, "--engine", "deepspeed", "--set", 'pipeline={"stages": 2}', "--set", "zero_optimization.stage=1"),
    ):
        found = metrics(on(launcher, int(processes), str(trained), *map(str, engine)))
        assert found == pytest.approx(last, rel=1e-6), engine
