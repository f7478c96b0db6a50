"""dsframe evaluate and load_model, on one process. On several: tests/engines/test_inference.py."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dsframe
from dsframe import cli, inference
from dsframe.checkpoint import generators, store
from dsframe.cluster.world import World
from dsframe.data import TensorSource
from dsframe.errors import CheckpointError
from dsframe.inference import load_model
from dsframe.job import Run
from dsframe.run import execute, prepared
from tests.processes import python, run_ranks

SAMPLES = 37


class Plane(dsframe.Task):
    """A network with BatchNorm and a buffer, on a ragged set."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    def train_data(self) -> Any:
        numbers = torch.Generator().manual_seed(0)
        return TensorSource(torch.randn(64, 3, generator=numbers), torch.randn(64, 2, generator=numbers))

    def eval_data(self) -> Any:
        numbers = torch.Generator().manual_seed(1)
        return TensorSource(torch.randn(SAMPLES, 3, generator=numbers), torch.randn(SAMPLES, 2, generator=numbers))


def file(run: Path, **more: Any) -> dict[str, Any]:
    settings = {"engine": "single", "steps": 6, "run_dir": str(run), "task": {"name": f"{__name__}:Plane"}, **more}
    return {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}}, "dsframe": settings}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dsframe.Summary]:
    run = tmp_path_factory.mktemp("inference") / "run"
    return run, execute(dsframe.load(file(run, ema={"decay": 0.8})))


def expected(run: Path, *, averages: bool | None = None) -> Tensor:
    model = load_model(run, averages=averages)
    assert not model.training
    with torch.no_grad():
        found: Tensor = model(Plane().eval_data().batch(torch.arange(SAMPLES), 0)[0])
    return found


def test_evaluate_gives_the_runs_last_evaluation(trained: tuple[Path, dsframe.Summary], tmp_path: Path) -> None:
    run, summary = trained
    out = tmp_path / "metrics.json"
    finished = run_ranks(
        python(["-m", "dsframe.cli", "evaluate", str(run), "--out", str(out)]), timeout_seconds=100
    ).check()
    line = next(line for line in finished.output.splitlines() if line.startswith("{"))
    found = json.loads(line)
    assert found["metrics"] == dict(summary.metrics)
    assert found["step"] == 6
    assert json.loads(out.read_text()) == found
    lines = [line for line in finished.stderr.splitlines() if re.match(r"  [a-z]", line)]
    labels = [line.split()[0] for line in lines]
    assert labels == ["model", "data", "engine", "processes", "precision"], "it neither trains nor writes into a run"


@contextmanager
def prepared_again(run: Path) -> Iterator[tuple[Run, Path]]:
    """The run as the commands prepare it, and its newest checkpoint."""
    path = store.complete(run)
    with prepared(dsframe.load(store.config_of(path)), None, World()) as made:
        read = cache(lambda: (made.task.train_data(), made.task.eval_data()))
        yield dataclasses.replace(made, data=read), path


def test_what_the_run_evaluated_is_loaded_and_evaluated(tmp_path: Path) -> None:
    """The averages with "ema": {"evaluate": true}; the weights, too, on request."""
    run = tmp_path / "run"
    summary = execute(dsframe.load(file(run, ema={"decay": 0.8, "evaluate": True})))
    with prepared_again(run) as (made, path):
        assert inference.evaluate(made, World(), path) == dict(summary.metrics)
        assert inference.evaluate(made, World(), path, averages=False) != dict(summary.metrics)
    assert torch.equal(expected(run), expected(run, averages=True))
    assert not torch.equal(expected(run), expected(run, averages=False))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "OUT"], "is neither a checkpoint nor a folder that holds one"),
        (["evaluate", "RUN", "--config", "none.json"], "none.json"),
    ],
)
def test_what_is_wrong_is_one_line(
    trained: tuple[Path, dsframe.Summary], tmp_path: Path, words: list[str], message: str
) -> None:
    given = [word.replace("RUN", str(trained[0])).replace("OUT", str(tmp_path)) for word in words]
    finished = run_ranks(python(["-m", "dsframe.cli", *given]), timeout_seconds=100)
    assert finished.returncode != 0
    assert message in finished.output
    assert "Traceback" not in finished.output


def test_load_model_names_another_model(trained: tuple[Path, dsframe.Summary]) -> None:
    class Other(Plane):
        def model(self) -> nn.Module:
            return nn.Linear(3, 2)

    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_model(trained[0], Other())
    assert "evaluate" in cli.COMMANDS


def test_a_checkpoint_alone_and_its_task_are_enough(trained: tuple[Path, dsframe.Summary], tmp_path: Path) -> None:
    """The file of the run is not asked for, and the program's random numbers stay its own."""
    (path,) = sorted((trained[0] / "checkpoints").glob("step-*"))[-1:]
    shutil.copytree(path, tmp_path / path.name)
    first = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        load_model(tmp_path / path.name, Plane())
        first.append(float(torch.rand(1)))
    assert first[0] != first[1]


class Waves(nn.Module):
    """Has a constant that no checkpoint keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.randn(3, 8)
        self.register_buffer("other", torch.randn(8), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cos(inputs @ self.constant + self.get_buffer("other"))


class Whole(Plane):
    def model(self) -> nn.Module:
        return nn.Sequential(Waves(), nn.Linear(8, 2))


class Layers(Plane):
    model = dsframe.Task.model

    def layers(self) -> Any:
        return [Waves, partial(nn.Linear, 8, 2)]


class Several(Plane):
    model = dsframe.Task.model

    def models(self) -> Any:
        return {"one": Whole().model}

    def losses(self) -> Any:
        return {"one": lambda models, inputs, targets: self.loss(models["one"](inputs), targets)}


@pytest.mark.parametrize("task", [Whole, Layers, Several])
def test_load_model_draws_what_the_training_drew(task: Callable[[], dsframe.Task], tmp_path: Path) -> None:
    """And leaves the caller's random generators, and its task, as they were."""
    run = tmp_path / "run"
    settings = file(run, seed=3)
    del settings["dsframe"]["task"]
    summary, given = dsframe.fit(task(), settings), task()
    drawn = []
    for loads in (False, True):
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        if loads:
            model: Any = load_model(run, given)
        drawn.append((float(torch.rand(())), float(np.random.random()), random.random()))
    assert drawn[0] == drawn[1]
    assert given.seed == 0
    inputs, targets = given.eval_data().batch(torch.arange(SAMPLES), 0)  # type: ignore[union-attr]
    with torch.no_grad():
        outputs = (model["one"] if task is Several else model)(inputs)
    assert given.loss(outputs, targets).item() == pytest.approx(summary.metrics["loss"], rel=1e-5)


def test_loading_a_model_does_not_move_the_programs_generators(trained: tuple[Path, dsframe.Summary]) -> None:
    cpu = torch.device("cpu")
    before = generators.capture(cpu)
    load_model(trained[0])
    assert generators.capture(cpu) == before
