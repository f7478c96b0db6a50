"""What follows the evaluations of a training: early stopping.

Evaluations are the same on every rank, so all ranks decide the same. Every checkpoint has the state, a few numbers: a run that goes
on does what the run that was not interrupted does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsframe.config.schema.settings_training import Stop
from dsframe.errors import CheckpointError, TaskError


class EarlyStop:
    """Training ends where the metric no longer gets better: counts evaluations without a better value."""

    key = "dsframe.stop.metric"
    """The key of the file that names the metric."""

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

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes in the evaluation after ``step``. A value that is not finite is no better one. Raises TaskError where there is no
        such metric."""
        if self.metric not in metrics:
            known = ", ".join(metrics) or "none"
            raise TaskError(f"{self.key}: no metric {self.metric!r} in the evaluation; it has {known}")
        value = self._sign * metrics[self.metric]
        if math.isfinite(value) and value > self._best + self._wanted.min_delta:
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1
        self.observed = step

    def state(self) -> dict[str, Any]:
        """Everything that decides the end, as JSON has it: infinite is null."""
        return {
            "metric": self._wanted.metric,
            "best": self._best if math.isfinite(self._best) else None,
            "best_step": self._best_step,
            "waited": self._waited,
            "observed": self.observed,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from :meth:`state`; of another metric nothing is taken. Raises CheckpointError for anything else."""
        counts: list[Any] = [state.get(key) for key in ("best_step", "waited", "observed")]
        counted = all(type(count) is int and count >= 0 for count in counts)
        if state.keys() != self.state().keys() or not counted or not _is_number(state["best"]):
            raise CheckpointError(f"the checkpoint's stop is no state of early stopping: {dict(state)}")
        if state["metric"] == self._wanted.metric:
            self._best = -math.inf if state["best"] is None else float(state["best"])
            self._best_step, self._waited, self.observed = map(int, counts)


def _is_number(value: Any) -> bool:
    """True for numbers of JSON, and for null, which stands for infinity."""
    return type(value) in (int, float, type(None))
