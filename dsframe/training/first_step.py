"""Checks task and model after the first step, before anything is saved, and the loss also after some later steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dsframe.checkpoint.saver import Saver
from dsframe.data.sample_draws import REMEDY
from dsframe.engine import StepResult
from dsframe.errors import TaskError
from dsframe.events import Listener, Training
from dsframe.host import phases
from dsframe.model.built import ON_RANKS
from dsframe.run_dir.record import Record
from dsframe.training.loss_kind import LossTrial
from dsframe.training.module_state import shortened
from dsframe.training.shared_buffers import but_statistics, differing

_REMEDY = "a resumed run begins with another. Make it of self.context.step, or write it in on_checkpoint and read it in on_start"


class FirstStep(Listener):
    """Checks the task's loss and the model's random numbers. Training rates count from the end of the first step."""

    def __init__(self, trial: LossTrial, record: Record | None, saver: Saver) -> None:
        self._trial, self._record, self._saver = trial, record, saver
        self._by_hooks, self._reported_unused = set[str](), False
        self.ended = time.perf_counter()
        """Time at which this process's first step ended; before that, the time at which training began."""

    def on_step(self, training: Training, result: StepResult) -> None:
        """**Collective.** Raises TaskError after the first step if the loss is of another kind than declared."""
        step, progress = training.step, training.progress
        self._report_unused(training, result.unused)
        if step != training.first_step:
            for line in filter(None, (self._trial.judge_again(), self._trial.branches.judge())):
                progress.say(f"dsframe: this task's {line}")
            self._say_later_draws(training)
            return
        self._by_hooks, differ = self._trial.changed_by_hooks(), differing(training.engine)
        looks = (self._trial.judge, self._trial.of_model.judge, self._trial.look_at_samples)
        for whose, look in zip(("task's ", "", "task's "), looks, strict=True):
            if line := look(differ, resumed=step > 1):
                progress.say(f"dsframe: this {whose}{line}")
        if names := ", ".join(sorted(self._by_hooks)):
            progress.say(
                f'dsframe: a hook changes {names}, which no checkpoint has: {_REMEDY}. For a mean teacher: "average_of" in models()'
            )
        if names := ", ".join(sorted(training.engine.plan.optimizer.kept_outside)):
            text = f"optimizer keeps {names} from one step to the next, and no checkpoint has it"
            if step > 1:
                raise TaskError(
                    f"this {text}: keep it in self.state[parameter], as a number, or a tensor in its format"
                )
            progress.say(f"dsframe: this {text}")
        self._say_draws(training)
        if names := but_statistics(training.engine, differ):
            progress.say(f"dsframe: this model's buffer {names} follows the samples of each rank, {ON_RANKS}")
        self.ended = time.perf_counter()
        phases.done("first step")
        if self._record:
            self._record.started(phases.seconds())
        self._saver.prepare()
        progress.begin(step)

    def on_checkpoint(self, training: Training, path: Path) -> None:
        """Reports attributes that have changed and that the checkpoint does not contain."""
        if names := ", ".join(sorted(self._trial.of_model.changed_later() - self._by_hooks)):
            training.progress.say(f"dsframe: {names} changed in training, and no checkpoint has it: {_REMEDY}")

    def _report_unused(self, training: Training, names: Sequence[str]) -> None:
        """Reports once that the loss did not use parameters which the optimizer changes all the same."""
        if not names or self._reported_unused:
            return
        self._reported_unused = True
        training.progress.say(
            f"dsframe: note: up to step {training.step} some losses do not use {shortened(sorted(names))}: the gradient counts as "
            "0 on every engine, so momentum and weight decay still change it, where a loop in plain torch skips it. Freeze what "
            "is never used"
        )

    def _say_later_draws(self, training: Training) -> None:
        """Reports, once, that a step draws random numbers, if the first one did not, or only in the optimizer."""
        if not self._trial.draws_later or self._trial.knows_draws:
            return
        self._trial.knows_draws = True
        if training.engine.built.sample_draws:
            raise TaskError(f"per_sample_randomness: step {training.step} draws numbers for no sample; {REMEDY}")
        training.progress.say(
            f"dsframe: this training draws random numbers in step {training.step}, different ones on each rank, {ON_RANKS}"
        )

    def _say_draws(self, training: Training) -> None:
        """Reports random numbers that belong to no sample, or raises TaskError if the file requires that they do."""
        built, trial, say = training.engine.built, self._trial, training.progress.say
        if trial.draws_own and training.step > 1:
            raise TaskError(
                "model or loss draws with a generator that the model or the task holds: a resumed run begins with its first "
                "numbers again. Draw with torch's own generator, which checkpoints have"
            )
        if trial.draws_others:
            what = "model or loss draws with NumPy, Python's random or a generator of its own"
            if built.sample_draws:
                raise TaskError(f"per_sample_randomness: {what}: numbers that belong to no sample; {REMEDY}")
            say(f"dsframe: {what} (which no checkpoint has), for no sample, {ON_RANKS}")
        known = any(dependence.on_processes for dependence in built.depends)
        trial.knows_draws = bool(known or trial.draws or trial.draws_others or (built.draws and built.draws.moved))
        if built.draws and built.draws.moved and not known:
            say(f"dsframe: this model draws random numbers in training, different ones on each rank, {ON_RANKS}")
        if trial.draws and not built.sample_draws:
            say(f"dsframe: this task's loss draws random numbers, different ones on each rank, {ON_RANKS}")
