""":class:`Loader` yields one rank's training micro-batches, :class:`EvaluationLoader` every sample exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsframe.data.collate import Pad
from dsframe.data.datasets import ENDLESS, DatasetSource, StreamSource, as_source
from dsframe.data.reading import Fetcher, Request
from dsframe.data.sampler import Order, Sampler, sequential
from dsframe.data.source import Batch, Source
from dsframe.errors import DataError


def _order_of(source: Source, seed: int, chosen: Callable[[int, int], Tensor | None] | None) -> Order:
    if isinstance(source, StreamSource):
        if chosen not in (None, sequential):
            raise DataError("StreamSource gives the order of its samples itself; remove Task.order")
        chosen = sequential
    return Order(len(source), seed, chosen)


_KEEP_SIZE = "give it its last number of rows from the start, and replace rows in their places"


class Loader:
    """The training micro-batches of one data-parallel rank.

    ``data``: a Source or a map-style torch Dataset of ``(input, target)`` pairs. ``workers``: processes that read a
    Dataset; sources in memory are read in this process, which is faster. Batches are on ``device``.

    Raises DataError if there are no samples, fewer than one global batch, or unsupported data.
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
        """``order``: of the samples of an epoch, as for :class:`Order`."""
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
            workers = 1  # reads ahead with its own random generators
        self._fetch = Fetcher(self.source, torch.device(device), workers)

    def stream(self, first_step: int = 0, last_step: int | None = None) -> Iterator[Batch]:
        """Yields micro-batches from ``first_step`` on, ``accumulation_steps`` per step, in order.

        Ends before ``last_step``, or never. With one stream for the run, workers and copies run ahead across steps.
        """
        return self._fetch(self._requests(first_step, last_step))

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yields the micro-batches of ``step``: ``stream(step, step + 1)``."""
        return self.stream(step, step + 1)

    def samples_at(self, step: int, row: int) -> list[int]:
        """Returns this rank's samples at ``row`` of each micro-batch of ``step``."""
        micro = range(self.accumulation_steps)
        parts = (self.sampler.micro_batch(step, at, self.rank, self.ranks, self.micro_batch_size) for at in micro)
        indices = (torch.cat([indices for _, indices in part]) for part in parts)
        return [int(each[row]) % len(self.source) for each in indices]

    def lines(self, steps: int) -> list[str]:
        """Returns warnings for a training of so many steps. Raises DataError if the data do not suffice."""
        samples = steps * self.sampler.global_batch_size
        lines = []
        if self.collate_draws:
            lines.append(
                "collate draws random numbers for a batch and not for its rows, or keeps a state: the losses depend on the "
                "micro-batch size and the number of ranks, and with a generator or a state of its own on workers and resumes too; "
                "draw one number for each row with torch (shape [rows, ...]), or draw in the data set's __getitem__; keep no state"
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
        """Returns :meth:`StreamSource.read`; empty for other data, which are the same on all ranks."""
        return self.source.read() if isinstance(self.source, StreamSource) else []

    def wrong_length(self) -> str:
        """Returns a warning if a stream's passes did not have ``__len__`` rows; else ""."""
        stated = len(self.source)
        _, passes, rows = self.rows_read() or (0, 0, 0)
        if stated == ENDLESS or rows == passes * stated:
            return ""
        name = type(self.source.dataset).__name__ if isinstance(self.source, StreamSource) else ""
        return (
            f"{name}.__len__ says {stated:,}, and {passes} pass(es) had {rows:,} rows: epochs, and the steps of a training that is "
            "so many, are counted by __len__; correct it, or leave it out and write steps"
        )

    @property
    def collates(self) -> bool:
        """True if a function of the task builds the batches, which may mix samples."""
        collate = self.source.collate if isinstance(self.source, DatasetSource) else None
        return collate is not None and not isinstance(collate, Pad)

    @property
    def regroups(self) -> bool:
        """True if a row may look different in another batch: :attr:`collates`, or rows are padded to the longest."""
        collate = self.source.collate if isinstance(self.source, DatasetSource) else None
        return self.collates or (isinstance(collate, Pad) and collate.length is None)

    @cached_property
    def collate_draws(self) -> bool:
        """True if the task's ``collate`` draws random numbers per batch and not per sample."""
        return self.collates and self._fetch.collate_draws()

    def rows(self, indices: list[int]) -> Iterator[Batch]:
        """Yields batches of one sample each, on the CPU, as in epoch 0."""
        return self._fetch.rows(indices)

    def batches(self, samples: Iterable[Sequence[int]]) -> Iterator[Batch]:
        """Yields batches of these samples, on the device, as in epoch 0."""
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
    """A batch of one rank and the samples in it."""

    batch: Batch
    samples: range
    counts: bool
    """False if this rank has no samples left: the batch is only for collectives; its result is discarded."""


class EvaluationLoader:
    """The evaluation batches of one rank; each iteration yields all :class:`EvaluationBatch` again.

    Over all ranks every sample occurs once. All ranks get equally many batches, of equal size at a time, so that a
    model that calls a module per row calls it equally often on every rank, as sharded parameters need. Samples that do
    not fill a batch on each rank are divided equally; if some are left, some ranks have one more, and the others repeat
    the first rank's.
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
        self._fetch = Fetcher(self.source, torch.device(device), workers)
        if len(self.source) == 0:
            raise DataError("the evaluation data set is empty")

    def limit(self, samples: int) -> None:
        """Restricts the loader to the first ``samples`` samples."""
        self._split = (min(len(self.source), samples), *self._split[1:])

    @property
    def samples(self) -> int:
        """Number of samples over all ranks."""
        return self._split[0]

    @property
    def ranks(self) -> int:
        """Number of ranks that divide the samples."""
        return self._split[2]

    @property
    def micro_batch_size(self) -> int:
        """Samples of every batch except the last ones."""
        return self._split[3]

    def __len__(self) -> int:
        """Number of batches, equal on every rank."""
        full_batches, remainder = divmod(self.samples, self.ranks * self.micro_batch_size)
        return full_batches + (remainder >= self.ranks) + (remainder % self.ranks > 0)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        return self._batches(self._fetch, range(len(self)))

    def trial(self) -> Iterator[EvaluationBatch]:
        """Yields the first batch and the shorter last ones. At most one worker, as for :meth:`Fetcher.batches`."""
        fetch = Fetcher(self.source, self._fetch.device, min(self._fetch.workers, 1))
        full = self.samples // (self.ranks * self.micro_batch_size)
        return self._batches(fetch, sorted({0, *range(full, len(self))}))

    def _batches(self, fetch: Fetcher, numbers: Sequence[int]) -> Iterator[EvaluationBatch]:
        shares = [self._share(number, self._split[1]) for number in numbers]
        run = [share or self._share(number, 0) for number, share in zip(numbers, shares, strict=True)]
        batches = fetch([(0, torch.arange(share.start, share.stop))] for share in run)
        return map(EvaluationBatch, batches, run, map(bool, shares))

    def _share(self, number: int, rank: int) -> range:
        """Returns the samples of ``rank`` in batch ``number``."""
        samples, _, ranks, size = self._split
        full_batches, remainder = divmod(samples, ranks * size)
        first, each, holders = number * ranks * size, size, ranks
        if number >= full_batches:
            first, each = full_batches * ranks * size, remainder // ranks
            if number > full_batches or not each:
                first, each, holders = first + each * ranks, 1, remainder % ranks
        return range(first + rank * each, first + (rank + 1) * each) if rank < holders else range(0)

    def rows(self, indices: list[int]) -> Iterator[Batch]:
        """Yields batches of one sample each, on the CPU."""
        return self._fetch.rows(indices)
