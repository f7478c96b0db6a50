"""The loop: the same for every engine, which it does not know by name.

Nothing here waits for the device except on steps that log: a loss stays a tensor until then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dsframe import phases
from dsframe.checkpoint.commits import Commits
from dsframe.checkpoint.resume import Start
from dsframe.checkpoint.saver import Saver
from dsframe.checkpoint.signals import StopRequest
from dsframe.data import EvaluationLoader, Loader
from dsframe.engine import Engine, StepResult
from dsframe.engines import precision
from dsframe.errors import StoppedError, TrainingError
from dsframe.evaluation import Evaluation
from dsframe.report import outcome, replay
from dsframe.report.memory import peak_memory_bytes
from dsframe.report.nonfinite import FirstNonFinite, accuse
from dsframe.report.observe import Observer
from dsframe.report.progress import Progress, clock
from dsframe.report.record import Record
from dsframe.report.utilization import Utilization
from dsframe.report.watchdog import Watchdog
from dsframe.weighting import LossWeights

if TYPE_CHECKING:
    from dsframe.config.settings import Settings
    from dsframe.data.sampler import Sampler

SKIPS_IN_A_ROW = 50
"""So many updates left out one after the other end a training: it does not recover by itself."""


@dataclass(frozen=True)
class Cadence:
    """How long to train and how often to speak, in steps."""

    total_steps: int
    log_every: int
    eval_steps: frozenset[int]
    """Evaluate after these steps, counted from 1."""

    @staticmethod
    def of(settings: Settings, sampler: Sampler, *, evaluates: bool) -> Cadence:
        """As the file says: evaluated after every so many steps or at each epoch's end, and always at the end."""
        total = settings.steps or sampler.total_steps(settings.epochs or 1)
        steps: set[int] = set()
        if evaluates:
            epochs = int(sampler.epoch(total))
            regular = (
                range(settings.eval_every_steps, total, settings.eval_every_steps)
                if settings.eval_every_steps
                else sampler.epoch_end_steps(epochs)
            )
            steps = {step for step in regular if step < total} | {total}
        return Cadence(total, settings.log_every_steps, frozenset(steps))

    def logs(self, step: int) -> bool:
        """Whether ``step`` is logged: 1, 2, 5, 10, 20, 50 ... where things go wrong first, every ``log_every``-th, the last."""
        return str(step).rstrip("0") in ("1", "2", "5") or step % self.log_every == 0 or step == self.total_steps


@dataclass(frozen=True)
class Summary:
    """What a run came to."""

    steps: int
    seconds: float
    """From the first step to the end of the last, evaluation left out."""
    rate: float
    """Units (samples or tokens) a second over all ranks, the first step left out."""
    unit: str
    units_per_step: int
    """Of one global batch."""
    first_step_seconds: float
    """From the first step's start to its end: compilation and first reads are in it."""
    loss: float
    """Mean over the last step's global batch."""
    metrics: Mapping[str, float]
    """The last evaluation."""
    peak_memory_bytes: tuple[int, ...]
    """By rank: on a GPU what torch allocated at most, on a CPU the process's largest resident set."""
    skipped_steps: int
    """Updates left out because gradients were not finite."""
    mfu: float | None = None
    """Model FLOPs utilization over the same steps as ``rate``, where the file asks for it: a share of what was measured."""

    def __str__(self) -> str:
        figures = "".join(f"  {name} {value:.4f}" for name, value in self.metrics.items())
        share = "" if self.mfu is None else f"  {self.mfu:.1%} MFU"
        return (
            f"{self.steps:,} steps in {clock(self.seconds)}  {self.rate:,.0f} {self.unit}/s{share}"
            f"  last training loss {self.loss:.4f}"
            f"{'  evaluation:' + figures if figures else ''}  peak {max(self.peak_memory_bytes) / 2**20:,.0f} MiB a rank"
        )


class Trainer:
    """Trains an engine on its task's data. Every method is **collective**."""

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        evaluation: EvaluationLoader | None,
        cadence: Cadence,
        progress: Progress,
        record: Record | None,
        saver: Saver,
        watchdog: Watchdog,
        observer: Observer,
        utilization: Utilization | None = None,
        commits: Commits | None = None,
    ) -> None:
        """``record``: where figures are written down; None on every rank but 0. ``watchdog``: entered by the caller.
        ``commits``: who keeps the state in memory, where ranks may come and go."""
        self.engine, self.loader, self.cadence = engine, loader, cadence
        self.evaluation = Evaluation(engine, evaluation, watchdog.beat, progress.say) if evaluation else None
        self.progress, self.record, self.saver = progress, record, saver
        self._watchdog, self._observer, self._utilization = watchdog, observer, utilization
        self._commits, self._weights = commits, LossWeights(engine)
        self._first = 1
        self._results: Mapping[str, float] = {}
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
        task, batch, total = self.engine.plan.task, self.engine.plan.batch, self.cadence.total_steps
        self._first, self._results = start.step + 1, start.evaluation
        loss = math.nan if start.loss is None else start.loss
        reporter = outcome.reporter()
        reporter.step = start.step
        if self.evaluation and self._first <= total and not (self._commits and self._commits.last):
            self.evaluation.try_out()
            phases.done("trial of evaluation")
        started = first_done = time.perf_counter()
        self.progress.begin(start.step)
        self._watchdog.begin(start.step)
        stream = self.loader.stream(start.step, total)
        reporter.say(began=True)
        with StopRequest(self.engine, start.step, lambda: self.saver.failed) as stop:
            if self._commits and self._commits.last is None:
                # A task may give the next engine the module that this one has trained.
                self._commits.keep(self.engine, replace(start, in_place=True))
            for step in range(self._first, total + 1):
                with self._observer.step(step):
                    result = self.engine.train_step(self._take(stream, batch.accumulation_steps))
                self._watchdog.done(step)
                self._look(step, result)
                self.progress.advance()
                reporter.step = step
                if self.cadence.logs(step):
                    loss = self._log(step, result)
                if step == self._first:
                    first_done = time.perf_counter()
                    phases.done("first step")
                    if self.record:
                        self.record.started(phases.seconds())
                    self.progress.begin(step)
                self._pause(self._observer.stepped(step))
                if step in self.cadence.eval_steps:
                    self._evaluate(step)
                if self.saver.due(step, total):
                    with stop.saving():
                        self._save(step, loss)
                if step < total and stop.agreed(step):
                    with stop.saving():
                        self._save(step, loss)
                        self.saver.settle()
                    self._observer.finish(self.engine)
                    raise StoppedError(
                        f"stopped after step {step} by {stop.name or 'a signal to another rank'}; go on with --resume auto"
                    )
                if stop.trouble:
                    self.saver.settle()
                if self._commits and step < total and self._commits.due(step):
                    known = loss if math.isfinite(loss) else None
                    self._commits.keep(self.engine, Start(step, known, self._results, in_place=True))
            waiting = time.perf_counter()
            with stop.saving():
                self.saver.settle()
        ended = time.perf_counter()
        self._pause(ended - waiting)
        self._observer.finish(self.engine)
        units = batch.train_batch_size * task.units_per_sample * max(total - self._first, 0)
        rate = units / max(ended - first_done - self._pausing, 1e-9)
        return Summary(
            steps=total,
            seconds=ended - started - self._pausing,
            rate=rate,
            unit=task.unit,
            units_per_step=batch.train_batch_size * task.units_per_sample,
            first_step_seconds=first_done - started,
            loss=loss,
            metrics=self._results,
            peak_memory_bytes=self._peak_memory(),
            skipped_steps=self._skipped,
            mfu=self._utilization.of(rate) if self._utilization and rate else None,
        )

    def communication(self) -> dict[str, Any]:
        """**Collective.** After the training: what a step sends, and what that takes, by one step more."""
        total = self.cadence.total_steps
        stream = self.loader.stream(total - 1, total)
        return replay.measure(self.engine, self._take(stream, self.engine.plan.batch.accumulation_steps))

    def _mean(self, value: torch.Tensor) -> float:
        """**Collective.** Mean over the data-parallel ranks, in float64."""
        world = self.engine.plan.world.size
        return float(self.engine.sum_over_ranks(value.detach().reshape(1).double())) / world

    def _log(self, step: int, result: StepResult) -> float:
        loss = self._mean(result.loss)
        rate = self.progress.rate(step) if step > self._first else 0.0
        norm = None if result.gradient_norm is None else float(result.gradient_norm)
        if not (math.isfinite(loss) and math.isfinite(norm or 0.0)) and not result.skipped:
            self._refuse(step)
        epoch = self.loader.sampler.epoch(step)
        memory = peak_memory_bytes(self.engine.plan.device)
        mfu = self._utilization.of(rate) if self._utilization and rate else None
        if self.record:
            values = {"loss": loss, "learning_rate": result.learning_rate, "gradient_norm": norm, "rate": rate}
            more = {**self._observer.figures(), **({} if mfu is None else {"mfu": mfu})}
            self.record.write(
                {"step": step, "epoch": epoch, **values, "memory_bytes": memory, **more, "skipped": result.skipped}
            )
        if step > self._first:
            self.progress.log(step, {"loss": loss, "lr": result.learning_rate}, rate, memory, mfu)
        return loss

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
        found = accuse(self.engine, self.loader, self._nonfinite, step)
        raise TrainingError(
            f"step {step}: {found}; lower the learning rate, warm up longer, clip harder or repair the data; "
            'or leave such updates out: "on_nonfinite": "skip"'
        )

    def _evaluate(self, step: int) -> None:
        assert self.evaluation is not None
        began = time.perf_counter()
        self._results = self.evaluation.run()
        self._pause(time.perf_counter() - began)
        self.progress.say(
            f"evaluation after step {step}: " + "  ".join(f"{k} {v:.4f}" for k, v in self._results.items())
        )
        if self.record:
            self.record.write({"step": step, "epoch": self.loader.sampler.epoch(step), "evaluation": self._results})

    def _save(self, step: int, loss: float) -> None:
        if step == self.saver.saved_step:
            return
        if self._stops and self._mean(self._nonfinite.found()) > 0:
            self._refuse(step)  # a checkpoint of NaN would push good ones out
        logged = self.cadence.logs(step) and math.isfinite(loss)
        results = self._results if step in self.cadence.eval_steps else {}
        finite = {name: value for name, value in results.items() if math.isfinite(value)}  # JSON has no others
        self._pause(self.saver.save(step, loss=loss if logged else None, evaluation=finite))

    def _pause(self, seconds: float) -> None:
        self._pausing += seconds
        self.progress.pause(seconds)

    def _peak_memory(self) -> tuple[int, ...]:
        plan = self.engine.plan
        own = torch.zeros(plan.world.size, dtype=torch.float64, device=plan.device)
        own[plan.world.rank] = peak_memory_bytes(plan.device)
        return tuple(int(value) for value in self.engine.sum_over_ranks(own).tolist())

    def _take(self, stream: Iterator[Any], count: int) -> Iterator[Any]:
        """The next ``count`` micro-batches, with their weights, leaving the stream open for the next step."""
        for item in self._weights(self._read(stream, count)):
            self._watchdog.alive()
            yield item

    def _read(self, stream: Iterator[Any], count: int) -> Iterator[Any]:
        for _ in range(count):
            self._watchdog.beat()
            yield next(stream)
