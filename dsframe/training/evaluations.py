"""Decides when evaluations run during training, and applies their results."""

from __future__ import annotations

import time

from dsframe.engine import StepResult
from dsframe.events import Events, Listener, Training
from dsframe.training.checkpoints import Checkpoints, finish_steps
from dsframe.training.evaluation import Evaluation


class Evaluations(Listener):
    """Evaluates after the steps configured in the file, and may end training early."""

    def __init__(self, evaluation: Evaluation, events: Events, checkpoints: Checkpoints) -> None:
        self._evaluation, self._events, self._checkpoints = evaluation, events, checkpoints

    def on_step(self, training: Training, result: StepResult) -> None:
        """**Collective** if this step is evaluated."""
        if training.step in training.schedule.eval_steps:
            self.evaluate(training)
            self._end_early(training)

    def evaluate(self, training: Training) -> None:
        """**Collective.** Evaluates, and adds the metrics to this step's checkpoint. Raises StoppedError at a
        signal."""
        step, stop_request = training.step, training.stop_request
        assert stop_request is not None
        finish_steps(training)
        began = time.perf_counter()
        with stop_request.between_batches() as stops, training.progress.evaluation(self._evaluation.batches):
            metrics = self._evaluation.run(stops)
        training.pause(time.perf_counter() - began)
        if metrics is None:
            self._checkpoints.save_and_stop(training)
        training.metrics, training.evaluated_step = metrics, step
        for follower in training.engine.plan.followers.values():
            if step in training.schedule.regular and (line := follower.observe(step, metrics)):
                training.progress.say(f"step {step}: {line}")
        self._checkpoints.add_evaluation(training)
        self._events.emit("on_evaluation", training, metrics)

    def _end_early(self, training: Training) -> None:
        """**Collective** if early stopping was triggered. Saves the state then if the last step is to be saved."""
        early = training.engine.plan.stop
        if early is None or not early.reached or training.step == training.schedule.total_steps:
            return
        training.last_step = training.step
        training.progress.say(f"dsframe: training ends after step {training.step:,}: {early.reached}")
        self._checkpoints.save_if_due(training)
