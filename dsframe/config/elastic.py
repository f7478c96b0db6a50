"""Runs whose number of processes changes while they train: what the file must say for it, and how its batch is shared out."""

from __future__ import annotations

from collections.abc import Sequence

from dsframe.config.batch import TRAIN, Batch
from dsframe.config.load import Config
from dsframe.errors import ConfigError, Problem


def problems(config: Config, smallest: int = 1) -> list[Problem]:
    """Why this file cannot be trained on ``smallest`` or more processes as they come and go."""
    found: list[tuple[Sequence[str], str, str]] = []
    settings, file = config.settings, config.deepspeed
    if file.train_batch_size is None:
        remedy = f'write "{TRAIN}" instead of the micro-batch size'
        found.append(((TRAIN,), "is missing: the batch would change with the number of processes", remedy))
    else:
        try:
            batch(config, smallest)
        except ConfigError as error:
            return [*error.problems]
    if settings.horovod.op == "adasum":
        found.append((("dsframe", "horovod", "op"), "adasum needs MPI, and elastic runs have Gloo", 'choose "average"'))
    elif settings.horovod.op == "sum" or (settings.horovod.op is None and file.gradient_allreduce_op == "sum"):
        text = "a sum of gradients changes with the number of processes"
        found.append((("gradient_allreduce_op",), text, 'choose "mean", or start horovodrun without --min-np'))
    if settings.horovod.timeline:
        found.append((("dsframe", "horovod", "timeline"), "is not written where processes come and go", "leave it out"))
    if settings.horovod.autotune:
        text = "an autotuned Horovod crashes when processes come or go"
        found.append((("dsframe", "horovod", "autotune"), text, "leave it out"))
    return [
        Problem(
            "error", ".".join(path), text, remedy, str(config.path or ""), *config.position(tuple(path)), code="world"
        )
        for path, text, remedy in found
    ]


def batch(config: Config, processes: int) -> Batch:
    """The batch on as many of ``processes`` as it can be divided among. Raises ConfigError where there is no such number."""
    for number in range(processes, 0, -1):
        try:
            return config.batch(number, replicas=True)
        except ConfigError as error:
            if number == processes:
                first = error
    raise first


def cautions(config: Config, processes: int) -> list[str]:
    """What becomes of the run when some of ``processes`` are gone: horovodrun tells its workers no least number."""
    for number in range(processes - 1, 0, -1):
        try:
            batch(config, number)
        except ConfigError:
            processes_left = f"{number} process{'es' if number > 1 else ''}"
            text = f"{processes_left} alone cannot train this file's batch: when no more are left the run ends"
            return [f"{text}; with --min-np {number + 1} it waits for others first"]
    return []


def said(batch: Batch, processes: int) -> list[str]:
    """What the user is told where some processes have no share."""
    readers = batch.data_parallel_size
    text = f"{processes} processes cannot share a batch of {batch.train_batch_size}: {readers} do, {processes - readers} count"
    return [f"{text} for nothing until others come or go"] if processes > readers else []
