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


def agree_on_parameters(ranks: Ranks, shards: Sequence[ParameterShard]) -> list[Parameter]:
    """**Collective.** Every parameter that some rank lists, in the order of the lists, rank after rank.

    Raises CheckpointError, on every rank, where the ranges leave a gap or overlap: a fault of the engine.
    """
    facts = [
        [shard.name, dict(shard.scalars), [[k, list(t.shape), _text(t.dtype)] for k, t in shard.tensors.items()]]
        for shard in shards
    ]
    every = _union(ranks, json.dumps(facts))
    held = {(shard.name, key): (tensor.first, tensor.size) for shard in shards for key, tensor in shard.tensors.items()}
    names = [(name, key) for name, (_, tensors) in every.items() for key, _, _ in tensors]
    table = torch.tensor([held.get(name, (0, 0)) for name in names], dtype=torch.int64).reshape(-1, 2)
    columns = [gathered.tolist() for gathered in all_gather_tensor(ranks, table)]
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
    texts = [facts] if same(ranks, facts) else all_gather_text(ranks, facts)
    every: dict[str, Any] = {}
    for text in texts:
        for name, *rest in json.loads(text):
            every.setdefault(name, rest)
    return every


def _holders(what: str, shape: Sequence[int], ranges: Sequence[Range]) -> dict[Range, list[int]]:
    holders: dict[Range, list[int]] = {}
    for rank, held in enumerate(ranges):
        if held[1]:
            holders.setdefault(held, []).append(rank)
    end = 0
    for first, size in sorted(holders):
        if first != end:
            break
        end += size
    else:
        if end == math.prod(shape):
            return dict(sorted(holders.items()))
    raise CheckpointError(f"the ranks' shards do not make {what} of shape {list(shape)}: they hold {sorted(holders)}")


class ByteBalancer:
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
            for piece in _cut(chunk, limit):
                travels = piece.source != piece.owner
                too_much_sent = travels and sent.get(piece.source, 0) + piece.bytes > limit
                if too_much_sent or written.get(piece.owner, 0) + piece.bytes > limit:
                    yield window
                    sent, written, window = {}, {}, []
                sent[piece.source] = sent.get(piece.source, 0) + piece.bytes * travels
                written[piece.owner] = written.get(piece.owner, 0) + piece.bytes
                window.append(piece)
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
    file_plan = FilePlan()
    balancer = ByteBalancer(ranks, part_bytes, "shard" if sharded else "part")
    for parameter in parameters:
        ranges = parameter.tensors[WEIGHT].holders
        alike = all(entry.holders == ranges for entry in parameter.tensors.values())
        if sharded and len(ranges) > 1 and alike:
            _deal_ranges(file_plan, balancer, parameter)
        else:
            _deal_whole(file_plan, balancer, parameter)
    return file_plan


def _deal_whole(file_plan: FilePlan, balancer: ByteBalancer, parameter: Parameter) -> None:
    tensors = _widest_first(parameter)
    owner = balancer.owner(set.intersection(*(_whole_on(entry) for _, entry in tensors)))
    name = _file(file_plan, balancer, owner, tensors, sum(entry.bytes for _, entry in tensors))
    for key, entry in tensors:
        file_plan.files[name].append(Content(f"{key}/{parameter.name}", entry.dtype, entry.shape))
        for (_, size), ranks in entry.holders.items():
            source = owner if owner in ranks else ranks[owner % len(ranks)]
            _send(file_plan, name, owner, source, (parameter.name, key, size), entry.dtype)
    file_plan.parameters[parameter.name] = {"file": name, **_described(parameter)}


def _deal_ranges(file_plan: FilePlan, balancer: ByteBalancer, parameter: Parameter) -> None:
    tensors = _widest_first(parameter)
    each = sum(entry.dtype.itemsize for _, entry in tensors)
    pieces = []
    for (first, size), holders in parameter.tensors[WEIGHT].holders.items():  # a rank holds one of them
        owner = balancer.owner(holders)
        pieces.append((owner, _file(file_plan, balancer, owner, tensors, size * each), first, size))
    for key, entry in tensors:  # ranks read tensor by tensor
        for owner, name, _, size in pieces:
            file_plan.files[name].append(Content(f"{key}/{parameter.name}", entry.dtype, (size,)))
            _send(file_plan, name, owner, owner, (parameter.name, key, size), entry.dtype)
    file_plan.parameters[parameter.name] = {"pieces": [[*piece[1:]] for piece in pieces], **_described(parameter)}


def _send(
    file_plan: FilePlan, file: str, owner: int, source: int, what: tuple[str, str, int], dtype: torch.dtype
) -> None:
    """Appends elements (parameter, key, number of elements) to ``file``."""
    parameter, key, size = what
    begin, count = file_plan.sizes[file], size * dtype.itemsize
    file_plan.chunks.append(Chunk(owner, source, parameter, key, 0, size, count, file, begin))
    file_plan.sizes[file] = begin + count


def _file(file_plan: FilePlan, balancer: ByteBalancer, owner: int, tensors: list[tuple[str, Entry]], count: int) -> str:
    name = balancer.file(owner, count, tensors[0][1].dtype.itemsize, tensors[-1][1].dtype.itemsize)
    file_plan.files.setdefault(name, [])
    file_plan.sizes.setdefault(name, 0)
    file_plan.owners[name] = owner
    return name


def _described(parameter: Parameter) -> dict[str, Any]:
    moments = sorted(key for key in parameter.tensors if key != WEIGHT)
    return {"shape": list(parameter.tensors[WEIGHT].shape), "moments": moments, "scalars": dict(parameter.scalars)}


def _widest_first(parameter: Parameter) -> list[tuple[str, Entry]]:
    return sorted(parameter.tensors.items(), key=lambda item: -item[1].dtype.itemsize)


def _whole_on(entry: Entry) -> set[int]:
    return set(next(iter(entry.holders.values()))) if len(entry.holders) == 1 else set()
