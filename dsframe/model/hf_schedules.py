"""Schedules of Hugging Face's Trainer, by its functions, and nanoGPT's, as factors of the learning rate."""

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
    if name == "nanogpt":
        return _nanogpt(base, **params)
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


def _nanogpt(base: float, lr_decay_iters: int, min_lr: float, warmup_iters: int = 0) -> Factor:
    """Returns warm-up from above 0, then cosine decay to ``min_lr``. Source: nanoGPT's ``train.py``, ``get_lr``."""

    def at(updates: int) -> float:
        if updates < warmup_iters:
            return (updates + 1) / (warmup_iters + 1)
        progress = min(1.0, (updates - warmup_iters) / max(1, lr_decay_iters - warmup_iters))
        return (min_lr + (1.0 + math.cos(math.pi * progress)) / 2 * (base - min_lr)) / base

    return at
