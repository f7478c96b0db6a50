"""``{"epochs": n}`` wherever a file counts steps: what it becomes, what is refused, and that a run goes by it."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dsframe
from dsframe import train
from dsframe.checkpoint.store import Retention
from dsframe.cli import main
from dsframe.config import Facts, load
from dsframe.config.resolve import epochs
from dsframe.config.schema.base import Interval
from dsframe.data.sampler import Sampler
from dsframe.errors import ConfigError
from dsframe.events import RunSchedule
from tests.files import ds_config, read_rows, write_json
from tests.lines import HeldOut


def known(config, samples, *, drop_last=False):
    """The configuration on so many samples, as a run resolves it."""
    batch = config.batch(1).train_batch_size
    sampler = Sampler(samples, batch, 0, drop_last=drop_last)
    return config.resolve(Facts(1, 1000, sampler.epoch_steps))


def scheduler(kind, **params):
    return {"train_batch_size": 8, "scheduler": {"type": kind, "params": params}, "dsframe": {}}


def params_of(config):
    return config.deepspeed.scheduler.params


@settings(deadline=None, max_examples=50)
@given(st.integers(8, 60), st.integers(1, 400).map(lambda tenths: tenths / 10))
def test_it_is_steps_when_the_data_are_known(samples, count):
    """Rounded up, at each place where steps are counted."""
    written = {"epochs": count}
    file = scheduler("MultiStepLR", milestones=[written, 4000])
    steps = math.ceil(Fraction(str(count)) * Fraction(samples, 8))
    assert params_of(load(file))["milestones"] == [written, 4000]
    assert params_of(known(load(file), samples))["milestones"] == [steps, 4000]
    linear = scheduler("linear", num_warmup_steps=written, num_training_steps=4000)
    assert params_of(known(load(linear), samples)) == {"num_warmup_steps": steps, "num_training_steps": 4000}


def test_schedules_inside_of_schedules():
    parts = [
        {"type": "LinearLR", "params": {"total_iters": {"epochs": 1}}},
        {"type": "SequentialLR", "params": {"milestones": [{"epochs": 4}], "schedulers": [
            {"type": "ConstantLR", "params": {"total_iters": {"epochs": 2}}},
            {"type": "CosineAnnealingLR", "params": {"T_max": {"epochs": 3}}}]}},
    ]  # fmt: skip
    config = known(load(scheduler("SequentialLR", milestones=[{"epochs": 1}], schedulers=parts)), 16)
    outer = params_of(config)
    inner = outer["schedulers"][1]["params"]
    assert outer["milestones"] == [2]
    assert outer["schedulers"][0]["params"] == {"total_iters": 2}
    assert inner["milestones"] == [8]
    assert [part["params"] for part in inner["schedulers"]] == [{"total_iters": 4}, {"T_max": 6}]


def test_the_batch_decides_and_accumulation_does_not():
    for sizes in (
        {"train_batch_size": 8},
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
    ):
        file = scheduler("StepLR", step_size={"epochs": 1})
        del file["train_batch_size"]
        assert params_of(known(load(file | sizes), 32)) == {"step_size": 4}
    whole = load(scheduler("StepLR", step_size={"epochs": 2}))
    assert params_of(known(whole, 20, drop_last=True)) == {"step_size": 4}
    assert params_of(known(whole, 20)) == {"step_size": 5}


def test_intervals_end_where_epochs_end():
    """Evaluations, checkpoints and lines do not drift away from the ends of epochs of 2.5 steps."""
    each = {"epochs": 1}
    config = known(
        load(
            ds_config(
                8,
                epochs=6,
                eval_every_steps=each,
                log_every_steps={"epochs": 2},
                checkpoints={"every_steps": each, "keep_every": {"epochs": 4}, "keep_best": "loss:min"},
            )
        ),
        20,
    )
    settings = config.settings
    assert settings.eval_every_steps == settings.checkpoints.every_steps == Interval(epochs=1)
    assert (settings.log_every_steps, settings.checkpoints.keep_every) == (5, 10)
    sampler = Sampler(20, 8, 0)
    schedule = RunSchedule.of(settings, sampler, evaluates=True)
    ends = {sampler.total_steps(count) for count in range(1, 7)}
    assert schedule.eval_steps == {3, 5, 8, 10, 13, 15} == ends
    every = epochs.steps(Interval(epochs=1), sampler.epoch_steps)
    assert Retention(last=1, every=every).keeps({step: {} for step in (2, 3, 4, 5, 6, 7)}) == {3, 5, 7}
    assert [step for step in range(11, 16) if schedule.logs(step)] == [15]


def test_the_end_is_logged_and_evaluated_but_no_regular_step():
    given = load(ds_config(8, "SGD", 0.1, steps=21, eval_every_steps=10, log_every_steps=100)).settings
    schedule = RunSchedule.of(given, Sampler(20, 8, 0), evaluates=True)
    assert (schedule.eval_steps, schedule.regular) == ({10, 20, 21}, {10, 20})
    assert [step for step in range(1, 22) if schedule.logs(step)] == [1, 2, 5, 10, 20, 21]


def test_a_tenth_of_an_epoch_is_a_tenth():
    tenth = epochs.steps(Interval(epochs=0.1), Fraction(30))
    assert tenth == 3
    assert [step for step in range(1, 10) if epochs.due(step, tenth)] == [3, 6, 9]
    assert epochs.first(Fraction(1, 2), 6) == [1, 2, 3]


def test_where_it_has_no_meaning_it_is_refused():
    file = scheduler("WarmupLR", warmup_num_steps={"epochs": 1})
    with pytest.raises(ConfigError, match=r"the training data has no length.*write steps"):
        load(file).resolve(Facts(1, 1000))


def test_what_check_prints_of_it_is_a_file(tmp_path, capsys):
    file = scheduler("MultiStepLR", milestones=[{"epochs": 30}, {"epochs": 60}])
    path = tmp_path / "file.json"
    write_json(path, file | {"optimizer": {"type": "SGD", "params": {}}})
    assert main(["check", str(path), "--resolved"]) == 0
    path.write_text(capsys.readouterr().out)
    assert params_of(load(path))["milestones"] == [{"epochs": 30}, {"epochs": 60}]


class Line(HeldOut):
    rows = 20

    def model(self):
        self.line = nn.Linear(2, 1)
        with torch.no_grad():
            self.line.weight.fill_(0.5)
            self.line.bias.zero_()
        return self.line


def lines(run):
    return read_rows(Path(run) / "metrics.jsonl")


def test_a_run_goes_by_epochs_and_says_what_they_are(here, capsys):
    each = {"epochs": 1}
    kept = {"every_steps": each, "keep_last": 9, "keep_best": "loss:min"}
    file = ds_config(
        8,
        "SGD",
        0.1,
        sections={"scheduler": {"type": "linear", "params": {"num_training_steps": {"epochs": 4}}}},
        engine="single",
        epochs=4,
        run_dir="run",
        eval_every_steps=each,
        checkpoints=kept,
    )
    dsframe.fit(Line(), file)
    said = capsys.readouterr().err
    assert 'an epoch has 2.5 steps; scheduler.params.num_training_steps {"epochs": 4} is 10 steps;' in said
    assert 'dsframe.checkpoints.every_steps {"epochs": 1}: after steps 3, 5, 8, ...' in said
    assert "the schedule is for" not in said
    assert sorted(int(path.name[-8:]) for path in Path("run/checkpoints").glob("step-*")) == [3, 5, 8, 10]
    assert [line["step"] for line in lines("run") if "evaluation" in line] == [3, 5, 8, 10]


@pytest.mark.parametrize(("written", "given"), [("epochs", "steps"), ("steps", "epochs")])
def test_a_length_on_the_command_line_replaces_the_files(written, given, tmp_path):
    file = write_json(tmp_path / "a.json", {"train_batch_size": 8, "dsframe": {written: 3}})
    settings = load(file, overrides=[f"dsframe.{given}=5"]).settings
    assert (getattr(settings, given), getattr(settings, written)) == (5, None)
    with pytest.raises(ConfigError, match="keep one of them"):
        load(file, overrides=["dsframe.steps=5", "dsframe.epochs=5"])


def test_what_waits_for_the_data_is_no_line_of_a_training(tmp_path, capsys):
    """It is known by then."""
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 1}}
    file = ds_config(8, "SGD", 0.1, engine="single", epochs=1, run_dir=str(tmp_path / "run"))
    path = write_json(tmp_path / "a.json", file | {"scheduler": schedule})
    assert "auto-later" in [problem.code for problem in load(path).problems]
    assert train.main(Line(), ["--config", str(path)]) == 0
    printed = capsys.readouterr()
    assert "is resolved when" not in printed.out + printed.err
    assert "warmup_max_lr 0.001, total_num_steps 3, warmup_num_steps 1" in printed.out + printed.err
