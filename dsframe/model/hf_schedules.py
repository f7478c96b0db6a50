"""The schedules of Hugging Face's Trainer, and nanoGPT's, as factors of the optimizer's rate.

Source: transformers 5.23, ``optimization.py``, and nanoGPT's ``train.py`` (``get_lr``). A test compares the first with
transformers' own, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Factor = Callable[[int], float]
"""``factor(updates)`` of the next update, after ``updates`` have been applied."""


def _warming(warmup: int, after: Factor) -> Factor:
    """Returns a straight line from 0 over ``warmup`` updates, then ``after``."""
    return lambda updates: updates / max(1, warmup) if updates < warmup else after(updates)


def _progress(updates: int, warmup: int, total: int) -> float:
    return (updates - warmup) / max(1, total - warmup)


def constant_with_warmup(base: float, num_warmup_steps: int = 0) -> Factor:
    """To the optimizer's rate, which stays."""
    return _warming(num_warmup_steps, lambda updates: 1.0)


def linear(base: float, num_training_steps: int, num_warmup_steps: int = 0) -> Factor:
    """Down to 0 in a straight line."""
    return _warming(
        num_warmup_steps, lambda updates: max(0.0, 1.0 - _progress(updates, num_warmup_steps, num_training_steps))
    )


def cosine(base: float, num_training_steps: int, num_warmup_steps: int = 0, num_cycles: float = 0.5) -> Factor:
    """Down to 0 as a cosine."""
    return cosine_with_min_lr(base, num_training_steps, num_warmup_steps, num_cycles, min_lr_rate=0.0)


def cosine_with_restarts(
    base: float, num_training_steps: int, num_warmup_steps: int = 0, num_cycles: int = 1
) -> Factor:
    """Down to 0 as a cosine, again and again."""

    def at(updates: int) -> float:
        progress = _progress(updates, num_warmup_steps, num_training_steps)
        return 0.0 if progress >= 1.0 else (1.0 + math.cos(math.pi * (num_cycles * progress % 1.0))) / 2

    return _warming(num_warmup_steps, at)


def cosine_with_min_lr(
    base: float,
    num_training_steps: int,
    num_warmup_steps: int = 0,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> Factor:
    """Down to ``min_lr``, or to ``min_lr_rate`` times the optimizer's rate, as a cosine. Raises TypeError for none or both."""
    if (min_lr is None) == (min_lr_rate is None):
        raise TypeError("write one of min_lr and min_lr_rate")
    lowest = min_lr_rate if min_lr is None else min_lr / base
    assert lowest is not None

    def at(updates: int) -> float:
        wave = math.cos(2.0 * math.pi * num_cycles * _progress(updates, num_warmup_steps, num_training_steps))
        return max(0.0, (1.0 + wave) / 2 * (1.0 - lowest) + lowest)

    return _warming(num_warmup_steps, at)


def polynomial(
    base: float, num_training_steps: int, num_warmup_steps: int = 0, lr_end: float = 1e-7, power: float = 1.0
) -> Factor:
    """Down to the rate ``lr_end``."""

    def at(updates: int) -> float:
        left = max(0.0, 1.0 - _progress(updates, num_warmup_steps, num_training_steps))
        return ((base - lr_end) * math.pow(left, power) + lr_end) / base

    return _warming(num_warmup_steps, at)


def warmup_stable_decay(
    base: float,
    num_warmup_steps: int,
    num_decay_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    **shapes: str,
) -> Factor:
    """Up, along, and down in the last ``num_decay_steps``. ``shapes``: ``warmup_type`` and ``decay_type``."""
    falls = num_training_steps - num_decay_steps

    def at(updates: int) -> float:
        if updates < num_warmup_steps:
            height = _height(shapes.get("warmup_type", "linear"), 1.0 - updates / max(1, num_warmup_steps), 0.5)
        elif updates < falls:
            return 1.0
        elif updates < num_training_steps:
            height = _height(
                shapes.get("decay_type", "cosine"), (updates - falls) / max(1, num_decay_steps), num_cycles
            )
        else:
            return min_lr_ratio
        return max(0.0, height * (1.0 - min_lr_ratio) + min_lr_ratio)

    return at


def _height(kind: str, down: float, cycles: float) -> float:
    """Height of a slope, 1 at its top, where ``down`` is 0; the way up is the way down the other way round."""
    if kind == "linear":
        return 1.0 - down
    return (1.0 + math.cos(math.pi * cycles * 2.0 * down)) / 2 if kind == "cosine" else 1.0 - math.sqrt(down)


def nanogpt(base: float, lr_decay_iters: int, min_lr: float, warmup_iters: int = 0) -> Factor:
    """Up from above 0, down as a cosine to the rate ``min_lr``."""

    def at(updates: int) -> float:
        if updates < warmup_iters:
            return (updates + 1) / (warmup_iters + 1)
        wave = math.cos(math.pi * min(1.0, _progress(updates, warmup_iters, lr_decay_iters)))
        return (min_lr + (1.0 + wave) / 2 * (base - min_lr)) / base

    return at


FACTORS: dict[str, Callable[..., Factor]] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "cosine_with_min_lr": cosine_with_min_lr,
    "polynomial": polynomial,
    "constant": constant_with_warmup,
    "constant_with_warmup": constant_with_warmup,
    "warmup_stable_decay": warmup_stable_decay,
    "nanogpt": nanogpt,
}
"""The file's ``scheduler.type`` and what makes its factor of (the optimizer's rate, the file's params)."""
