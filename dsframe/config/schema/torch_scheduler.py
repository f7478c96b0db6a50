# ruff: noqa: RUF012 - pydantic copies mutable defaults
"""``scheduler.params`` for the classes of ``torch.optim.lr_scheduler``. Source: torch 2.13."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from dsframe.config.schema.base import Count, NonNegative, Real, Section, SectionClass, Steps, StepsOrNone
from dsframe.config.schema.scheduler import TORCH_SCHEDULERS


class StepLrParams(Section):
    """torch: times ``gamma`` each ``step_size`` steps."""

    step_size: Steps
    """Steps between two decays. Required."""
    gamma: Real = 0.1
    """Factor."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class MultiStepLrParams(Section):
    """torch: times ``gamma`` at each milestone."""

    milestones: list[StepsOrNone]
    """Steps at which the rate falls. Required."""
    gamma: Real = 0.1
    """Factor."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class ConstantLrParams(Section):
    """torch: ``factor`` times the rate for ``total_iters`` steps, then the rate."""

    factor: NonNegative = 1 / 3
    """Factor at the start."""
    total_iters: StepsOrNone = 5
    """Steps of it."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class LinearLrParams(Section):
    """torch: a straight line between two factors."""

    start_factor: NonNegative = 1 / 3
    """Factor at the start."""
    end_factor: NonNegative = 1.0
    """Factor at the end."""
    total_iters: StepsOrNone = 5
    """Steps between them."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class ExponentialLrParams(Section):
    """torch: times ``gamma`` at each step."""

    gamma: Real
    """Factor. Required."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class PolynomialLrParams(Section):
    """torch: a polynomial down to 0."""

    total_iters: Steps = 5
    """Steps until 0."""
    power: Real = 1.0
    """Power of the polynomial."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class CosineAnnealingLrParams(Section):
    """torch: half a cosine wave."""

    T_max: Steps
    """Steps until the lowest rate. Required."""
    eta_min: NonNegative = 0.0
    """Lowest rate."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class CosineAnnealingWarmRestartsParams(Section):
    """torch: cosine waves, each starting anew."""

    T_0: Steps
    """Steps of the first wave. Required."""
    T_mult: Count = 1
    """Each wave is so many times the one before."""
    eta_min: NonNegative = 0.0
    """Lowest rate."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class CyclicLrParams(Section):
    """torch: a triangle wave."""

    base_lr: NonNegative | list[NonNegative]
    """Lowest rate. Required."""
    max_lr: NonNegative | list[NonNegative]
    """Highest rate. Required."""
    step_size_up: Steps = 2000
    """Steps up."""
    step_size_down: Steps | None = None
    """Steps down. Default: as many as up."""
    mode: Literal["triangular", "triangular2", "exp_range"] = "triangular"
    """How the peaks change."""
    gamma: Real = 1.0
    """Factor of ``exp_range``."""
    scale_mode: Literal["cycle", "iterations"] = "cycle"
    """Unit of the scaling."""
    cycle_momentum: bool = True
    """Move the momentum the other way. The optimizer must have one."""
    base_momentum: NonNegative = 0.8
    """Lowest momentum."""
    max_momentum: NonNegative = 0.9
    """Highest momentum."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class OneCycleLrParams(Section):
    """torch's 1-cycle policy."""

    max_lr: NonNegative | list[NonNegative]
    """Highest rate. Required."""
    total_steps: Steps | None = None
    """Steps of the whole training."""
    epochs: Count | None = None
    """With ``steps_per_epoch``, in place of ``total_steps``."""
    steps_per_epoch: Steps | None = None
    """With ``epochs``, in place of ``total_steps``."""
    pct_start: Real = 0.3
    """Share of the steps that go up."""
    anneal_strategy: Literal["cos", "linear"] = "cos"
    """Shape of the way down."""
    cycle_momentum: bool = True
    """Move the momentum the other way."""
    base_momentum: NonNegative = 0.85
    """Lowest momentum."""
    max_momentum: NonNegative = 0.95
    """Highest momentum."""
    div_factor: Real = 25.0
    """First rate is ``max_lr`` divided by it."""
    final_div_factor: Real = 10000.0
    """Last rate is the first one divided by it."""
    three_phase: bool = False
    """A third phase down to the last rate."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class LambdaLrParams(Section):
    """torch: a factor of the rate by a function of the step; with MultiplicativeLR of the rate before."""

    lr_lambda: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """``module:function``. Required."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class SchedulePart(Section):
    """One of torch's schedules as a part of another."""

    type: str
    """A class of ``torch.optim.lr_scheduler``. Required."""
    params: dict[str, Any] = {}
    """Its arguments."""

    @classmethod
    def variant(cls, raw: Mapping[str, Any], key: str) -> SectionClass | None:
        return TORCH_SCHEDULERS.get(str(raw.get("type"))) if key == "params" else None


class ChainedSchedulerParams(Section):
    """torch: the product of several schedules."""

    schedulers: Annotated[list[SchedulePart], Field(min_length=1)]
    """Each ``{"type": ..., "params": {...}}`` of torch's. Required."""


class SequentialLrParams(ChainedSchedulerParams):
    """torch: several schedules, one after the other."""

    milestones: list[StepsOrNone]
    """Steps at which the next one begins. Required."""
    last_epoch: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""
