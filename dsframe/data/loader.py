"""From data sets to batches on a device, for one rank.

:func:`as_source` accepts what a task returns: a :class:`~dsframe.data.source.Source` or a map-style torch ``Dataset``.
:class:`Loader` gives this rank's micro-batches of every step; :class:`EvaluationLoader` every sample exactly once.
"""

from __future__ import annotations

import copy
import itertools
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dsframe.data.collate import Collate, Pad, collated
from dsframe.data.sample_draws import RowDraws
from dsframe.data.sampler import Order, Part, Sampler, sequential
from dsframe.data.source import Batch, GatheringSource, ImageSource, Source, TensorSource, draw, own_rows
from dsframe.data.workers import held, outlive_signals
from dsframe.errors import DataError
from dsframe.host import generators
from dsframe.values import same

Item = tuple[int, int, Any]
"""An epoch, an index and the row."""
Request = list[Part]
"""The samples of one batch."""
READER = "dsframe-reader"
"""Prefix of the name of the thread that reads ahead."""
_ITEM = 0x6974656D  # the stream of draws that seeds the random generators before dataset[i]
_TOLD = "_told_by_dsframe"
"""The attribute of a data set with the epoch that it was told last."""
_READINGS = 5
"""So many rows are collated so often, less one, to see whether they come out the same."""
ENDLESS = 2**53
"""Length of a stream that does not say how long it is."""


def as_source(data: Any, seed: int, collate: Collate | None = None, *, streams: bool = False) -> Source:
    """``data`` itself if it is a source; a map-style torch ``Dataset`` of pairs or dicts wrapped as one.

    ``collate``: makes a batch of a list of rows (:func:`dsframe.data.collate.collated`). ``streams``: take an ``IterableDataset``
    too, which can only be read from its start.

    Before ``dataset[i]`` the generators of torch, NumPy and ``random`` are seeded from ``(seed, epoch, i)``, so that
    random transforms give a sample the same look on every rank, in every worker and after every restart.

    Raises DataError for an ``IterableDataset`` elsewhere (it has no indices) and anything else.
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
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return DatasetSource(data, seed, collate)
    raise DataError(f"{type(data).__name__} is neither a map-style torch Dataset nor a dsframe.data.Source")


def _of_datasets(data: Any) -> bool:
    """True for a data set of the library ``datasets``, which has a method ``batch`` too: another one."""
    return any(kind.__module__ == "datasets.arrow_dataset" for kind in type(data).__mro__)


class DatasetSource:
    """A map-style torch ``Dataset`` as a source: ``dataset[i]`` one by one, then ``collate``, or torch's ``default_collate``."""

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Collate | None = None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate
        self._draws = RowDraws(seed, torch.device("cpu"))
        self._listens = _who_listen(dataset)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # Dataset promises no length, a map-style one has it

    def batch(self, indices: Tensor, epoch: int) -> Batch:
        return self.gather([(epoch, indices)])

    def gather(self, parts: list[Part]) -> Batch:
        """The samples of all parts, collated once: batches with strings or lists in them cannot be put together afterwards."""
        with generators.kept():
            items = [(epoch, index, self.item(epoch, index)) for epoch, rows in parts for index in rows.tolist()]
            return self.collated(items)

    def item(self, epoch: int, index: int) -> Any:
        """Sample ``index`` in ``epoch``. Leaves the global random generators seeded from the two."""
        bits = draw(self.seed, epoch, index, _ITEM) & 0x7FFF_FFFF_FFFF_FFFF
        _tell_epoch(self._listens, epoch)
        generators.seed(bits, gpus=False)
        place = index % len(self)
        many = getattr(self.dataset, "__getitems__", None)
        try:
            if many is None or _of_datasets(self.dataset):
                return self.dataset[place]
            rows = many([place])  # as torch's DataLoader reads it
        except StopIteration as error:  # which would be taken for the end of the data
            last = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"{type(self.dataset).__name__} raised StopIteration for row {place}: a next() found nothing; give it a default "
                f"({last.filename}:{last.lineno})"
            ) from error
        if isinstance(rows, (list, tuple)) and len(rows) == 1:
            return rows[0]
        name = type(self.dataset).__name__
        raise DataError(f"{name}.__getitems__ returned {type(rows).__name__}, and not a list with a row for each index")

    def refuse_other_order(self) -> None:
        """Raises DataError where ``collate`` gives rows in another order than it gets them, as one that sorts them by length."""
        count = min(len(self), _READINGS)
        with generators.kept():
            items = [(0, index, self.item(0, index)) for index in range(count)]
            ways = [self.collated(copy.deepcopy(way)) for way in (items, items[::-1], items[1:])] if count > 1 else []
        leaves = (tree_leaves(way, is_leaf=lambda part: isinstance(part, PackedSequence)) for way in ways)
        for there, back, fewer in zip(*leaves, strict=False):
            if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in (there, back, fewer)):
                continue
            if (len(there), len(back), len(fewer)) != (count, count, count - 1):  # it is one row of a list
                continue
            rows, others = there.tolist(), back.tolist()
            if rows != others[::-1] and sorted(map(str, rows)) == sorted(map(str, others)):
                whose = getattr(self.collate, "__qualname__", type(self.collate).__qualname__)
                raise DataError(
                    f"{whose} gives the rows of a batch in another order, so predictions would be of other "
                    "samples; leave the order as it is (pack_padded_sequence takes "
                    "enforce_sorted=False), or write eval_collate"
                )

    def collated(self, items: list[Item]) -> Batch:
        """The batch of these samples. What ``collate`` draws with torch for each row belongs to the row."""
        numbered = [(index % len(self), row) for _, index, row in items]
        if self.collate is None or isinstance(self.collate, Pad):
            return collated(numbered, self.collate)
        with self._draws.collating([(epoch, index) for epoch, index, _ in items]):
            return collated(numbered, self.collate)


def _who_listen(dataset: Any) -> list[Any]:
    """The data set, or those inside of it (of a ``Subset``, a ``ConcatDataset``), that have ``set_epoch``."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    several = getattr(dataset, "datasets", ())
    several = several.values() if isinstance(several, dict) else several if isinstance(several, (list, tuple)) else ()
    inside = [part for part in (getattr(dataset, "dataset", None), *several) if part is not None]
    return [listener for part in inside for listener in _who_listen(part)]


def _tell_epoch(datasets: list[Any], epoch: int) -> None:
    """Calls ``set_epoch`` where this process has not said so yet. A set that is trained and evaluated on is told both in turn."""
    for dataset in datasets:
        if getattr(dataset, _TOLD, None) != epoch:
            dataset.set_epoch(epoch)
            setattr(dataset, _TOLD, epoch)


class StreamSource(DatasetSource):
    """An ``IterableDataset``: rows in its own order, numbered as they come, one pass after the other. Reading goes forward."""

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
        """Rows that were read from the data set so far, some of them ahead, passes that ended, and rows until the last of these
        ended: of whichever process of this rank reads."""
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
        """As of other data. What ``collate`` draws follows from the first row, and leaves the generators of the stream alone: it
        may shuffle with them, and ranks make other batches of its rows."""
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


def _order_of(source: Source, seed: int, chosen: Callable[[int, int], Tensor | None] | None) -> Order:
    """The order of the samples. ``chosen``: the task's or the file's."""
    if isinstance(source, StreamSource):
        if chosen not in (None, sequential):
            raise DataError("StreamSource gives the order of its samples itself; remove Task.order")
        chosen = sequential
    return Order(len(source), seed, chosen)


class _Keyed(Dataset[Any]):
    """The data set that a worker process reads: samples by ``(epoch, index)``."""

    def __init__(self, source: DatasetSource) -> None:
        self.source = source

    def __getitem__(self, key: tuple[int, int]) -> Item:
        epoch, index = key
        return epoch, index, self.source.item(epoch, index)

    def draws(self, rows: list[Item]) -> bool:
        """True where ``collate`` draws what belongs to no row, or makes another batch each time of the same rows."""
        batches, following = [], []
        for reading in range(_READINGS):
            generators.seed(0, gpus=False)
            if reading:
                batches.append(tree_leaves(DatasetSource.collated(self.source, copy.deepcopy(rows))))
            following.append((torch.rand(()).item(), np.random.random(), random.random()))
        return len(set(following)) > 1 or not all(same(batches[0], batch) for batch in batches[1:])


class _Fetcher:
    """Turns requests into batches on a device, ahead of time where that helps."""

    def __init__(self, source: Source, device: torch.device, workers: int) -> None:
        self.source, self.device, self.workers = source, device, workers
        self._read: Callable[[Tensor, int], Any] = source.batch
        self._finish: Callable[[Batch], Batch] | None = None
        # Images travel as uint8, and the device normalises them; but a subclass may have changed what a batch is.
        if device.type != "cpu" and isinstance(source, ImageSource) and type(source).batch is ImageSource.batch:
            self._read, self._finish = source.pixels, source.normalised

    def __call__(self, requests: Iterable[Request]) -> Iterator[Batch]:
        if self.workers and isinstance(self.source, DatasetSource):
            keys = ([(epoch, index) for epoch, rows in parts for index in rows.tolist()] for parts in requests)
            loader = DataLoader(
                _Keyed(self.source),
                batch_sampler=keys,  # any iterable of lists of keys will do
                num_workers=self.workers,
                collate_fn=self.source.collated,
                worker_init_fn=outlive_signals,
                generator=torch.Generator(),  # else it would draw a number from training's own generator
            )
            with held():
                batches: Iterator[Batch] = in_one_line(iter(loader))
        else:
            batches = (self._fetch(parts) for parts in requests)  # a map would take a StopIteration in it for its end
        return self._to_device(batches)

    def _to_device(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        if self.device.type == "cpu":
            return batches
        ahead = _Ahead(self.device, self._finish)
        # A data set's own items are read between seeding the global generators and giving them back, which only one thread may do.
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
        """True where the task's ``collate`` draws random numbers: by batch, not by sample. Read as :meth:`rows` are."""
        source = self.source
        keys = [[(0, index) for index in range(min(_READINGS, len(source)))]]
        read = _Keyed(source)  # type: ignore[arg-type]  # of what has a collate
        loader = DataLoader(
            read,
            batch_sampler=keys,
            num_workers=min(self.workers, 1),
            collate_fn=read.draws,
            worker_init_fn=outlive_signals,
            generator=torch.Generator(),
        )
        with held(), generators.kept():
            return bool(next(in_one_line(iter(loader))))

    def batches(self, samples: Iterable[Sequence[int]], device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Batches of these samples. One worker reads them where there are any: a file that this process opened all of them would
        share."""
        fetch = _Fetcher(self.source, torch.device(device), min(self.workers, 1))
        return fetch([(0, torch.tensor(list(indices)))] for indices in samples)

    def rows(self, indices: list[int]) -> Iterator[Batch]:
        """Batches of one sample each, on the CPU."""
        return self.batches([index] for index in indices)


def in_one_line(batches: Iterator[Any]) -> Iterator[Any]:
    """``batches`` of worker processes. torch gives a worker's error its traceback as text: what dsframe says itself needs none."""
    try:
        yield from batches
    except DataError as error:
        raise DataError(str(error).strip().rpartition("DataError: ")[2]) from None
    except (EOFError, ConnectionError) as error:  # of a worker that was killed in the middle of a batch
        if not traceback.extract_tb(error.__traceback__)[-1].filename.endswith("multiprocessing/connection.py"):
            raise
        raise DataError(
            "a process that reads data has ended while it handed over a batch, perhaps because memory was short; go on with "
            "--resume auto, and with fewer workers"
        ) from error


class _Ahead:
    """Batches on a device, each on its way before the one ahead of it is handed out.

    On a GPU copies run on a stream of their own, beside the step that is under way.
    """

    def __init__(self, device: torch.device, finish: Callable[[Batch], Batch] | None = None) -> None:
        """``finish``: what is left to do on the device."""
        self._device, self._finish = device, finish or (lambda batch: batch)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        held: list[tuple[Batch, Any]] = []
        for batch in batches:
            held.append(self._start(batch))
            if len(held) == 2:
                yield self._arrived(*held.pop(0))
        for waiting in held:
            yield self._arrived(*waiting)

    def in_thread(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same, with each batch read, pinned and sent in a thread, while this one calls the kernels of the step before."""
        if self._stream is None:
            yield from self(batches)
            return
        begin = partial(torch.cuda.set_device, self._device)  # a thread has its own, on which memory is pinned
        with ThreadPoolExecutor(1, READER, begin) as reader:
            coming = reader.submit(self._read, batches)
            while (item := coming.result()) is not None:
                coming = reader.submit(self._read, batches)
                yield self._arrived(*item)

    def _read(self, batches: Iterator[Batch]) -> tuple[Batch, Any] | None:
        batch = next(batches, None)
        return None if batch is None else self._start(batch)

    def _start(self, batch: Batch) -> tuple[Batch, Any]:
        """The batch on the device, and the event that follows its copies."""
        if self._stream is None:
            return self._finish(_moved(batch, lambda leaf: leaf.to(self._device, non_blocking=True))), None
        with torch.cuda.stream(self._stream):
            # Pinned memory is what makes the copy asynchronous; torch keeps it alive until the copy is done. A tensor with holes
            # would go through pageable memory all the same.
            moved = _moved(batch, lambda leaf: _dense(leaf).pin_memory().to(self._device, non_blocking=True))
            return self._finish(moved), self._stream.record_event()

    def _arrived(self, batch: Batch, copied: Any) -> Batch:
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor):
                    leaf.record_stream(current)  # whose memory nobody takes before this stream has done with it
        return _mapped(batch, self._moved_object)

    def _moved_object(self, leaf: Any) -> Any:
        """What moves itself, such as a graph; on the stream that uses it, for nobody knows its tensors."""
        moves = callable(getattr(leaf, "to", None)) and not isinstance(leaf, (Tensor, nn.Module))
        return leaf.to(self._device) if moves else leaf


def _moved(batch: Batch, move: Callable[[Tensor], Tensor]) -> Batch:
    def of_host(leaf: Any) -> Any:
        return move(leaf) if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf

    return _mapped(batch, of_host)


def _mapped(batch: Batch, function: Callable[[Any], Any]) -> Batch:
    """``function`` of everything in a batch. torch's packed sequences are one thing: a part of them stays on the host."""
    inputs, targets = tree_map(function, batch, is_leaf=lambda part: isinstance(part, PackedSequence))
    return inputs, targets


def _dense(leaf: Tensor) -> Tensor:
    """``leaf``, contiguous where it is so in no order of its dimensions (channels last is one)."""
    return leaf if torch.ops.aten.is_non_overlapping_and_dense(leaf) else leaf.contiguous()


_KEEP_SIZE = "give it its last number of rows from the start, and replace rows in their places"


class Loader:
    """The training micro-batches of one data-parallel rank.

    ``data``: a Source or a map-style torch Dataset of ``(input, target)`` pairs. ``workers``: processes that read a
    torch Dataset; sources in memory are read in place, which is faster. Batches arrive on ``device``.

    Raises DataError: no samples, fewer samples than one global batch, or data that cannot be read by index.
    """

    def __init__(
        self,
        data: Any,
        *,
        seed: int,
        micro_batch_size: int,
        accumulation_steps: int = 1,
        rank: int = 0,
        ranks: int = 1,
        drop_last: bool = False,
        device: torch.device | str = "cpu",
        workers: int = 0,
        order: Callable[[int, int], Tensor | None] | None = None,
    ) -> None:
        """``order``: of the samples of an epoch, as :class:`Order` takes it."""
        self.source = as_source(data, seed, streams=True)
        self.micro_batch_size, self.accumulation_steps = micro_batch_size, accumulation_steps
        self.rank, self.ranks = rank, ranks
        self.sampler = Sampler(
            len(self.source),
            micro_batch_size * accumulation_steps * ranks,
            seed,
            drop_last=drop_last,
            order=_order_of(self.source, seed, order),
        )
        if isinstance(self.source, StreamSource):
            workers = 1  # which reads ahead, and has its own random generators
        self._fetch = _Fetcher(self.source, torch.device(device), workers)

    def stream(self, first_step: int = 0, last_step: int | None = None) -> Iterator[Batch]:
        """Micro-batches from step ``first_step`` on, ``accumulation_steps`` per step, in order.

        Ends before ``last_step``, or never. One stream for the whole run lets workers and copies run ahead
        across steps.
        """
        return self._fetch(self._requests(first_step, last_step))

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Exactly the ``accumulation_steps`` micro-batches of ``step``: ``stream(step, step + 1)``."""
        return self.stream(step, step + 1)

    def samples_at(self, step: int, row: int) -> list[int]:
        """The samples at ``row`` of each micro-batch of ``step``, of this rank."""
        micro = range(self.accumulation_steps)
        parts = (self.sampler.micro_batch(step, at, self.rank, self.ranks, self.micro_batch_size) for at in micro)
        indices = (torch.cat([indices for _, indices in part]) for part in parts)
        return [int(each[row]) % len(self.source) for each in indices]

    def lines(self, steps: int) -> list[str]:
        """Returns what is to be said before a training of so many steps. Raises DataError where the data do not suffice."""
        samples = steps * self.sampler.global_batch_size
        lines = []
        if self.collate_draws:
            lines.append(
                "collate draws random numbers for a batch and not for its rows: the losses depend on the micro-batch size and "
                "on the number of ranks, and with a generator of its own on workers and resumes too; draw one number for each "
                "row with torch (shape [rows, ...]), or draw in the data set's __getitem__"
            )
        if isinstance(self.source, StreamSource):
            if samples >= ENDLESS:
                raise DataError(
                    f'{type(self.source.dataset).__name__} does not say how many rows it has; write "steps"'
                )
            read, every = self.micro_batch_size * self.accumulation_steps, self.sampler.global_batch_size
            lines.append(
                f"{type(self.source.dataset).__name__} is an IterableDataset: each rank reads all of its rows "
                f"and takes {read:,} of every {every:,}; a resumed run reads again from the first row; "
                "dsframe does not know whether the rows are the same on every rank and at every start"
            )
        return lines

    def rows_read(self) -> list[int]:
        """As :meth:`StreamSource.read`; empty for other data, of which all ranks have the same."""
        return self.source.read() if isinstance(self.source, StreamSource) else []

    def wrong_length(self) -> str:
        """What is to be said of a stream whose passes have had another number of rows than its ``__len__`` says; else ""."""
        said = len(self.source)
        _, passes, rows = self.rows_read() or (0, 0, 0)
        if said == ENDLESS or rows == passes * said:
            return ""
        name = type(self.source.dataset).__name__ if isinstance(self.source, StreamSource) else ""
        return (
            f"{name}.__len__ says {said:,}, and {passes} pass(es) had {rows:,} rows: epochs, and the steps of a training that is "
            "so many, are counted by __len__; correct it, or leave it out and write steps"
        )

    @property
    def collates(self) -> bool:
        """True where a function of the task's makes the batches: it may mix samples."""
        collate = self.source.collate if isinstance(self.source, DatasetSource) else None
        return collate is not None and not isinstance(collate, Pad)

    @cached_property
    def collate_draws(self) -> bool:
        """True where the task's ``collate`` draws random numbers: by batch, not by sample."""
        return self.collates and self._fetch.collate_draws()

    def rows(self, indices: list[int]) -> Iterator[Batch]:
        """Batches of one sample each, on the CPU, as they look in epoch 0."""
        return self._fetch.rows(indices)

    def batches(self, samples: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """Batches of these samples, on the device, as they look in epoch 0."""
        return self._fetch.batches(samples, self._fetch.device)

    def _requests(self, first_step: int, last_step: int | None) -> Iterator[Request]:
        step, size = first_step, len(self.source)
        while last_step is None or step < last_step:
            if (now := len(self.source)) != size:
                raise DataError(
                    f"the data set has {now:,} rows before step {step}, and had {size:,} at the start; {_KEEP_SIZE}"
                )
            for micro in range(self.accumulation_steps):
                yield self.sampler.micro_batch(step, micro, self.rank, self.ranks, self.micro_batch_size)
            step += 1


class EvaluationBatch(NamedTuple):
    """A batch of one rank, and which samples it is made of."""

    batch: Batch
    """What the data made of the samples."""
    samples: range
    """Their numbers."""
    counts: bool
    """False where this rank has no samples left: the batch is there for what is collective, and its result is thrown away."""


class EvaluationLoader:
    """The evaluation batches of one rank; iterating gives :class:`EvaluationBatch` anew each time.

    Over all ranks every sample is in one batch. Every rank gets the same number of batches, and at a time all ranks have equally
    long ones: models that call a module for each row call it as often on each rank, which ranks with shards need. So the samples
    that do not fill a batch of each rank are shared out equally; where some are left then, some ranks have one more, and the
    others repeat the first rank's.
    """

    def __init__(
        self,
        data: Any,
        *,
        seed: int,
        micro_batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
        workers: int = 0,
    ) -> None:
        self.source = as_source(data, seed)
        self._split = (len(self.source), rank, ranks, micro_batch_size)
        self._fetch = _Fetcher(self.source, torch.device(device), workers)
        if len(self.source) == 0:
            raise DataError("the evaluation data set is empty")

    def limit(self, samples: int) -> None:
        """From now on it has the first ``samples`` samples, if there are more."""
        self._split = (min(len(self.source), samples), *self._split[1:])

    @property
    def samples(self) -> int:
        """Number of samples of all ranks."""
        return self._split[0]

    @property
    def ranks(self) -> int:
        """Number of ranks that share the samples."""
        return self._split[2]

    @property
    def micro_batch_size(self) -> int:
        """Samples of all batches but the last."""
        return self._split[3]

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        whole, rest = divmod(self.samples, self.ranks * self.micro_batch_size)
        return whole + (rest >= self.ranks) + (rest % self.ranks > 0)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return self._batches(self._fetch, range(len(self)))

    def trial(self) -> Iterator[EvaluationBatch]:
        """The first batch, and the last ones that are shorter. By one worker where there are any: a file that this process opened
        all of them would share."""
        fetch = _Fetcher(self.source, self._fetch.device, min(self._fetch.workers, 1))
        full = self.samples // (self.ranks * self.micro_batch_size)
        return self._batches(fetch, sorted({0, *range(full, len(self))}))

    def _batches(self, fetch: _Fetcher, numbers: Sequence[int]) -> Iterator[EvaluationBatch]:
        shares = [self._share(number, self._split[1]) for number in numbers]
        run = [share or self._share(number, 0) for number, share in zip(numbers, shares, strict=True)]
        batches = fetch([(0, torch.arange(share.start, share.stop))] for share in run)
        return map(EvaluationBatch, batches, run, map(bool, shares))

    def _share(self, number: int, rank: int) -> range:
        """The samples that ``rank`` has of batch ``number`` of all ranks."""
        samples, _, ranks, size = self._split
        whole, rest = divmod(samples, ranks * size)
        first, each, holders = number * ranks * size, size, ranks
        if number >= whole:
            first, each = whole * ranks * size, rest // ranks
            if number > whole or not each:
                first, each, holders = first + each * ranks, 1, rest % ranks
        return range(first + rank * each, first + (rank + 1) * each) if rank < holders else range(0)

    def rows(self, indices: list[int]) -> Iterator[Batch]:
        """Batches of one sample each, on the CPU."""
        return self._fetch.rows(indices)
