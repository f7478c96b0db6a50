"""What a model gives for a batch, as rows of plain values: one for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, view_as_real
from torch.utils._pytree import tree_leaves

from dsframe.errors import TaskError
from dsframe.model.output_classes import attributes
from dsframe.tasks.task import Task


def rows_of(task: Task, outputs: Any, targets: Any, samples: int) -> list[dict[str, Any]]:
    """Returns what the task predicts for a batch of so many ``samples``, a dict for each, as JSON has it. Raises TaskError."""
    whose = f"{type(task).__name__}.predictions"
    predicted = task.predictions(outputs, targets)
    if not isinstance(predicted, Mapping):
        raise TaskError(
            f"{whose} returned {type(predicted).__name__}; return tensors or lists by name, a row for each sample"
        )
    return _dicts({str(name): _rows(value, samples, f"{whose}: {name!r}") for name, value in predicted.items()})


def _dicts(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _rows(value: Any, samples: int, what: str) -> list[Any]:
    """``value`` by samples. A tensor has a row for each and a list an entry; anything else is made of such."""
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim and len(value) == samples:
            return list(plain(value, what))
        raise _refused(what, f"shape {list(value.shape)}", samples)
    parts = _parts(value)
    if parts is not None:
        return _dicts({name: _constant(part, samples, f"{what}, {name}") for name, part in parts.items()})
    if not isinstance(value, (tuple, list)):
        raise _refused(what, type(value).__name__, samples)
    tensors = bool(value) and all(isinstance(array, (Tensor, np.ndarray)) and array.ndim for array in value)
    by_part = tensors and all(len(array) == samples for array in value)
    if by_part and isinstance(value, list) and len(value) == samples > 1:
        raise TaskError(
            f"{what}: a list of {samples} tensors of {samples} rows each: its entries or its rows may be the samples; return them "
            "by names from predictions(outputs, targets)"
        )
    if by_part or (isinstance(value, tuple) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))):
        each = [_constant(part, samples, f"{what}, part {number}") for number, part in enumerate(value)]
        return [list(row) for row in zip(*each, strict=True)]
    if len(value) == samples:
        return [plain(array, what) for array in value]
    raise _refused(what, f"a {type(value).__name__} of {len(value)}", samples)


def _constant(value: Any, samples: int, what: str) -> list[Any]:
    """``value`` by samples, where it may also be one value for all of them: a field of an object that is no result."""
    if value is None or isinstance(value, (str, bool, int)):
        return [value] * samples
    return _rows(value, samples, what)


def _refused(what: str, shape: str, samples: int) -> TaskError:
    return TaskError(
        f"{what}: {shape} for a batch of {samples} samples; return a row for each sample from predictions(outputs, targets)"
    )


def _parts(value: Any) -> Mapping[str, Any] | None:
    """The named parts of a dict, a named tuple, a dataclass or an object of a model's own class; None of anything else."""
    if isinstance(value, Mapping):
        return {str(name): part for name, part in value.items()}
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    return None if isinstance(value, (tuple, list, set)) else attributes(value) or None


def plain(value: Any, what: str) -> Any:
    """``value`` as JSON has it. Raises TaskError for what JSON has not."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Tensor):
        return (view_as_real(value) if value.is_complex() else value).detach().cpu().tolist()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (tuple, list)) and not hasattr(value, "_asdict"):
        return [plain(item, what) for item in value]
    parts = _parts(value)
    if parts is None:
        raise TaskError(
            f"{what}: {type(value).__name__} is nothing that can be written; return tensors, numbers or texts"
        )
    return {name: plain(part, what) for name, part in parts.items()}
