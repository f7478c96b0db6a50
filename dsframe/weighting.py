"""Losses that are means over numbers of items that differ: what each micro-batch counts in its step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dsframe.config.batch import Batch
from dsframe.engine import Engine, Inputs, Weighted
from dsframe.errors import TaskError
from dsframe.tasks.task import Task


def refuse(task: Task, batch: Batch) -> None:
    """Raises TaskError where ``task`` weighs and ranks share sequences: a slice's loss is a mean over its own positions."""
    if _weighs(task) and batch.sequence_parallel_size > 1:
        raise TaskError(
            f"{type(task).__name__}.loss_weight: ranks that share sequences average over positions, each as much as any other; "
            "leave sequence_parallel_size at 1, or the weights out"
        )


def _weighs(task: Task) -> bool:
    return type(task).loss_weight is not Task.loss_weight


class LossWeights:
    """Weighs the micro-batches of each step for a task that defines ``loss_weight``; hands them on for all others."""

    def __init__(self, engine: Engine) -> None:
        batch, world = engine.plan.batch, engine.plan.world
        self._engine, self._wanted = engine, _weighs(engine.plan.task)
        same = [rank for rank in range(world.size) if batch.data_rank(rank) == batch.data_rank(world.rank)]
        self._speaks = world.rank == same[0]  # of the ranks that read the same samples

    def __call__(self, micro_batches: Iterator[tuple[Inputs, Any]]) -> Iterator[tuple[Inputs, Any]]:
        """**Collective** where the task weighs. The micro-batches of one step; with weights all of them are read at once.

        Raises TaskError where a weight is not one number.
        """
        return self._weighted(list(micro_batches)) if self._wanted else micro_batches

    def _weighted(self, step: list[tuple[Inputs, Any]]) -> Iterator[tuple[Inputs, Any]]:
        plan = self._engine.plan
        own = torch.stack([self._weight(targets) for _, targets in step])
        total = self._engine.sum_over_ranks(own.sum().reshape(1) * self._speaks)
        # An engine takes the mean over micro-batches and shares.
        factors = own * (len(step) * plan.batch.data_parallel_size) / total.clamp(min=torch.finfo(torch.float64).tiny)
        for (inputs, targets), factor in zip(step, factors.float(), strict=True):
            yield inputs, Weighted(targets, factor)

    def _weight(self, targets: Any) -> Tensor:
        task = self._engine.plan.task
        found = task.loss_weight(targets)
        if not isinstance(found, (Tensor, int, float)) or (isinstance(found, Tensor) and found.numel() != 1):
            what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise TaskError(
                f"{type(task).__name__}.loss_weight: it returned {what}; one number for a micro-batch is wanted"
            )
        return torch.as_tensor(found).reshape(()).to(self._engine.plan.device).double()
