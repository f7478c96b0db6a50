"""What kind of number a task's loss is: a mean over the rows of a micro-batch, a sum over them, or neither.

Engines average over micro-batches and ranks. That is the loss of the global batch only where each loss is a mean; a sum would
train with another gradient on another number of ranks, silently. So the first micro-batch of a run is looked at: its loss
beside the losses of its two halves, which come from the same outputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from dsframe.checkpoint import generators
from dsframe.engine import Engine, Weighted
from dsframe.errors import TaskError
from dsframe.tasks.task import Task, loss_and_terms

_KINDS = ("mean", "sum", "neither")
_TOLERANCE = 1e-3
"""Relative. The halves come from the same fp32 outputs, so that rounding is far smaller, and other lengths of rows are larger."""
_ELEMENTS = 1 << 22
"""Elements of the outputs that are looked at, whole rows and at least four: logits over a large vocabulary are large."""


class LossTrial:
    """Looks at one micro-batch of this rank and judges with the other ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._votes = engine, dict.fromkeys(_KINDS, 0)
        # A slice of a sequence has a loss over its own positions, which a task has to give as a mean.
        self._looks = engine.plan.batch.sequence_parallel_size == 1

    def watched(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """The micro-batch, whose loss will be looked at."""
        inputs, targets = batch
        if not self._looks:
            return batch
        if not isinstance(targets, Weighted):
            targets = Weighted(targets, 1.0)
        return inputs, Weighted(targets.targets, targets.factor, self._look)

    def judge(self) -> str:
        """**Collective.** Returns what is to be said, or nothing. Raises TaskError where the task says another kind of loss."""
        engine, task = self._engine, self._engine.plan.task
        own = torch.tensor([float(self._votes[kind]) for kind in _KINDS], dtype=torch.float64)
        votes = dict(zip(_KINDS, engine.sum_over_ranks(own.to(engine.plan.device)).tolist(), strict=True))
        kind = max(votes, key=lambda name: votes[name]) if any(votes.values()) else ""
        if task.gathers_rows:
            return ""  # the look, without gradients, saw one rank's rows; the loss is that of the global batch
        if kind == "neither":
            if task.batch_dependent:
                return ""  # has been said
            return "loss is neither a mean nor a sum over rows, so the training depends on the micro batch size"
        if kind in ("", task.loss_is):
            return ""
        whose = type(task).__name__
        if task.loss_is == "sum":
            raise TaskError(
                f'{whose}.loss gives a mean over the rows of a micro-batch, but the task says loss_is = "sum"; '
                "leave loss_is out, or return the sum"
            )
        batch = engine.plan.batch
        count = batch.accumulation_steps * batch.data_parallel_size
        if count == 1:
            return 'loss is a sum over rows: with more ranks or accumulation the task needs loss_is = "sum"'
        raise TaskError(
            f"{whose}.loss gives a sum over the rows of a micro-batch. A step takes the mean over its {count} micro-batches, so "
            f'gradients would be 1/{count} of those of the whole batch; write loss_is = "sum" in class {whose}, or return the mean'
        )

    @torch.no_grad()
    def _look(self, outputs: Any, targets: Any) -> None:
        kept = generators.capture(self._engine.plan.device)
        try:
            kind = _kind_of(self._engine.plan.task, outputs, targets)
        except Exception:  # a loss that takes no other number of rows: the training says what is wrong, if anything is
            kind = ""
        finally:
            generators.restore(kept, self._engine.plan.device)
        if kind:
            self._votes[kind] += 1


def _rows(part: slice, leaf: Tensor) -> Tensor:
    return leaf[part] if leaf.ndim else leaf


def _kind_of(task: Task, outputs: Any, targets: Any) -> str:
    """Returns the kind, or "" where it cannot be told: one row, tensors without rows, a loss of 0."""
    tensors = [leaf for leaf in tree_leaves((outputs, targets)) if isinstance(leaf, Tensor) and leaf.ndim]
    if len({len(leaf) for leaf in tensors}) != 1:
        return ""
    each = max(leaf[0].numel() for leaf in tensors)
    rows = min(len(tensors[0]), max(4, _ELEMENTS // max(each, 1))) // 2 * 2
    if not rows:
        return ""
    whole, first, second = slice(0, rows), slice(0, rows // 2), slice(rows // 2, rows)
    losses, items = [], []
    for part in (whole, first, second):
        some, of = tree_map_only(Tensor, partial(_rows, part), (outputs, targets))
        losses.append(float(loss_and_terms(task.loss(some, of))[0]))
        items.append(float(task.loss_weight(of)))
    near = _TOLERANCE * max(map(abs, losses))
    mean = sum(loss * count for loss, count in zip(losses[1:], items[1:], strict=True)) / sum(items[1:])
    is_mean, is_sum = abs(losses[0] - mean) <= near, abs(losses[0] - sum(losses[1:])) <= near
    if near == 0 or is_mean == is_sum:
        return "neither" if near > 0 and not is_mean else ""
    return "mean" if is_mean else "sum"
