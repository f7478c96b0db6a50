"""Several data sets as one, each with a share of the samples.

Which of them gives a sample follows from the seed and from the sample's number in the training, whatever the batches are cut into:
samples come in blocks, in each of which every set has its exact share in a drawn order. So where training stands in each set
is arithmetic, and no state.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dsframe.data.packed import RowSource
from dsframe.data.sampler import Order, Part, taken
from dsframe.data.source import Batch, Source, draws
from dsframe.errors import DataError

_MIXTURE = 0x6D6978  # a stream of draws of its own
_FINEST = 10_000
"""Weights whose ratio needs larger blocks are rounded to parts of so many."""
_LEAST = 256
"""Samples of a block, at least: shorter ones would come in nearly the same order each time."""
EXHAUSTED = ("repeats", "error")


class Mixture:
    """What :meth:`Task.train_data` may return: map-style data sets, or sources, by name.

    ``weights``: shares of the samples, by name; by default as many as each has. ``exhausted``: what follows when all samples of a
    set have been read, for all or by name: it ``repeats`` in a new order, or the training is refused (``error``). An epoch is as
    many samples as all sets have.
    """

    def __init__(
        self,
        sets: Mapping[str, Any],
        weights: Mapping[str, float] | None = None,
        *,
        exhausted: str | Mapping[str, str] = "repeats",
    ) -> None:
        """Raises DataError for names without a set, weights that are no numbers above 0, and sets that are empty."""
        self.sets = dict(sets)
        for name, data in self.sets.items():
            if len(data) == 0:
                raise DataError(f"mixture: {name} is empty")
        self.ends = list(accumulate(len(data) for data in self.sets.values()))
        given = {name: len(data) for name, data in self.sets.items()} if weights is None else dict(weights)
        what = dict.fromkeys(sets, exhausted) if isinstance(exhausted, str) else dict(exhausted)
        if not self.sets or set(given) != set(self.sets) or not set(what) <= set(self.sets):
            raise DataError(
                f"mixture: weights of {sorted(given)}, but data sets {sorted(self.sets)}; name the same ones"
            )
        for name in self.sets:
            if not (isinstance(given[name], (int, float)) and 0 < given[name] < math.inf):
                raise DataError(
                    f"mixture: the weight of {name} is {given[name]}; give a number above 0, or leave it out"
                )
            if what.setdefault(name, "repeats") not in EXHAUSTED:
                raise DataError(f'mixture: exhausted is "{what[name]}" for {name}; choose from {", ".join(EXHAUSTED)}')
        self.weights = [Fraction(str(given[name])) for name in self.sets]
        self.exhausted = [what[name] for name in self.sets]

    def __len__(self) -> int:
        return self.ends[-1]

    @cached_property
    def lengths(self) -> list[int] | None:
        """The ``lengths`` of all data sets, one after another; None where one has none."""
        each: list[Any] = [getattr(data, "lengths", None) for data in self.sets.values()]
        return None if any(data is None for data in each) else [int(n) for data in each for n in data]

    def __getitem__(self, index: int) -> Any:
        number = bisect_right(self.ends, index)
        return list(self.sets.values())[number][index - (self.ends[number - 1] if number else 0)]


class MixtureSource:
    """A mixture of sources: each gives its rows of a batch, and they are put together in their order."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self._sources: list[Source] = list(mixture.sets.values())
        self._ends = torch.tensor(mixture.ends)
        self.global_width = any(isinstance(source, RowSource) and source.global_width for source in self._sources)

    def __len__(self) -> int:
        return len(self.mixture)

    def batch(self, indices: Tensor, epoch: int) -> Batch:
        return self.gather([(epoch, indices)])

    def common_width(self, parts: list[Part]) -> int:
        """As :meth:`RowSource.common_width`: the widest of its sources."""
        indices = torch.cat([rows for _, rows in parts])
        which = torch.searchsorted(self._ends, indices, right=True)
        widths = []
        for number, source in enumerate(self._sources):
            numbers = indices[which == number] - (self._ends[number - 1] if number else 0)
            if isinstance(source, RowSource) and len(numbers):
                widths.append(source.width(numbers))
        return max(widths)

    def gather(self, parts: list[Part], width: int | None = None) -> Batch:
        """The rows of all parts as one batch. ``width``: in place of their own."""
        epochs = torch.cat([torch.full_like(rows, epoch) for epoch, rows in parts])
        indices = torch.cat([rows for _, rows in parts])
        which = torch.searchsorted(self._ends, indices, right=True)
        widths = [width or 0]
        wanted: list[tuple[Source, list[Part], Tensor]] = []
        for number, source in enumerate(self._sources):
            numbers = indices - (self._ends[number - 1] if number else 0)
            for epoch in epochs[which == number].unique().tolist():  # type: ignore[no-untyped-call]
                here = ((which == number) & (epochs == epoch)).nonzero().flatten()
                wanted.append((source, [(epoch, numbers[here])], here))
                if isinstance(source, RowSource):
                    widths.append(source.width(numbers[here]))
        batches = [
            source.gather(rows, max(widths)) if isinstance(source, RowSource) else source.batch(rows[0][1], rows[0][0])
            for source, rows, _ in wanted
        ]
        back = torch.cat([here for _, _, here in wanted]).argsort()
        try:
            inputs, targets = tree_map(lambda *rows: torch.cat(rows).index_select(0, back), *batches)
        except (RuntimeError, ValueError, TypeError) as error:
            raise DataError(
                f"mixture: the rows of {', '.join(self.mixture.sets)} do not fit each other: {error}"
            ) from error
        return inputs, targets


class MixtureOrder(Order):
    """The order of a mixture's samples, numbered from set to set. An epoch continues in each set where the last one stopped."""

    def __init__(self, mixture: Mixture, orders: Sequence[Order], seed: int) -> None:
        """Raises DataError for a weight that is too small beside the others."""
        super().__init__(len(mixture), seed)
        self._mixture, self._orders = mixture, orders
        self._block = _shares(mixture)
        """How many samples of each set are in a block, int64."""
        self._size = int(self._block.sum())

    def take(self, epoch: int, start: int, count: int) -> list[Part]:
        which, nth = self._drawn(epoch * self.samples + start, count)
        epochs, indices = torch.empty_like(nth), torch.empty_like(nth)
        for number, order in enumerate(self._orders):
            here = (which == number).nonzero().flatten()
            offset = self._mixture.ends[number] - order.samples
            drawn = taken(order, *divmod(int(nth[here[0]]), order.samples), len(here)) if len(here) else []
            for (passes, rows), places in zip(drawn, here.split([len(rows) for _, rows in drawn]), strict=True):  # type: ignore[no-untyped-call]
                epochs[places], indices[places] = passes, rows + offset
        cuts = (epochs.diff().nonzero().flatten() + 1).tolist()
        return [(int(epochs[cut]), rows) for cut, rows in zip([0, *cuts], indices.tensor_split(cuts), strict=True)]

    def _drawn(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Which set gives each of ``count`` samples, and how many of that set come before it in the training."""
        which, nth = [], []
        while count:
            block, at = divmod(first, self._size)
            sets, ranks = (of_block[at : at + count] for of_block in self._shuffled(block))
            which.append(sets)
            nth.append((block * self._block)[sets] + ranks)
            first, count = first + len(sets), count - len(sets)
        return torch.cat(which), torch.cat(nth)

    @cached_property
    def _shuffled(self) -> Callable[[int], tuple[Tensor, Tensor]]:
        return lru_cache(maxsize=64)(self._of_block)

    def _of_block(self, number: int) -> tuple[Tensor, Tensor]:
        """Which set gives each sample of a block, and how many of that set are before it there."""
        sets = torch.repeat_interleave(torch.arange(len(self._block)), self._block)
        sets = sets[torch.argsort(draws(self.seed, number, torch.arange(len(sets)), _MIXTURE), stable=True)]
        ranks = (sets[:, None] == torch.arange(len(self._block))).cumsum(0).gather(1, sets[:, None]).flatten() - 1
        return sets, ranks

    def shares(self, samples: int) -> dict[str, int]:
        block, at = divmod(samples, self._size)
        sets, _ = self._shuffled(block)
        counts = block * self._block + torch.bincount(sets[:at], minlength=len(self._block))
        return dict(zip(self._mixture.sets, counts.tolist(), strict=True))

    def about(self) -> dict[str, Any]:
        names, weights = self._mixture.sets, self._mixture.weights
        return {
            name: {"weight": str(weight), "exhausted": what, "samples": order.samples, **order.about()}
            for name, weight, what, order in zip(names, weights, self._mixture.exhausted, self._orders, strict=True)
        }

    def lines(self, samples: int) -> list[str]:
        lines = []
        for (name, count), order, what in zip(
            self.shares(samples).items(), self._orders, self._mixture.exhausted, strict=True
        ):
            if what == "error" and count > order.samples:
                raise DataError(
                    f"mixture: {name} has {order.samples:,} samples, and the training takes {count:,} of it; train less, lower "
                    'its weight, or let it repeat ("exhausted")'
                )
            lines.append(f"mixture: {name}: {count / samples:.1%} of the samples, {count:,} of its {order.samples:,}")
        return lines


def _shares(mixture: Mixture) -> Tensor:
    """How many samples of each set a block has: the weights' ratio, as far as there are parts of 10,000. Raises DataError."""
    shares = [weight / sum(mixture.weights) for weight in mixture.weights]
    size = min(math.lcm(*(share.denominator for share in shares)), _FINEST)
    counts = [math.floor(share * size) for share in shares]
    largest = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index] * size)
    for index in largest[: size - sum(counts)]:
        counts[index] += 1
    if 0 in counts:
        name = list(mixture.sets)[counts.index(0)]
        raise DataError(
            f"mixture: {name} has less than a part in {_FINEST:,} of the weights; raise its weight or leave it out"
        )
    return torch.tensor(counts) * math.ceil(_LEAST / size)
