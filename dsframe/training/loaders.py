"""The data of a run: this rank's share of the training samples, and of each set to evaluate on."""

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
    """Returns this rank's shares. ``data``: for training and for evaluation."""
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
    """Returns the sets to evaluate on, by name: one without a name where the task gives no dict. Raises TaskError."""
    if not isinstance(held_out, dict):
        return {} if held_out is None else {"": held_out}
    for name in held_out:
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
            raise TaskError(
                f"{type(task).__name__}.eval_data: a set is named {name!r}; take letters, digits, '_', '-' and '.'"
            )
    return held_out


def _order(config: Config, task: Task) -> Callable[[int, int], torch.Tensor | None] | None:
    """The order of an epoch's samples: the task's, or the file's; None: the data's own. Raises TaskError where both say one."""
    of_task = task.order if gives(task, "order") else None
    if config.settings.order == "shuffled":
        return of_task
    if of_task:
        raise TaskError(
            f'{type(task).__name__}.order gives the order of the samples, and the file has "order" too; remove one of them'
        )
    return sequential
