"""Any engine under any launcher, and the two lines of the README exactly as a person types them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from dsframe.config import load
from dsframe.report.compare import losses
from dsframe.report.record import read_summary
from tests.processes import deepspeed, horovodrun, run_ranks, torchrun

LAUNCHERS = {"deepspeed": deepspeed, "horovodrun": horovodrun, "torchrun": torchrun}
ENGINES = ("deepspeed", "horovod", "ddp")
STEPS = 10


def short(directory: Path, steps: int) -> None:
    """The default file in ``directory``, where it is found first, with few steps."""
    document = load("zero3.json").written()
    del document["dsframe"]["epochs"]
    document["dsframe"] |= {
        "steps": steps,
        "log_every_steps": 1,
        "task": {"name": "vision", "dataset": "synthetic", "samples": 1024},
    }
    (directory / "zero3.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("expected"), "ddp", "torchrun")


def train(directory: Path, engine: str, launcher: str) -> list[float]:
    short(directory, STEPS)
    command = LAUNCHERS[launcher](2, ["-m", "dsframe.train", "--engine", engine, "--run-dir", "run"])
    run_ranks(command, cwd=directory, timeout_seconds=150).check()
    summary = read_summary(directory / "run")
    assert (summary["engine"], summary["launcher"], summary["world_size"]) == (engine, launcher, 2)
    return [loss for _, loss in sorted(losses(directory / "run").items())]


@pytest.mark.parametrize(("engine", "launcher"), list(itertools.product(ENGINES, LAUNCHERS)))
def test_every_cell_has_the_same_losses(engine: str, launcher: str, expected: list[float], tmp_path: Path) -> None:
    assert train(tmp_path, engine, launcher) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("line", "engine", "processes"),
    [
        ("deepspeed --num_gpus=4 -m dsframe.train --config zero3.json", "deepspeed", 4),
        ("horovodrun -np 8 python -m dsframe.train", "horovod", 8),
    ],
)
def test_the_two_lines_as_typed(line: str, engine: str, processes: int, tmp_path: Path) -> None:
    short(tmp_path, 3)
    finished = run_ranks(line.split(), cwd=tmp_path, timeout_seconds=300).check()
    summary = read_summary(tmp_path / "runs" / f"zero3-{engine}")
    assert (summary["engine"], summary["world_size"], summary["steps"]) == (engine, processes, 3)
    assert finished.output.count("steps; runs/zero3") == 1, "one rank speaks"
    assert len(finished.output.splitlines()) < 20, f"little noise\n{finished}"
