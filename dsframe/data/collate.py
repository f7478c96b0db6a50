"""Builds batches from rows: pairs, dicts as in Hugging Face's data sets, or with a task's ``collate``."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.data import default_collate

from dsframe.data.source import Batch
from dsframe.errors import DataError
from dsframe.text import reason
from dsframe.values import Tensors

Collate = Callable[[list[Any]], Any]
"""List of rows -> batch: ``(inputs, targets)``, or a dict with ``labels``, as transformers' collators return."""
LABELS = ("labels", "label")
"""Names of the target in a dict."""


def collated(numbered: Sequence[tuple[int, Any]], collate: Collate | None = None) -> Batch:
    """Returns the batch of rows, each with its number. Without ``collate`` a row is an ``(input, target)`` pair or a
    dict with ``labels``, and all have the same size.

    Raises DataError with the rows' numbers if rows have another form or do not fit each other.
    """
    rows = [row for _, row in numbered]
    if collate is None:
        return _by_default(numbered, rows)
    collate_name = getattr(collate, "__qualname__", type(collate).__qualname__)
    try:
        batch = collate(rows)
    except Exception as error:  # any library's collator
        numbers = ", ".join(str(number) for number, _ in numbered[:8]) + (" ..." if len(numbered) > 8 else "")
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}:{last.lineno}"
        raise DataError(f"{collate_name} makes no batch of rows {numbers}: {reason(error, 400)} ({where})") from error
    return _split(batch, f"{collate_name} returned {_type_of(batch)}")


def _by_default(numbered: Sequence[tuple[int, Any]], rows: list[Any]) -> Batch:
    as_dicts = all(isinstance(row, Mapping) for row in rows)
    for number, row in numbered:
        if not (as_dicts or (isinstance(row, (tuple, list)) and len(row) == 2)):
            raise DataError(
                f"a data set must give (input, target) pairs, or dicts with labels; got {_type_of(row)} for row {number}; where a "
                "model takes several inputs, give them as one: ((first, second), target), which reach it as model(first, "
                "second), or write collate(rows) in the task"
            )
    if as_dicts:
        _refuse_other_names(numbered)
        rows = [{name: _tensor(value) for name, value in row.items()} for row in rows]
    try:
        batch = default_collate(rows)
    except (RuntimeError, TypeError, KeyError, ValueError) as error:  # ValueError: integers that are too large
        mismatch = _misfit([number for number, _ in numbered], rows) or error
        raise DataError(f"the rows of a batch do not fit each other: {mismatch}") from error
    return _split(batch, f"a data set gave dicts with {', '.join(map(repr, batch))}" if as_dicts else "")


def _refuse_other_names(numbered: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
    """Raises DataError if rows have other names than the first one."""
    for number, row in numbered:
        if other := sorted(map(repr, row.keys() ^ numbered[0][1].keys())):
            raise DataError(
                f"row {numbered[0][0]} or row {number} lacks {', '.join(other)}; give it to every row, or to none"
            )


def _split(batch: Any, text: str) -> Batch:
    """Returns inputs and targets. ``what`` describes the batch, for messages."""
    if isinstance(batch, Mapping):
        names = [name for name in LABELS if name in batch]
        if not names:
            raise DataError(
                f"{text}: a dict without labels has no target; name one of them labels, or return (inputs, targets) from the "
                "task's collate(rows)"
            )
        if len(names) == 2:
            raise DataError("rows have both 'labels' and 'label', and one of them would be lost; leave one out")
        return {name: value for name, value in batch.items() if name not in LABELS}, batch[names[0]]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(f"{text}, not (inputs, targets) or a dict with labels")


def _tensor(value: Any) -> Any:
    """Converts a list of numbers, as in rows from files, to a tensor."""
    if isinstance(value, (list, tuple)):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError):  # of texts, of objects, of numbers that are too large
            return value
    return value


def _type_of(row: Any) -> str:
    if isinstance(row, (tuple, list)):
        return f"a {type(row).__name__} of {len(row)}"
    return type(row).__name__


def _misfit(numbers: list[int], rows: list[Any]) -> str:
    """Describes the first row whose leaves differ from the first row's in shape, dtype or number."""

    def describe(row: Any) -> list[str]:
        lines = []
        for path, leaf in tree_leaves_with_path(row):
            tensor = leaf if isinstance(leaf, Tensor) else np.asarray(leaf)
            kind = str(tensor.dtype).removeprefix("torch.").replace("object", f"object ({type(leaf).__name__})")
            lines.append(f"{keystr(path)} {list(tensor.shape)} {kind}")
        return lines

    first = describe(rows[0])
    for number, row in zip(numbers[1:], rows[1:], strict=True):
        if (other := describe(row)) != first:
            only_first = [leaf for leaf in first if leaf not in other] or first
            only_other = [leaf for leaf in other if leaf not in first] or other
            return (
                f"row {numbers[0]} has {', '.join(only_first)}, but row {number} has {', '.join(only_other)}; pad them to one size "
                "(collate = dsframe.data.Pad() in the task), or cut them"
            )
    return ""


@dataclass(frozen=True)
class Pad:
    """A ``collate`` for rows that are dicts of sequences: pads each to the longest of the micro-batch.

    The padded length depends on which rows share a micro-batch, so on the number of ranks, as do the last bits of a
    loss. Otherwise the loss does not depend on it if padding is masked: rows with ``input_ids`` and without
    ``attention_mask`` get one, and ``labels`` are filled with -100. For models whose outputs depend on padding use
    ``length``, which gives every batch the same size.
    """

    fill: Mapping[str, float] = field(default_factory=dict)
    """Fill value by name; default -100 for labels, else 0."""
    multiple: int = 1
    """The padded length is a multiple of this."""
    length: int | None = None
    """Fixed padded length. A longer row is an error."""

    def __call__(self, rows: list[Mapping[str, Any]]) -> Tensors:
        """Returns one tensor for each name, ``[rows, longest, ...]``. Raises DataError if a row is too long."""
        batch: Tensors = {}
        _refuse_other_names([(f"{number} of these", row) for number, row in enumerate(rows, start=1)])
        masks = all("input_ids" in row and "attention_mask" not in row for row in rows)
        for name in rows[0]:
            tensors = [torch.as_tensor(row[name]) for row in rows]
            if dtypes := {tensor.dtype for tensor in tensors if tensor.numel()}:  # an empty list would be float32
                tensors = [tensor if tensor.numel() else tensor.to(next(iter(dtypes))) for tensor in tensors]
            if tensors[0].ndim == 0:
                batch[name] = torch.stack(tensors)
                continue
            longest = max(len(tensor) for tensor in tensors)
            size = self.length or -(-longest // self.multiple) * self.multiple
            if self.length and longest > size:
                raise DataError(
                    f"{name} has a row of {longest}, longer than length={size}; cut the rows, or raise length"
                )
            value = self.fill.get(name, -100 if name in LABELS else 0)
            padded = [torch.cat([row, row.new_full((size - len(row), *row.shape[1:]), value)]) for row in tensors]
            batch[name] = torch.stack(padded)
            if name == "input_ids" and masks:
                lengths = torch.tensor([len(tensor) for tensor in tensors])
                batch["attention_mask"] = (torch.arange(size) < lengths[:, None]).long()
        return batch
