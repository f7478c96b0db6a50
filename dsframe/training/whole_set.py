"""Computes metrics that are not means: functions of what the task keeps of all batches of an evaluation, on rank 0."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from dsframe.cluster.exchange import Ranks, all_gather_json, all_gather_tensor
from dsframe.errors import TaskError
from dsframe.model.metric_objects import FailedMetricError
from dsframe.text import reason


class UndefinedMetricError(FailedMetricError, ValueError):
    """A metric that is undefined for these samples, such as an area under a curve if all have one class."""


_ERRORS = {"undefined": UndefinedMetricError, "failed": FailedMetricError, "refused": TaskError}


def packed(kept: Any) -> bytes:
    """Returns what a task keeps of a batch as bytes; tensors are copied from the device."""
    content = io.BytesIO()
    torch.save(tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), kept), content)
    return content.getvalue()


def _unpacked(content: bytes, whose: str) -> Any:
    """Raises TaskError for anything but tensors, numbers and texts, because no other objects are built from bytes."""
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise TaskError(
            f"{whose}.keep returned objects of a class; return tensors, numbers and texts in lists, tuples and dicts"
        ) from None


def compute(engine: Ranks, kept: Sequence[bytes]) -> dict[str, float]:
    """**Collective.** Returns ``metrics_of_all`` over all ranks' batches, the same on every rank. Raises TaskError on
    all. ``kept``: the result of :func:`packed` for each batch of this rank."""
    task, is_main = engine.plan.task, engine.plan.world.is_main
    if engine.plan.batch.sequence_parallel_size > 1:
        raise TaskError(f"{type(task).__name__}.metrics_of_all: a rank has slices of sequences; choose another engine")
    batches = gathered(engine, kept)
    computed = _computed(task, batches) if is_main else {}
    answer = all_gather_json(engine, computed)[0]
    if error := answer.get("error"):
        raise _ERRORS[answer["how"]](error)
    return {str(name): float(value) for name, value in answer["metrics"].items()}


def _computed(task: Any, packed_batches: Sequence[bytes]) -> dict[str, Any]:
    how = "refused"
    try:
        batches = [_unpacked(content, type(task).__name__) for content in packed_batches]
        how = "failed"
        metrics = task.metrics_of_all(batches)
        how = "refused"
        return {"metrics": {str(name): float(value) for name, value in metrics.items()}}
    except Exception as error:
        if how == "failed" and isinstance(error, (ArithmeticError, ValueError)):
            how = "undefined"
        return {"error": f"{type(task).__name__}.metrics_of_all: {reason(error, 400)}", "how": how}


def gathered(engine: Ranks, kept: Sequence[bytes]) -> list[bytes]:
    """**Collective.** Returns, on rank 0, the ``kept`` values of all ranks, in the order of the samples; [] on other
    ranks. Sends one batch of each rank at a time, to limit the memory of other ranks."""
    if engine.plan.world.size == 1:
        return list(kept)
    most = max(all_gather_json(engine, len(kept)))
    batches: list[bytes] = []
    for number in range(most):
        content = kept[number] if number < len(kept) else b""
        parts = all_gather_tensor(engine, torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else _NONE)
        if engine.plan.world.is_main:
            batches += [part.numpy().tobytes() for part in parts if part.numel()]
    return batches


_NONE = torch.zeros(0, dtype=torch.uint8)
