"""Creates the data loaders of a rank: for training, and for each validation set."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsframe.cluster.world import World
from dsframe.config.resolve.batch import Batch
from dsframe.config.value import Config
from dsframe.data import EvaluationLoader, Loader, as_source
from dsframe.data.sampler import sequential
from dsframe.errors import DataError, TaskError
from dsframe.tasks.task import Task, gives


def loaders(
    config: Config, task: Task, data: tuple[Any, Any], batch: Batch, world: World, device: torch.device
) -> tuple[Loader, dict[str, EvaluationLoader]]:
    """Returns this rank's loaders. ``data``: for training and for validation."""
    seed, rank, ranks = config.settings.seed, batch.data_rank(world.rank), batch.data_parallel_size
    loader = Loader(
        as_source(data[0], seed, task.collate, streams=True),
        seed=seed,
        micro_batch_size=batch.micro_batch_size,
        accumulation_steps=batch.accumulation_steps,
        rank=rank,
        ranks=ranks,
        drop_last=config.deepspeed.dataloader_drop_last,
        device=device,
        workers=task.workers,
        order=_order(config, task),
    )
    evaluation = {}
    for name, held_out in sets(task, data[1]).items():
        source = as_source(held_out, seed, task.eval_collate or task.collate)
        if name and not len(source):
            raise DataError(f'the evaluation data set "{name}" is empty')
        evaluation[name] = EvaluationLoader(
            source,
            seed=seed,
            micro_batch_size=config.settings.eval_micro_batch_size or batch.micro_batch_size,
            rank=rank,
            ranks=ranks,
            device=device,
            workers=task.workers,
        )
        if config.settings.eval_samples:
            evaluation[name].limit(config.settings.eval_samples)
    return loader, evaluation


def sets(task: Task, held_out: Any) -> Mapping[str, Any]:
    """Returns the validation sets by name; a set that is not in a dict is named "". Raises TaskError."""
    if not isinstance(held_out, dict):
        return {} if held_out is None else {"": held_out}
    for name in held_out:
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
            raise TaskError(
                f"{type(task).__name__}.eval_data: a set is named {name!r}; take letters, digits, '_', '-' and '.'"
            )
    return held_out


def _order(config: Config, task: Task) -> Callable[[int, int], torch.Tensor | None] | None:
    """Returns the function for an epoch's sample order, from the task or the file; None for the default shuffling.
    Raises TaskError if both define one."""
    of_task = task.order if gives(task, "order") else None
    if config.settings.order == "shuffled":
        return of_task
    if of_task:
        raise TaskError(
            f'{type(task).__name__}.order gives the order of the samples, and the file has "order" too; remove one of them'
        )
    return sequential
