"""The evaluation of one model on all held-out samples, whatever the engine and the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from dsframe.checkpoint import generators
from dsframe.checkpoint.share import share
from dsframe.data import EvaluationLoader
from dsframe.data.source import Batch
from dsframe.engine import Engine
from dsframe.tasks.task import Sum

_WORD_BYTES = 4
"""Of a buffer in one float64: whole numbers of so many bytes, and their sum with zeros, are exact there."""


class Evaluation:
    """Takes the task's metrics of an engine's model."""

    def __init__(self, engine: Engine, loader: EvaluationLoader, sign_of_life: Callable[[], None]) -> None:
        """``sign_of_life``: called before each batch."""
        self._engine, self._loader, self._sign_of_life = engine, loader, sign_of_life

    def run(self) -> dict[str, float]:
        """**Collective.** Means over all held-out samples, the same on every rank."""
        return self._of(self._loader)

    def try_out(self) -> None:
        """**Collective.** One batch a rank, before training: what is wrong with it shall not wait for the first epoch's end.

        Training does not see it: random generators are put back.
        """
        device = self._engine.plan.device
        kept = generators.capture(device)
        self._of([self._loader.first()])
        generators.restore(kept, device)

    def _of(self, batches: Iterable[tuple[Batch, int]]) -> dict[str, float]:
        sums: dict[str, Sum] = {}
        with self._one_model():
            for batch, valid in batches:
                self._sign_of_life()
                for name, value in self._engine.eval_step(batch, valid).items():
                    sums[name] = sums[name] + value if name in sums else value
        return self._means(sums)

    def _means(self, sums: Mapping[str, Sum]) -> dict[str, float]:
        """**Collective.** Exact means over all ranks; a rank that did not see a metric takes part with zeros."""
        names = sorted({name for found in share(self._engine, json.dumps(sorted(sums))) for name in json.loads(found)})
        table = torch.zeros(len(names), 2, dtype=torch.float64, device=self._engine.plan.device)
        for row, name in enumerate(names):
            if name in sums:
                table[row, 0], table[row, 1] = sums[name].total.double(), float(sums[name].count)
        total = self._engine.sum_over_ranks(table.reshape(-1)).reshape(len(names), 2)
        return {name: float(total[row, 0] / total[row, 1]) for row, name in enumerate(names)}

    @contextmanager
    @torch.no_grad()
    def _one_model(self) -> Iterator[None]:
        """**Collective.** Every rank has the buffers of the first rank that holds them, and its own again afterwards.

        Weights are everybody's. BatchNorm's statistics are of the samples that a rank has seen, so that without this each rank
        would evaluate a model of its own, and none of them the one that an export gives, which is rank 0's.
        """
        own = self._engine.buffers()
        places = _places(self._engine, own)
        if not places:
            yield
            return
        kept = {name: buffer.clone() for name, buffer in own.items()}
        _take_over(self._engine, own, places)
        try:
            yield
        finally:
            for name, buffer in own.items():
                buffer.copy_(kept[name])


@dataclass(frozen=True)
class _Place:
    """Of a buffer, in one row of words for all."""

    source: int
    """The first rank that holds it."""
    first: int
    end: int


def _places(engine: Engine, own: Mapping[str, Tensor]) -> dict[str, _Place]:
    """**Collective.** By name. A pipeline's stage knows its own layers' buffers alone; one whose size differs between ranks stays
    with each."""
    if engine.plan.world.size == 1:
        return {}
    mine = {name: -(-buffer.nbytes // _WORD_BYTES) for name, buffer in own.items()}
    sizes: dict[str, dict[int, int]] = {}
    for rank, text in enumerate(share(engine, json.dumps(mine))):
        for name, words in json.loads(text).items():
            sizes.setdefault(name, {})[rank] = words
    places: dict[str, _Place] = {}
    end = 0
    for name, words in sizes.items():
        if len({*words.values()}) == 1:
            source, size = next(iter(words.items()))
            places[name] = _Place(source, end, end + size)
            end += size
    return places


def _take_over(engine: Engine, own: Mapping[str, Tensor], places: Mapping[str, _Place]) -> None:
    """**Collective.** Every buffer from its source, to the last bit, by the sum that all engines have."""
    rank, device = engine.plan.world.rank, engine.plan.device
    row = torch.zeros(max(place.end for place in places.values()), dtype=torch.float64, device=device)
    held = [(buffer, places[name]) for name, buffer in own.items() if name in places]
    for buffer, place in held:
        if place.source == rank:
            content = torch.zeros((place.end - place.first) * _WORD_BYTES, dtype=torch.uint8, device=device)
            content[: buffer.nbytes] = buffer.contiguous().reshape(-1).view(torch.uint8)
            row[place.first : place.end] = content.view(torch.int32).double()
    row = engine.sum_over_ranks(row)
    for buffer, place in held:
        if place.source != rank:
            content = row[place.first : place.end].to(torch.int32).view(torch.uint8)[: buffer.nbytes]
            buffer.copy_(content.clone().view(buffer.dtype).reshape(buffer.shape))
