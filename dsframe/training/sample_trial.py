"""The kind of a task's loss by a few samples beside two halves of them, through collate, model and loss.

It sees what halves of the outputs do not show: outputs with time first, a loss inside of the model, targets of another length, a
``collate`` that mixes samples. The model runs in evaluation mode, and what it draws belongs to samples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsframe.data import Loader
from dsframe.data.loader import StreamSource
from dsframe.data.sample_draws import RowDraws
from dsframe.engine import Engine
from dsframe.engines import precision
from dsframe.errors import EngineError, WorldError
from dsframe.model import derivatives
from dsframe.tasks.task import Sum, Task, loss_and_terms
from dsframe.text import reason
from dsframe.training import unmoved

_SAMPLES = 4
"""At most: without gradients so many take less memory than a training step, also where that has one."""
_TOLERANCE, _TOLERANCE_OF_16_BITS = 3e-4, 1e-2
"""Relative. The same row differs by less in a batch of another size, also in TF32."""


def is_needed(engine: Engine, loader: Loader, kind: str) -> bool:
    """True if ``kind``, which halves of the outputs gave, is not sure."""
    watch = engine.built.watch
    # Halves of the outputs are looked at without gradients, which such a loss may leave terms out for.
    differentiates = watch is not None and bool(derivatives.line_of(engine.plan.task, watch.model))
    if loader.collate_draws or (kind in ("mean", "sum") and not loader.collates and not differentiates):
        return False
    module = type(engine.plan.task).__module__
    if module.startswith("dsframe.") and module != Task.__module__:
        return False  # the built-in ones give means; Task.from_module has a loss of the user's
    batch = engine.plan.batch
    return batch.data_parallel_size == engine.plan.world.size  # of a pipeline, a single rank would see the loss


def kind_of(engine: Engine, loader: Loader) -> tuple[str, str]:
    """**Collective.** Returns the kind, or "" and what is to be said."""
    watch, plan = engine.built.watch, engine.plan
    unknown = 'loss was not examined ({}): where it is a sum over samples, write loss_is = "sum"'
    samples = 2 if plan.batch.micro_batch_size == 1 else _SAMPLES
    if watch is None or isinstance(loader.source, StreamSource) or len(loader.source) < samples:
        return "", unknown.format("the samples cannot be read again")
    numbers = torch.arange(samples)
    halves = [part.tolist() for first in halvings(samples) for part in (numbers[first], numbers[~first])]
    parts = [list(range(samples)), *halves]
    losses = Losses(engine)
    draws = RowDraws(plan.seed, plan.device)
    try:
        with (
            unmoved.unmoved(watch.model, plan.device),
            watch.trial(),
            plan.task.context.evaluation(),  # without engine.evaluating: shards are to stay shards
        ):
            for part, batch in zip(parts, loader.batches(parts), strict=True):
                with draws.of(0, torch.tensor(part)):
                    losses.add(batch, samples=len(part))
    except (EngineError, WorldError):
        raise
    except Exception as error:  # such as a model that takes batches of one size
        first = error.__context__ or error  # a library's hooks may raise another behind it
        return "", unknown.format(reason(first, 100))
    short = plan.task.context.dtype.itemsize < 4 or precision.autocast_dtype(plan.config, plan.device)
    tolerance = _TOLERANCE_OF_16_BITS if short else _TOLERANCE
    items = losses.items
    kinds = set()
    for values in losses.of.values():
        pairs = ((0, at, at + 1) for at in range(1, len(parts), 2))
        kinds.add(
            agreed({kind_of_parts([values[n] for n in three], [items[n] for n in three], tolerance) for three in pairs})
        )
    return next((kind for kind in ("sum", "neither", "mean") if kind in kinds), ""), ""


def halvings(rows: int) -> list[Tensor]:
    """Returns which of ``rows``, an even number, are in the first half, for each way to halve them: of four rows all ways, so that
    the largest half of their losses is not a mean over halves in each of them."""
    numbers = torch.arange(rows)
    ways = [numbers < rows // 2, numbers % 2 == 0, numbers % 4 % 3 == 0]
    return ways[: 1 if rows == 2 else 3 if rows % 4 == 0 else 2]


def agreed(kinds: Collection[str]) -> str:
    """Returns the kind of a loss of which several halvings have shown ``kinds``."""
    return next((kind for kind in ("neither", "sum", "mean") if kind in kinds), "")


class Losses:
    """The losses of some batches in evaluation, by name ("" of a single model), and what each is over."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._task = engine, engine.plan.task
        watch = engine.built.watch
        self._differentiates = watch is not None and bool(derivatives.line_of(self._task, watch.model))
        self.of: dict[str, list[float]] = {}
        self.items: list[float] = []

    def add(self, batch: tuple[Any, Any], *, samples: int) -> None:
        """**Collective.** Adds the losses of ``batch``, which has so many ``samples``. Leaves no trace in the task."""
        engine, task = self._engine, self._task
        of_several = engine.built.losses
        weighted = type(task).loss_weight is not Task.loss_weight
        self.items.append(float(task.loss_weight(batch[1])) if weighted else samples)
        with self._gradients():
            if of_several is None:
                engine.eval_step(batch, self._measure)
                return
            state = vars(unmoved.twin(task))
            for name, loss in of_several(*batch).items():
                self.of.setdefault(name, []).append(float(loss))
            vars(task).update(state)

    @contextmanager
    def _gradients(self) -> Iterator[None]:
        """Inside, an evaluation has gradients where model or loss take derivatives."""
        asked = self._task.eval_gradients
        self._task.eval_gradients = asked or self._differentiates
        try:
            yield
        finally:
            self._task.eval_gradients = asked

    def _measure(self, outputs: Any, targets: Any) -> Mapping[str, Sum]:
        held, copied = unmoved.HeldBuffers(self._engine), unmoved.twin(self._task)
        self.of.setdefault("", []).append(float(loss_and_terms(copied.loss(outputs, targets))[0]))
        held.put_back()
        return {}


def kind_of_parts(losses: Sequence[float], items: Sequence[float], tolerance: float) -> str:
    """Returns the kind by the losses of a whole and of its two halves, or "" where they do not tell.

    ``items``: the number of things that a mean would be over, of each. ``tolerance``: relative.
    """
    near = tolerance * max(map(abs, losses))
    mean = sum(loss * count for loss, count in zip(losses[1:], items[1:], strict=True)) / sum(items[1:])
    is_mean, is_sum = abs(losses[0] - mean) <= near, abs(losses[0] - sum(losses[1:])) <= near
    if near == 0 or is_mean == is_sum:
        return "neither" if near > 0 and not is_mean else ""
    return "mean" if is_mean else "sum"
