"""Several models of one task, each with its own optimizer or frozen: on every engine the training of a loop of plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dsframe
from dsframe import engines
from dsframe.config import load
from dsframe.engines.part_models import Drawn
from dsframe.errors import CheckpointError, ConfigError, EngineError, TaskError
from dsframe.tasks.several import model_names
from dsframe.tools.compare import losses
from dsframe.tools.plan.meta import model_of
from tests.engines.parts import SGD, STEPS, TASKS, Distilled, Gan, file, loop, net, taught
from tests.files import ds_config, read_rows, write_json
from tests.processes import reported, run_ranks, warm

BOUND = 1e-5
BF16_BOUND = 0.05
TWO = [
    *("gan 1 ddp", "gan 2 fsdp", "gan 1 deepspeed:0", "gan 2 deepspeed:1", "gan 1 deepspeed:2", "gan 2 deepspeed:3"),
    *("distilled 2 ddp", "distilled 1 fsdp", "distilled 2 deepspeed:1", "distilled 1 deepspeed:3"),
    *("smooth 2 fsdp", "smooth 1 deepspeed:1", "smooth 2 deepspeed:3"),
    *("dino 1 ddp", "dino 1 fsdp", "dino 1 deepspeed:0", "dino 1 deepspeed:2", "dino 1 deepspeed:3"),
    *("critic 1 ddp", "critic 2 fsdp", "critic 1 deepspeed:1", "critic 2 deepspeed:3"),
    *("gan 1 deepspeed:2:cpu", "rounded 1 fsdp::bf16", "rounded 1 deepspeed:3:bf16", "gan 2 deepspeed:3:units"),
]
HOROVOD = ["gan 2 horovod", "distilled 1 horovod", "critic 2 horovod", "dino 1 horovod"]


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (1, ["gan 2 single", "distilled 1 single", "critic 1 single", "dino 1 single"]),
        (2, TWO),
        (2, HOROVOD),
        pytest.param(3, TWO, marks=pytest.mark.long),
    ],
    ids=["alone", "2", "horovod", "3"],
)
def test_a_loop_by_hand(processes, cases, tmp_path):
    report = reported("parts", tmp_path, processes, cases, timeout_seconds=400)
    for case in cases:
        task, found = case.split()[0], report[case]
        wanted, bound = report[task], BF16_BOUND if "bf16" in case else BOUND
        for key in ("losses", "norms", "weights", "averages", "distance"):
            assert found[key] == like(wanted[key], bound), (case, key)
        on = [wanted["losses"][STEPS // 2 :], wanted["norms"][STEPS // 2 :]]
        assert found["on from the case before"] == like(on, bound), case
        assert found["again"], f"{case}: its own state, put back, goes on to the last bit"
        assert found["swapped"]
        assert wanted["losses"][-1][-1] < wanted["losses"][0][-1] or "generator" in TASKS[task]().models(), (
            "it has learned something"
        )
        shards = "teacher" in TASKS[task]().models() and processes > 1 and ("fsdp" in case or ":3" in case)
        assert found.get("share", 1.0) < 0.7 if shards else found.get("share", 1.0) == 1.0


def like(value, bound):
    """Numbers of any nesting, to be compared within ``bound``."""
    if isinstance(value, dict):
        return {name: like(one, bound) for name, one in value.items()}
    if isinstance(value, list):
        return [like(one, bound) for one in value]
    return pytest.approx(value, rel=0, abs=bound)


# A whole run.


def run_file(tmp_path, case, **more):
    given = file(case)
    given["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    given["scheduler"]["params"] |= {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01}
    given["dsframe"] |= {"steps": STEPS, "log_every_steps": 1, "threads_per_rank": 1, "run_dir": str(tmp_path / "run")}
    given["dsframe"] |= {"checkpoints": {"every_steps": 3}, "eval_every_steps": 6, **more}
    return given


@pytest.mark.parametrize("task", ["gan", "distilled"])
def test_a_run_that_goes_on_elsewhere(task, tmp_path, monkeypatch):
    """Checkpoints have what is trained and name what is frozen; the metrics have each loss; the module comes out."""
    write_json(tmp_path / "file.json", run_file(tmp_path, f"{task} 1 fsdp", steps=3))
    first = run_ranks(
        warm(2, ["-m", "dsframe.train", "--config", str(tmp_path / "file.json")]), timeout_seconds=200
    ).check()
    said = {
        "gan": "parameter group: discriminator, lr_scale 0.5: 2 parameters",
        "distilled": "teacher (163 parameters; frozen, digest ",
    }
    assert said[task] in first.stderr
    summary = dsframe.fit(TASKS[task](), run_file(tmp_path, f"{task} 2 single"), resume="auto")
    wanted = loop(task, warm_up=4)
    found = losses(tmp_path / "run")
    assert [found[step] for step in sorted(found)] == like([sum(one) for one in wanted["losses"]], BOUND)
    assert summary.metrics["distance"] == like(wanted["distance"], BOUND)
    trained = {"gan": ["generator", "discriminator"], "distilled": ["student"]}[task]
    assert list(dsframe.load_model(tmp_path / "run", TASKS[task]())) == trained
    if task == "gan":
        (*_, last) = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
        assert last["discriminator_loss"] == like(wanted["losses"][-1][0], BOUND)
        assert 0.0 <= last["told"] <= 1.0
    else:
        monkeypatch.setattr("tests.engines.parts.taught", partial(taught, nn.LayerNorm))
        with pytest.raises(CheckpointError, match=r'models\.teacher was "frozen, digest .*", is "frozen, digest'):
            dsframe.fit(Distilled(), run_file(tmp_path, "distilled 1 single", steps=9), resume="auto")


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed:3"])
def test_ranks_that_call_other_models(engine, tmp_path):
    given = run_file(tmp_path, f"gan 1 {engine}", task={"name": "tests.engines.parts:Uneven"}, hang_timeout_seconds=2)
    write_json(tmp_path / "file.json", given)
    run = run_ranks(warm(2, ["-m", "dsframe.train", "--config", str(tmp_path / "file.json")]), timeout_seconds=100)
    assert run.returncode != 0
    assert "Uneven: ranks call different modules of the model. The first difference: " in run.stderr


class Seen(Gan):
    def __init__(self):
        self.seen = set()

    def models(self):
        return {**super().models(), "discriminator": self.discriminator}

    def discriminator(self):
        model = net(3, 1)
        model.register_forward_pre_hook(lambda model, _: self.seen.add((torch.is_grad_enabled(), model.training)))
        return model

    def metrics_of_models(self, models, noise, real):
        return {"told": dsframe.Sum(models["discriminator"](real).sum(), len(real))}


def test_after_an_evaluation_of_all_models_each_trains(tmp_path):
    task = Seen()
    dsframe.fit(task, run_file(tmp_path, "gan 1 single", eval_every_steps=1))
    assert (True, True) in task.seen
    assert (True, False) not in task.seen


class Drawing(Gan):
    """Its noise is drawn in the loss."""

    def fool(self, models, noise, real):
        return super().fool(models, torch.randn_like(noise), real)


@pytest.mark.parametrize(("task", "said"), [(Gan, False), (Drawing, True)])
def test_losses_that_draw(task, said, tmp_path, capsys):
    dsframe.fit(task(), run_file(tmp_path, "gan 1 single", steps=1))
    assert ("draws random numbers in training, different ones on each rank" in capsys.readouterr().err) == said


class Normed(Gan):
    """With statistics in what is saved."""

    def models(self):
        return {**super().models(), "generator": lambda: nn.Sequential(nn.BatchNorm1d(4), net(4, 3))}

    def parameter_groups(self, model):
        return [{"match": ["generator.*.bias"], "freeze": True}, {"match": ["discriminator.0.*"], "lr_scale": 0.5}]


def test_statistics_and_groups_of_the_task(tmp_path):
    """A run that goes on is the whole one to the bit, evaluation included; frozen parameters stay."""
    more = {"parameter_groups": [], "eval_every_steps": 5}
    whole = dsframe.fit(Normed(), run_file(tmp_path / "whole", "gan 1 single", steps=5, **more))
    for steps in (3, 5):
        parts = dsframe.fit(Normed(), run_file(tmp_path, "gan 1 single", steps=steps, **more), resume="auto")
    assert (parts.loss, parts.metrics) == (whole.loss, whole.metrics)
    trained = dsframe.load_model(tmp_path / "run", Normed())["generator"]
    assert trained[0].num_batches_tracked == 10, "each loss has seen the batch"
    for name, fresh in Normed().model_of("generator").named_parameters():
        assert torch.equal(fresh, trained.get_parameter(name)) == name.endswith(".bias"), name


# What is refused.


@pytest.mark.parametrize(
    ("engine", "changes", "path"),
    [
        ("deepspeed", {"pipeline": {"stages": 2}}, "pipeline.stages"),
        ("fsdp", {"dsframe": {"adapter": {"r": 2}}}, "dsframe.adapter"),
        ("single", {"dsframe": {"per_sample_randomness": True}}, "dsframe.per_sample_randomness"),
        ("single", {"dsframe": {"model": {"compile": True}}}, "dsframe.model.compile"),
        (
            "deepspeed",
            {"zero_optimization": {"stage": 3}, "dsframe": {"model": {"activation_checkpointing": ["Sequential"]}}},
            "dsframe.model.activation_checkpointing",
        ),
    ],
)
def test_what_is_not_possible_is_named(engine: str, changes: dict[str, Any], path: str) -> None:
    plain = ds_config(12, "AdamW", 0.01)
    config = load({**plain, **changes, "dsframe": {"engine": engine, **changes.get("dsframe", {})}})
    (problem,) = engines.problems_with_several_models(config, engine)
    assert problem.path == path
    assert "is not possible with several models" in problem.message


def test_a_plan_has_no_prediction():
    with pytest.raises(TaskError, match=r"several models .*, whose steps have no prediction"):
        model_of(Gan(), torch.float32)


def test_another_engine_trains_one_model(tmp_path):
    with pytest.raises(EngineError, match="trains one model, and the task has several"):
        dsframe.fit(Gan(), run_file(tmp_path, "gan 1 reference-allreduce"))


def test_optimizers_are_of_models(tmp_path):
    given = run_file(tmp_path, "distilled 1 single", optimizers={"teacher": {"type": "SGD", "params": {"lr": 0.1}}})
    with pytest.raises(
        TaskError, match=r"dsframe\.optimizers: no loss trains a model 'teacher'; those that are trained are student"
    ):
        dsframe.fit(Distilled(), given)
    given = run_file(tmp_path, "gan 1 single", optimizers={"generator": {"type": "Muon", "params": {"lr": 0.1}}})
    del given["dsframe"]["ema"], given["dsframe"]["parameter_groups"]
    with pytest.raises(
        EngineError, match=r"dsframe\.optimizers\.generator: Muon.* is not possible with several models"
    ):
        dsframe.fit(Gan(), given)
    frozen = {**given["dsframe"], "optimizers": {}, "parameter_groups": [{"match": ["teacher.*"], "lr_scale": 2.0}]}
    with pytest.raises(ConfigError, match=r'"teacher\.\*" matches no parameter'):
        dsframe.fit(Distilled(), {**given, "dsframe": frozen})
    given["dsframe"]["optimizers"] = {"generator": {"type": "SGD", "params": {"lrr": 0.1}}}
    with pytest.raises(ConfigError, match=r"dsframe\.optimizers\.generator\.params\.lrr"):
        load(given)


class Models(Gan):
    """Whatever a test gives it."""

    def __init__(self, models, losses, **more):
        self._models, self._losses = models, losses
        vars(self).update(more)

    def models(self):
        return self._models

    def losses(self):
        return self._losses


def both(models, inputs, targets):
    return models["one"](inputs, targets=targets).sum()


@pytest.mark.parametrize(
    ("models", "losses", "message"),
    [
        (
            {"one": partial(net, 4, 3)},
            {"two": both},
            "losses: there is no model 'two' for it to train; models.. has one",
        ),
        ({"one": partial(net, 4, 3)}, {}, "has models.. and no losses.., so nothing would be trained"),
        ({"a.b": partial(net, 4, 3)}, {"a.b": both}, "'a.b' cannot be the name of a model"),
        ({"train": partial(net, 4, 3)}, {"train": both}, "'train' cannot be the name of a model"),
        (
            {"one": net(4, 3)},
            {"one": both},
            "models: 'one' is Sequential, made already; give what makes the model",
        ),
        ({"one": dict}, {"one": both}, "models: 'one' made dict, which is not a module"),
        (
            {"one": partial(net, 4, 3), "teacher": partial(net, 4, 3)},
            {"one": both},
            "no loss trains the model 'teacher', and its teacher.0.weight is drawn from random numbers; load its weights",
        ),
        (
            {"one": partial(net, 4, 3), "teacher": dsframe.average_of("two")},
            {"one": both},
            "'teacher' is the average of two, momentum 0.996; that has to be a model with a loss",
        ),
        (
            {"one": partial(net, 4, 3), "teacher": dsframe.average_of("one")},
            {"one": both, "teacher": both},
            "'teacher' is the average of one, .*, and 'teacher' has none",
        ),
        (
            {"one": partial(net, 4, 3), "teacher": dsframe.average_of("one")},
            {"one": both},
            "dsframe.ema: Models averages a model itself",
        ),
    ],
)
def test_bad_tasks(models, losses, message, tmp_path):
    with pytest.raises(TaskError, match=r"Models has model\(\) and models\(\); remove one"):
        model_names(Models(models, losses, model=partial(net, 4, 3)))
    with pytest.raises(TaskError, match=message):
        dsframe.fit(Models(models, losses), run_file(tmp_path, "rounded 1 single"))


class TwoInputs(nn.Linear):
    def forward(self, inputs, *, scale):
        return super().forward(inputs) * scale.mean()


class Unevaluated(Models):
    def eval_data(self):
        return None


def called(models, inputs, targets):
    return models["one"](inputs, scale=targets).square().mean()


def test_positional_arguments_and_keywords(tmp_path):
    given = run_file(tmp_path, "rounded 1 single")
    del given["dsframe"]["eval_every_steps"]
    assert dsframe.fit(Unevaluated({"one": lambda: TwoInputs(4, 3)}, {"one": called}), given).steps == STEPS


class ModelAndModels(Gan):
    def model(self):
        return net(4, 3)


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        (ModelAndModels(), {}, r"has model\(\) and models\(\); remove one of them"),
        (Gan(), {"model": {"sync_batch_norm": True}}, '"sync_batch_norm" has no effect: no model has BatchNorm'),
        (
            Gan(),
            {"optimizers": {name: {**SGD, "every_steps": 2} for name in ("generator", "discriminator")}},
            "each model has every_steps above 1, so some steps would train nothing",
        ),
    ],
)
def test_what_contradicts_itself(task, more, message, tmp_path):
    with pytest.raises(TaskError, match=message):
        dsframe.fit(task, run_file(tmp_path, "gan 1 single", **more))


def test_statistics_of_the_one_that_has_some(tmp_path):
    given = run_file(tmp_path, "gan 1 single", parameter_groups=[], model={"sync_batch_norm": True})
    assert dsframe.fit(Normed(), given).steps == STEPS


class Summed(Gan):
    """Its generator's loss is a sum."""

    def fool(self, models, noise, real):
        return super().fool(models, noise, real) * len(noise)


def test_a_sum_among_several_losses(tmp_path, capsys):
    with pytest.raises(TaskError, match=r"Summed\.loss gives a sum over the rows of a micro-batch"):
        dsframe.fit(Summed(), run_file(tmp_path, "gan 2 single"))
    capsys.readouterr()
    dsframe.fit(Gan(), run_file(tmp_path / "mean", "gan 2 single"))
    assert "this task's" not in capsys.readouterr().err


def test_another_rhythm_is_another_training(tmp_path):
    def every(steps):
        given = run_file(tmp_path, "gan 1 single")
        given["dsframe"]["optimizers"] |= {"generator": {**SGD, "every_steps": steps}}
        return given

    dsframe.fit(Gan(), every(2))
    with pytest.raises(CheckpointError, match=r"models\.generator was .*every 2 steps"):
        dsframe.fit(Gan(), every(3), resume="auto")


def test_what_has_been_drawn_is_known():
    """Also where it has been copied, and no longer where a file's numbers have been copied over it."""
    with Drawn() as drawn:
        fresh, copied, loaded = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in loaded.parameters():
                parameter.copy_(torch.zeros_like(parameter))
            copied.weight = nn.Parameter(torch.empty(2, 2).copy_(fresh.weight))
            copied.bias.zero_()
    assert drawn.among(fresh) == drawn.among(copied) == "weight"
    assert drawn.among(loaded) == ""
    assert drawn.among(nn.LayerNorm(2)) == ""
