"""Turns requests for samples into batches on the device, read here or by workers."""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

from dsframe.data.datasets import READINGS, DatasetSource, Item
from dsframe.data.prefetch import Ahead
from dsframe.data.sampler import Part
from dsframe.data.source import Batch, GatheringSource, ImageSource, Source, own_rows
from dsframe.data.workers import held, outlive_signals
from dsframe.errors import DataError
from dsframe.host import generators
from dsframe.values import same

Request = list[Part]
"""The samples of one batch."""


def _pair(batch: Any, source: Source) -> Batch:
    if not (isinstance(batch, tuple) and len(batch) == 2):
        raise DataError(f"{type(source).__name__}.batch must return (inputs, targets); got {type(batch).__name__}")
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            raise DataError(
                f"{type(source).__name__}.batch must return tensors, in any nesting; got {type(leaf).__name__}; "
                "leave it out, or give a map-style Dataset, whose samples may hold other things"
            )
    return batch


class _Keyed(Dataset[Any]):
    """The data set of a worker: samples by ``(epoch, index)``."""

    def __init__(self, source: DatasetSource) -> None:
        self.source = source

    def __getitem__(self, key: tuple[int, int]) -> Item:
        epoch, index = key
        return epoch, index, self.source.item(epoch, index)

    def draws(self, rows: list[Item]) -> bool:
        """True if ``collate`` draws numbers that belong to no row, or batches of the same rows differ."""
        batches, following = [], []
        for reading in range(READINGS):
            generators.seed(0, gpus=False)
            if reading:
                batches.append(tree_leaves(DatasetSource.collated(self.source, copy.deepcopy(rows))))
            following.append((torch.rand(()).item(), np.random.random(), random.random()))
        return len(set(following)) > 1 or not all(same(batches[0], batch) for batch in batches[1:])


class Fetcher:
    """Turns requests into batches on a device, reading ahead if useful."""

    def __init__(self, source: Source, device: torch.device, workers: int) -> None:
        self.source, self.device, self.workers = source, device, workers
        self._read: Callable[[Tensor, int], Any] = source.batch
        self._finish: Callable[[Batch], Batch] | None = None
        # Images are copied as uint8 and normalised on the device, unless a subclass has its own batch().
        if device.type != "cpu" and isinstance(source, ImageSource) and type(source).batch is ImageSource.batch:
            self._read, self._finish = source.pixels, source.normalised

    def __call__(self, requests: Iterable[Request]) -> Iterator[Batch]:
        if self.workers and isinstance(self.source, DatasetSource):
            keys = ([(epoch, index) for epoch, rows in parts for index in rows.tolist()] for parts in requests)
            rows, collate = _Keyed(self.source), self.source.collated
            batches: Iterator[Batch] = loaded(rows, self.workers, batch_sampler=keys, collate_fn=collate)
        else:
            batches = (self._fetch(parts) for parts in requests)  # map() would take a StopIteration inside for its end
        return self._to_device(batches)

    def _to_device(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self.device.type == "cpu":
            return batches
        ahead = Ahead(self.device, self._finish)
        # Reading a data set's items seeds the global generators and restores them, so it must stay in this thread.
        return ahead(batches) if isinstance(self.source, DatasetSource) else ahead.in_thread(batches)

    def _fetch(self, parts: list[Part]) -> Batch:
        if isinstance(self.source, GatheringSource):
            return self.source.gather(parts)
        batches = [_pair(self._read(own_rows(self.source, rows), epoch), self.source) for epoch, rows in parts]
        if len(batches) == 1:
            return batches[0]
        try:
            inputs, targets = tree_map(lambda *rows: torch.cat(rows), *batches)
        except (RuntimeError, ValueError) as error:
            shapes = "; then ".join(
                ", ".join(str(list(leaf.shape)) for leaf in tree_leaves(batch)) for batch in batches
            )
            raise DataError(
                f"{type(self.source).__name__}.batch gives rows of different sizes. This batch has rows of two epochs, and "
                f"its two parts cannot be joined: shapes {shapes}. Give all rows one size, or write "
                '"dataloader_drop_last": true'
            ) from error
        return inputs, targets

    def collate_draws(self) -> bool:
        """True if ``collate`` draws random numbers per batch and not per sample. Reads rows like :meth:`rows`."""
        source = self.source
        keys = [[(0, index) for index in range(min(READINGS, len(source)))]]
        read = _Keyed(source)  # type: ignore[arg-type]  # of what has a collate
        with generators.kept():
            return bool(next(loaded(read, min(self.workers, 1), batch_sampler=keys, collate_fn=read.draws)))

    def batches(self, samples: Iterable[Sequence[int]], device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Yields batches of these samples. At most one worker reads: several would share files that are open here."""
        fetch = Fetcher(self.source, torch.device(device), min(self.workers, 1))
        return fetch([(0, torch.tensor(list(indices)))] for indices in samples)

    def rows(self, indices: list[int]) -> Iterator[Batch]:
        """Yields batches of one sample each, on the CPU."""
        return self.batches([index] for index in indices)


def loaded(rows: Dataset[Any], workers: int, **how: Any) -> Iterator[Any]:
    """Reads ``rows`` with torch's ``DataLoader``. ``workers``: 0 for this process. ``how``: its other arguments."""
    loader = DataLoader(
        rows,
        num_workers=workers,
        worker_init_fn=outlive_signals,
        generator=torch.Generator(),  # else it would draw from training's generator
        **how,
    )
    with held():
        return in_one_line(iter(loader))


def in_one_line(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields ``batches`` of workers. Reduces a worker's DataError to its message: torch adds a traceback as text."""
    try:
        yield from batches
    except DataError as error:
        raise DataError(str(error).strip().rpartition("DataError: ")[2]) from None
    except (EOFError, ConnectionError) as error:  # a worker was killed while sending a batch
        if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith("multiprocessing/connection.py"):
            raise
        raise DataError(
            "a process that reads data has ended while it handed over a batch, perhaps because memory was short; continue with "
            "--resume auto, and with fewer workers"
        ) from error
