"""Decides when checkpoints are saved during training."""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from dsframe.checkpoint.saver import Saver
from dsframe.engine import StepResult
from dsframe.errors import StoppedError
from dsframe.events import Events, Listener, Training, UserHooks
from dsframe.training.finite import FiniteCheck


class Checkpoints(Listener):
    """Saves after the steps configured in the file, and when a signal asks all ranks to stop."""

    def __init__(self, saver: Saver, events: Events, finite: FiniteCheck, hooks: UserHooks) -> None:
        self._saver, self._events, self._finite, self._hooks = saver, events, finite, hooks

    def on_step(self, training: Training, result: StepResult) -> None:
        """**Collective** if this step is saved."""
        self.save_if_due(training)

    def save_if_due(self, training: Training) -> None:
        """**Collective** if a checkpoint is due."""
        if self._saver.due(training.step, training.last_step):
            self.save(training)

    def save(self, training: Training) -> None:
        """**Collective.** Saves, unless this step is already saved. A signal does not interrupt saving. Raises
        CheckpointError, and TrainingError if the loss is not finite."""
        step = training.step
        if step == self._saver.saved_step:
            return
        assert training.stop_request is not None
        with training.stop_request.saving():
            self._finite.check_before_save(training)
            finish_steps(training)
            logged = training.schedule.logs(step) and math.isfinite(training.loss)
            seconds = self._saver.save(
                step, loss=training.loss if logged else None, evaluation=training.current_metrics()
            )
            training.pause(seconds)
            if self._hooks.listens("on_checkpoint") and not self._saver.asynchronous:
                self._saver.settle()  # a hook may copy the checkpoint elsewhere
            self._events.emit("on_checkpoint", training, self._saver.path(step))

    def save_and_stop(self, training: Training) -> NoReturn:
        """**Collective.** Saves when a signal has asked all ranks to stop, then raises StoppedError."""
        stop_request = training.stop_request
        assert stop_request is not None
        name = stop_request.name or "a signal to another rank"
        with stop_request.saving():
            self.save(training)
            self._saver.settle()
        self._events.emit("on_finish", training)
        raise StoppedError(
            f"stopped after step {training.step}{f' by {name}' if name != 'SIGUSR1' else ''}; continue with --resume auto"
        )

    def add_evaluation(self, training: Training) -> None:
        """**Collective.** Adds the metrics of an evaluation to the checkpoint that was saved before it."""
        if training.step == self._saver.saved_step:
            self._saver.rate(training.step, training.current_metrics())

    def settle(self) -> None:
        """**Collective.** Waits for a checkpoint that is being written in the background."""
        self._saver.settle()

    @property
    def failed(self) -> bool:
        """True if a running save is known to have failed on this rank."""
        return self._saver.failed


def finish_steps(training: Training) -> None:
    """Waits until the GPU has finished all queued steps, whose time belongs to the training rate."""
    device = training.engine.plan.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
