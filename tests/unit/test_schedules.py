"""One schedule everywhere: dsframe's formulas beside DeepSpeed's own classes, step by step."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch

from dsframe import schedules
from dsframe.errors import ConfigError

BASE = 0.05
CASES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_num_steps": 10}),
    ("WarmupLR", {"warmup_num_steps": 1, "warmup_type": "linear", "warmup_min_lr": 1e-5, "warmup_max_lr": 0.3}),
    ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 40}),
    ("WarmupDecayLR", {"warmup_num_steps": 10, "total_num_steps": 5, "warmup_max_lr": 0.2, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"warmup_num_steps": 10, "total_num_steps": 40}),
    ("WarmupCosineLR", {"warmup_num_steps": 7, "total_num_steps": 30, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.01,
                        "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_step_size": 7}),
    ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": True, "lr_range_test_step_rate": 3.0}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10, "cycle_second_step_size": 20,
                  "decay_step_size": 5, "decay_lr_rate": 0.3, "decay_mom_rate": 0.1}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10, "cycle_first_stair_count": 3,
                  "cycle_second_stair_count": 4, "cycle_momentum": False}),
    ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 10, "decay_step_size": 5,
                  "decay_mom_rate": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_the_formulas_are_deepspeeds(kind: str, params: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.runtime import lr_schedules
        from deepspeed.utils import logger
    logger.setLevel(logging.ERROR)
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=BASE)
    theirs = getattr(lr_schedules, kind)(optimizer, **params)
    ours = schedules.build(kind, BASE, params)
    for updates in range(80):
        group = optimizer.param_groups[0]
        rates = ours(updates)
        assert rates.learning_rate == pytest.approx(group["lr"], abs=1e-15), updates
        if rates.momentum is not None:
            assert (rates.momentum, rates.second_beta) == pytest.approx(group["betas"], abs=1e-15), updates
        theirs.step()


def test_torchs_own_are_read_off_and_can_go_back() -> None:
    schedule = schedules.build("StepLR", 0.1, {"step_size": 3})
    assert [schedule(updates).learning_rate for updates in (0, 2, 3, 6, 1)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.001, 0.1]
    )


def test_without_a_scheduler_the_rate_stays() -> None:
    assert schedules.build(None, BASE, {})(10**6).learning_rate == BASE


def test_rates_reach_the_optimizer() -> None:
    groups: list[dict[str, Any]] = [{"lr": 1.0, "betas": (0.9, 0.999)}, {"lr": 1.0, "momentum": 0.9}, {"lr": 1.0}]
    schedules.Rates(0.5, 0.8, 0.99).apply(groups)
    assert groups == [{"lr": 0.5, "betas": (0.8, 0.99)}, {"lr": 0.5, "momentum": 0.9}, {"lr": 0.5}]
    schedules.Rates(0.5, 0.7).apply(groups)
    assert groups == [{"lr": 0.5, "betas": (0.7, 0.99)}, {"lr": 0.5, "momentum": 0.7}, {"lr": 0.5}]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("WarmupLR", {"warmup_num_steps": 4}),
        ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 12}),
        ("StepLR", {"step_size": 3}),
        ("PolynomialLR", {"total_iters": 9}),
        ("CosineAnnealingLR", {"T_max": 9}),
    ],
)
def test_groups_keep_the_proportion_of_their_rates(kind: str, params: dict[str, Any]) -> None:
    """As the rates of Muon's halves, and those by muP's widths, do with DeepSpeed's and torch's own classes."""
    from deepspeed.runtime import lr_schedules

    theirs, ours = (
        torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.02, 3e-4)], lr=BASE) for _ in range(2)
    )
    shares = schedules.shares(ours.param_groups, 0.02)
    make = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind)
    scheduler, course = make(theirs, **params), schedules.build(kind, 0.02, params)
    for updates in range(12):
        course(updates).apply(ours.param_groups, shares)
        for mine, original in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert mine["lr"] == pytest.approx(original["lr"], rel=1e-12, abs=1e-18), updates
        theirs.step()
        scheduler.step()


def test_groups_without_a_rate_share_nothing() -> None:
    assert schedules.shares([{"lr": 0.0}, {"lr": 0.0}], 0.0) == [1.0, 1.0]


def test_a_list_of_one_rate_is_that_rate() -> None:
    course = schedules.build("WarmupLR", BASE, {"warmup_min_lr": [0.0], "warmup_max_lr": [0.3], "warmup_num_steps": 2})
    assert course(9).learning_rate == 0.3


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_torchs_cycled_momentum_is_torchs(kind: str) -> None:
    params = {"max_lr": 0.1, "total_steps": 20}
    ours_optimizer, theirs_optimizer = (
        getattr(torch.optim, kind)([torch.zeros(1)], lr=BASE, **({"momentum": 0.9} if kind == "SGD" else {}))
        for _ in range(2)
    )
    theirs = torch.optim.lr_scheduler.OneCycleLR(theirs_optimizer, **params)
    ours = schedules.build("OneCycleLR", BASE, params)
    key = "betas" if kind == "AdamW" else "momentum"
    for updates in range(20):
        ours(updates).apply(ours_optimizer.param_groups)
        assert ours_optimizer.param_groups[0][key] == theirs_optimizer.param_groups[0][key], updates
        assert ours_optimizer.param_groups[0]["lr"] == theirs_optimizer.param_groups[0]["lr"]
        theirs_optimizer.step()
        if updates < 19:
            theirs.step()


@pytest.mark.parametrize(
    ("kind", "params", "message"),
    [
        ("Foo", {}, "'Foo' is neither a DeepSpeed schedule nor one of torch's"),
        ("ReduceLROnPlateau", {}, "depends on the step alone"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("StepLR", {"step": 3}, "step"),
    ],
)
def test_mistakes(kind: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedules.build(kind, BASE, params)
