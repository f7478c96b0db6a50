"""Weights micro-batches whose losses are means over different numbers of items, or sums."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dsframe.config.resolve.batch import Batch
from dsframe.engine import Engine
from dsframe.errors import TaskError
from dsframe.model.micro_batch import MicroBatch, Pair
from dsframe.tasks.task import Task, gives
from dsframe.values import tensors_of


def refuse(task: Task, batch: Batch) -> None:
    """Raises TaskError for an unknown ``loss_is``, or a sum with sequence parallelism or ``loss_weight``."""
    name = type(task).__name__
    if task.loss_is not in ("mean", "sum"):
        raise TaskError(f'{name}.loss_is is {task.loss_is!r}; write "mean" or "sum"')
    if _has_weight(task) and task.loss_is == "sum":
        raise TaskError(f'{name} has loss_weight, which is for means, and loss_is = "sum"; remove one of them')
    if batch.sequence_parallel_size > 1 and task.loss_is == "sum":
        raise TaskError(
            f'{name}.loss_is = "sum" cannot be used with sequence parallelism: ranks average over '
            "positions; remove sequence_parallel_size, or loss_is"
        )


def _has_weight(task: Task) -> bool:
    return gives(task, "loss_weight")


class LossWeights:
    """Weights the micro-batches of a step if the task defines ``loss_weight``, or if its loss is a sum."""

    def __init__(self, engine: Engine) -> None:
        plan = engine.plan
        batch, world = plan.batch, plan.world
        self._engine = engine
        self._has_weight = _has_weight(plan.task)
        # An engine takes the mean over micro-batches and data-parallel ranks.
        count = batch.accumulation_steps * batch.data_parallel_size
        self._factor = float(count) if plan.task.loss_is == "sum" else 1.0
        # With sequence parallelism each rank's loss is that of its own slice.
        self._slices = batch.sequence_parallel_size
        readers = [rank for rank in range(world.size) if batch.data_rank(rank) == batch.data_rank(world.rank)]
        # Only one of the ranks that read the same samples counts.
        self._counts = self._slices > 1 or world.rank == readers[0]
        self._collates = plan.task.collate is not None and plan.task.loss_is == "mean" and world.is_main
        self._rows = set[int]()

    def settle(self, batches: Iterator[Pair]) -> Iterable[MicroBatch]:
        """**Collective** if the task defines ``loss_weight``. Returns the weighted micro-batches of one step. With
        ``loss_weight`` all of them are read at once; without, each is read when it is needed. Raises TaskError if a
        weight is not one number."""
        if self._has_weight:
            return self._weighed(list(batches))
        return MicroBatch.of(self._counted(batches) if self._collates else batches, self._factor)

    def _counted(self, batches: Iterator[Pair]) -> Iterator[Pair]:
        """Reports once that a ``collate`` makes micro-batches of different sizes, which all count the same."""
        for batch in batches:
            sizes = {len(leaf) for leaf in tensors_of(batch) if leaf.ndim}
            self._rows |= sizes if len(sizes) == 1 else set()
            if self._collates and len(self._rows) > 1:
                self._collates = False
                text = (
                    f"dsframe: this task's collate makes micro-batches of {' and of '.join(map(str, sorted(self._rows)))} rows, "
                    "which count the same: the training depends on the micro batch size and the number of ranks; define loss_weight"
                )
                print(text, file=sys.stderr, flush=True)
            yield batch

    def _weighed(self, step: list[Pair]) -> list[MicroBatch]:
        plan = self._engine.plan
        weights = torch.stack([self._weight(targets) for _, targets in step])
        total = self._engine.sum_over_ranks(weights.sum().reshape(1) * self._counts)
        count = len(step) * plan.batch.data_parallel_size * self._slices
        factors = weights * count / total.clamp(min=torch.finfo(torch.float64).tiny)
        return [
            MicroBatch(inputs, targets, factor) for (inputs, targets), factor in zip(step, factors.float(), strict=True)
        ]

    def _weight(self, targets: Any) -> Tensor:
        plan = self._engine.plan
        if self._slices > 1:
            own_slice = plan.world.rank % self._slices
            targets = tree_map_only(Tensor, lambda tensor: tensor.chunk(self._slices, dim=1)[own_slice], targets)
        weight = plan.task.loss_weight(targets)
        if isinstance(weight, Tensor) and weight.numel() == 1:
            return weight.reshape(()).to(plan.device).double()
        if isinstance(weight, (int, float)):
            return torch.tensor(weight, dtype=torch.float64, device=plan.device)
        returned = f"shape {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise TaskError(
            f"{type(plan.task).__name__}.loss_weight returned {returned}; return one number for a micro-batch"
        )
