"""``scheduler.params`` for DeepSpeed's own schedules. Source: ``deepspeed/runtime/lr_schedules.py`` of DeepSpeed 0.19.8."""

from typing import Literal

from dsframe.config.schema.base import NonNegative, Real, Section, Size, Steps, StepsOrNone


class LrRangeTestParams(Section):
    """A learning rate that grows, to find how large it may be."""

    lr_range_test_min_lr: NonNegative | list[NonNegative] = 1e-3
    """First learning rate."""
    lr_range_test_step_size: Steps = 2000
    """Steps in one interval."""
    lr_range_test_step_rate: Real = 1.0
    """Growth in one interval."""
    lr_range_test_staircase: bool = False
    """Grow in jumps, one each interval."""
    last_batch_iteration: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class OneCycleParams(Section):
    """DeepSpeed's 1-cycle policy: up, down, then a slow decay."""

    cycle_min_lr: NonNegative
    """Learning rate at both ends of the cycle. Required."""
    cycle_max_lr: NonNegative
    """Learning rate at its peak. Required."""
    decay_lr_rate: Real = 0.0
    """Decay after the cycle."""
    cycle_first_step_size: Steps = 2000
    """Steps up."""
    cycle_second_step_size: StepsOrNone | None = None
    """Steps down. Default: as many as up."""
    cycle_first_stair_count: Size = 0
    """Stairs on the way up. 0: a straight line."""
    cycle_second_stair_count: Size | None = None
    """Stairs on the way down. Default: as many as up."""
    decay_step_size: StepsOrNone = 0
    """Steps between decays after the cycle. 0: no decay."""
    cycle_momentum: bool = True
    """Move the momentum the other way."""
    cycle_min_mom: Real = 0.8
    """Momentum at the peak."""
    cycle_max_mom: Real = 0.9
    """Momentum at both ends."""
    decay_mom_rate: Real = 0.0
    """Decay of the momentum after the cycle."""
    last_batch_iteration: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class WarmupLrParams(Section):
    """From ``warmup_min_lr`` to ``warmup_max_lr``, then constant."""

    warmup_min_lr: NonNegative | list[NonNegative] = 0.0
    """First learning rate. ``"auto"`` is 0."""
    warmup_max_lr: NonNegative | list[NonNegative] | None = None
    """Last learning rate. Default, and ``"auto"``: the optimizer's ``lr``."""
    warmup_num_steps: Steps = 1000
    """Steps of warm-up. ``"auto"`` is 1, the least that DeepSpeed takes: the Trainer's default is no warm-up."""
    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warm-up."""
    last_batch_iteration: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class WarmupDecayLrParams(Section):
    """Warm-up, then linear decay to 0 at ``total_num_steps``."""

    total_num_steps: Steps
    """Steps of the whole training. Required. ``"auto"`` is computed from the data and the ``dsframe`` section."""
    warmup_min_lr: NonNegative | list[NonNegative] = 0.0
    """First learning rate. ``"auto"`` is 0."""
    warmup_max_lr: NonNegative | list[NonNegative] = 1e-3
    """Learning rate after warm-up. ``"auto"`` is the optimizer's ``lr``."""
    warmup_num_steps: Steps = 1000
    """Steps of warm-up. ``"auto"`` is 1."""
    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warm-up."""
    last_batch_iteration: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""


class WarmupCosineLrParams(Section):
    """Warm-up, then cosine decay. Ratios of the optimizer's ``lr``."""

    total_num_steps: Steps
    """Steps of the whole training. Required. ``"auto"`` is computed from the data and the ``dsframe`` section."""
    warmup_min_ratio: NonNegative = 0.0
    """First learning rate as a ratio."""
    warmup_num_steps: Steps = 1000
    """Steps of warm-up. ``"auto"`` is 1."""
    cos_min_ratio: NonNegative = 1e-4
    """Last learning rate as a ratio."""
    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warm-up."""
    last_batch_iteration: int = -1
    """Always -1, the start: a training that goes on takes the checkpoint's step."""
