"""What the first step shows of a run, before anything is saved."""

from __future__ import annotations

import time

from dsframe.checkpoint.saver import Saver
from dsframe.engine import StepResult
from dsframe.events import Listener, Training
from dsframe.host import phases
from dsframe.model.build import ON_RANKS
from dsframe.run_dir.record import Record
from dsframe.training.loss_kind import LossTrial


class FirstStep(Listener):
    """Judges the task's loss and the model's random numbers; rates count from here."""

    def __init__(self, trial: LossTrial, record: Record | None, saver: Saver) -> None:
        self._trial, self._record, self._saver = trial, record, saver
        self.ended = time.perf_counter()
        """When this process's first step had ended; before it, when the training began."""

    def on_step(self, training: Training, result: StepResult) -> None:
        """**Collective** after the first step. Raises TaskError where the loss is of another kind than
        the task says."""
        step = training.step
        if step != training.first_step:
            return
        built, progress = training.engine.built, training.progress
        if line := self._trial.judge(resumed=step > 1):
            progress.say(f"dsframe: this task's {line}")
        known = any(dependence.on_processes for dependence in built.depends)
        if built.draws and built.draws.found and not known:
            progress.say(f"dsframe: this model draws random numbers in training, others on each rank, {ON_RANKS}")
        self.ended = time.perf_counter()
        phases.done("first step")
        if self._record:
            self._record.started(phases.seconds())
        self._saver.prepare()
        progress.begin(step)
