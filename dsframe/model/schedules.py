"""Learning-rate schedules: DeepSpeed's warm-ups, computed only from the step number, and torch's.

Every engine, including DeepSpeed, takes its learning rate from here, so that a file has one schedule on all engines and
a resumed run needs only its step number. Formulas: DeepSpeed 0.19.8's (``runtime/lr_schedules.py``); a test compares
them with its classes.

``updates`` counts applied optimizer updates; DeepSpeed's ``last_batch_iteration`` is ``updates - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dsframe.config.schema.parameters import HF_SCHEDULERS
from dsframe.errors import ConfigError, Problem, TaskError
from dsframe.model import hf_schedules
from dsframe.model.followers import Plateau
from dsframe.model.rates import Rates, Schedule

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from dsframe.config.value import Config
    from dsframe.tasks.task import Task


def constant(base: float) -> Schedule:
    """Returns the constant learning rate ``base``."""
    return lambda updates: Rates(base)


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """Returns ``schedule`` with its learning rates multiplied by ``factor``."""

    def at(updates: int) -> Rates:
        rates = schedule(updates)
        return replace(rates, learning_rate=rates.learning_rate * factor)

    return at


def _ramp(last: int, steps: int, form: str) -> float:
    """Returns the warm-up factor: 0 at ``last`` = 0, 1 at ``last`` = steps (linear) or steps - 1 (log)."""
    return math.log(last + 1) / math.log(steps) if form == "log" else last / steps


def warmup(
    base: float,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    total_num_steps: int | None = None,
) -> Schedule:
    """Returns WarmupLR; with ``total_num_steps`` WarmupDecayLR, which then falls linearly to 0 at that step."""
    highest = base if warmup_max_lr is None else warmup_max_lr
    steps = max(2, warmup_num_steps)

    def at(updates: int) -> Rates:
        last = updates - 1
        if last < 0:
            return Rates(warmup_min_lr)
        factor = 1.0
        if last < steps:
            factor = _ramp(last, steps, warmup_type)
        elif total_num_steps is not None:
            factor = max(0.0, (total_num_steps - last) / max(1.0, total_num_steps - steps))
        return Rates(warmup_min_lr + (highest - warmup_min_lr) * factor)

    return at


def warmup_decay(base: float, *, total_num_steps: int, warmup_max_lr: float = 0.001, **ramp: Any) -> Schedule:
    """Returns WarmupDecayLR. DeepSpeed's default of ``warmup_max_lr`` is 0.001, not the optimizer's learning rate."""
    return warmup(base, total_num_steps=total_num_steps, warmup_max_lr=warmup_max_lr, **ramp)


def warmup_cosine(
    base: float,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> Schedule:
    """Returns WarmupCosineLR, whose ratios apply to the optimizer's learning rate."""
    steps = max(2, warmup_num_steps)

    def at(updates: int) -> Rates:
        last = updates - 1
        if last < 0:
            return Rates(0.0)
        if last < steps:
            return Rates(base * (warmup_min_ratio + (1.0 - warmup_min_ratio) * _ramp(last, steps, warmup_type)))
        progress = min(1.0, (last - steps + 1) / max(1, total_num_steps - steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return Rates(base * max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * cosine))

    return at


class TorchSchedule:
    """A schedule of ``torch.optim.lr_scheduler``, run with a dummy optimizer. ZeRO's optimizers are not
    ``torch.optim.Optimizer``, and these classes refuse them (measured, deepspeed 0.19.8); reading the dummy's learning
    rate works on every engine. Stepping is sequential: a resumed run replays the steps."""

    def __init__(self, name: str, base: float, params: Mapping[str, Any]) -> None:
        """Raises ConfigError if torch has no such schedule, or if it needs more than a step number."""
        self._name, self._base, self._params = name, base, params
        self._restart()

    def _restart(self) -> None:
        import torch

        self._optimizer = torch.optim.AdamW([torch.zeros(1)], lr=self._base)
        self._scheduler = _of_torch(self._name, self._params, self._optimizer)
        self._updates = 0

    def __call__(self, updates: int) -> Rates:
        """Returns the rates after ``updates``; fast if called in order."""
        if updates < self._updates:
            self._restart()
        while self._updates < updates:
            self._optimizer.step()
            self._scheduler.step()
            self._updates += 1
        group = self._optimizer.param_groups[0]
        # OneCycleLR and CyclicLR, unless configured otherwise.
        cycles = getattr(self._scheduler, "cycle_momentum", False)
        return Rates(float(group["lr"]), float(group["betas"][0]) if cycles else None)


def _of_torch(name: str, params: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """Returns torch's schedule of this name, including inner schedules and functions (``module:function``)."""
    from torch.optim import lr_scheduler

    cls: Any = getattr(lr_scheduler, name, None)
    if not isinstance(cls, type) or name == "ReduceLROnPlateau":
        raise _config_error(
            "type", f"{name!r} is neither a DeepSpeed schedule nor one of torch's that depends only on the step"
        )
    arguments = dict(params)
    if "lr_lambda" in arguments:
        module, _, function = str(arguments["lr_lambda"]).partition(":")
        arguments["lr_lambda"] = getattr(import_module(module), function)
    if "schedulers" in arguments:
        arguments["schedulers"] = [
            _of_torch(part["type"], part.get("params", {}), optimizer) for part in arguments["schedulers"]
        ]
    scheduler: LRScheduler = cls(**arguments) if name == "ChainedScheduler" else cls(optimizer, **arguments)
    return scheduler


_SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "WarmupLR": warmup,
    "WarmupDecayLR": warmup_decay,
    "WarmupCosineLR": warmup_cosine,
}


def build(name: str | None, base: float, params: Mapping[str, Any]) -> Schedule:
    """Returns the schedule of the file's ``scheduler`` section (``name`` None: constant), for the optimizer's learning
    rate ``base``. Raises ConfigError if the name or a parameter is unknown."""
    if name is None:
        return constant(base)
    if name == "ReduceLROnPlateau":
        return Plateau(base, params)
    try:
        if name in HF_SCHEDULERS:
            factor = hf_schedules.factor(name, base, params)
            return lambda updates: Rates(base * factor(updates))
        if name not in _SCHEDULES:
            return TorchSchedule(name, base, params)
        # A list has a rate for each parameter group; there is one group.
        single = {key: value[0] if isinstance(value, list) else value for key, value in params.items()}
        single.pop("last_batch_iteration", None)
        return _SCHEDULES[name](base, **single)
    except (TypeError, ValueError, AttributeError, ImportError, ZeroDivisionError) as error:
        raise _config_error("params", f"{name}: {error}") from None


def _config_error(key: str, message: str) -> ConfigError:
    return ConfigError([Problem("error", f"scheduler.{key}", message, code="value")])


def of_task(task: Task, base: float) -> Schedule:
    """Returns the schedule of :meth:`dsframe.Task.schedule` for the optimizer's learning rate ``base``."""

    def at(updates: int) -> Rates:
        factor = task.schedule(updates)
        if not isinstance(factor, (int, float)) or not math.isfinite(factor):
            raise TaskError(
                f"{type(task).__name__}.schedule({updates}) returned {factor!r}; return a factor of the optimizer's rate"
            )
        return Rates(base * factor)

    return at


def with_weight_decay(schedule: Schedule, task: Task) -> Schedule:
    """Returns ``schedule`` with the weight decay of :meth:`dsframe.Task.weight_decay`."""

    def at(updates: int) -> Rates:
        decay = task.weight_decay(updates)
        if not isinstance(decay, (int, float)) or not 0.0 <= decay < math.inf:
            raise TaskError(
                f"{type(task).__name__}.weight_decay({updates}) returned {decay!r}; return a number from 0 on"
            )
        return replace(schedule(updates), weight_decay=float(decay))

    return at


def notes(config: Config, schedule: Schedule, total_steps: int, done: int = 0) -> Iterator[str]:
    """Yields warnings about a schedule in a training of ``total_steps`` updates, of which ``done`` are complete. Raises
    ConfigError if the schedule is for fewer updates and has no rate after them."""
    if total_steps > 1 and not done and schedule(0).learning_rate == schedule(1).learning_rate == 0.0:
        yield "the first two updates have the learning rate 0: DeepSpeed's warm-up counts so"
    scheduler = config.deepspeed.scheduler
    params = scheduler.params if scheduler else {}
    if scheduler and "OneCycleLR" in f"{scheduler.type} {params}":  # of torch's schedules only this one ends
        try:
            schedule(total_steps)
        except ValueError:
            raise _config_error(
                "params", f"OneCycleLR ends before the training of {total_steps:,} updates; raise total_steps"
            ) from None
    usual = {"warmup_num_steps": 1000} if scheduler and scheduler.type.startswith("Warmup") else {}
    for key, steps in (usual | params).items():
        if key in ("warmup_num_steps", "num_warmup_steps") and steps >= total_steps:
            yield f"the training ends in the schedule's warm-up: that takes {steps:,} updates ({key})"
    for key in ("total_num_steps", "num_training_steps", "T_max"):
        if isinstance(params.get(key), int) and params[key] != total_steps:
            last = f"the last has the rate {schedule(total_steps - 1).learning_rate:.3g}; write {key} {total_steps} to end with it"
            yield f"the schedule is for {params[key]:,} updates ({key}), the training has {total_steps:,}: {last}"


def planned(config: Config, task: Task, base: float) -> Schedule:
    """Returns the schedule of the file or the task for the optimizer's learning rate ``base``. Raises TaskError if both
    have one, or if the task's does not return a number."""
    scheduler = config.deepspeed.scheduler
    schedule = build(scheduler.type, base, scheduler.params) if scheduler else constant(base)
    if task.schedule(0) is not None:
        if scheduler:
            raise TaskError(
                f'{type(task).__name__}.schedule gives the rate, and the file has "scheduler" too; remove one of them'
            )
        schedule = of_task(task, base)
    if task.weight_decay(0) is not None:
        if isinstance(schedule, Plateau):
            raise TaskError(
                f"{type(task).__name__}.weight_decay is not possible with ReduceLROnPlateau; remove one of them"
            )
        schedule = with_weight_decay(schedule, task)
    return schedule
