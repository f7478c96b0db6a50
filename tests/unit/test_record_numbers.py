"""A run's own record: JSON that every reader takes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import torch

from dsframe.cluster.world import World
from dsframe.config import load
from dsframe.results import Summary
from dsframe.run_dir.loggers import Loggers
from dsframe.run_dir.record import Record
from dsframe.tools.report.runs import numbers, read_run


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_are_null_at_any_depth(tmp_path):
    nan = float("nan")
    plan = SimpleNamespace(
        directory=tmp_path,
        config=load({"train_batch_size": 4}),
        world=World(),
        device=torch.device("cpu"),
        batch=SimpleNamespace(train_batch_size=4),
    )
    about = {"engine": "single", "start_seconds": 1.0}
    record = Record(plan, about, loggers=Loggers, say=print)
    record.write({"step": 1, "loss": nan, "evaluation": {"loss": nan, "accuracy": 0.5, "worst": [float("inf")]}})
    summary = Summary(
        steps=1,
        seconds=1.0,
        rate=1.0,
        unit="samples",
        units_per_step=4,
        first_step_seconds=1.0,
        loss=nan,
        metrics={"loss": nan, "accuracy": 0.5},
        peak_memory_bytes=(1, 2),
        skipped_steps=0,
    )
    record.finish(replace(summary, rate=nan))
    written = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written[-1] == {"step": 1, "loss": None, "evaluation": {"loss": None, "accuracy": 0.5, "worst": [None]}}
    finished = strict((tmp_path / "summary.json").read_text())
    assert (finished["loss"], finished["metrics"]) == (None, {"loss": None, "accuracy": 0.5})
    assert finished["rate"] is None
    assert finished["peak_memory_bytes"] == [1, 2]
    run = read_run(tmp_path, "run")
    assert strict(json.dumps(numbers(run, run)))
