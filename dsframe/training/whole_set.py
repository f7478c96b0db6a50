"""Metrics that are no means: a function of what all batches of an evaluation have left, on rank 0."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dsframe.cluster.exchange import Ranks, all_gather_tensor, all_gather_text
from dsframe.errors import TaskError
from dsframe.text import reason


class UndefinedMetricError(TaskError, ValueError):
    """A metric that the samples do not define, such as an area under a curve where all have one class."""


def on_cpu(kept: Any) -> Any:
    """Returns what a task keeps of a batch, with copies of its tensors in the host's memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), kept)


def compute(engine: Ranks, kept: Sequence[Any]) -> dict[str, float]:
    """**Collective.** Returns the metrics of what all ranks have ``kept``, the same on every rank. Raises TaskError on all."""
    task, is_main = engine.plan.task, engine.plan.world.is_main
    if engine.plan.batch.sequence_parallel_size > 1:
        raise TaskError(f"{type(task).__name__}.metrics_of_all: a rank has slices of sequences; choose another engine")
    batches = gathered(engine, kept)
    computed = _computed(task, batches) if is_main else {}
    answer = json.loads(all_gather_text(engine, json.dumps(computed))[0])
    if error := answer.get("error"):
        raise (UndefinedMetricError if answer["undefined"] else TaskError)(error)
    return {str(name): float(value) for name, value in answer["metrics"].items()}


def _computed(task: Any, batches: list[Any]) -> dict[str, Any]:
    """What the task makes of all batches, or what went wrong."""
    whose = f"{type(task).__name__}.metrics_of_all"
    try:
        return {"metrics": {str(name): float(value) for name, value in task.metrics_of_all(batches).items()}}
    except Exception as error:
        undefined = isinstance(error, (ArithmeticError, ValueError))
        return {"error": f"{whose}: {reason(error, 400)}", "undefined": undefined}


def gathered(engine: Ranks, kept: Sequence[Any]) -> list[Any]:
    """**Collective.** On rank 0 what all ranks have ``kept``, batch by batch in the order of the samples; nothing on the others.

    One batch of each rank travels at a time, so other ranks hold no more than that beside their own.
    """
    if engine.plan.world.size == 1:
        return list(kept)
    most = max(int(text) for text in all_gather_text(engine, str(len(kept))))
    batches: list[Any] = []
    for number in range(most):
        content = pickle.dumps(kept[number]) if number < len(kept) else b""
        parts = all_gather_tensor(engine, torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else _NONE)
        if engine.plan.world.is_main:
            batches += [pickle.loads(part.numpy().tobytes()) for part in parts if part.numel()]
    return batches


_NONE = torch.zeros(0, dtype=torch.uint8)
