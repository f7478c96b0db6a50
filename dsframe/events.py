"""The events of a training and the listeners that receive them, in the order of one list.

The loop (``dsframe.trainer``) makes optimizer steps and emits events. Everything else listens: log lines, the record,
checkpoints, evaluations, early stopping, users' hooks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dsframe.config.resolve import epochs
from dsframe.config.schema.base import Interval
from dsframe.engine import Engine, StepResult
from dsframe.hooks import Hooks, RunView
from dsframe.host import generators
from dsframe.results import Metrics, Summary

if TYPE_CHECKING:
    from dsframe.config.schema.settings import Settings
    from dsframe.data import Loader
    from dsframe.data.sampler import Sampler
    from dsframe.guard.signals import StopRequest
    from dsframe.run_dir.progress import Progress


@dataclass(frozen=True)
class RunSchedule:
    """Length of the training, and intervals of logging and evaluation, in steps."""

    total_steps: int
    log_every: Fraction
    eval_steps: frozenset[int]
    """Steps after which to evaluate, counted from 1."""
    regular: frozenset[int]
    """The evaluations at regular intervals, which a longer training has too. Schedules follow these only."""

    @staticmethod
    def of(settings: Settings, sampler: Sampler, *, evaluates: bool) -> RunSchedule:
        """Returns the schedule of the file: evaluations at regular steps or at each epoch's end, and always at the end."""
        total = settings.steps or sampler.total_steps(settings.epochs or 1)
        interval = settings.eval_every_steps or Interval(epochs=1)
        regular = frozenset[int]()
        if evaluates:
            every = epochs.steps(interval, sampler.epoch_steps)
            regular = frozenset(epochs.first(every, total // every))
        log_every = epochs.steps(settings.log_every_steps, sampler.epoch_steps)
        end = {total} if evaluates else set()
        return RunSchedule(total, log_every, regular | end, regular)

    def logs(self, step: int) -> bool:
        """True if ``step`` is logged: 1, 2, 5, 10, 20, 50 ... (errors show early), every ``log_every``-th, and the
        last."""
        early = str(step).rstrip("0") in ("1", "2", "5")
        return early or epochs.due(step, self.log_every) or step == self.total_steps


@dataclass
class Training:
    """State of a training. Listeners read it, and update the fields that they own."""

    engine: Engine
    loader: Loader
    schedule: RunSchedule
    progress: Progress
    first_step: int = 1
    """The first step of this process."""
    last_step: int = 0
    """The last step; less than the schedule's if the training ends early."""
    step: int = 0
    """Number of completed steps."""
    result: StepResult | None = None
    """Result of the last step of this process."""
    loss: float = math.nan
    """Loss of the last logged step, mean over the global batch."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the last evaluation."""
    evaluated_step: int = 0
    """Step after which the last evaluation ran."""
    skipped_steps: int = 0
    """Number of updates skipped because gradients were not finite."""
    paused_seconds: float = 0.0
    """Time excluded from the rate: evaluations and saves."""
    copy_model: Callable[[bool, bool], nn.Module | None] = lambda averages, all_ranks: None
    """**Collective.** Copies the running model to rank 0 or all ranks (``training.running_model``)."""
    stop_request: StopRequest | None = None
    """Signals that ask to stop."""

    def pause(self, seconds: float) -> None:
        """Excludes ``seconds`` from the training's rate."""
        self.paused_seconds += seconds
        self.progress.pause(seconds)

    def current_metrics(self) -> Metrics:
        """Returns the metrics of the evaluation after this step, or an empty mapping."""
        return self.metrics if self.step == self.evaluated_step else {}

    def view(self) -> RunView:
        """Returns the training as users' hooks see it."""
        plan, result = self.engine.plan, self.result
        return RunView(
            step=self.step,
            total_steps=self.schedule.total_steps,
            epoch=self.loader.sampler.epoch(self.step),
            learning_rate=result.learning_rate if result else 0.0,
            loss=result.loss.detach() if result else None,
            rank=plan.world.rank,
            world_size=plan.world.size,
            directory=plan.directory,
            copy_model=self.copy_model,
        )


@dataclass
class LogEntry:
    """Log entry of one step."""

    metrics: Metrics
    """``loss``, ``learning_rate``, and the terms that the task's loss returned with the loss: means over the global
    batch."""
    rate: float
    """Units (samples or tokens) per second; 0 after the first step, when it is not known yet."""
    details: dict[str, Any] = field(default_factory=dict)
    """Further values for the record."""


class Listener:
    """Base class: methods that are not overridden cost nothing. All ranks call every method in the same order, so it
    may communicate."""

    def on_start(self, training: Training) -> None:
        """Called before the first step of these processes, also on resume."""

    def on_step(self, training: Training, result: StepResult) -> None:
        """Called after each optimizer step."""

    def on_log(self, training: Training, entry: LogEntry) -> None:
        """Called after each logged step. A listener may add details for the listeners after it."""

    def on_evaluation_batch(self, training: Training, outputs: Any, targets: Any) -> None:
        """Called after each batch of an evaluation, on ranks that have samples in it and hold the outputs. Not
        collective."""

    def on_evaluation(self, training: Training, metrics: Metrics) -> None:
        """Called after each evaluation."""

    def on_checkpoint(self, training: Training, path: Path) -> None:
        """Called after each save. An asynchronous save may still be in progress."""

    def on_finish(self, training: Training) -> None:
        """Called after the last step, or after the step at which a signal stops all ranks."""

    def on_end(self, training: Training, summary: Summary) -> None:
        """Called after a training that reached its end."""


_EVENTS = tuple(name for name in vars(Listener) if name.startswith("on_"))


class Events:
    """The listeners of a training, called in the order in which they were added."""

    def __init__(self) -> None:
        self._methods: dict[str, list[Callable[..., None]]] = {name: [] for name in _EVENTS}

    def add(self, listener: Listener) -> None:
        """Appends a listener."""
        listener_class = type(listener)
        for name, methods in self._methods.items():
            if getattr(listener_class, name) is not getattr(Listener, name):
                methods.append(getattr(listener, name))

    def emit(self, event: str, training: Training, *values: Any) -> None:
        """Calls every listener that overrides the method named ``event``."""
        for method in self._methods[event]:
            method(training, *values)


_HOOK_EVENTS = tuple(event for event in _EVENTS if hasattr(Hooks, event))


_OTHER_STEPS = ("on_start", "on_log", "on_evaluation", "on_checkpoint")
"""A resumed run emits these after other steps, so what hooks draw must not advance the training's generators."""


class UserHooks(Listener):
    """Users' hooks as one listener. They may read weights, so the weight watch encloses each call."""

    def __init__(self, hooks: Sequence[Hooks]) -> None:
        self._methods: dict[str, list[Callable[..., None]]] = {}
        for name in _HOOK_EVENTS:
            self._methods[name] = [
                getattr(hook, name) for hook in hooks if getattr(type(hook), name) is not getattr(Hooks, name)
            ]

    def listens(self, event: str) -> bool:
        """Returns whether a hook overrides the method named ``event``."""
        return bool(self._methods[event])

    def _call(self, event: str, training: Training, *values: Any) -> None:
        methods = self._methods[event]
        if not methods:
            return
        view, watch = training.view(), training.engine.built.watch
        unmoved = generators.kept(training.engine.plan.device) if event in _OTHER_STEPS else nullcontext()
        with unmoved, watch.inside(always=True) if watch else nullcontext():
            for method in methods:
                method(view, *values)

    def on_start(self, training: Training) -> None:
        self._call("on_start", training)

    def on_step(self, training: Training, result: StepResult) -> None:
        self._call("on_step", training)

    def on_log(self, training: Training, entry: LogEntry) -> None:
        self._call("on_log", training, dict(entry.metrics))

    def on_evaluation_batch(self, training: Training, outputs: Any, targets: Any) -> None:
        self._call("on_evaluation_batch", training, outputs, targets)

    def on_evaluation(self, training: Training, metrics: Metrics) -> None:
        self._call("on_evaluation", training, dict(metrics))

    def on_checkpoint(self, training: Training, path: Path) -> None:
        self._call("on_checkpoint", training, path)

    def on_end(self, training: Training, summary: Summary) -> None:
        self._call("on_end", training, summary)
