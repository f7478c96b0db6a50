"""Weights of micro-batches whose losses are means over different numbers of items, or sums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsframe.config.resolve.batch import Batch
from dsframe.engine import Engine, Inputs, Weighted
from dsframe.errors import TaskError
from dsframe.tasks.task import Task


def refuse(task: Task, batch: Batch) -> None:
    """Raises TaskError for a kind of loss that there is not, or a sum with sequence parallelism or ``loss_weight``."""
    whose = type(task).__name__
    if task.loss_is not in ("mean", "sum"):
        raise TaskError(f'{whose}.loss_is is {task.loss_is!r}; write "mean" or "sum"')
    if _weighs(task) and task.loss_is == "sum":
        raise TaskError(f'{whose} has loss_weight, which is for means, and loss_is = "sum"; remove one of them')
    if batch.sequence_parallel_size > 1 and task.loss_is == "sum":
        raise TaskError(
            f'{whose}.loss_is = "sum" cannot be used with sequence parallelism: ranks average over positions; '
            "remove sequence_parallel_size, or loss_is"
        )


def _weighs(task: Task) -> bool:
    return type(task).loss_weight is not Task.loss_weight


class LossWeights:
    """Weighs the micro-batches of each step for a task that defines ``loss_weight``, or whose loss is a sum."""

    def __init__(self, engine: Engine) -> None:
        batch, world = engine.plan.batch, engine.plan.world
        self._engine, self._wanted = engine, _weighs(engine.plan.task)
        # An engine takes the mean over micro-batches and shares.
        count = batch.accumulation_steps * batch.data_parallel_size
        self._factor = float(count) if engine.plan.task.loss_is == "sum" else 1.0
        # Ranks that share sequences each have a loss, of their own slice.
        self._parts = batch.sequence_parallel_size
        same = [rank for rank in range(world.size) if batch.data_rank(rank) == batch.data_rank(world.rank)]
        self._speaks = self._parts > 1 or world.rank == same[0]  # of the ranks that read the same samples

    def __call__(self, micro_batches: Iterator[tuple[Inputs, Any]]) -> Iterator[tuple[Inputs, Any]]:
        """**Collective** where the task weighs. The micro-batches of one step; with weights all of them are read at once.

        Raises TaskError where a weight is not one number.
        """
        if self._wanted:
            return self._weighted(list(micro_batches))
        if self._factor == 1.0:
            return micro_batches
        return ((inputs, Weighted(targets, self._factor)) for inputs, targets in micro_batches)

    def _weighted(self, step: list[tuple[Inputs, Any]]) -> Iterator[tuple[Inputs, Any]]:
        plan = self._engine.plan
        own = torch.stack([self._weight(targets) for _, targets in step])
        total = self._engine.sum_over_ranks(own.sum().reshape(1) * self._speaks)
        count = len(step) * plan.batch.data_parallel_size * self._parts
        factors = own * count / total.clamp(min=torch.finfo(torch.float64).tiny)
        for (inputs, targets), factor in zip(step, factors.float(), strict=True):
            yield inputs, Weighted(targets, factor)

    def _weight(self, targets: Any) -> Tensor:
        task = self._engine.plan.task
        found = task.loss_weight(self._engine.own_targets(targets))
        if not isinstance(found, (Tensor, int, float)) or (isinstance(found, Tensor) and found.numel() != 1):
            what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TaskError(f"{type(task).__name__}.loss_weight returned {what}; return one number for a micro-batch")
        return torch.as_tensor(found).reshape(()).to(self._engine.plan.device).double()
