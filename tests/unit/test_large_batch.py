"""Learning rates for other batch sizes: the schedule that results, and what is said of it. And cores for each rank."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsframe.config.load import examine
from dsframe.config.resolve.scaling import factor, sentence
from dsframe.config.schema.settings_model import LargeBatch
from dsframe.model import schedules

LINEAR = LargeBatch(lr_scaling="linear", reference_batch_size=256)


def test_factors() -> None:
    assert factor(LINEAR, 1024) == 4.0
    assert factor(LINEAR, 64) == 0.25
    assert factor(LargeBatch(lr_scaling="sqrt", reference_batch_size=256), 1024) == 2.0
    assert factor(LargeBatch(reference_batch_size=256), 1024) == 1.0
    assert sentence(LargeBatch(reference_batch_size=256), 1024) is None
    assert sentence(LINEAR, 1024) == "learning rates x 4 (linear: batch 1,024 / reference 256)"


SCHEDULES: list[tuple[str | None, dict[str, Any], tuple[str, ...]]] = [
    (None, {}, ()),
    ("WarmupLR", {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 5}, ("warmup_min_lr", "warmup_max_lr")),
    ("WarmupCosineLR", {"total_num_steps": 20, "warmup_num_steps": 5}, ()),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 5}, ("cycle_min_lr", "cycle_max_lr")),
    ("StepLR", {"step_size": 3}, ()),
    ("CosineAnnealingLR", {"T_max": 10, "eta_min": 1e-4}, ("eta_min",)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "rates"), SCHEDULES)
def test_scaling_is_as_if_every_rate_of_the_file_were_scaled(kind: Any, params: Any, rates: tuple[str, ...]) -> None:
    written = {name: value * 4 if name in rates else value for name, value in params.items()}
    by_hand = schedules.build(kind, 4e-3, written)
    scaled = schedules.scaled(schedules.build(kind, 1e-3, params), 4.0)
    for step in range(25):
        assert scaled(step).learning_rate == pytest.approx(by_hand(step).learning_rate, rel=1e-12)
        assert scaled(step).momentum == by_hand(step).momentum


def test_the_factor_grows() -> None:
    course = schedules.scaled(schedules.constant(0.1), 5.0, warmup_steps=4)
    assert [course(step).learning_rate for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])


def problems(large_batch: dict[str, Any], processes: int | None = None, **keys: Any) -> list[str]:
    from dsframe.config.resolve.auto import Facts

    file = {"train_batch_size": 1024, **keys, "dsframe": {"large_batch": large_batch}}
    return [str(problem) for problem in examine(json.dumps(file), "x.json", facts=Facts(world_size=processes)).problems]


def test_what_the_check_says() -> None:
    good = {"lr_scaling": "linear", "reference_batch_size": 256, "warmup_steps": 500}
    [line] = problems(good, 2)
    assert "note: dsframe.large_batch: learning rates x 4 (linear: batch 1,024 / reference 256), growing" in line
    assert any('add "reference_batch_size"' in line for line in problems({"lr_scaling": "sqrt"}))
    assert any('lr_scaling is "none"' in line for line in problems({"warmup_steps": 5}))
    assert any(
        "already scales with the number of ranks" in line for line in problems(good, gradient_allreduce_op="sum")
    )
    warmup = {"type": "WarmupLR", "params": {}}
    assert any("the two ramps multiply" in line for line in problems(good, scheduler=warmup))
