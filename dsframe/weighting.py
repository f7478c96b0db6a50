"""Losses that are means over numbers of items that differ: what each micro-batch counts in its step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dsframe.engine import Engine, Inputs, Weighted
from dsframe.errors import TaskError
from dsframe.tasks.task import Task


class LossWeights:
    """Weighs the micro-batches of each step for a task that defines ``loss_weight``; hands them on for all others."""

    def __init__(self, engine: Engine) -> None:
        """Raises TaskError where ranks share sequences: a slice's loss is a mean over its own positions."""
        task, batch, world = engine.plan.task, engine.plan.batch, engine.plan.world
        self._engine, self._wanted = engine, type(task).loss_weight is not Task.loss_weight
        if self._wanted and batch.sequence_parallel_size > 1:
            raise TaskError(
                f"{type(task).__name__}.loss_weight: ranks that share sequences average over positions, each as much as any "
                "other; leave sequence_parallel_size at 1, or the weights out"
            )
        same = [rank for rank in range(world.size) if batch.data_rank(rank) == batch.data_rank(world.rank)]
        self._speaks = world.rank == same[0]  # of the ranks that read the same samples

    def __call__(self, micro_batches: Iterator[tuple[Inputs, Any]]) -> Iterator[tuple[Inputs, Any]]:
        """**Collective** where the task weighs. The micro-batches of one step; with weights all of them are read at once."""
        return self._weighted(list(micro_batches)) if self._wanted else micro_batches

    def _weighted(self, step: list[tuple[Inputs, Any]]) -> Iterator[tuple[Inputs, Any]]:
        plan = self._engine.plan
        found = [torch.as_tensor(plan.task.loss_weight(targets)).to(plan.device).double() for _, targets in step]
        own = torch.stack([weight.reshape(()) for weight in found])
        total = self._engine.sum_over_ranks(own.sum().reshape(1) * self._speaks)
        # An engine takes the mean over micro-batches and shares.
        factors = own * (len(step) * plan.batch.data_parallel_size) / total.clamp(min=torch.finfo(torch.float64).tiny)
        for (inputs, targets), factor in zip(step, factors.float(), strict=True):
            yield inputs, Weighted(targets, factor)
