"""Early stopping: where it ends, in checkpoints, and over restarts at any step."""

import json
from pathlib import Path

import pytest

import dsframe
from dsframe.config.schema.settings_training import Stop
from dsframe.errors import CheckpointError, TaskError
from dsframe.model.followers import EarlyStop
from dsframe.run_dir.record import read_summary
from dsframe.tasks.task import Sum
from tests.files import ds_config
from tests.lines import HeldOut

VALUES = [5.0, 4.0, 4.5, 3.95, float("nan"), 4.1, 1.0]


def stop(**more):
    return EarlyStop(Stop.model_validate({"metric": "loss:min", "patience": 3, **more}))


@pytest.mark.parametrize(("more", "last"), [({}, None), ({"min_delta": 0.1}, 5), ({"patience": 2}, 6)])
def test_it_waits_for_a_better_value(more, last):
    one, ended = stop(**more), None
    for step, value in enumerate(VALUES, start=1):
        assert not one.reached
        one.observe(step, {"loss": value})
        again = stop(**more)  # a run that goes on
        again.restore(json.loads(json.dumps(one.state(), allow_nan=False)))
        assert again.state() == one.state()
        one = again
        if one.reached:
            ended = step
            break
    assert ended == last
    if more.get("min_delta"):
        assert one.reached == "loss is not better in 3 evaluation(s); the best was 4 after step 2"


def test_what_is_wrong_is_said():
    for state in ({}, {**stop().state(), "waited": "x"}, {**stop().state(), "best": "x"}):
        with pytest.raises(CheckpointError, match="not a state of early stopping"):
            stop().restore(state)
    other = stop(metric="accuracy:max")
    other.restore({**stop().state(), "waited": 3})
    assert not other.reached  # another metric begins anew


class Falling(HeldOut):
    """Whose evaluation gets better until its fourth."""

    def __init__(self):
        self.seen = 0.0

    def loss(self, outputs, targets):
        loss = super().loss(outputs, targets)
        return loss, {"errors": Sum(loss, 1)}


class Noted(dsframe.Hooks):
    """Writes down what it is called with."""

    def __init__(self):
        self.calls = []

    def on_step(self, run):
        assert (run.loss.ndim, run.rank, run.total_steps) == (0, 0, 20)
        self.calls.append(("step", run.step))

    def on_log(self, run, figures):
        self.calls.append(("log", run.step, dict(figures)))

    def on_evaluation(self, run, metrics):
        self.calls.append(("evaluation", run.step, dict(metrics)))

    def on_checkpoint(self, run, path):
        assert (path / "manifest.json").exists()
        self.calls.append(("checkpoint", run.step))

    def on_end(self, run, summary):
        self.calls.append(("end", run.step, summary.stopped))


def file(run, **more):
    settings = {
        "engine": "single",
        "steps": 20,
        "eval_every_steps": 2,
        "log_every_steps": 1,
        "run_dir": run,
        "stop": {"metric": "loss:min", "patience": 2, "min_delta": 0.5},
        "checkpoints": {"every_steps": 2, "keep_last": 20},
        **more,
    }
    return ds_config(8, "SGD", 0.01, **settings)


def test_a_run_ends_early_and_stays_ended(here, capsys):
    run, hooks, task = "run", Noted(), Falling()
    task.hooks = [hooks]
    summary = dsframe.fit(task, file(run))
    assert summary.steps == 6  # better at 2, not at 4, not at 6
    assert summary.stopped.startswith("loss is not better in 2 evaluation(s); the best was ")
    assert "training ends after step 6: loss is not better" in capsys.readouterr().err
    assert read_summary(Path(run))["stopped"] == summary.stopped
    assert [call[1] for call in hooks.calls if call[0] == "step"] == list(range(1, 7))
    assert [call[1] for call in hooks.calls if call[0] == "checkpoint"] == [2, 4, 6]
    assert hooks.calls[-1] == ("end", 6, summary.stopped)
    shown = [call[2] for call in hooks.calls if call[0] in ("log", "evaluation")]
    assert all(one["errors"] == pytest.approx(one["loss"], rel=1e-6) for one in shown)

    before = (Path(run) / "metrics.jsonl").read_bytes()
    again = dsframe.fit(Falling(), file(run), resume="auto")
    assert (again.steps, again.stopped) == (6, summary.stopped)
    assert "is complete: loss is not better" in capsys.readouterr().err
    assert (Path(run) / "metrics.jsonl").read_bytes() == before  # its record stays

    later = dsframe.fit(Falling(), file("part"), resume=f"{run}/checkpoints/step-00000004")
    assert (later.steps, later.stopped) == (6, summary.stopped)
    longer = file(run, stop={"metric": "loss:min", "patience": 3, "min_delta": 0.5})
    assert dsframe.fit(Falling(), longer, resume="auto").steps == 8


def test_an_early_end_is_saved_and_a_last_evaluation_off_the_schedule_does_not_count(here, capsys):
    few = {"metric": "loss:min", "patience": 2, "min_delta": 100.0}
    assert dsframe.fit(Falling(), file("whole", steps=5, stop=few)).stopped == ""
    dsframe.fit(Falling(), file("last", steps=6, stop=few))
    assert "training ends after" not in capsys.readouterr().err  # it is the file's last step
    dsframe.fit(Falling(), file("early", stop=few, checkpoints={}))
    assert [path.name for path in (here / "early" / "checkpoints").glob("step-*")] == ["step-00000006"]
    assert dsframe.fit(Falling(), file("early", stop={**few, "patience": 3}), resume="auto").steps == 8


def test_refusals(tmp_path):
    task = Falling()
    task.held_out = False
    with pytest.raises(TaskError, match=r"dsframe.stop waits for evaluations, but the task has no eval_data"):
        dsframe.fit(task, file(str(tmp_path)))
    with pytest.raises(
        TaskError,
        match=r'hook "tests.unit.test_early_stop:Falling": Falling is not a hook; write',
    ):
        dsframe.fit(Falling(), file(str(tmp_path), hooks=["tests.unit.test_early_stop:Falling"]))
    task = Falling()
    task.hooks = [3]
    with pytest.raises(TaskError, match=r"hooks: int is not a subclass of dsframe.Hooks"):
        dsframe.fit(task, file(str(tmp_path)))


class Wrong(Falling):
    def loss(self, outputs, targets):
        loss, _ = super().loss(outputs, targets)
        return loss, {"loss": Sum(loss, 1)}


def test_what_a_loss_returns_beside_itself_has_a_name_of_its_own(tmp_path):
    with pytest.raises(TaskError, match=r'Wrong.loss: "loss" is the loss itself'):
        dsframe.fit(Wrong(), file(str(tmp_path), steps=2))
