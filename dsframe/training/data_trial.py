"""Reads a few samples before training, to test whether data and order depend only on the file and the sample."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

from dsframe.data import folder
from dsframe.data.datasets import DatasetSource, StreamSource, as_source
from dsframe.data.fingerprint import digest
from dsframe.data.reading import loaded
from dsframe.data.source import Source
from dsframe.errors import DataError
from dsframe.host import generators
from dsframe.model.user_state import functions_of, is_generator, state_of, words_of
from dsframe.tasks.task import Task, gives
from dsframe.text import Say
from dsframe.training.loaders import sets
from dsframe.values import FEW

_CPU = torch.device("cpu")
_DEPTH = 5
"""Number of attribute levels below the data set that are searched for a generator."""
_LONG = 32
"""Longer lists are assumed to hold rows, not transforms."""
_MOST_FILES = 2_000
"""Number of files whose sizes are asked for: a network may take a millisecond each, on every rank."""
_OVERWRITTEN = "overwritten"
"""Returned in place of the digest of a stream's first row."""
_SO = "so the result depends on the number of processes, on workers and on restarts"
_REMEDY = "draw in __getitem__ with torch, NumPy or random, which dsframe seeds for each sample"


def examined(task: Task, seed: int, data: tuple[Any, Any], say: Say) -> tuple[Any, Any]:
    """Returns ``data`` (for training and validation). Reports dependencies of samples on anything but their index.
    Raises DataError if their order has some, or if processes that read a stream share a file."""
    source = as_source(data[0], seed, task.collate, streams=True)
    if isinstance(source, StreamSource):
        _refuse_shared_files(source)
    else:
        _record_files(source)
        _refuse_changing_order(task, len(source))
        if len(source) and (line := _state_warning(source, "training", task.workers)):
            say(line)
    for held_out in sets(task, data[1]).values():
        source = as_source(held_out, seed, task.eval_collate or task.collate)
        _record_files(source)
        if len(source) and (line := _state_warning(source, "evaluation", task.workers)):
            say(line)
    return data


def _refuse_changing_order(task: Task, samples: int) -> None:
    """Raises DataError if ``Task.order`` returns different orders for an epoch, or draws without seeding."""
    if not gives(task, "order") or not samples:
        return
    orders = []
    with generators.kept():
        for asked, epoch in enumerate((0, 1, 0)):
            generators.seed(asked)
            order = task.order(epoch, samples)
            orders.append(order.clone() if isinstance(order, Tensor) else order)  # later calls may change it in place
    first, _, again = orders
    same = torch.equal(first, again) if isinstance(first, Tensor) and isinstance(again, Tensor) else first is again
    if not same and isinstance(first, Tensor):  # the loader refuses what is not a tensor
        raise DataError(
            f"{type(task).__name__}.order gives epoch 0 another order when it is asked again, so it would be another one on each "
            "rank and after a restart; make it from seed and epoch alone: "
            "torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))"
        )


def _record_files(source: Source) -> None:
    """Gives a user's data set whose rows are files a digest of all names and some sizes, by which ranks, and a resumed
    run, compare more than a few samples."""
    data = getattr(source, "dataset", None)
    if paths := _files_of(data):
        with suppress(AttributeError):  # a list, or slots
            vars(data)["digest_of_files"] = folder.digest_of([path.name for path in paths], paths, _MOST_FILES)


def _files_of(data: Any, depth: int = _DEPTH) -> list[Path]:
    """Returns the files that a data set, or those inside a ``Subset`` or ``ConcatDataset``, keeps in a list with one for
    each row; [] for data sets of dsframe."""
    attributes = vars(data) if hasattr(data, "__dict__") else {}
    if type(data).__module__.startswith("dsframe.") or not depth:
        return []
    several = attributes.get("datasets")
    inside = [attributes.get("dataset"), *(several if isinstance(several, (list, tuple)) else ())]
    if nested := [path for part in inside for path in _files_of(part, depth - 1)]:
        return nested
    bases = ["", *(str(value) for value in attributes.values() if isinstance(value, (str, Path)))]
    for rows in attributes.values():
        if isinstance(rows, (list, tuple)) and rows and hasattr(data, "__len__") and len(rows) == len(data):
            names = [_path_in(row) for row in rows]
            for base in bases if all(names) else ():
                with suppress(OSError, ValueError):  # a long text is no path
                    if Path(base, names[0]).is_file():
                        return [Path(base, name) for name in names]
    return []


def _path_in(row: Any) -> str:
    """Returns the first text or path of a row; "" if it has none."""
    parts = row.values() if isinstance(row, dict) else row if isinstance(row, (tuple, list)) else [row]
    return next((os.fspath(part) for part in parts if isinstance(part, (str, Path))), "")


class _Reading(NamedTuple):
    """Result of reading sample 0 once."""

    row: str
    drawn: dict[str, Any]
    """State of the process's generators afterwards; they were seeded before."""
    generator_states: dict[str, Any]
    """State of the data set's own generators afterwards, by name."""
    overwritten: bool
    """True if reading the next row changes the values of this one."""


class _Readings(Dataset[_Reading]):
    """Reads sample 0 of epoch 0 in the process that reads the data."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, number: int) -> _Reading:
        source = self._source
        with generators.kept():
            if isinstance(source, DatasetSource):
                row = source.item(0, 0)  # this seeds
                drawn = generators.capture(_CPU)
                batch = digest(source.collated([(0, 0, row)]))
                data: Any = source.dataset
            else:
                batch, drawn, data, row = digest(source.batch(torch.tensor([0]), 0)), {}, source, None
            states = {name: state_of(value) for name, value in _own_generators(data).items()}
            several = isinstance(source, DatasetSource) and len(source) > 1
            return _Reading(batch, drawn, states, number > 0 and several and _overwritten(source, row))


def _overwritten(source: Any, row: Any) -> bool:
    """Returns True if reading the next row changes ``row``, the first one."""
    before = _values(row)
    source.item(0, 1)
    return _values(row) != before


def _values(row: Any) -> str:
    """Returns a digest of the tensors, arrays, numbers and texts of a row."""
    plain = (Tensor, np.ndarray, int, float, str, bytes)
    return digest([leaf for leaf in tree_leaves(row) if isinstance(leaf, plain)])


def _refuse_overwritten(which: str) -> None:
    raise DataError(
        f"the {which} data give each row in the same memory, so a batch would have its last row several times; return a "
        "copy of it (.clone(), .copy())"
    )


def _state_warning(source: Source, which: str, workers: int) -> str:
    """Returns a warning if the data have a state or a generator of their own, else ""."""
    readers, before = min(workers, 1) if isinstance(source, DatasetSource) else 0, _file_positions()
    first, second = loaded(_Readings(source), readers, batch_size=None, sampler=[0, 1])
    if second.overwritten:
        _refuse_overwritten(which)
    if readers < workers and (name := _moved_file(before)):
        return (
            f"the {which} data read {name}, which was open before the workers started: they share the position in it, so one may "
            "read what another has looked for; open files in __getitem__, once in each process"
        )
    if moved := [
        name for name, state in second.generator_states.items() if first.generator_states.get(name, state) != state
    ]:
        return f"the {which} data draw from a random generator of their own ({', '.join(moved)}), {_SO}; {_REMEDY}"
    if first.row != second.row:
        return f"the {which} data give another sample 0 when it is read again: they have a state, {_SO}; {_REMEDY}"
    if first.drawn != second.drawn:
        return (
            f"the {which} data draw for sample 0 when it is first read, and not so when it is read again: they keep what they "
            f"drew, {_SO}; keep rows as they are before random changes, and change them at each reading"
        )
    return ""


def _own_generators(data: Any) -> dict[str, Any]:
    """Returns the random generators in attributes of a data set and of its parts (nested sets, transforms), and the
    global ones that their code refers to."""
    by_name, seen, ahead = dict[str, Any](), set[int](), [("", data, 0)]
    while ahead:
        name, value, depth = ahead.pop()
        if is_generator(value):
            if getattr(value, "device", _CPU) == _CPU:
                by_name[name] = value
        elif id(value) not in seen and depth <= _DEPTH and len(seen) < FEW:
            seen.add(id(value))
            ahead += [(f"{name}.{key}".removeprefix("."), part, depth + 1) for key, part in _children(value)]
    return by_name


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, dict)):
        if len(value) <= _LONG:
            yield from (
                (str(key), part) for key, part in (value.items() if isinstance(value, dict) else enumerate(value))
            )
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, Tensor)):
        yield from vars(value).items()
        for function in functions_of(type(value)):
            outside = ((name, function.__globals__.get(name)) for name in words_of(function.__code__))
            yield from ((name, value) for name, value in outside if is_generator(value))


def _refuse_shared_files(source: StreamSource) -> None:
    """Raises DataError if processes take rows of the stream from each other by a shared file position."""
    before = _file_positions()
    first = _first_row(source)
    if first == _OVERWRITTEN:
        _refuse_overwritten("training")
    shared = _moved_file(before)
    if first and shared and (again := _first_row(source)) != first:
        raise DataError(
            f"{type(source.dataset).__name__} has {'another' if again else 'no'} first row when a second process reads it: they "
            f"share the position in {shared}, which was open before; open files in __iter__"
        )


def _first_row(source: StreamSource) -> str:
    """Returns a digest of the first row as read by a separate process; "" if there is no row."""
    (row,) = loaded(_FirstRow(source), 1, batch_size=None, sampler=[0])
    return str(row)


class _FirstRow(Dataset[str]):
    def __init__(self, source: StreamSource) -> None:
        self._source = source

    def __getitem__(self, number: int) -> str:
        with suppress(DataError):  # "gives no row"
            row = self._source.item(0, 0)
            first = digest(self._source.collated([(0, 0, row)]))
            with suppress(DataError):
                return _OVERWRITTEN if _overwritten(self._source, row) else first
            return first
        return ""


def _file_positions() -> dict[str, tuple[str, int]]:
    """Returns name and position of each file open for reading, by descriptor; empty if the system lacks /proc."""
    positions, opened = {}, Path("/proc/self/fd")
    for link in opened.iterdir() if opened.is_dir() else ():
        with suppress(OSError):  # already closed, or not seekable
            if fcntl.fcntl(int(link.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                positions[link.name] = str(link.readlink()), os.lseek(int(link.name), 0, os.SEEK_CUR)
    return positions


def _moved_file(before: dict[str, tuple[str, int]]) -> str:
    """Returns the name of a file whose position another process has moved; "" if there is none."""
    for number, (name, position) in _file_positions().items():
        was, then = before.get(number, ("", 0))
        if was == name and then != position:
            return name
    return ""
