"""Early stopping: training ends where a metric of the evaluation no longer gets better.

Evaluations are the same on every rank, so all ranks stop together. Every checkpoint has the state: a run that goes on stops where
the run that was not interrupted does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsframe.config.schema.settings_training import Stop
from dsframe.errors import CheckpointError, TaskError


class EarlyStop:
    """Counts evaluations without a better value."""

    def __init__(self, wanted: Stop) -> None:
        self.metric, _, direction = wanted.metric.partition(":")
        self.observed = 0
        """The step of the last evaluation that was looked at."""
        self._wanted, self._sign = wanted, 1.0 if direction == "max" else -1.0
        self._best, self._best_step, self._waited = -math.inf, 0, 0

    @property
    def reached(self) -> str:
        """Why training ends, or nothing."""
        if self._waited < self._wanted.patience:
            return ""
        best = f"{self._sign * self._best:.6g} after step {self._best_step:,}" if self._best_step else "no finite value"
        return f"{self.metric} is not better in {self._waited} evaluation(s); the best was {best}"

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raises TaskError where an evaluation has no such metric."""
        if self.metric not in metrics:
            known = ", ".join(metrics) or "none"
            raise TaskError(f"dsframe.stop.metric: no metric {self.metric!r} in the evaluation; it has {known}")

    def observe(self, step: int, metrics: Mapping[str, float]) -> str:
        """Takes in the evaluation after ``step``. A value that is not finite is no better one. Returns nothing to be said."""
        self.check(metrics)
        value = self._sign * metrics[self.metric]
        if math.isfinite(value) and value > self._best + self._wanted.min_delta:
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1
        self.observed = step
        return ""

    def state(self) -> dict[str, Any]:
        """Everything that decides the end, as JSON has it: infinite is null."""
        best = self._best if math.isfinite(self._best) else None
        return {
            "metric": self._wanted.metric,
            "best": best,
            "best_step": self._best_step,
            "waited": self._waited,
            "observed": self.observed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from :meth:`state`; of another metric nothing is taken over. Raises CheckpointError for anything else."""
        counts = [state.get(key) for key in ("best_step", "waited", "observed")]
        best = state.get("best")
        if state.keys() != self.state().keys() or not all(type(one) is int and one >= 0 for one in counts):
            raise CheckpointError(f"the checkpoint's stop is no state of early stopping: {dict(state)}")
        if type(best) not in (int, float, type(None)):
            raise CheckpointError(f"the checkpoint's stop is no state of early stopping: {dict(state)}")
        if state["metric"] != self._wanted.metric:
            return
        self._best = -math.inf if best is None else float(best)
        self._best_step, self._waited, self.observed = (int(one) for one in counts if one is not None)
