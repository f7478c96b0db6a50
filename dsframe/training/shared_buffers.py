"""Synchronizes buffers that differ between ranks with the first rank's, so that ranks evaluate one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from dsframe.cluster.exchange import aligned, all_gather_json, sum_rows
from dsframe.engine import Engine
from dsframe.model import extra_state
from dsframe.model.digests import flat_copy
from dsframe.model.persistent import put
from dsframe.values import Tensors


def take_over(engine: Engine, kept: Tensors) -> Collection[str]:
    """**Collective.** Copies every buffer that differs between ranks in any bit from its first rank. ``kept``: this
    rank's buffers, on the CPU. Returns the names of those that differed."""
    world = engine.plan.world
    places, end = _row_spans(_of_ranks(engine, kept))
    if not places:
        return ()
    row = torch.zeros(end, dtype=torch.uint8)
    for name, place in places.items():
        if place.source == world.rank:
            row[place.bytes] = _bytes(kept[name])
    sum_rows(engine, row)
    for name, buffer in engine.buffers().items():
        if name in places and places[name].source != world.rank:
            content = row[places[name].bytes].clone()
            put(content.view(buffer.dtype).reshape(buffer.shape), buffer)
    return places.keys()


def but_statistics(engine: Engine, names: Iterable[str]) -> str:
    """Returns, as text, those ``names`` of buffers that no known dependence lists as statistics."""
    known = frozenset[str]().union(*(dependence.statistics for dependence in engine.built.depends))
    return ", ".join(name for name in names if name not in known)


def differing(engine: Engine) -> Collection[str]:
    """**Collective.** Returns the names of buffers and extra states that differ between their ranks."""
    extra = extra_state.pack(engine.built.watch.model) if engine.built.watch else {}
    of_ranks = _of_ranks(engine, {**engine.buffers(), **extra})
    versions = Counter(name for name, _ in {(name, digest) for of in of_ranks for name, (_, digest) in of.items()})
    return sorted(name for name, count in versions.items() if count > 1)


@dataclass(frozen=True)
class _RowSpan:
    """Position of a buffer in the exchange row."""

    source: int
    """The first rank that holds it."""
    bytes: slice


def _of_ranks(engine: Engine, kept: Tensors) -> list[dict[str, tuple[int, str]]]:
    """**Collective.** Returns the size in bytes and digest of each buffer, by rank; [] with one rank."""
    if engine.plan.world.size == 1:
        return []
    mine = {name: (buffer.nbytes, xxh3_64_hexdigest(_bytes(buffer).numpy().data)) for name, buffer in kept.items()}
    return all_gather_json(engine, mine)


def _bytes(buffer: Tensor) -> Tensor:
    return flat_copy(buffer).view(torch.uint8)


def _row_spans(of_ranks: Sequence[Mapping[str, tuple[int, str]]]) -> tuple[dict[str, _RowSpan], int]:
    """Returns where each differing buffer lies in the exchange row, and the row's length in bytes. ``of_ranks``: as
    from :func:`_of_ranks`. A pipeline stage holds only its own layers' buffers. Buffers of different sizes are not
    exchanged."""
    by_name: dict[str, dict[int, tuple[int, str]]] = {}
    for rank, held in enumerate(of_ranks):
        for name, (size, digest) in held.items():
            by_name.setdefault(name, {})[rank] = (size, digest)
    places: dict[str, _RowSpan] = {}
    end = 0
    for name, holders in by_name.items():
        source, (size, _) = next(iter(holders.items()))
        if len({*holders.values()}) > 1 and {each for each, _ in holders.values()} == {size}:
            places[name] = _RowSpan(source, slice(end, end + size))
            end += aligned(size)
    return places, end
