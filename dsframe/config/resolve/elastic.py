"""Elastic runs, whose number of processes changes: what the file must say for them, and how their batch is sharded."""

from __future__ import annotations

from dsframe.config.load import Config
from dsframe.config.resolve.batch import TRAIN, Batch
from dsframe.config.rules.table import table
from dsframe.config.schema.conditions import holds, matches
from dsframe.errors import ConfigError, Problem


def problems(config: Config, smallest: int = 1) -> list[Problem]:
    """Return why an elastic run of ``smallest`` or more processes cannot train this file."""
    file, reasons = config.deepspeed, []
    if file.train_batch_size is None:
        remedy = f'write "{TRAIN}" instead of the micro-batch size'
        message = "is required in elastic runs: the batch would change with the number of processes"
        reasons.append(config.error(TRAIN, message, remedy, code="world"))
    else:
        try:
            batch(config, smallest)
        except ConfigError as error:
            return [*error.problems]
    for row in table()["elastic"]:
        if matches(file, row["key"], row.get("is")) and holds(file, row):
            reasons.append(config.error(row["key"], row["says"], row.get("write", "remove it"), code="world"))
    return reasons


def batch(config: Config, processes: int) -> Batch:
    """Return the batch on as many of ``processes`` as can divide it. Raises ConfigError if there is no such number."""
    for number in range(processes, 0, -1):
        try:
            return config.batch(number, replicas=True)
        except ConfigError as error:
            if number == processes:
                first = error
    raise first


def cautions(config: Config, processes: int) -> list[str]:
    """Return a warning if the run must end when some of ``processes`` are gone. horovodrun tells workers no minimum."""
    for number in range(processes - 1, 0, -1):
        try:
            batch(config, number)
        except ConfigError:
            processes_left = f"{number} process{'es' if number > 1 else ''}"
            text = f"{processes_left} cannot divide this file's batch: the run ends if no more are left"
            return [f"{text}; with --min-np {number + 1} it waits for others instead"]
    return []


def said(batch: Batch, processes: int) -> list[str]:
    """Return a note if some processes have no samples."""
    readers = batch.data_parallel_size
    text = f"{processes} processes cannot divide a batch of {batch.train_batch_size}: {readers} train, {processes - readers}"
    return [f"{text} stay in step but contribute no gradients"] if processes > readers else []
