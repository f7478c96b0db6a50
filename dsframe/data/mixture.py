"""Several data sets as one, each with a share of the samples.

Which of them gives a sample follows from the seed and from the sample's number in the training, whatever the batches are cut into:
samples come in blocks, in each of which every set has its exact share in a drawn order. So where training stands in each set
is arithmetic, and no state.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dsframe.data.packed import RowSource
from dsframe.data.sampler import Order, Part, taken
from dsframe.data.source import Batch, Source, draws, own_rows
from dsframe.errors import DataError

_MIXTURE = 0x6D6978  # a stream of draws of its own
_FINEST = 10_000
"""Weights whose ratio needs larger blocks are rounded to parts of so many."""
_LEAST = 256
"""Samples of a block, at least: shorter ones would come in nearly the same order each time."""
EXHAUSTED = ("repeats", "ends", "error")


class Mixture:
    """What :meth:`Task.train_data` may return: map-style data sets, or sources, by name.

    ``weights``: shares of the samples, by name; by default as many as each has. ``exhausted``: what follows when all samples of a
    set have been read, for all or by name: it ``repeats`` in a new order, it ``ends`` and the others share its place, or the
    training would be too long and is refused (``error``). An epoch is as many samples as all sets have.
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
        indices = torch.cat([rows for _, rows in parts]) % len(self)
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
        rows = torch.cat([rows for _, rows in parts])
        copies, indices = rows // len(self), rows % len(self)
        which = torch.searchsorted(self._ends, indices, right=True)
        widths = [width or 0]
        wanted: list[tuple[Source, list[Part], Tensor]] = []
        for number, source in enumerate(self._sources):
            numbers = indices - (self._ends[number - 1] if number else 0)
            numbers = own_rows(source, numbers + copies * len(source))
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


@dataclass(frozen=True)
class _Phase:
    """A stretch of the training in which the same data sets are left."""

    begin: int
    before: Tensor
    """How many samples of each set come before, int64."""
    block: Tensor
    """How many of each are in a block, int64."""
    size: int


class MixtureOrder(Order):
    """The order of a mixture's samples, numbered from set to set. An epoch continues in each set where the last one stopped."""

    def __init__(self, mixture: Mixture, orders: Sequence[Order], seed: int) -> None:
        super().__init__(len(mixture), seed)
        self._mixture, self._orders = mixture, orders
        self._sizes = torch.tensor([order.samples for order in orders])
        self._ends = "repeats" not in mixture.exhausted
        """True if all sets end: then an epoch has each sample once."""

    def take(self, epoch: int, start: int, count: int) -> list[Part]:
        which, nth = self._drawn(epoch * self.samples + start, count)
        epochs, indices = torch.empty_like(nth), torch.empty_like(nth)
        for number, order in enumerate(self._orders):
            here = (which == number).nonzero().flatten()
            offset = self._mixture.ends[number] - order.samples
            drawn = taken(order, *divmod(int(nth[here[0]]), order.samples), len(here)) if len(here) else []
            for (passes, rows), places in zip(drawn, here.split([len(rows) for _, rows in drawn]), strict=True):  # type: ignore[no-untyped-call]
                copies = rows // order.samples * self.samples
                epochs[places], indices[places] = passes, rows % order.samples + offset + copies
        cuts = (epochs.diff().nonzero().flatten() + 1).tolist()
        return [(int(epochs[cut]), rows) for cut, rows in zip([0, *cuts], indices.tensor_split(cuts), strict=True)]

    def _drawn(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Which set gives each of ``count`` samples, and how many of that set come before it in the training."""
        which, nth = [], []
        while count:
            cycle, number, block, at = self._place(first)
            phases = self._phases(cycle)
            phase = phases[number]
            here = min(count, phase.size - at)
            if number + 1 < len(phases):
                here = min(here, phases[number + 1].begin - (first - cycle * self.samples))
            elif self._ends:
                here = min(here, (cycle + 1) * self.samples - first)
            sets, ranks = self._block(cycle, number, block)
            sets, ranks = sets[at : at + here], ranks[at : at + here]
            which.append(sets)
            nth.append((cycle * self._sizes * self._ends + phase.before + block * phase.block)[sets] + ranks)
            first, count = first + here, count - here
        return torch.cat(which), torch.cat(nth)

    def _place(self, sample: int) -> tuple[int, int, int, int]:
        """In which cycle, phase and block the sample is, and where in the block."""
        cycle, left = divmod(sample, self.samples) if self._ends else (0, sample)
        number = bisect_right([phase.begin for phase in self._phases(cycle)], left) - 1
        phase = self._phases(cycle)[number]
        return cycle, number, *divmod(left - phase.begin, phase.size)

    @cached_property
    def _phases(self) -> Callable[[int], list[_Phase]]:
        return lru_cache(maxsize=4)(self._found)

    def _found(self, cycle: int) -> list[_Phase]:
        begin, before = 0, torch.zeros_like(self._sizes)
        finite = torch.tensor([what != "repeats" for what in self._mixture.exhausted])
        phases: list[_Phase] = []
        while True:
            alive = ~(finite & (before == self._sizes))
            block = self._shares(alive)
            phase = _Phase(begin, before, block, int(block.sum()))
            phases.append(phase)
            ends = []
            for index in (alive & finite).nonzero().flatten().tolist():
                whole, rest = divmod(int(self._sizes[index] - before[index]), int(block[index]))
                sets, ranks = _shuffled(block, self.seed, cycle, len(phases) - 1, whole)
                last = ((sets == index) & (ranks == rest - 1)).nonzero()
                ends.append(whole * phase.size + (int(last) + 1 if rest else 0))
            if not ends:
                return phases
            length = min(ends)
            before = before + self._counted(phase, cycle, len(phases) - 1, *divmod(length, phase.size))
            begin += length
            if begin == self.samples and self._ends:
                return phases

    def _counted(self, phase: _Phase, cycle: int, number: int, block: int, at: int) -> Tensor:
        """Returns how many samples of each set the phase has until place ``at`` of ``block``."""
        sets, _ = _shuffled(phase.block, self.seed, cycle, number, block)
        return block * phase.block + torch.bincount(sets[:at], minlength=len(self._sizes))

    @cached_property
    def _block(self) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
        return lru_cache(maxsize=64)(
            lambda cycle, number, block: _shuffled(self._phases(cycle)[number].block, self.seed, cycle, number, block)
        )

    def _shares(self, alive: Tensor) -> Tensor:
        """Returns how many samples of each set a block has: the weights' ratio, as far as there are parts of 10,000."""
        weights = [weight * here for weight, here in zip(self._mixture.weights, alive.tolist(), strict=True)]
        shares = [weight / sum(weights) for weight in weights]
        size = min(math.lcm(*(share.denominator for share in shares)), _FINEST)
        counts = [math.floor(share * size) for share in shares]
        largest = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index] * size)
        for index in largest[: size - sum(counts)]:
            counts[index] += 1
        for name, share, count in zip(self._mixture.sets, shares, counts, strict=True):
            if share and not count:
                raise DataError(
                    f"mixture: {name} has less than a part in {_FINEST:,} of the weights; raise its weight or leave it out"
                )
        return torch.tensor(counts) * math.ceil(_LEAST / size)

    def shares(self, samples: int) -> dict[str, int]:
        cycle, number, block, at = self._place(samples)
        phase = self._phases(cycle)[number]
        counts = cycle * self._sizes * self._ends + phase.before + self._counted(phase, cycle, number, block, at)
        return dict(zip(self._mixture.sets, counts.tolist(), strict=True))

    def about(self) -> dict[str, Any]:
        names, weights = self._mixture.sets, self._mixture.weights
        return {
            name: {"weight": str(weight), "exhausted": what, "samples": order.samples, **order.about()}
            for name, weight, what, order in zip(names, weights, self._mixture.exhausted, self._orders, strict=True)
        }

    def lines(self, samples: int) -> list[str]:
        lines = []
        counts = self.shares(samples)
        for (name, count), size, what in zip(
            counts.items(), self._sizes.tolist(), self._mixture.exhausted, strict=True
        ):
            if what == "error" and (count > size or samples > self._last(name)):
                raise DataError(
                    f"mixture: {name} has {size:,} samples, which are read after {self._last(name):,} of the {samples:,} samples "
                    'of this training; train less, lower its weight, or let it repeat or end ("exhausted")'
                )
            then = ", which then ends" if what == "ends" and count >= size and not self._ends else ""
            lines.append(f"mixture: {name}: {count / samples:.1%} of the samples, {count:,} of its {size:,}{then}")
        return lines

    def _last(self, name: str) -> int:
        """Returns how many samples of the training there are until the set of that name is read."""
        number = list(self._mixture.sets).index(name)
        gone = (phase.begin for phase in self._phases(0) if int(phase.before[number]) == int(self._sizes[number]))
        return next(gone, self.samples)


def _shuffled(block: Tensor, seed: int, cycle: int, phase: int, number: int) -> tuple[Tensor, Tensor]:
    """Which set gives each sample of a block, and how many of that set are before it there."""
    sets = torch.repeat_interleave(torch.arange(len(block)), block)
    bits = draws(seed, number, torch.arange(len(sets)), _MIXTURE + (cycle << 16) + phase)
    sets = sets[torch.argsort(bits, stable=True)]
    ranks = (sets[:, None] == torch.arange(len(block))).cumsum(0).gather(1, sets[:, None]).flatten() - 1
    return sets, ranks
