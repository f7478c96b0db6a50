"""The training loop. It is the same for every engine and knows none by name.

Nothing here waits for the device: a loss stays a tensor until a listener reads it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dsframe.checkpoint.resume import Start
from dsframe.checkpoint.saver import Saver
from dsframe.cluster.exchange import all_gather_json
from dsframe.data import EvaluationLoader, Loader
from dsframe.engine import Engine, StepResult
from dsframe.events import Events, RunSchedule, Training, UserHooks
from dsframe.guard.signals import StopRequest
from dsframe.guard.watchdog import Watchdog
from dsframe.hooks import Hooks
from dsframe.host import phases
from dsframe.host.memory import peak_memory_bytes
from dsframe.model.micro_batch import MicroBatch
from dsframe.results import Summary
from dsframe.run_dir import outcome
from dsframe.run_dir.progress import Progress
from dsframe.run_dir.record import Record
from dsframe.training import running_model
from dsframe.training.checkpoints import Checkpoints
from dsframe.training.evaluation import Evaluation
from dsframe.training.evaluations import Evaluations
from dsframe.training.finite import FiniteCheck
from dsframe.training.first_step import FirstStep
from dsframe.training.loss_kind import LossTrial
from dsframe.training.step_log import RunLog, StepLog
from dsframe.training.weighting import LossWeights


@dataclass(frozen=True)
class Work:
    """What to train on, and for how long."""

    loader: Loader
    evaluation: Mapping[str, EvaluationLoader]
    """Evaluation sets by name; a single set has an empty name."""
    schedule: RunSchedule


@dataclass(frozen=True)
class Outputs:
    """Receivers of metrics and states."""

    progress: Progress
    record: Record | None
    """None on ranks other than 0, and if an earlier run has completed all steps."""
    saver: Saver
    hooks: tuple[Hooks, ...] = ()


class Trainer:
    """Trains an engine on its task's data."""

    def __init__(
        self,
        engine: Engine,
        work: Work,
        outputs: Outputs,
        watchdog: Watchdog,
    ) -> None:
        """``watchdog``: entered by the caller."""
        self.engine, self.loader = engine, work.loader
        self._progress = outputs.progress
        self._watchdog = watchdog
        self._weights, self._trial = LossWeights(engine), LossTrial(engine, work.loader)
        self.training = Training(engine, work.loader, work.schedule, outputs.progress)
        self.training.copy_model = partial(running_model.copy_of, engine)
        hooks = UserHooks(outputs.hooks)
        self.events = events = Events()
        self.evaluation = None
        if work.evaluation:
            shown = partial(events.emit, "on_evaluation_batch", self.training)
            show = shown if hooks.listens("on_evaluation_batch") else None
            self.evaluation = Evaluation(engine, work.evaluation, self._evaluating, outputs.progress.say, show)
        finite = FiniteCheck(engine)
        self._checkpoints = Checkpoints(outputs.saver, events, finite, hooks)
        self._first_step = FirstStep(self._trial, outputs.record, outputs.saver)
        self._evaluations = None
        if self.evaluation:
            self._evaluations = Evaluations(self.evaluation, events, self._checkpoints)
        listeners = [
            finite,
            StepLog(events, finite),
            RunLog(outputs.record),
            hooks,
            self._first_step,
            self._checkpoints,  # before the evaluation, which may fail
            self._evaluations,
        ]
        for listener in listeners:
            if listener is not None:
                events.add(listener)

    def fit(self, start: Start) -> Summary:
        """**Collective.** Trains from ``start`` to the end.

        Raises TrainingError if the loss is not finite, CheckpointError if the state cannot be saved, StoppedError if a
        signal asked to stop and the state is saved.
        """
        training, checkpoints = self.training, self._checkpoints
        self._begin(start)
        began = self._first_step.ended = time.perf_counter()
        stream = self.loader.stream(start.step, training.schedule.total_steps)
        with StopRequest(self.engine, start.step, lambda: checkpoints.failed) as stop_request:
            training.stop_request = stop_request
            self.events.emit("on_start", training)
            if self._evaluations and self._evaluates_first(start):
                self._evaluations.evaluate(training)
            while training.step < training.last_step:
                training.result = self._train_step(training.step + 1, stream)
                training.step += 1
                self._progress.advance()
                outcome.reporter().step = training.step
                self.events.emit("on_step", training, training.result)
                if training.step < training.last_step and stop_request.agreed(training.step):
                    checkpoints.save_and_stop(training)
                if stop_request.trouble:
                    checkpoints.settle()
            waiting = time.perf_counter()
            with stop_request.saving():
                checkpoints.settle()
        ended = time.perf_counter()
        training.pause(ended - waiting)
        self.events.emit("on_finish", training)
        summary = self._summary(began, ended)
        self.events.emit("on_end", training, summary)
        return summary

    def _begin(self, start: Start) -> None:
        training = self.training
        training.step, training.first_step = start.step, start.step + 1
        training.metrics = start.evaluation
        training.last_step = training.schedule.total_steps
        if start.loss is not None:
            training.loss = start.loss
        if (early := self.engine.plan.stop) and early.reached:
            training.last_step = start.step
        reporter = outcome.reporter()
        reporter.step = start.step
        self.engine.plan.task.context.step = training.first_step  # a loss may divide by it
        if self.evaluation and training.first_step <= training.last_step:
            with watch.explaining() if (watch := self.engine.built.watch) else nullcontext():
                self.evaluation.try_out()
            phases.done("trial of evaluation")
        self.engine.plan.task.context.step = start.step
        self._progress.begin(start.step)
        self._watchdog.begin(start.step)
        reporter.say(began=True)

    def _evaluates_first(self, start: Start) -> bool:
        """True if the file asks for an evaluation before training, or if the previous run saved here and ended before
        its evaluation."""
        asked = start.step == 0 and self.engine.plan.config.settings.eval_before_training
        return not start.evaluation and (asked or start.step in self.training.schedule.eval_steps)

    def _evaluating(self) -> None:
        self._watchdog.beat()
        self._progress.evaluated()

    def _train_step(self, step: int, stream: Iterator[Any]) -> StepResult:
        """**Collective.** Makes one update, and detects weights that are used outside of the engine."""
        plan, watch = self.engine.plan, self.engine.built.watch
        plan.task.context.step = step
        self._trial.begin_step(step - self.training.first_step, logs=self.training.schedule.logs(step))
        if watch:
            watch.begin(step)
        micro_batches = self._weights.settle(self._read(stream))
        with watch.explaining() if watch else nullcontext():
            result = self.engine.train_step(self._observed(micro_batches, step))
        self._trial.step_ended()
        if watch:
            watch.end(step)
            while watch.notes:
                self._progress.say(f"dsframe: {watch.notes.pop()}")
        self._watchdog.done(step)
        average = plan.config.settings.ema
        if average and not result.skipped and step % average.every_steps == 0:
            self.engine.average(average.decay_at(step))
        return result

    def _read(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Yields the micro-batches of one step and leaves the stream open for the next."""
        for _ in range(self.engine.plan.batch.accumulation_steps):
            self._watchdog.beat()
            yield next(stream)

    def _observed(self, micro_batches: Iterable[MicroBatch], step: int) -> Iterator[MicroBatch]:
        """Yields the micro-batches of ``step``. Before each, reports to the watchdog and sets the samples whose random
        numbers come next."""
        plan, sample_draws = self.engine.plan, self.engine.built.sample_draws
        for index, micro_batch in enumerate(micro_batches):
            self._watchdog.alive()
            if sample_draws:
                share = index * plan.batch.data_parallel_size + plan.data_rank
                sample_draws.at(step - 1, share * plan.batch.micro_batch_size)
                micro_batch = replace(micro_batch, draws=sample_draws)
            yield self._trial.watched(micro_batch, index)

    def _summary(self, began: float, ended: float) -> Summary:
        plan, training, first_done = self.engine.plan, self.training, self._first_step.ended
        steps = training.last_step
        units_per_step = plan.batch.train_batch_size * plan.task.units_per_sample
        units = units_per_step * max(steps - training.first_step, 0)
        rate = units / max(ended - first_done - training.paused_seconds, 1e-9)
        return Summary(
            steps=steps,
            seconds=ended - began - training.paused_seconds,
            rate=rate,
            unit=plan.task.unit,
            units_per_step=units_per_step,
            first_step_seconds=first_done - began,
            loss=training.loss,
            metrics=training.metrics,
            peak_memory_bytes=tuple(all_gather_json(self.engine, peak_memory_bytes(plan.device))),
            skipped_steps=training.skipped_steps,
            stopped=plan.stop.reached if plan.stop else "",
            directory=str(plan.directory),
        )
