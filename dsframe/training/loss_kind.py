"""What kind of number a task's loss is: a mean over the rows of a micro-batch, a sum over them, or neither.

Engines average over micro-batches and ranks. That is the loss of the global batch only where each loss is a mean; a sum would
train with another gradient on another number of ranks, silently. So the first micro-batch of a run is looked at: its loss
beside the losses of its two halves, which come from the same outputs.
"""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import Dataset

from dsframe.checkpoint import generators
from dsframe.cluster.exchange import all_gather_text
from dsframe.engine import Engine
from dsframe.errors import TaskError
from dsframe.model.forward import MicroBatch
from dsframe.tasks.task import Task, loss_and_terms

_KINDS = ("mean", "sum", "neither")
_TOLERANCE = 1e-3
"""Relative. The halves come from the same fp32 outputs, so that rounding is far smaller, and other lengths of rows are larger."""
_FEW = 1000
"""Entries of a list or dict that is copied for the look; a data set has more."""
_ELEMENTS = 1 << 22
"""Elements of the outputs that are looked at, whole rows and at least four: logits over a large vocabulary are large."""


class LossTrial:
    """Looks at one micro-batch of this rank and judges with the other ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._votes = engine, dict.fromkeys(_KINDS, 0)
        self._state: set[str] = set()
        self._numbers: set[str] = set()
        # A slice of a sequence has a loss over its own positions, which a task has to give as a mean.
        self._looks = engine.plan.batch.sequence_parallel_size == 1

    def watched(self, batch: MicroBatch) -> MicroBatch:
        """Returns the micro-batch, with its loss to be inspected."""
        return replace(batch, inspect=self._inspect) if self._looks else batch

    def judge(self, *, resumed: bool = False) -> str:
        """**Collective.** Returns what is to be said, or nothing. Raises TaskError where the task says another kind of loss, and
        where the loss has a state that ranks, or a run that is ``resumed``, would not share."""
        engine, task = self._engine, self._engine.plan.task
        verdict = self._judge_state(resumed=resumed)
        local_votes = torch.tensor([float(self._votes[kind]) for kind in _KINDS], dtype=torch.float64)
        votes = dict(zip(_KINDS, engine.sum_over_ranks(local_votes.to(engine.plan.device)).tolist(), strict=True))
        kind = max(votes, key=lambda name: votes[name]) if any(votes.values()) else ""
        if task.gathers_rows:
            return verdict  # the look, without gradients, saw one rank's rows; the loss is that of the global batch
        if kind == "neither":
            if task.batch_dependent:
                return verdict  # has been said
            return (
                verdict or "loss is neither a mean nor a sum over rows, so the training depends on the micro batch size"
            )
        if kind in ("", task.loss_is):
            return verdict
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

    def _judge_state(self, *, resumed: bool) -> str:
        whose, world = type(self._engine.plan.task).__name__, self._engine.plan.world
        state = {
            name for text in all_gather_text(self._engine, json.dumps(sorted(self._state))) for name in json.loads(text)
        }
        names = ", ".join(sorted(state))
        if state and (resumed or world.size > 1):
            why = "a resumed run would begin with another" if resumed else "each rank would have its own"
            raise TaskError(
                f"{whose}.loss changes {names}, a state that the task keeps: {why}, and no checkpoint has it. Keep it as a buffer "
                "of a module that model() returns, and make it from the rows of all ranks (dsframe.tasks.global_batch.all_rows)"
            )
        if state or self._numbers:
            return f"loss changes {names or ', '.join(sorted(self._numbers))} of the task, which no checkpoint has"
        return ""

    @torch.no_grad()
    def _inspect(self, outputs: Any, targets: Any) -> None:
        kept = generators.capture(self._engine.plan.device)
        task = self._engine.plan.task
        with _unchanged_buffers(task) as changed:
            twin = copy.copy(task)
            vars(twin).update({name: _copied(value) for name, value in vars(task).items()})
            self._inspect_copy(twin, outputs, targets, kept)
            self._state |= changed()
        before = vars(task)
        for name, value in vars(twin).items():
            changes = self._numbers if isinstance(value, (int, float)) else self._state
            made = name not in before and isinstance(value, Tensor)
            if name != "terms" and (made or not _same(before.get(name), value)):
                changes.add(name)

    def _inspect_copy(self, task: Task, outputs: Any, targets: Any, kept: Any) -> None:
        try:
            kind = _kind_of(task, outputs, targets)
        except Exception:  # a loss that takes no other number of rows: the training says what is wrong, if anything is
            kind = ""
        finally:
            generators.restore(kept, self._engine.plan.device)
        if kind:
            self._votes[kind] += 1


def _copied(value: Any, depth: int = 2) -> Any:
    """A copy whose tensors and numbers may change; modules, data sets and what cannot be copied stay as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= _ELEMENTS else value
    if isinstance(value, (list, set, dict, deque)) and len(value) <= _FEW:
        if isinstance(value, dict):
            return {key: _copied(item, depth - 1) for key, item in value.items()} if depth else dict(value)
        return type(value)(_copied(item, depth - 1) if depth else item for item in value)
    if isinstance(value, (nn.Module, Dataset)) or not depth or not type(value).__dict__.get("__dict__"):
        return value
    try:
        copied = copy.copy(value)
        vars(copied).update({name: _copied(item, depth - 1) for name, item in vars(value).items()})
    except Exception:  # an object that cannot be copied
        return value
    return copied


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and before.shape == after.shape and torch.equal(before, after)
    if isinstance(before, (int, float)):
        return before is after or before == after
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(value, after[key]) for key, value in before.items())
    if isinstance(before, (list, tuple, deque)) and isinstance(after, type(before)):
        return len(before) == len(after) and all(map(_same, before, after))
    if type(before) is type(after) and type(before).__dict__.get("__dict__") and not isinstance(before, nn.Module):
        return before is after or _same(vars(before), vars(after))
    return True


@contextmanager
def _unchanged_buffers(task: Task) -> Iterator[Callable[[], set[str]]]:
    """Puts the buffers of the modules that the task holds back; what it yields gives the names of those that have changed."""
    held = {
        f"{name}.{inner}": (buffer, buffer.clone())
        for name, value in vars(task).items()
        if isinstance(value, nn.Module)
        for inner, buffer in value.named_buffers()
        if buffer.layout == torch.strided
    }
    yield lambda: {name for name, (buffer, before) in held.items() if not torch.equal(buffer, before)}
    for buffer, before in held.values():
        buffer.copy_(before)


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
