"""A model of a task that is the moving average of another one: the teacher of BYOL, MoCo or DINO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsframe.errors import TaskError


@dataclass(frozen=True)
class AverageOf:
    """In the place of a function in ``Task.models``: ``{"student": Net, "teacher": dsframe.average_of("student", 0.996)}``."""

    model: str
    """Name of the model that is averaged. Both begin with the same weights."""
    momentum: float | Callable[[int], float] = 0.996
    """Share of the old average that stays at an update, from 0 to 1; or a function of the updates of the model, counted from 1."""

    def momentum_at(self, update: int) -> float:
        """Returns the share that stays at this update. Raises TaskError for a number outside of 0 to 1."""
        momentum = float(self.momentum(update) if callable(self.momentum) else self.momentum)
        if not 0.0 <= momentum <= 1.0:
            raise TaskError(f'average_of("{self.model}"): a momentum of {momentum} at update {update}; give 0 to 1')
        return momentum

    def __str__(self) -> str:
        momentum = "by a function" if callable(self.momentum) else self.momentum
        return f"average of {self.model}, momentum {momentum}"


average_of = AverageOf
