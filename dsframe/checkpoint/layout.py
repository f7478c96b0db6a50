"""Which rank holds which range of every tensor, and which rank writes it into which file.

Every rank tells the others once in a save what it holds; all come to the same plan without another word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dsframe.cluster.exchange import Ranks, all_gather_tensor, all_gather_text, same
from dsframe.errors import CheckpointError
from dsframe.model.state import WEIGHT, ParameterShard

Range = tuple[int, int]
"""First element and size in a flattened tensor."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a parameter on all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    holders: Mapping[Range, Sequence[int]]
    """Range -> the ranks that hold it. The ranges are disjoint, in order, and cover the tensor."""

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Parameter:
    """One parameter on all ranks."""

    name: str
    tensors: Mapping[str, Entry]
    scalars: Mapping[str, float]


def agree(ranks: Ranks, own: Sequence[ParameterShard]) -> list[Parameter]:
    """**Collective.** Every parameter that some rank lists, in the order of the lists, rank after rank.

    Raises CheckpointError, on every rank, where the ranges leave a gap or overlap: a fault of the engine.
    """
    facts = [
        [one.name, dict(one.scalars), [[k, list(t.shape), _text(t.dtype)] for k, t in one.tensors.items()]]
        for one in own
    ]
    every = _union(ranks, json.dumps(facts))
    held = {(one.name, key): (tensor.first, tensor.size) for one in own for key, tensor in one.tensors.items()}
    names = [(name, key) for name, (_, tensors) in every.items() for key, _, _ in tensors]
    table = torch.tensor([held.get(name, (0, 0)) for name in names], dtype=torch.int64).reshape(-1, 2)
    columns = [one.tolist() for one in all_gather_tensor(ranks, table)]
    of = {name: [tuple(rows[index]) for rows in columns] for index, name in enumerate(names)}
    return [
        Parameter(
            name,
            {
                key: Entry(tuple(shape), getattr(torch, dtype), _holders(f"{key}/{name}", shape, of[name, key]))
                for key, shape, dtype in tensors
            },
            scalars,
        )
        for name, (scalars, tensors) in every.items()
    ]


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _union(ranks: Ranks, facts: str) -> dict[str, Any]:
    """**Collective.** Name -> its scalars and tensors; the lists themselves are sent only where they differ, as in a pipeline."""
    told = [facts] if same(ranks, facts) else all_gather_text(ranks, facts)
    every: dict[str, Any] = {}
    for text in told:
        for name, *rest in json.loads(text):
            every.setdefault(name, rest)
    return every


def _holders(what: str, shape: Sequence[int], ranges: Sequence[Range]) -> dict[Range, list[int]]:
    found: dict[Range, list[int]] = {}
    for rank, one in enumerate(ranges):
        if one[1]:
            found.setdefault(one, []).append(rank)
    end = 0
    for first, size in sorted(found):
        if first != end:
            break
        end += size
    else:
        if end == math.prod(shape):
            return dict(sorted(found.items()))
    raise CheckpointError(f"the ranks' shards do not make {what} of shape {list(shape)}: they hold {sorted(found)}")


class Dealer:
    """Deals tensors to ranks, to the one that has fewest bytes so far, and to files of about ``part_bytes``."""

    def __init__(self, ranks: int, part_bytes: int, prefix: str = "part") -> None:
        self._part_bytes, self._prefix = part_bytes, prefix
        self._dealt, self._part, self._in_part, self._narrowest = ([0] * ranks for _ in range(4))

    def owner(self, among: Collection[int] = ()) -> int:
        """The rank with the fewest bytes, of all or of those ``among``."""
        return min(among or range(len(self._dealt)), key=lambda rank: (self._dealt[rank], rank))

    def file(self, owner: int, count: int, widest: int = 0, narrowest: int = 0) -> str:
        """The file of ``owner`` for ``count`` bytes more. Wider elements (in bytes) than the last ones there begin another: where
        no tensor follows narrower ones, each is aligned to its elements."""
        full = self._in_part[owner] + count > self._part_bytes or widest > self._narrowest[owner]
        if self._in_part[owner] and full:
            self._part[owner] += 1
            self._in_part[owner] = 0
        self._dealt[owner] += count
        self._in_part[owner] += count
        self._narrowest[owner] = narrowest
        return f"{self._prefix}-{owner:05}-{self._part[owner]:03}.safetensors"


class Chunk(NamedTuple):
    """Elements of one tensor on their way from the rank that holds them to the one that writes them."""

    owner: int
    source: int
    parameter: str
    key: str
    skip: int
    """Elements of the source's range before them."""
    size: int
    bytes: int
    file: str
    begin: int
    """Bytes before them in the file, its header aside."""


class Content(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class FilePlan:
    """What goes where. The chunks of one owner come in the order of its files and of the tensors in them."""

    files: dict[str, list[Content]] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of a file, its header aside."""
    chunks: list[Chunk] = field(default_factory=list)
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The manifest's entry of every parameter."""

    def windows(self, limit: int) -> Iterator[list[Chunk]]:
        """The chunks in turn, so many that no rank sends, and none writes, more than ``limit`` bytes of them."""
        sent: dict[int, int] = {}
        written: dict[int, int] = {}
        window: list[Chunk] = []
        for chunk in self.chunks:
            for one in _cut(chunk, limit):
                if (sent.get(one.source, 0) + one.bytes > limit and one.source != one.owner) or written.get(
                    one.owner, 0
                ) + one.bytes > limit:
                    yield window
                    sent, written, window = {}, {}, []
                sent[one.source] = sent.get(one.source, 0) + one.bytes * (one.source != one.owner)
                written[one.owner] = written.get(one.owner, 0) + one.bytes
                window.append(one)
        if window:
            yield window


def _cut(chunk: Chunk, limit: int) -> Iterator[Chunk]:
    each = chunk.bytes // chunk.size
    step = max(1, limit // each)
    for begin in range(0, chunk.size, step):
        size = min(step, chunk.size - begin)
        yield chunk._replace(skip=chunk.skip + begin, size=size, bytes=size * each, begin=chunk.begin + begin * each)


def plan(parameters: Sequence[Parameter], ranks: int, part_bytes: int, *, sharded: bool) -> FilePlan:
    """Deals the parameters. ``sharded``: each range stays with a rank that holds it; else a parameter is put together by one."""
    found, dealer = FilePlan(), Dealer(ranks, part_bytes, "shard" if sharded else "part")
    for one in parameters:
        ranges = one.tensors[WEIGHT].holders
        alike = all(entry.holders == ranges for entry in one.tensors.values())
        if sharded and len(ranges) > 1 and alike:
            _deal_ranges(found, dealer, one)
        else:
            _deal_whole(found, dealer, one)
    return found


def _deal_whole(found: FilePlan, dealer: Dealer, one: Parameter) -> None:
    tensors = _widest_first(one)
    owner = dealer.owner(set.intersection(*(_whole_on(entry) for _, entry in tensors)))
    name = _file(found, dealer, owner, tensors, sum(entry.bytes for _, entry in tensors))
    for key, entry in tensors:
        found.files[name].append(Content(f"{key}/{one.name}", entry.dtype, entry.shape))
        for (_, size), ranks in entry.holders.items():
            source = owner if owner in ranks else ranks[owner % len(ranks)]
            _send(found, name, owner, source, (one.name, key, size), entry.dtype)
    found.parameters[one.name] = {"file": name, **_described(one)}


def _deal_ranges(found: FilePlan, dealer: Dealer, one: Parameter) -> None:
    tensors = _widest_first(one)
    each = sum(entry.dtype.itemsize for _, entry in tensors)
    pieces = []
    for (first, size), holders in one.tensors[WEIGHT].holders.items():  # a rank holds one of them
        owner = dealer.owner(holders)
        pieces.append((owner, _file(found, dealer, owner, tensors, size * each), first, size))
    for key, entry in tensors:  # ranks read tensor by tensor
        for owner, name, _, size in pieces:
            found.files[name].append(Content(f"{key}/{one.name}", entry.dtype, (size,)))
            _send(found, name, owner, owner, (one.name, key, size), entry.dtype)
    found.parameters[one.name] = {"pieces": [[*piece[1:]] for piece in pieces], **_described(one)}


def _send(found: FilePlan, file: str, owner: int, source: int, what: tuple[str, str, int], dtype: torch.dtype) -> None:
    """Appends elements (parameter, key, number of elements) to ``file``."""
    parameter, key, size = what
    begin, count = found.sizes[file], size * dtype.itemsize
    found.chunks.append(Chunk(owner, source, parameter, key, 0, size, count, file, begin))
    found.sizes[file] = begin + count


def _file(found: FilePlan, dealer: Dealer, owner: int, tensors: list[tuple[str, Entry]], count: int) -> str:
    name = dealer.file(owner, count, tensors[0][1].dtype.itemsize, tensors[-1][1].dtype.itemsize)
    found.files.setdefault(name, [])
    found.sizes.setdefault(name, 0)
    found.owners[name] = owner
    return name


def _described(one: Parameter) -> dict[str, Any]:
    moments = sorted(key for key in one.tensors if key != WEIGHT)
    return {"shape": list(one.tensors[WEIGHT].shape), "moments": moments, "scalars": dict(one.scalars)}


def _widest_first(one: Parameter) -> list[tuple[str, Entry]]:
    return sorted(one.tensors.items(), key=lambda item: -item[1].dtype.itemsize)


def _whole_on(entry: Entry) -> set[int]:
    return set(next(iter(entry.holders.values()))) if len(entry.holders) == 1 else set()
