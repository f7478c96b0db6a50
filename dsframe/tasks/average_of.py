"""Declares a model of a task as the moving average of another one: the teacher of BYOL, MoCo or DINO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsframe.errors import TaskError


@dataclass(frozen=True)
class AverageOf:
    """An entry of ``Task.models``: ``{"student": Net, "teacher": dsframe.average_of("student", 0.996)}``."""

    model: str
    """Name of the model that is averaged. Both start with the same weights."""
    momentum: float | Callable[[int], float] = 0.996
    """Weight of the old average in an update, 0 to 1; or a function of the number of the model's updates, counted from
    1."""

    def momentum_at(self, update: int) -> float:
        """Returns the momentum of this update. Raises TaskError if it is not within 0 to 1."""
        momentum = float(self.momentum(update) if callable(self.momentum) else self.momentum)
        if not 0.0 <= momentum <= 1.0:
            raise TaskError(f'average_of("{self.model}"): a momentum of {momentum} at update {update}; give 0 to 1')
        return momentum

    def __str__(self) -> str:
        momentum = "by a function" if callable(self.momentum) else self.momentum
        return f"average of {self.model}, momentum {momentum}"


average_of = AverageOf
