"""ReduceLROnPlateau: a rate that falls where a metric of the evaluation no longer gets better.

The only schedule that the step number does not decide. Its state is a few numbers, the same on every rank because evaluations
are, and every checkpoint has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dsframe.errors import CheckpointError, ConfigError, Problem, TaskError
from dsframe.model.schedules import Rates

_KEPT = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class Plateau:
    """torch's class beside a stand-in optimizer, as a :data:`dsframe.model.schedules.Schedule`."""

    def __init__(self, base: float, params: Mapping[str, Any]) -> None:
        """``params``: torch's arguments, and ``metric``. Raises ConfigError for what torch refuses."""
        arguments = dict(params)
        self.metric = str(arguments.pop("metric", "loss"))
        self.observed = 0
        """The step of the last evaluation that was looked at."""
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=base)
        try:
            self._torchs = ReduceLROnPlateau(self._optimizer, **arguments)
        except (TypeError, ValueError) as error:
            problem = Problem("error", "scheduler.params", f"ReduceLROnPlateau: {error}", code="value")
            raise ConfigError([problem]) from None

    def __call__(self, updates: int) -> Rates:
        """The rate that the evaluations so far have left."""
        return Rates(float(self._optimizer.param_groups[0]["lr"]))

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raises TaskError where an evaluation has no such metric."""
        if self.metric not in metrics:
            known = ", ".join(metrics) or "none"
            raise TaskError(f"scheduler.params.metric: no metric {self.metric!r} in the evaluation; it has {known}")

    def observe(self, step: int, metrics: Mapping[str, float]) -> str:
        """Takes in the evaluation after ``step``. Returns what is to be said where the rate falls."""
        self.check(metrics)
        before = self(0).learning_rate
        self._torchs.step(metrics[self.metric])
        self.observed, now = step, self(0).learning_rate
        return f"{self.metric} no longer gets better: learning rate {before:g} -> {now:g}" if now != before else ""

    def state(self) -> dict[str, float | None]:
        """Everything that decides the rates to come, as JSON has it: infinite is null."""
        values = {key: float(getattr(self._torchs, key)) for key in _KEPT}
        values |= {"rate": self(0).learning_rate, "observed": self.observed}
        return {key: value if math.isfinite(value) else None for key, value in values.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`. Raises CheckpointError for anything else."""
        if state.keys() != self.state().keys() or not all(
            type(one) in (int, float, type(None)) for one in state.values()
        ):
            raise CheckpointError(f"the checkpoint's schedule is no ReduceLROnPlateau: {dict(state)}")
        worst = math.inf if self._torchs.mode == "min" else -math.inf
        self._torchs.best = worst if state["best"] is None else float(state["best"])
        for key in _KEPT[1:]:
            setattr(self._torchs, key, int(state[key]))
        self._optimizer.param_groups[0]["lr"], self.observed = float(state["rate"]), int(state["observed"])
