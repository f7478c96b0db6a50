"""Decides which steps are logged, and computes and writes their log lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from dsframe.cluster.exchange import all_gather_json
from dsframe.data import Loader
from dsframe.engine import Engine, StepResult
from dsframe.errors import DataError
from dsframe.events import Events, Listener, LogEntry, Training
from dsframe.host.memory import peak_memory_bytes
from dsframe.run_dir.record import Record
from dsframe.training.evaluation import totals
from dsframe.training.finite import FiniteCheck


class StepLog(Listener):
    """Computes the logged values of a step and emits ``on_log``."""

    def __init__(self, events: Events, finite: FiniteCheck) -> None:
        self._events, self._finite = events, finite
        self._said_length = False

    def on_step(self, training: Training, result: StepResult) -> None:
        """**Collective** if this step is logged. Raises TrainingError if the loss is not finite, DataError if ranks
        have read different streams."""
        if training.schedule.logs(training.step):
            self.log(training, result)

    def log(self, training: Training, result: StepResult) -> None:
        """**Collective.** Emits the logged values of this step. Raises like :meth:`on_step`."""
        step = training.step
        loss, terms = _means(training.engine, result)
        rate = training.progress.rate(step) if step > training.first_step else 0.0
        norm = None if result.gradient_norm is None else float(result.gradient_norm)
        finite = math.isfinite(loss) and math.isfinite(norm or 0.0)
        if not finite and not result.skipped:
            self._finite.fail(training)
        sampler = training.loader.sampler
        details: dict[str, Any] = {"epoch": sampler.epoch(step), "gradient_norm": norm}
        details["memory_bytes"] = peak_memory_bytes(training.engine.plan.device)
        details |= _rows_read(training.engine, training.loader)
        if not self._said_length and (line := training.loader.wrong_length()):
            self._said_length = True
            training.progress.say(f"warning: {line}")
        metrics = {"loss": loss, "learning_rate": result.learning_rate, **terms}
        training.loss = loss
        self._events.emit("on_log", training, LogEntry(metrics, rate, details))


class RunLog(Listener):
    """Writes log lines and evaluations into the record, and prints them."""

    def __init__(self, record: Record | None) -> None:
        """``record``: None on every rank but 0."""
        self._record = record

    def on_log(self, training: Training, entry: LogEntry) -> None:
        details = entry.details
        if self._record:
            skipped = training.result is not None and training.result.skipped
            line = {"step": training.step, **entry.metrics, "rate": entry.rate, **details}
            self._record.write({**line, "skipped": skipped})
        shown = {name: value for name, value in entry.metrics.items() if name != "learning_rate"}
        shown["lr"] = entry.metrics["learning_rate"]
        training.progress.log(training.step, shown, entry.rate, details["memory_bytes"])

    def on_evaluation(self, training: Training, metrics: Mapping[str, float]) -> None:
        step = training.step
        values = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        training.progress.say(f"evaluation after step {step}: {values}")
        if self._record:
            epoch = training.loader.sampler.epoch(step)
            self._record.write({"step": step, "epoch": epoch, "evaluation": metrics})


def _means(engine: Engine, result: StepResult) -> tuple[float, dict[str, float]]:
    """**Collective.** Returns the loss over the global batch, and the means of the terms."""
    loss = result.loss.detach().reshape(()).double()
    count = loss.new_tensor(len(result.terms))
    total, term_count = engine.sum_over_ranks(torch.stack([loss, count])).tolist()
    terms = totals(engine, result.terms) if term_count else {}
    return total / engine.plan.world.size, {name: term.mean for name, term in terms.items()}


def _rows_read(engine: Engine, loader: Loader) -> dict[str, Any]:
    """**Collective** if the data are a stream. Returns the rows that each rank has read. Raises DataError if ranks had
    different numbers of rows in equally many passes, and so different samples."""
    if not loader.rows_read():
        return {}
    of_ranks = all_gather_json(engine, loader.rows_read())
    of_passes: dict[int, tuple[int, int]] = {}
    for rank, (_, passes, rows) in enumerate(of_ranks):  # ranks may have finished different numbers of passes
        first, expected = of_passes.setdefault(passes, (rank, rows))
        if rows != expected:
            raise DataError(
                f"the training data differ between ranks: the first {passes} passes over a stream had "
                f"{expected:,} rows on rank {first}, but {rows:,} on rank {rank}. Since then these "
                "ranks take their samples from different places of the stream. Give all ranks the "
                "same rows"
            )
    return {"rows_read": [rows for rows, _, _ in of_ranks]}
