"""Early stopping and ReduceLROnPlateau, which follow the metrics of evaluations. Evaluations are the same on every
rank, so all ranks decide the same. Every checkpoint contains the state, a few numbers, so that a resumed run continues
like an uninterrupted one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dsframe.config.schema.settings_training import Stop
from dsframe.errors import CheckpointError, ConfigError, Problem, TaskError
from dsframe.model.rates import Rates
from dsframe.results import Metrics
from dsframe.text import Json


class Follower:
    """Follows one metric of each evaluation."""

    key: str
    """The key of the file that names the metric."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.observed = 0
        """The step of the last evaluation that was observed."""

    def check(self, metrics: Metrics) -> None:
        """Raises TaskError if an evaluation does not have the metric."""
        if self.metric not in metrics:
            known = ", ".join(metrics) or "none"
            raise TaskError(f"{self.key}: no metric {self.metric!r} in the evaluation; it has {known}")


class EarlyStop(Follower):
    """Ends training if the metric stops improving. Counts evaluations without a better value."""

    key = "dsframe.stop.metric"

    def __init__(self, wanted: Stop) -> None:
        metric, _, direction = wanted.metric.partition(":")
        super().__init__(metric)
        self._wanted, self._sign = wanted, 1.0 if direction == "max" else -1.0
        self._best, self._best_step, self._waited = -math.inf, 0, 0

    @property
    def reached(self) -> str:
        """Why training ends, or ""."""
        if self._waited < self._wanted.patience:
            return ""
        best = f"{self._sign * self._best:.6g} after step {self._best_step:,}" if self._best_step else "no finite value"
        return f"{self.metric} is not better in {self._waited} evaluation(s); the best was {best}"

    def observe(self, step: int, metrics: Metrics) -> str:
        """Observes the evaluation after ``step``. A value that is not finite is not an improvement. Returns ""."""
        self.check(metrics)
        value = self._sign * metrics[self.metric]
        if math.isfinite(value) and value > self._best + self._wanted.min_delta:
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1
        self.observed = step
        return ""

    def state(self) -> Json:
        """Returns the complete state as JSON values; infinity is null."""
        return {
            "metric": self._wanted.metric,
            "best": self._best if math.isfinite(self._best) else None,
            "best_step": self._best_step,
            "waited": self._waited,
            "observed": self.observed,
        }

    def restore(self, state: Json) -> None:
        """Restores :meth:`state`; ignores that of another metric. Raises CheckpointError if it is invalid."""
        counts: list[Any] = [state.get(key) for key in ("best_step", "waited", "observed")]
        counted = all(type(count) is int and count >= 0 for count in counts)
        if state.keys() != self.state().keys() or not counted or not _is_number(state["best"]):
            raise CheckpointError(f"the checkpoint's stop is not a state of early stopping: {dict(state)}")
        if state["metric"] == self._wanted.metric:
            self._best = -math.inf if state["best"] is None else float(state["best"])
            self._best_step, self._waited, self.observed = map(int, counts)


def _is_number(value: Any) -> bool:
    """Returns True for JSON numbers, and for null, which represents infinity."""
    return type(value) in (int, float, type(None))


_KEPT = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")


class Plateau(Follower):
    """A learning rate that falls if the metric stops improving: the only schedule that depends on more than the step.
    Runs torch's class with a dummy optimizer, as a :data:`dsframe.model.rates.Schedule`."""

    key = "scheduler.params.metric"

    def __init__(self, base: float, params: Mapping[str, Any]) -> None:
        """``params``: torch's arguments, and ``metric``. Raises ConfigError if torch refuses them."""
        arguments = dict(params)
        super().__init__(str(arguments.pop("metric", "loss")))
        self._optimizer = torch.optim.SGD([torch.zeros(1)], lr=base)
        try:
            self._torchs = ReduceLROnPlateau(self._optimizer, **arguments)
        except (TypeError, ValueError) as error:
            problem = Problem("error", "scheduler.params", f"ReduceLROnPlateau: {error}", code="value")
            raise ConfigError([problem]) from None
        self._watched, self._base = f"{self.metric}:{self._torchs.mode}", base

    def __call__(self, updates: int) -> Rates:
        """Returns the current learning rate."""
        return Rates(float(self._optimizer.param_groups[0]["lr"]))

    def observe(self, step: int, metrics: Metrics) -> str:
        """Observes the evaluation after ``step``. Returns a message if the learning rate falls."""
        self.check(metrics)
        before = self(0).learning_rate
        self._torchs.step(metrics[self.metric])
        self.observed, now = step, self(0).learning_rate
        return f"{self.metric} no longer gets better: learning rate {before:g} -> {now:g}" if now != before else ""

    def state(self) -> Json:
        """Returns the complete state as JSON values; infinity is null."""
        values = {key: float(getattr(self._torchs, key)) for key in _KEPT}
        values |= {"rate": self(0).learning_rate, "observed": self.observed, "base": self._base}
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        return {"metric": self._watched, **finite}

    def restore(self, state: Json) -> None:
        """Restores :meth:`state`; of another metric only the learning rate. Raises CheckpointError if it is invalid."""
        state = {"metric": self._watched, "base": self._base, **state}  # missing in older checkpoints
        if state.keys() != self.state().keys() or not all(_is_number(state[key]) for key in state if key != "metric"):
            raise CheckpointError(f"the checkpoint's schedule is not that of ReduceLROnPlateau: {dict(state)}")
        rate = float(state["rate"]) * (self._base / state["base"]) if state["base"] else self._base
        self._optimizer.param_groups[0]["lr"] = rate
        if state["metric"] != self._watched:
            return
        self._torchs.best = self._torchs.mode_worse if state["best"] is None else float(state["best"])
        for key in _KEPT[1:]:
            setattr(self._torchs, key, int(state[key]))
        self.observed = int(state["observed"])
