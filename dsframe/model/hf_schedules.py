"""Schedules of Hugging Face's Trainer, computed by its functions, as factors of the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from dsframe.errors import ConfigError, Problem

Factor = Callable[[int], float]
"""``factor(updates)`` of the next update, after ``updates`` have been applied."""


def factor(name: str, base: float, params: Mapping[str, Any]) -> Factor:
    """Returns the schedule's factor of the optimizer's learning rate ``base``. Raises ConfigError if transformers is
    missing, TypeError and ValueError if the schedule does not accept ``params``."""
    try:
        from transformers import get_scheduler
    except ImportError as error:
        message, remedy = f"{name} needs the package transformers ({error})", "pip install 'dsframe[transformers]'"
        raise ConfigError([Problem("error", "scheduler.type", message, remedy, code="not-installed")]) from None
    others = dict(params)
    warmup, total = others.pop("num_warmup_steps", 0), others.pop("num_training_steps", None)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base)
    scheduler: Any = get_scheduler(name, optimizer, warmup, total, others)
    factors: list[Factor] = scheduler.lr_lambdas
    return partial(_at, factors[0])


def _at(theirs: Factor, updates: int) -> float:
    try:
        return theirs(updates)
    except ZeroDivisionError:  # polynomial, at the last step of a training that is all warm-up
        return theirs(updates + 1)
