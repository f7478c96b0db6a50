"""Wraps a task's data as a source: map-style data sets, read row by row, and streams."""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from dsframe.data.collate import Collate, Pad, collated
from dsframe.data.sample_draws import RowDraws
from dsframe.data.sampler import Part
from dsframe.data.source import Batch, Source, TensorSource, draw
from dsframe.errors import DataError
from dsframe.host import generators

Item = tuple[int, int, Any]
"""Epoch, index and row."""
_ITEM = 0x6974656D  # the stream of draws that seeds the generators before dataset[i]
_LAST_EPOCH = "_told_by_dsframe"
"""Attribute of a data set that holds the epoch last passed to ``set_epoch``."""
READINGS = 5
"""Number of rows that are collated ``READINGS - 1`` times, to see whether the batches are equal."""
ENDLESS = 2**53
"""Length of a stream without ``__len__``."""


def as_source(data: Any, seed: int, collate: Collate | None = None, *, streams: bool = False) -> Source:
    """Returns ``data`` if it is a source, else wraps a map-style torch ``Dataset`` of pairs or dicts.

    ``collate``: builds a batch from a list of rows (:func:`dsframe.data.collate.collated`). ``streams``: also accept an
    ``IterableDataset``, which can only be read from its start.

    Before ``dataset[i]`` the generators of torch, NumPy and ``random`` are seeded from ``(seed, epoch, i)``, so random
    transforms give the same sample on every rank, in every worker and after every restart.

    Raises DataError for an ``IterableDataset`` without ``streams`` (it has no indices), and for anything else.
    """
    if isinstance(data, IterableDataset):
        if streams:
            return StreamSource(data, seed, collate)
        raise DataError(
            f"{type(data).__name__} is an IterableDataset: it can be trained on, but not evaluated, because its samples "
            "cannot be read by index; give a map-style Dataset (__len__ and __getitem__) or a dsframe.data.Source"
        )
    if type(data) is TensorDataset and len(data.tensors) == 2 and collate is None:
        return TensorSource(*data.tensors)
    if isinstance(data, Source) and callable(getattr(type(data), "batch", None)) and not _of_datasets(data):
        if collate is not None:
            raise DataError(
                f"{type(data).__name__} makes its own batches, so the task's collate would not be called; leave it out"
            )
        return data
    tensors = isinstance(data, tuple) and collate is None and all(isinstance(part, Tensor) for part in data)
    if tensors or (isinstance(data, Mapping) and not all(isinstance(key, int) for key in data)):
        raise DataError(
            f"a {type(data).__name__} of {'tensors' if tensors else ', '.join(map(str, data))} has no rows; return one of its data "
            "sets, or torch.utils.data.TensorDataset(inputs, targets)"
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data, seed, collate)
    raise DataError(f"{type(data).__name__} is neither a map-style torch Dataset nor a dsframe.data.Source")


def _of_datasets(data: Any) -> bool:
    """True for a data set of the library ``datasets``, whose ``batch`` is another method."""
    return any(base.__module__ == "datasets.arrow_dataset" for base in type(data).__mro__)


class DatasetSource:
    """A map-style torch ``Dataset`` as a source: reads ``dataset[i]``, then calls ``collate`` or torch's default."""

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Collate | None = None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self._draws = RowDraws(seed, torch.device("cpu"))
        self._epoch_listeners = _with_set_epoch(dataset)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Dataset promises no length, a map-style one has it

    def batch(self, indices: Tensor, epoch: int) -> Batch:
        return self.gather([(epoch, indices)])

    def gather(self, parts: list[Part]) -> Batch:
        """Returns all samples, collated once, because batches with strings or lists cannot be joined later."""
        with generators.kept():
            items = [(epoch, index, self.item(epoch, index)) for epoch, rows in parts for index in rows.tolist()]
            return self.collated(items)

    def item(self, epoch: int, index: int) -> Any:
        """Returns sample ``index`` in ``epoch``. Leaves the global random generators seeded from both."""
        bits = draw(self.seed, epoch, index, _ITEM) & 0x7FFF_FFFF_FFFF_FFFF
        _set_epoch(self._epoch_listeners, epoch)
        generators.seed(bits, gpus=False)
        position = index % len(self)
        read_rows = getattr(self.dataset, "__getitems__", None)
        try:
            if read_rows is None or _of_datasets(self.dataset):
                return self.dataset[position]
            rows = read_rows([position])  # as torch's DataLoader does
        except StopIteration as error:  # would be taken for the end of the data
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"{type(self.dataset).__name__} raised StopIteration for row {position}: a next() found nothing; give it a default "
                f"({last.filename}:{last.lineno})"
            ) from error
        if isinstance(rows, (list, tuple)) and len(rows) == 1:
            return rows[0]
        name = type(self.dataset).__name__
        raise DataError(f"{name}.__getitems__ returned {type(rows).__name__}, and not a list with a row for each index")

    def refuse_other_order(self) -> None:
        """Raises DataError if ``collate`` reorders rows, for example by length."""
        count = min(len(self), READINGS)
        with generators.kept():
            items = [(0, index, self.item(0, index)) for index in range(count)]
            ways = [self.collated(copy.deepcopy(way)) for way in (items, items[::-1], items[1:])] if count > 1 else []
        leaves = (tree_leaves(way, is_leaf=lambda part: isinstance(part, PackedSequence)) for way in ways)
        for forward, backward, without_first in zip(*leaves, strict=False):
            if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in (forward, backward, without_first)):
                continue
            if (len(forward), len(backward), len(without_first)) != (count, count, count - 1):  # not one entry per row
                continue
            rows, others = forward.tolist(), backward.tolist()
            if rows != others[::-1] and sorted(map(str, rows)) == sorted(map(str, others)):
                collate_name = getattr(self.collate, "__qualname__", type(self.collate).__qualname__)
                raise DataError(
                    f"{collate_name} gives the rows of a batch in another order, so predictions would be of other "
                    "samples; leave the order as it is (pack_padded_sequence takes "
                    "enforce_sorted=False), or write eval_collate"
                )

    def collated(self, items: list[Item]) -> Batch:
        """Returns the batch of these samples. Numbers that ``collate`` draws per row with torch belong to the row."""
        numbered = [(index % len(self), row) for _, index, row in items]
        if self.collate is None or isinstance(self.collate, Pad):
            return collated(numbered, self.collate)
        with self._draws.collating([(epoch, index) for epoch, index, _ in items]):
            return collated(numbered, self.collate)


def _with_set_epoch(dataset: Any) -> list[Any]:
    """Returns the data sets with ``set_epoch``: this one, or those inside a ``Subset`` or ``ConcatDataset``."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    datasets = getattr(dataset, "datasets", ())
    datasets = (
        datasets.values() if isinstance(datasets, dict) else datasets if isinstance(datasets, (list, tuple)) else ()
    )
    inside = [part for part in (getattr(dataset, "dataset", None), *datasets) if part is not None]
    return [listener for part in inside for listener in _with_set_epoch(part)]


def _set_epoch(datasets: list[Any], epoch: int) -> None:
    """Calls ``set_epoch`` unless this epoch was passed last. Data for both training and evaluation get both in turn."""
    for dataset in datasets:
        if getattr(dataset, _LAST_EPOCH, None) != epoch:
            dataset.set_epoch(epoch)
            setattr(dataset, _LAST_EPOCH, epoch)


class StreamSource(DatasetSource):
    """An ``IterableDataset`` as a source. Rows are numbered in its order, over all passes, and read forwards only."""

    def __init__(self, dataset: Any, seed: int, collate: Collate | None = None) -> None:
        super().__init__(dataset, seed, collate)
        self.dataset: Any = dataset
        self._read = torch.zeros(3, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._rows: Iterator[Any] = iter(())
        self._next: int | None = None

    def __len__(self) -> int:
        try:
            return super().__len__()
        except TypeError:
            return ENDLESS

    def read(self) -> list[int]:
        """Returns rows read (including read-ahead), passes ended, and rows read when the last one ended, by this
        rank."""
        return [int(count) for count in self._read]

    def item(self, epoch: int, index: int) -> Any:
        wanted = epoch * len(self) + index
        if self._next is None or wanted < self._next:
            self._rows, self._next = self._passes(), 0
        while True:
            row = next(self._rows)
            self._next += 1
            if self._next > wanted:
                return row

    def collated(self, items: list[Item]) -> Batch:
        """Collates with generators seeded from the first row. The stream's generators stay untouched: it may shuffle
        with them, and ranks build different batches of its rows."""
        with generators.kept():
            generators.seed(draw(self.seed, *items[0][:2], _ITEM + 1) & 0x7FFF_FFFF, gpus=False)
            return super().collated(items)

    def _passes(self) -> Iterator[Any]:
        self._read.zero_()
        for number in itertools.count():
            generators.seed(draw(self.seed, number, 0, _ITEM) & 0x7FFF_FFFF, gpus=False)
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(number)
            row = None
            for row in self.dataset:
                self._read[0] += 1
                yield row
            self._read[1], self._read[2] = number + 1, self._read[0]
            if row is None:
                raise DataError(f"{type(self.dataset).__name__} gives no row")
