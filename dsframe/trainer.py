"""The loop: the same for every engine, which it does not know by name.

Nothing here waits for the device except on steps that log: a loss stays a tensor until then.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dsframe.checkpoint.memory_checkpoint import MemoryCheckpoint
from dsframe.checkpoint.resume import Start
from dsframe.checkpoint.saver import Saver
from dsframe.cluster.exchange import all_gather_text
from dsframe.config.resolve import epochs
from dsframe.config.schema.base import Interval
from dsframe.data import EvaluationLoader, Loader
from dsframe.engine import ON_RANKS, Engine, StepResult
from dsframe.engines import precision
from dsframe.errors import DataError, StoppedError, TrainingError
from dsframe.guard.nonfinite import FirstNonFinite, diagnose_nonfinite
from dsframe.guard.signals import StopRequest
from dsframe.guard.watchdog import Watchdog
from dsframe.hooks import Called, RunView
from dsframe.host import phases
from dsframe.host.memory import peak_memory_bytes
from dsframe.observe.observer import Observers
from dsframe.results import Summary
from dsframe.run_dir import outcome
from dsframe.run_dir.progress import Progress
from dsframe.run_dir.record import Record
from dsframe.training import running_model
from dsframe.training.evaluation import Evaluation, totals
from dsframe.training.loss_kind import LossTrial
from dsframe.training.weighting import LossWeights

if TYPE_CHECKING:
    from dsframe.config.schema.settings import Settings
    from dsframe.data.sampler import Sampler

SKIPS_IN_A_ROW = 50
"""So many updates left out one after the other end a training: it does not recover by itself."""


@dataclass(frozen=True)
class RunSchedule:
    """How long to train and how often to speak, in steps."""

    total_steps: int
    log_every: Fraction
    eval_steps: frozenset[int]
    """Evaluate after these steps, counted from 1."""
    regular: frozenset[int]
    """Those that a longer training has as well, and that a schedule goes by: not the end where it is out of turn."""

    @staticmethod
    def of(settings: Settings, sampler: Sampler, *, evaluates: bool) -> RunSchedule:
        """As the file says: evaluated after every so many steps or at each epoch's end, and always at the end."""
        total = settings.steps or sampler.total_steps(settings.epochs or 1)
        wanted, regular = settings.eval_every_steps or Interval(epochs=1), frozenset[int]()
        if evaluates:
            every = epochs.steps(wanted, sampler.epoch_steps)
            regular = frozenset(epochs.first(every, total // every))
        log_every = epochs.steps(settings.log_every_steps, sampler.epoch_steps)
        return RunSchedule(total, log_every, regular | ({total} if evaluates else set()), regular)

    def logs(self, step: int) -> bool:
        """Whether ``step`` is logged: 1, 2, 5, 10, 20, 50 ... where things go wrong first, every ``log_every``-th, the last."""
        return str(step).rstrip("0") in ("1", "2", "5") or epochs.due(step, self.log_every) or step == self.total_steps


@dataclass(frozen=True)
class Work:
    """What to train on, and for how long."""

    loader: Loader
    evaluation: Mapping[str, EvaluationLoader]
    """Sets to evaluate on, by name; a single one has an empty name."""
    schedule: RunSchedule


@dataclass(frozen=True)
class Outputs:
    """Where figures and states go."""

    progress: Progress
    record: Record | None
    """None on every rank but 0, and where an earlier run has done all steps."""
    saver: Saver
    hooks: Called = field(default_factory=Called)


class Trainer:
    """Trains an engine on its task's data. Every method is **collective**."""

    def __init__(
        self,
        engine: Engine,
        work: Work,
        outputs: Outputs,
        watchdog: Watchdog,
        observers: Observers,
        commits: MemoryCheckpoint | None = None,
    ) -> None:
        """``watchdog``: entered by the caller. ``commits``: who keeps the state in memory, where ranks may come and go."""
        self.engine, self.loader, self.schedule = engine, work.loader, work.schedule
        self.progress, self.record, self.saver = outputs.progress, outputs.record, outputs.saver
        self._hooks = outputs.hooks
        shown = self._show if self._hooks.listens("on_evaluation_batch") else None
        self.evaluation = (
            Evaluation(engine, work.evaluation, self._evaluating, self.progress.say, shown) if work.evaluation else None
        )
        self._watchdog, self._observers = watchdog, observers
        self._commits, self._weights, self._trial = commits, LossWeights(engine), LossTrial(engine)
        self._first, self._last = 1, self.schedule.total_steps
        self._result: StepResult | None = None
        self._loss = math.nan
        self._results: Mapping[str, float] = {}
        self._evaluated = self._step = 0
        """The step of the last evaluation; that of the one under way."""
        self._skipped = self._row = 0
        self._nonfinite = FirstNonFinite(engine.plan.device)
        self._stops = engine.plan.config.settings.on_nonfinite == "stop"
        self._overflows = precision.scales_losses(engine.plan.config, engine.plan.device)
        self._pausing = 0.0

    def fit(self, start: Start) -> Summary:
        """**Collective.** Trains from ``start`` to the end.

        Raises TrainingError where the loss stops being a finite number, CheckpointError where the state cannot be saved,
        StoppedError when a signal asked for it and the state is saved.
        """
        total, reporter = self.schedule.total_steps, outcome.reporter()
        self._begin(start)
        began = first_done = time.perf_counter()
        self.progress.begin(start.step)
        self._watchdog.begin(start.step)
        stream = self.loader.stream(start.step, total)
        reporter.say(began=True)
        with StopRequest(self.engine, start.step, lambda: self.saver.failed) as stop:
            if self._commits and self._commits.last is None:
                # A task may give the next engine the module that this one has trained.
                self._commits.keep(self.engine, replace(start, in_place=True))
            if self._evaluates_first(start):
                self._evaluate(start.step, stop)
            for step in range(self._first, self._last + 1):
                self._train_step(step, stream)
                if step == self._first:
                    first_done = self._first_step_done(step)
                self._pause(self._observers.paused(step))
                self._save_if_due(step, stop)  # before the evaluation, which may fail
                if step in self.schedule.eval_steps:
                    self._evaluate(step, stop)
                    if self._ends_early(step, stop):
                        break
                if step < total and stop.agreed(step):
                    self._save_and_stop(step, stop)
                if stop.trouble:
                    self.saver.settle()
                if self._commits and step < total and self._commits.due(step):
                    known = self._loss if math.isfinite(self._loss) else None
                    self._commits.keep(self.engine, Start(step, known, self._results, in_place=True))
            waiting = time.perf_counter()
            with stop.saving():
                self.saver.settle()
        ended = time.perf_counter()
        self._pause(ended - waiting)
        self._observers.finish(self.engine)
        summary = self._summary(began, first_done, ended)
        self._tell("on_end", self._last, summary)
        return summary

    def _begin(self, start: Start) -> None:
        self._first, self._results = start.step + 1, start.evaluation
        self._loss = math.nan if start.loss is None else start.loss
        outcome.reporter().step = start.step
        if (early := self.engine.plan.stop) and early.reached:
            self._last = start.step
        resumed_in_memory = self._commits is not None and self._commits.last is not None
        if self.evaluation and self._first <= self._last and not resumed_in_memory:
            self.evaluation.try_out()
            phases.done("trial of evaluation")

    def _evaluates_first(self, start: Start) -> bool:
        """True before training where the file asks for it, and where the run before has saved and ended before it was through."""
        asked = start.step == 0 and self.engine.plan.config.settings.eval_before_training
        return not start.evaluation and (asked or start.step in self.schedule.eval_steps)

    def _evaluating(self) -> None:
        self._watchdog.beat()
        self.progress.evaluated()

    def _ends_early(self, step: int, stop: StopRequest) -> bool:
        """**Collective.** Whether the evaluation after ``step`` was the last one; the state is saved then, where the end is."""
        early = self.engine.plan.stop
        if early is None or not early.reached or step == self.schedule.total_steps:
            return False
        self._last = step
        self.progress.say(f"dsframe: training ends after step {step:,}: {early.reached}")
        self._save_if_due(step, stop, step)
        return True

    def _tell(self, event: str, step: int, *more: Any) -> None:
        """Calls the users' hooks, in every step under the watch: they may look at weights."""
        watch = self.engine.watch
        with watch.inside(always=True) if watch and self._hooks.listens(event) else nullcontext():
            self._hooks(event, lambda: self._view(step), *more)

    def _view(self, step: int) -> RunView:
        """The training as hooks see it."""
        plan, result = self.engine.plan, self._result
        rate = result.learning_rate if result else 0.0
        return RunView(
            step=step,
            total_steps=self.schedule.total_steps,
            epoch=self.loader.sampler.epoch(step),
            learning_rate=rate,
            loss=result.loss.detach() if result else None,
            rank=plan.world.rank,
            world_size=plan.world.size,
            directory=plan.directory,
            copy_model=partial(running_model.copy_of, self.engine),
        )

    def _show(self, outputs: Any, targets: Any) -> None:
        self._tell("on_evaluation_batch", self._step, outputs, targets)

    def _train_step(self, step: int, stream: Iterator[Any]) -> None:
        self.engine.plan.task.terms = {}
        watch = self.engine.watch
        if watch:
            watch.begin(step)
        with self._observers.step(step):
            try:
                result = self._result = self.engine.train_step(self._take(stream, step))
            except Exception as error:
                if watch and (said := watch.explained(error)):
                    raise said from error
                raise
        if watch:
            watch.end(step)
            while watch.told:
                self.progress.say(f"dsframe: {watch.told.pop()}")
        self._watchdog.done(step)
        if (average := self.engine.plan.config.settings.ema) and not result.skipped and step % average.every_steps == 0:
            self.engine.average(average.decay)
        self._look(step, result)
        self.progress.advance()
        outcome.reporter().step = step
        if self.schedule.logs(step):
            self._loss = self._log(step, result)
        self._tell("on_step", step)

    def _first_step_done(self, step: int) -> float:
        """**Collective.** Raises TaskError where the loss is of another kind than the task says: nothing is saved yet."""
        if found := self._trial.judge(resumed=step > 1):
            self.progress.say(f"dsframe: this task's {found}")
        drawn, known = self.engine.draws, any(ON_RANKS in what for what in self.engine.depends)
        if drawn and drawn.found and not known:
            self.progress.say(f"dsframe: this model draws random numbers in training, others on each rank, {ON_RANKS}")
        now = time.perf_counter()
        phases.done("first step")
        if self.record:
            self.record.started(phases.seconds())
        self.saver.prepare()
        self.progress.begin(step)
        return now

    def _save_if_due(self, step: int, stop: StopRequest, last_step: int | None = None) -> None:
        if self.saver.due(step, last_step or self.schedule.total_steps):
            with stop.saving():
                self._save(step)

    def _save_and_stop(self, step: int, stop: StopRequest) -> NoReturn:
        """A signal has asked all ranks to stop: raises StoppedError when the state is saved."""
        with stop.saving():
            self._save(step)
            self.saver.settle()
        self._observers.finish(self.engine)
        raise StoppedError(
            f"stopped after step {step} by {stop.name or 'a signal to another rank'}; go on with --resume auto"
        )

    def _summary(self, began: float, first_done: float, ended: float) -> Summary:
        task, batch, total = self.engine.plan.task, self.engine.plan.batch, self._last
        units_per_step = batch.train_batch_size * task.units_per_sample
        units = units_per_step * max(total - self._first, 0)
        rate = units / max(ended - first_done - self._pausing, 1e-9)
        memory = self._peak_memory()  # before observers take some
        found = self._observers.results(rate)
        return Summary(
            steps=total,
            seconds=ended - began - self._pausing,
            rate=rate,
            unit=task.unit,
            units_per_step=units_per_step,
            first_step_seconds=first_done - began,
            loss=self._loss,
            metrics=self._results,
            peak_memory_bytes=memory,
            skipped_steps=self._skipped,
            mfu=found.get("mfu"),
            stopped=self.engine.plan.stop.reached if self.engine.plan.stop else "",
            directory=str(self.engine.plan.directory),
        )

    def _mean(self, value: torch.Tensor) -> float:
        """**Collective.** Mean over the data-parallel ranks, in float64."""
        world = self.engine.plan.world.size
        return float(self.engine.sum_over_ranks(value.detach().reshape(1).double())) / world

    def _figures(self, result: StepResult) -> tuple[float, dict[str, float]]:
        """**Collective.** The loss over the global batch, and the means of what the task's loss returned beside it."""
        terms = self.engine.plan.task.terms
        own = torch.stack([result.loss.detach().reshape(()).double(), result.loss.new_tensor(len(terms)).double()])
        loss, told = self.engine.sum_over_ranks(own).tolist()
        more = {name: one.mean for name, one in totals(self.engine, terms).items()} if told else {}
        return loss / self.engine.plan.world.size, more

    def _log(self, step: int, result: StepResult) -> float:
        loss, terms = self._figures(result)
        rate = self.progress.rate(step) if step > self._first else 0.0
        norm = None if result.gradient_norm is None else float(result.gradient_norm)
        if not (math.isfinite(loss) and math.isfinite(norm or 0.0)) and not result.skipped:
            self._refuse(step)
        epoch = self.loader.sampler.epoch(step)
        memory = peak_memory_bytes(self.engine.plan.device)
        more = self._observers.figures(rate)
        rows = self._rows_read()
        if self.record:
            values = {"loss": loss, "learning_rate": result.learning_rate, "gradient_norm": norm, "rate": rate}
            self.record.write(
                {
                    **terms,
                    "step": step,
                    "epoch": epoch,
                    **values,
                    "memory_bytes": memory,
                    **({"samples_of": shares} if (shares := self.loader.sampler.shares(step)) else {}),
                    **rows,
                    **more,
                    "skipped": result.skipped,
                }
            )
        self.progress.log(step, {"loss": loss, **terms, "lr": result.learning_rate}, rate, memory, more.get("mfu"))
        figures = {"loss": loss, "learning_rate": result.learning_rate, **terms}
        self._tell("on_log", step, figures)
        return loss

    def _rows_read(self) -> dict[str, Any]:
        """**Collective** where the data are a stream: the rows that each rank has read from it, for the record. Raises DataError
        where ranks had another number of rows in as many passes: from there on they took other samples."""
        if not self.loader.rows_read():
            return {}
        told = [json.loads(text) for text in all_gather_text(self.engine, json.dumps(self.loader.rows_read()))]
        of_passes: dict[int, tuple[int, int]] = {}
        for rank, (_, passes, rows) in enumerate(told):  # some may have read further ahead than others
            first, expected = of_passes.setdefault(passes, (rank, rows))
            if rows != expected:
                raise DataError(
                    f"the training data differ between ranks: the first {passes} passes over a stream had {expected:,} rows on "
                    f"rank {first}, but {rows:,} on rank {rank}. Since then these ranks take their samples from different places "
                    "of the stream. Give all ranks the same rows"
                )
        return {"rows_read": [rows for rows, _, _ in told]}

    def _look(self, step: int, result: StepResult) -> None:
        """Counts the updates that were left out, and ends a training that will not recover. Does not wait for the device."""
        self._row = self._row + 1 if result.skipped else 0
        self._skipped += result.skipped
        if result.skipped and self._overflows and self._row < SKIPS_IN_A_ROW:
            return  # the next loss scale is lower, where it is not fixed
        if self._row == 1:
            self._nonfinite = FirstNonFinite(self.engine.plan.device)  # what was left out earlier is past
        self._nonfinite.look(step, result.loss, result.gradient_norm)
        if not result.skipped:
            return
        if self._stops or self._row == SKIPS_IN_A_ROW:
            self._refuse(step)
        self.progress.say(f"step {step}: gradients are not finite, update left out ({self._skipped} so far)")

    def _refuse(self, step: int) -> NoReturn:
        """**Collective.** Raises TrainingError, saying what is not finite."""
        found = diagnose_nonfinite(self.engine, self.loader, self._nonfinite, step)
        raise TrainingError(
            f"step {step}: {found}; lower the learning rate, warm up longer, clip harder or repair the data; "
            'or leave such updates out: "on_nonfinite": "skip"'
        )

    def _evaluate(self, step: int, stop: StopRequest) -> None:
        """The evaluation after ``step``, whose figures join its checkpoint. Raises StoppedError where a signal comes first."""
        if self.evaluation is None:
            return
        self._finish_steps()
        began, self._step = time.perf_counter(), step
        with stop.between_batches() as stops, self.progress.evaluation(self.evaluation.batches):
            found = self.evaluation.run(stops)
        self._pause(time.perf_counter() - began)
        if found is None:
            self._save_and_stop(step, stop)
        self._results, self._evaluated = found, step
        for follower in self.engine.plan.followers.values():
            if step in self.schedule.regular and (said := follower.observe(step, found)):
                self.progress.say(f"step {step}: {said}")
        if step == self.saver.saved_step:
            self.saver.rate(step, self._results)
        self.progress.say(
            f"evaluation after step {step}: " + "  ".join(f"{k} {v:.4f}" for k, v in self._results.items())
        )
        if self.record:
            self.record.write({"step": step, "epoch": self.loader.sampler.epoch(step), "evaluation": self._results})
        self._tell("on_evaluation", step, dict(found))

    def _save(self, step: int) -> None:
        if step == self.saver.saved_step:
            return
        if self._stops and self._mean(self._nonfinite.found()) > 0:
            self._refuse(step)  # a checkpoint of NaN would push good ones out
        self._finish_steps()
        logged = self.schedule.logs(step) and math.isfinite(self._loss)
        evaluation = self._results if step == self._evaluated else {}
        self._pause(self.saver.save(step, loss=self._loss if logged else None, evaluation=evaluation))
        if self._hooks.listens("on_checkpoint") and not self.saver.asynchronous:
            self.saver.settle()  # a hook may copy the checkpoint elsewhere
        self._tell("on_checkpoint", step, self.saver.path(step))

    def _finish_steps(self) -> None:
        """Waits until a GPU has done the steps that it was given: the time that they take belongs to training's rate."""
        if self.engine.plan.device.type == "cuda":
            torch.cuda.synchronize(self.engine.plan.device)

    def _pause(self, seconds: float) -> None:
        self._pausing += seconds
        self.progress.pause(seconds)

    def _peak_memory(self) -> tuple[int, ...]:
        plan = self.engine.plan
        own = torch.zeros(plan.world.size, dtype=torch.float64, device=plan.device)
        own[plan.world.rank] = peak_memory_bytes(plan.device)
        return tuple(int(value) for value in self.engine.sum_over_ranks(own).tolist())

    def _take(self, stream: Iterator[Any], step: int) -> Iterator[Any]:
        """The micro-batches of ``step``, with their weights, leaving the stream open for the next step."""
        batch, of_samples = self.engine.plan.batch, self.engine.sample_draws
        for micro, taken in enumerate(self._weights(self._read(stream, batch.accumulation_steps))):
            self._watchdog.alive()
            item = self._trial.watched(taken) if step == self._first and not micro else taken
            if of_samples:
                share = micro * batch.data_parallel_size + self.engine.data_rank
                of_samples.at(step - 1, share * batch.micro_batch_size)
            yield item

    def _read(self, stream: Iterator[Any], count: int) -> Iterator[Any]:
        for _ in range(count):
            self._watchdog.beat()
            yield next(stream)
