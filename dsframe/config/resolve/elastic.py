"""Elastic runs, whose number of processes changes: what the file must say for them, and how their batch is sharded."""

from __future__ import annotations

from dsframe.config.load import Config
from dsframe.config.read.reader import Path
from dsframe.config.resolve.batch import TRAIN, Batch
from dsframe.errors import ConfigError, Problem


def problems(config: Config, smallest: int = 1) -> list[Problem]:
    """Return why an elastic run of ``smallest`` or more processes cannot train this file."""
    found: list[tuple[Path, str, str]] = []
    settings, file = config.settings, config.deepspeed
    if file.train_batch_size is None:
        remedy = f'write "{TRAIN}" instead of the micro-batch size'
        text = "is required in elastic runs: the batch would change with the number of processes"
        found.append(((TRAIN,), text, remedy))
    else:
        try:
            batch(config, smallest)
        except ConfigError as error:
            return [*error.problems]
    if settings.horovod.op == "adasum":
        found.append((("dsframe", "horovod", "op"), "adasum needs MPI, but elastic runs use Gloo", 'choose "average"'))
    elif settings.horovod.op == "sum" or (settings.horovod.op is None and file.gradient_allreduce_op == "sum"):
        text = "a sum of gradients changes with the number of processes"
        found.append((("gradient_allreduce_op",), text, 'choose "mean", or start horovodrun without --min-np'))
    if settings.horovod.timeline:
        found.append((("dsframe", "horovod", "timeline"), "is not possible in elastic runs", "remove it"))
    if settings.horovod.autotune:
        text = "Horovod's autotuning crashes when processes come or go"
        found.append((("dsframe", "horovod", "autotune"), text, "remove it"))
    return [config.error(path, text, remedy, code="world") for path, text, remedy in found]


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
