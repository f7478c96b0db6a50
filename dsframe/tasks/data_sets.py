"""Reads a task's data sets, seeded from the file's seed, and rejects objects that are not data sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from dsframe.data.source import Source, draw
from dsframe.errors import DataError
from dsframe.host import generators
from dsframe.tasks.task import Task

_GIVEN = 0x676976656E  # the stream that seeds the random generators before a task creates its data


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the random generators of this process inside the context, and restores them at exit."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)  # type: ignore[no-untyped-call]
    with generators.kept(), torch.random.fork_rng(gpus):
        generators.seed(seed)
        yield


def given(task: Task, name: str) -> Any:
    """Returns ``train_data``, ``eval_data`` or ``predict_data`` of ``task``. Seeds torch, NumPy and ``random`` from the
    task's seed: the same on every rank and at every start, and for validation independent of what training drew. Raises
    DataError if the result is not a data set but could be read like one."""
    trains = name == "train_data"
    with seeded(draw(task.seed, 0, int(trains), _GIVEN)):
        data = getattr(task, name)()
    if data is None and not trains:
        return None
    for part in data.values() if isinstance(data, dict) and not trains else [data]:
        if what := _no_data_set(part):
            raise DataError(f"{type(task).__name__}.{name} gives {what}")
    return data


def _no_data_set(data: Any) -> str:
    """Returns what is wrong if ``data`` are not a data set, or their items not samples; else ""."""
    kind = type(data).__name__
    if data is None:
        return "None; return a data set"
    if isinstance(data, DataLoader):
        return "a DataLoader; return its data set: dsframe makes the batches of every rank (train_batch_size, collate, workers)"
    if not (hasattr(data, "__getitem__") or isinstance(data, Source)):
        what = f"a {kind}, which can be read once" if isinstance(data, Iterator) else f"{kind}, which is not a data set"
        return f"{what}; return a list, a torch Dataset or an IterableDataset"
    if isinstance(data, Mapping) and 0 not in data:
        names = [repr(name) for name in data] or ["no names"]
        if all(isinstance(part, Dataset) or hasattr(part, "column_names") for part in data.values()):
            return (
                f"a {kind} of several data sets ({', '.join(names)}); return one of them, such as its split {names[0]}"
            )
        return f"a {kind} with {', '.join(names[:5])}, and not samples by number; return TensorDataset(inputs, targets)"
    arrays = isinstance(data, (tuple, list)) and len(data) == 2 and hasattr(data[0], "shape")
    if arrays and hasattr(data[1], "__len__"):
        return f"a {kind} of two {type(data[0]).__name__}s, which is read as two samples; return TensorDataset(inputs, targets)"
    return ""
