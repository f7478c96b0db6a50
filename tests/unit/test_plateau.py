"""ReduceLROnPlateau over evaluations: torch's rates, kept in checkpoints, the same after a restart wherever it stops."""

import json
from pathlib import Path

import pytest
import torch

import dsframe
from dsframe.config import load
from dsframe.errors import CheckpointError, ConfigError, TaskError
from dsframe.model.followers import Plateau
from dsframe.tasks.task import Sum
from tests.files import ds_config, read_rows
from tests.lines import HeldOut

METRICS = [5.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 9.0, 1.0, 1.0, 1.0]


def test_the_rates_are_torchs_and_go_on():
    params = {"factor": 0.5, "patience": 1, "cooldown": 1}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.8)
    theirs = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **params)
    ours, rates = Plateau(0.8, params), []
    for step, value in enumerate(METRICS, start=1):
        ours.observe(step, {"loss": value})
        theirs.step(value)
        rates.append(ours(step).learning_rate)
        assert rates[-1] == optimizer.param_groups[0]["lr"]
        again = Plateau(0.8, params)  # a run that goes on
        again.restore(json.loads(json.dumps(ours.state(), allow_nan=False)))
        assert again.state() == ours.state()
        ours = again
    assert len(set(rates)) > 2
    Plateau(0.8, {"mode": "max"}).restore(Plateau(0.8, {"mode": "max"}).state())


def fallen(**params):
    """The state after the rate 0.8 has become 0.4."""
    found = Plateau(0.8, {"factor": 0.5, "patience": 0, **params})
    for step in (1, 2):
        found.observe(step, {"loss": 1.0, "accuracy": 1.0})
    assert found(2).learning_rate == 0.4
    return found.state()


def test_a_new_base_rate_falls_as_often():
    for base, expected in ((0.8, 0.4), (0.08, 0.04), (0.0, 0.0)):
        again = Plateau(base, {"factor": 0.5, "patience": 0})
        again.restore(fallen())
        assert again(2).learning_rate == pytest.approx(expected)
        assert again.observed == 2
    never = Plateau(0.1, {})
    never.restore(Plateau(0.0, {}).state())  # a rate of 0 does not know how often it fell
    assert never(0).learning_rate == 0.1


@pytest.mark.parametrize("params", [{"metric": "accuracy"}, {"mode": "max"}])
def test_of_another_metric_only_the_rate_is_taken(params):
    again = Plateau(0.8, {"factor": 0.5, "patience": 0, **params})
    fresh = again.state()
    again.restore(fallen())
    assert again.state() == fresh | {"rate": 0.4}


def test_what_is_wrong_is_said():
    with pytest.raises(ConfigError, match=r"ReduceLROnPlateau: .*mode"):
        Plateau(0.1, {"mode": "least"})
    for state in ({}, {"best": "x"}, {**Plateau(0.1, {}).state(), "rate": "fast"}):
        with pytest.raises(CheckpointError, match="not that of ReduceLROnPlateau"):
            Plateau(0.1, {}).restore(state)


class Stuck(HeldOut):
    """Whose evaluation never gets better."""

    def metrics(self, outputs, targets):
        return {"score": Sum(torch.tensor(3.0 * len(targets)), len(targets))}


def file(run, steps=12, metric="score", **more):
    settings = {"engine": "single", "steps": steps, "eval_every_steps": 2, "run_dir": run, "log_every_steps": 1, **more}
    params = {"metric": metric, "patience": 1, "factor": 0.5}
    scheduler = {"scheduler": {"type": "ReduceLROnPlateau", "params": params}}
    return ds_config(8, "SGD", 0.4, scheduler, **settings)


def rates(run):
    lines = read_rows(Path(run) / "metrics.jsonl")
    return {line["step"]: line["learning_rate"] for line in lines if "learning_rate" in line}


@pytest.mark.parametrize(("stops_at", "every"), [(7, 7), (8, 4)])
def test_a_run_that_goes_on_has_the_same_rates(stops_at, every, here, capsys):
    whole = dsframe.fit(Stuck(), file("whole"))
    assert [rates("whole")[step] for step in (1, 4, 6, 7, 10, 11)] == [0.4, 0.4, 0.4, 0.2, 0.2, 0.1]
    assert "step 6: score no longer gets better: learning rate 0.4 -> 0.2" in capsys.readouterr().err
    saves = {"checkpoints": {"every_steps": every, "at_end": False}}
    dsframe.fit(Stuck(), file("parts", stops_at, **saves))
    parts = dsframe.fit(Stuck(), file("parts", **saves), resume="auto")
    assert rates("parts") == rates("whole")
    assert parts.loss == whole.loss


def test_before_training_it_is_known_what_it_waits_for(here):
    with pytest.raises(TaskError, match="no metric 'right' in the evaluation; it has loss, score"):
        dsframe.fit(Stuck(), file("a", metric="right"))
    task = Stuck()
    task.held_out = False
    with pytest.raises(TaskError, match="waits for evaluations, but the task has no eval_data"):
        dsframe.fit(task, file("b"))
    plain = file("c")
    del plain["dsframe"]
    with pytest.raises(ConfigError, match="cannot be used"):
        load(plain)
