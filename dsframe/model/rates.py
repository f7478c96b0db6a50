"""The learning rate and momentum of one update, and how they are written to an optimizer's parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dsframe.errors import TaskError


@dataclass(frozen=True)
class Rates:
    """The values that a schedule sets for one update."""

    learning_rate: float
    momentum: float | None = None
    """Adam's first beta, or SGD's momentum, if the schedule cycles it."""

    weight_decay: float | None = None
    """For groups with a weight decay, if the task schedules it."""

    def apply(self, parameter_groups: list[dict[str, Any]]) -> None:
        """Writes the values to torch's ``param_groups``, the learning rate times each group's ``lr_scale``. Raises
        TaskError if something else has set a learning rate since the last update."""
        for group in parameter_groups:
            now = group.get("lr")
            if group.get("lr_set", now) != now:
                raise TaskError(
                    f"something else has set the learning rate to {now:g} (a scheduler of torch's, a hook, the optimizer's "
                    "step), and dsframe sets it before each update: give its factor by schedule(updates) in the task"
                )
            group["lr_set"] = group["lr"] = self.learning_rate * group.get("lr_scale", 1.0)
            if self.momentum is not None and "betas" in group:
                group["betas"] = (self.momentum, group["betas"][1])
            elif self.momentum is not None and "momentum" in group:
                group["momentum"] = self.momentum
            # The weight decay may be 0 for some updates.
            if self.weight_decay is not None and group.setdefault("decays", bool(group.get("weight_decay"))):
                group["weight_decay"] = self.weight_decay


Schedule = Callable[[int], Rates]
"""``schedule(updates)`` returns the rates of the next update, after ``updates`` have been applied."""


def keep_ratios(parameter_groups: list[dict[str, Any]], base: float) -> None:
    """Sets the ``lr_scale`` of groups that an optimizer created itself: their learning rate relative to ``base``."""
    for group in parameter_groups:
        known = base and group["lr"] is not None
        group.setdefault("lr_scale", float(group["lr"]) / base if known else 1.0)
