"""One schedule everywhere: dsframe's formulas beside DeepSpeed's own classes, step by step."""

import copy
import logging
import warnings

import pytest
import torch

import dsframe
from dsframe.config import load
from dsframe.config.schema.parameters import HF_SCHEDULERS
from dsframe.errors import ConfigError, TaskError
from dsframe.model import schedules
from dsframe.model.rates import Rates, keep_ratios
from tests.files import ds_config

BASE = 0.05
CASES = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear", "warmup_min_lr": 1e-5, "warmup_max_lr": 0.3}),
    ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 40}),
    ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 5, "warmup_max_lr": 0.2, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"warmup_num_steps": 10, "total_num_steps": 40}),
    ("WarmupCosineLR", {"warmup_num_steps": 7, "total_num_steps": 30, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01,
                        "warmup_type": "linear"}),
]  # fmt: skip


def half_each(updates):
    return 0.5**updates


CASES += [
    ("SequentialLR", {"milestones": [3], "schedulers": [
        {"type": "LinearLR", "params": {"total_iters": 3}}, {"type": "CosineAnnealingLR", "params": {"T_max": 10}}]}),
    ("ChainedScheduler", {"schedulers": [
        {"type": "ConstantLR", "params": {"factor": 0.1, "total_iters": 4}}, {"type": "ExponentialLR", "params": {"gamma": 0.9}}]}),
    ("LambdaLR", {"lr_lambda": f"{__name__}:half_each"}),
    ("OneCycleLR", {"max_lr": 0.1, "total_steps": 80}),
    ("StepLR", {"step_size": 3}),
]  # fmt: skip


def of_the_library(kind, params, optimizer):
    """DeepSpeed's own object, or torch's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime import lr_schedules
        from deepspeed.utils import logger
    logger.setLevel(logging.ERROR)
    if "schedulers" in params:
        params = {**params, "schedulers": [of_the_library(*one.values(), optimizer) for one in params["schedulers"]]}
        optimizer = [] if kind == "ChainedScheduler" else [optimizer]
        return getattr(torch.optim.lr_scheduler, kind)(*optimizer, **params)
    if kind == "LambdaLR":
        params = {"lr_lambda": half_each}
    return (getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind))(optimizer, **params)


RELATIVE = ("WarmupLR", "WarmupCosineLR", "StepLR")
"""Where the rates are those of the optimizer, of each group its own."""
OPTIMIZERS = [(*case, optimizer) for case in CASES for optimizer in ("AdamW", "SGD")]
OPTIMIZERS += [(kind, params, "groups") for kind, params in CASES if kind in RELATIVE and "warmup_max_lr" not in params]


@pytest.mark.parametrize(("kind", "params", "optimizer"), OPTIMIZERS)
def test_rates_and_momentum_are_those_of_the_librarys_own(kind, params, optimizer):
    """Groups keep the proportion of their rates."""
    rates = (0.02, 3e-4) if optimizer == "groups" else (BASE,)
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in rates]
    other = torch.optim.AdamW(groups) if optimizer == "AdamW" else torch.optim.SGD(groups, momentum=0.9)
    ours = copy.deepcopy(other.param_groups)
    keep_ratios(ours, rates[0])
    theirs, course = of_the_library(kind, params, other), schedules.build(kind, rates[0], params)
    for updates in range(80):
        course(updates).apply(ours)
        for mine, group in zip(ours, other.param_groups, strict=True):
            for key in {"lr", "betas", "momentum"} & group.keys():
                assert mine[key] == pytest.approx(group[key], rel=1e-12, abs=1e-15), (key, updates)
        other.step()
        if updates < 79:  # the last that OneCycleLR has
            theirs.step()
    assert course(1).learning_rate == schedules.build(kind, rates[0], params)(1).learning_rate  # and can go back
    assert load({"train_batch_size": 4, "scheduler": {"type": kind, "params": params}}).deepspeed.scheduler is not None


def test_a_list_of_one_rate_is_that_rate():
    course = schedules.build("WarmupLR", BASE, {"warmup_min_lr": [0.0], "warmup_max_lr": [0.3], "warmup_num_steps": 2})
    assert course(9).learning_rate == 0.3


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Foo", {}, "'Foo' is neither a DeepSpeed schedule nor one of torch's"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("StepLR", {"step": 3}, "step"),
    ],
)
def test_mistakes(kind, params, message):
    with pytest.raises(ConfigError, match=message):
        schedules.build(kind, BASE, params)


@pytest.mark.parametrize(
    ("name", "params", "rates"),
    [
        ("linear", {"num_warmup_steps": 2, "num_training_steps": 6}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
        ("cosine_with_min_lr", {"num_training_steps": 2, "min_lr": 0.1 * BASE}, [1.0, 0.55, 0.1]),
        (
            "warmup_stable_decay",
            {"num_warmup_steps": 1, "num_decay_steps": 1, "num_training_steps": 3},
            [0.0, 1.0, 1.0, 0.0],
        ),
        ("polynomial", {"num_warmup_steps": 2, "num_training_steps": 2}, [0.0, 0.5, 1e-7 / BASE]),
    ],
)
def test_the_names_of_hugging_face(name, params, rates):
    pytest.importorskip("transformers")
    schedule = schedules.build(name, BASE, params)
    assert [schedule(updates).learning_rate / BASE for updates in range(len(rates))] == pytest.approx(rates)
    assert name in HF_SCHEDULERS


class Halving(dsframe.Task):
    def schedule(self, updates):
        return 0.5**updates if updates < 5 else float("nan")


def test_a_tasks_own_schedule():
    document = ds_config(4, "SGD", 0.8)
    rates = schedules.planned(load(document), Halving(), 0.8)
    assert [rates(updates).learning_rate for updates in (0, 1, 3, 1)] == [0.8, 0.4, 0.1, 0.4]
    with pytest.raises(TaskError, match=r"Halving\.schedule\(5\) returned nan; return a factor"):
        rates(5)
    both = load({**document, "scheduler": {"type": "StepLR", "params": {"step_size": 3}}})
    with pytest.raises(TaskError, match=r'Halving\.schedule gives the rate, and the file has "scheduler" too'):
        schedules.planned(both, Halving(), 0.8)
    assert schedules.planned(both, dsframe.Task(), 0.8)(0).learning_rate == 0.8


class Decaying(dsframe.Task):
    def weight_decay(self, updates):
        return 0.1 * updates - 0.2 * (updates > 4)


def test_a_tasks_own_weight_decay():
    """Groups without a decay keep none; others have it again after it was 0."""
    document = ds_config(4, "AdamW", 0.8)
    schedule = schedules.planned(load(document), Decaying(), 0.8)
    assert schedules.with_weight_decay(schedules.of_task(Halving(), 0.8), Decaying())(1) == Rates(0.4, None, 0.1)
    assert schedules.scaled(lambda updates: Rates(0.4, 0.9, 0.1), 2)(1) == Rates(0.8, 0.9, 0.1)
    groups = [{"weight_decay": 0.3}, {"weight_decay": 0.0}, {}]
    seen = []
    for updates in (1, 0, 2):
        schedule(updates).apply(groups)
        seen.append([group.get("weight_decay") for group in groups])
    assert seen == [[0.1, 0.0, None], [0.0, 0.0, None], [0.2, 0.0, None]]
    with pytest.raises(TaskError, match=r"Decaying\.weight_decay\(-1\) returned -0\.1; return a number from 0 on"):
        schedule(-1)
    plateau = {"type": "ReduceLROnPlateau", "params": {}}
    with pytest.raises(TaskError, match=r"Decaying\.weight_decay is not possible with ReduceLROnPlateau"):
        schedules.planned(load({**document, "scheduler": plateau, "dsframe": {}}), Decaying(), 0.8)


def test_what_is_said_of_a_schedule():
    def said(total, kind, done=0, **params):
        config = load({"train_batch_size": 4, "scheduler": {"type": kind, "params": params}, "dsframe": {}})
        return list(schedules.notes(config, schedules.build(kind, BASE, params), total, done))

    assert said(50, "WarmupLR", warmup_num_steps=10) == [
        "the first two updates have the learning rate 0: DeepSpeed's warm-up counts so"
    ]
    assert (
        said(50, "WarmupLR", warmup_num_steps=10, warmup_min_lr=0.1)
        == said(50, "WarmupLR", 20, warmup_num_steps=10)
        == []
    )
    assert said(21, "linear", num_training_steps=40) == [
        f"the schedule is for 40 updates (num_training_steps), the training has 21: the last has the rate {BASE / 2:.3g}; write "
        "num_training_steps 21 to end with it"
    ]
    assert said(5, "linear", num_warmup_steps=5, num_training_steps=5) == [
        "the training ends in the schedule's warm-up: that takes 5 updates (num_warmup_steps)"
    ]
    assert list(schedules.notes(load({"train_batch_size": 4}), schedules.constant(0.1), 50)) == []


@pytest.mark.parametrize("inside", [False, True])
def test_a_schedule_that_ends_before_the_training_is_refused(inside):
    """torch raises after its last step, in the middle of the training."""
    cycle = {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 4}}
    after = {"schedulers": [{"type": "ConstantLR"}, cycle], "milestones": [2]}
    scheduler = {"type": "SequentialLR", "params": after} if inside else cycle
    config = load({"train_batch_size": 4, "scheduler": scheduler})
    schedule = schedules.build(scheduler["type"], BASE, scheduler["params"])
    fits = 6 if inside else 4
    assert list(schedules.notes(config, schedule, fits)) == []
    with pytest.raises(
        ConfigError, match=f"OneCycleLR ends before the training of {fits + 1} updates; raise total_steps"
    ):
        list(schedules.notes(config, schedule, fits + 1))
