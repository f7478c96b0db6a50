"""Converts a model's outputs for a batch to rows of plain values, one for each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, view_as_real

from dsframe.data.collate import LABELS, Collate, collated
from dsframe.data.datasets import DatasetSource
from dsframe.errors import TaskError
from dsframe.tasks.task import Task, gives
from dsframe.values import attributes_of, tensors_of


def rows_of(task: Task, outputs: Any, targets: Any, samples: int) -> list[dict[str, Any]]:
    """Returns the task's predictions: a dict of JSON values for each of ``samples``. Raises TaskError."""
    whose = f"{type(task).__name__}.predictions"
    predicted = task.predictions(outputs, targets)
    if not isinstance(predicted, Mapping):
        raise TaskError(
            f"{whose} returned {type(predicted).__name__}; return tensors or lists by name, a row for each sample"
        )
    if not predicted:
        raise TaskError(f"{whose} returned nothing to write; return tensors or lists by name, a row for each sample")
    parts = _parts(predicted, whose) or {}
    return _records({name: _rows(value, samples, f"{whose}: {name!r}") for name, value in parts.items()})


def padded(task: Task, inputs: Any, outputs: Any, targets: Any) -> bool:
    """Returns True if some positions of a batch are masked, ``outputs`` have an entry for each (``[rows, positions]``),
    and the task has no :meth:`Task.predictions` to remove them. Mask: ``attention_mask``, else targets that are not
    -100."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if mask is None and isinstance(targets, Tensor) and targets.ndim > 1:
        mask = targets != -100
    if gives(task, "predictions") or not isinstance(mask, Tensor) or bool(mask.all()):
        return False
    return any(leaf.shape[:2] == mask.shape[:2] for leaf in tensors_of(outputs))


@dataclass(frozen=True)
class Untargeted:
    """A ``collate`` of rows without a target. If ``collate`` returns no targets, they are zeros, int64 ``[rows]``."""

    collate: Collate | None

    def __call__(self, rows: list[Any]) -> Any:
        """Returns the batch. Raises DataError if rows do not fit each other."""
        if self.collate is None:
            return collated(list(enumerate(map(_with_target, rows))))
        batch = self.collate(rows)
        complete = not isinstance(batch, Mapping) or any(name in batch for name in LABELS)
        return batch if complete else (batch, torch.zeros(len(rows), dtype=torch.int64))


def take_inputs_alone(source: Any) -> None:
    """Allows rows of ``source`` without a target, if its first row has none: a tensor, a tuple of one, or a dict
    without labels; with a ``collate``, anything but a pair."""
    if not isinstance(source, DatasetSource):
        return
    row = source.dataset[0]
    labelled = isinstance(row, Mapping) and any(name in row for name in LABELS)
    pair = isinstance(row, (tuple, list)) and len(row) == 2
    if not (labelled or pair) and (source.collate or _with_target(row) is not row):
        source.collate = Untargeted(source.collate)


def _with_target(row: Any) -> Any:
    """Returns a row that has only inputs with the target 0; another row unchanged."""
    if isinstance(row, Mapping):
        return {**row, LABELS[0]: 0}
    if isinstance(row, (tuple, list)):
        return (row[0], 0) if len(row) == 1 else row
    return (row, 0) if isinstance(row, (Tensor, np.ndarray)) else row


def _records(columns: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _rows(value: Any, samples: int, what: str) -> list[Any]:
    """Returns ``value`` by sample. A tensor needs a row for each sample, a list an entry; None is None for each sample;
    other objects are built of these."""
    if value is None:
        return [None] * samples
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim and _length(value) == samples:
            return list(plain(value, what))
        nested = isinstance(value, Tensor) and value.is_nested
        raise _shape_error(what, f"{_length(value)} rows" if nested else f"shape {list(value.shape)}", samples)
    parts = _parts(value, what)
    if parts is not None:
        return _records({name: _constant(part, samples, f"{what}, {name}") for name, part in parts.items()})
    if not isinstance(value, (tuple, list)):
        raise _shape_error(what, type(value).__name__, samples)
    tensors = bool(value) and all(isinstance(array, (Tensor, np.ndarray)) and array.ndim for array in value)
    by_part = tensors and all(len(array) == samples for array in value)
    if by_part and isinstance(value, list) and len(value) == samples > 1:
        raise TaskError(
            f"{what}: a list of {samples} tensors of {samples} rows each: its entries or its rows may be the samples; return them "
            "by names from predictions(outputs, targets)"
        )
    if by_part or (isinstance(value, tuple) and bool(tensors_of(value))):
        each = [_constant(part, samples, f"{what}, part {number}") for number, part in enumerate(value)]
        return [list(row) for row in zip(*each, strict=True)]
    if len(value) == samples:
        return [plain(array, what) for array in value]
    raise _shape_error(what, f"a {type(value).__name__} of {len(value)}", samples)


def _constant(value: Any, samples: int, what: str) -> list[Any]:
    """Returns ``value`` by sample; a scalar field of an output object is repeated."""
    if isinstance(value, (str, bool, int)):
        return [value] * samples
    return _rows(value, samples, what)


def _shape_error(what: str, shape: str, samples: int) -> TaskError:
    return TaskError(
        f"{what}: {shape} for a batch of {samples} samples; return a row for each sample from predictions(outputs, targets)"
    )


def _parts(value: Any, what: str) -> Mapping[str, Any] | None:
    """Returns the named parts of a dict, named tuple, dataclass or object of a model's own class; else None. Raises
    TaskError if JSON would have two of the same name."""
    if isinstance(value, Mapping):
        names = [*map(str, value)]
        if twice := [name for name in names if names.count(name) > 1]:
            raise TaskError(
                f"{what}: JSON has texts as names, and two of these are {twice[0]!r}; give them other names"
            )
        return {str(name): part for name, part in value.items() if not _is_cache(str(name), part, value)}
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    parts = {} if isinstance(value, (tuple, list, set)) else attributes_of(value)
    return parts if any(not name.startswith("_") for name in parts) else None  # a path's are its own affair


def _is_cache(name: str, part: Any, whole: Any) -> bool:
    """Returns True for the key-value cache that transformers models return for the next call."""
    kept = name == "past_key_values" and type(whole).__module__.startswith("transformers.")
    return kept or any(
        kind.__module__.startswith("transformers.") and kind.__name__.endswith("Cache") for kind in type(part).__mro__
    )


def _length(rows: Any) -> int:
    """Returns the number of rows; len() of nested tensors raises."""
    return int(rows.size(0)) if isinstance(rows, Tensor) else len(rows)


def _listed(value: Tensor) -> Any:
    """Returns numbers in lists; a complex one is a pair, a row of a nested tensor has its own length."""
    if value.is_nested:
        return [_listed(row) for row in value.unbind()]
    value = value.dequantize() if value.is_quantized else value
    value = view_as_real(value.to_dense()) if value.is_complex() else value.to_dense()
    return value.cpu().tolist()


_PLAIN = "biufU"
"""Kinds of NumPy's arrays whose values JSON has."""


def plain(value: Any, what: str) -> Any:
    """Returns ``value`` as JSON values. Raises TaskError if that is impossible."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Tensor):
        return _listed(value.detach())
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind == "c":
            return _listed(torch.as_tensor(value))
        if value.dtype.kind in "mM":  # a list of them may be of whole numbers
            raise TaskError(
                f"{what}: {value.dtype} is nothing that can be written; return texts: numpy.datetime_as_string"
            )
        return value.tolist() if value.dtype.kind in _PLAIN else plain(value.tolist(), what)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_asdict"):
        return [plain(item, what) for item in value]
    parts = _parts(value, what)
    if parts is None:
        raise TaskError(
            f"{what}: {type(value).__name__} is nothing that can be written; return tensors, numbers or texts"
        )
    return {name: plain(part, what) for name, part in parts.items()}
