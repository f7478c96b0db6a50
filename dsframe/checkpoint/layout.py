"""Computes where each tensor of a state is in the files of a checkpoint, and which rank writes which range of it.

In each save every rank sends once what it holds; then all compute the same plan without communication.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from dsframe.cluster.exchange import Ranks, all_gather_tensor, all_gather_text, any_rank, same
from dsframe.errors import CheckpointError
from dsframe.model.digests import flat_copy
from dsframe.model.state import (
    WEIGHT,
    EngineState,
    Number,
    ParameterShard,
    ParameterState,
    ShardedParameters,
    TensorShard,
    full_precision,
)
from dsframe.text import Json

MODEL, OPTIMIZER, BUFFERS = "model", "optimizer", "buffers"
FILE_BYTES = 4 << 30
"""Size of a file's tensors, unless a single tensor is larger."""
PIECE_BYTES = 16 << 20
"""Size of the pieces in which ranks take turns to write a range that several of them hold."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names in safetensors."""

Range = tuple[int, int]
"""First element and size in a flattened tensor."""
Place = tuple[str, str]
"""A tensor of the state: the name of a parameter or a buffer, and the key."""


def buffers_of(rank: int) -> str:
    """Returns the key of a rank's buffers. Ranks without a key of their own have rank 0's."""
    return f"rank-{rank:05}"


class Entry(NamedTuple):
    """One tensor on all ranks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    holders: Mapping[Range, Sequence[int]]
    """Range -> the ranks that hold it. The ranges are disjoint, in order, and cover the tensor."""

    @property
    def bytes(self) -> int:
        """Size of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


Entries = dict[Place, Entry]


def shards_of(state: EngineState) -> Iterable[ParameterShard]:
    """**Collective** to read to its end if the engine gathers. Returns what this rank holds of each parameter."""
    if isinstance(state.parameters, ShardedParameters):
        return state.parameters.shards
    return (whole_shard(parameter) for parameter in state.parameters)


def whole_shard(parameter: ParameterState) -> ParameterShard:
    """Returns the shard of a parameter that this rank holds completely."""
    tensors = {WEIGHT: parameter.weight, **parameter.moments}
    shards = {key: whole(tensor, full_precision(tensor.dtype)) for key, tensor in tensors.items()}
    return ParameterShard(parameter.name, shards, parameter.scalars)


def whole(tensor: Tensor, dtype: torch.dtype) -> TensorShard:
    """Returns the shard of a tensor that this rank holds completely, to be written as ``dtype``."""
    return TensorShard(tuple(tensor.shape), dtype, 0, tensor.numel(), lambda: tensor)


class Layout:
    """Layout of all files. Computed at a run's first save, and again if the ranges of a rank have changed."""

    def __init__(self, file_bytes: int = FILE_BYTES) -> None:
        """``file_bytes``: size of a file's tensors, unless a single tensor is larger."""
        self._file_bytes = file_bytes
        self._held = ""
        self._entries, self._buffers = Entries(), Entries()
        self._plan = FilePlan()

    def agree(self, ranks: Ranks, state: EngineState) -> tuple[FilePlan, dict[str, dict[str, Number]]]:
        """**Collective.** Returns the plan for ``state``, and all parameters' scalars in the order of the ranks' lists.

        Consumes parameters that come from an iterator. Raises CheckpointError, on every rank, if the ranges leave a gap
        or overlap, which is a bug of the engine.
        """
        held, scalars = [], dict[str, dict[str, Number]]()
        for shard in shards_of(state):
            tensors = shard.tensors.items()
            held.append([shard.name, [[key, t.shape, _text(t.dtype), t.first, t.size] for key, t in tensors]])
            scalars[shard.name] = dict(shard.scalars)
        text = json.dumps(held)
        changed = any_rank(ranks, text != self._held)
        if changed:
            self._entries = _agree_on_parameters(ranks, held)
            self._held = text
        buffers = _agree_on_buffers(ranks, state.buffers)
        if changed or buffers != self._buffers:
            world = ranks.plan.world
            self._plan = _plan(self._entries | buffers, world.rank, world.size, self._file_bytes)
            self._buffers = buffers
        of_all = dict[str, dict[str, Number]]()
        for numbers in _gathered(ranks, json.dumps(scalars)):
            of_all |= {name: of for name, of in json.loads(numbers).items() if name not in of_all}
        return self._plan, of_all


def _agree_on_parameters(ranks: Ranks, held: Sequence[Any]) -> Entries:
    """**Collective.** Returns the tensors of every parameter that some rank lists, in list order, rank after rank."""
    facts = [[name, [[key, shape, dtype] for key, shape, dtype, *_ in tensors]] for name, tensors in held]
    ranges = {(name, key): (first, size) for name, tensors in held for key, _, _, first, size in tensors}
    specs_of = dict[Place, Any]()
    for text in _gathered(ranks, json.dumps(facts)):
        listed = {name for name, _ in specs_of}
        for name, specs in json.loads(text):
            if name not in listed:
                specs_of |= {(name, key): spec for key, *spec in specs}
    table = [ranges.get(place, (0, 0)) for place in specs_of]
    columns = [table] * ranks.plan.world.size
    if not same(ranks, json.dumps(table)):
        columns = [rows.tolist() for rows in all_gather_tensor(ranks, torch.tensor(table, dtype=torch.int64))]
    return {
        place: Entry(getattr(torch, dtype), tuple(shape), _holders(place, shape, [rows[index] for rows in columns]))
        for index, (place, (shape, dtype)) in enumerate(specs_of.items())
    }


def _agree_on_buffers(ranks: Ranks, buffers: Mapping[str, Tensor]) -> Entries:
    """**Collective.** Returns rank 0's buffers, and those of each rank with different ones (BatchNorm's statistics)."""
    hasher, specs = xxhash.xxh3_128(), []
    for name, buffer in buffers.items():
        specs.append([name, buffer.shape, _text(buffer.dtype)])
        hasher.update(flat_copy(buffer).view(torch.uint8).numpy().data)
    of_ranks = _gathered(ranks, json.dumps([specs, hasher.hexdigest()]))
    return {
        (name, buffers_of(rank)): Entry(getattr(torch, dtype), tuple(shape), {(0, math.prod(shape)): [rank]})
        for rank, text in enumerate(of_ranks)
        if rank == 0 or text != of_ranks[0]
        for name, shape, dtype in json.loads(text)[0]
    }


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gathered(ranks: Ranks, text: str) -> list[str]:
    """**Collective.** Returns every rank's text, or only one if all are equal: then only a digest is sent."""
    return [text] if same(ranks, text) else all_gather_text(ranks, text)


def _holders(place: Place, shape: Sequence[int], ranges: Sequence[Sequence[int]]) -> dict[Range, list[int]]:
    holders: dict[Range, list[int]] = {}
    for rank, (first, size) in enumerate(ranges):
        if size:
            holders.setdefault((first, size), []).append(rank)
    ranges = sorted(holders)
    ends = [0, *itertools.accumulate(size for _, size in ranges)]
    if [first for first, _ in ranges] != ends[:-1] or ends[-1] != math.prod(shape):
        what = f"{place[1]}/{place[0]} of shape {list(shape)}"
        raise CheckpointError(f"the ranks' shards do not make {what}: they hold {ranges}")
    return holders


class Content(NamedTuple):
    """One tensor of a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def header(tensors: Sequence[Content], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[int]]:
    """Returns the header of a safetensors file, the byte at which each of ``tensors`` begins in it, and the end.

    Format (https://huggingface.co/docs/safetensors): length of a JSON header (8 bytes, little-endian), header, the
    tensors' bytes. Raises CheckpointError for a dtype that the format does not have.
    """
    entries: Json = {"__metadata__": dict(metadata)} if metadata else {}
    ends = [0]
    for name, dtype, shape in tensors:
        if dtype not in DTYPES:
            raise CheckpointError(f"{name}: checkpoints do not support {dtype}")
        ends.append(ends[-1] + math.prod(shape) * dtype.itemsize)
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + end for end in ends]


class Piece(NamedTuple):
    """Elements of one tensor that one rank writes."""

    file: str
    begin: int
    """First byte in the file."""
    first: int
    """First element in the whole, flattened tensor."""
    size: int
    bytes: int


@dataclass
class FilePlan:
    """The files, and this rank's part of them."""

    headers: dict[str, bytes] = field(default_factory=dict)
    """File -> its header."""
    sizes: dict[str, int] = field(default_factory=dict)
    """File -> its size in bytes."""
    pieces: dict[Place, list[Piece]] = field(default_factory=dict)
    """What this rank writes of each tensor, in order."""
    tensors: dict[Place, Json] = field(default_factory=dict)
    """The manifest's entry of each tensor."""
    weights: dict[str, str] = field(default_factory=dict)
    """Name of a weight or a buffer -> its file, as in transformers' index."""


def _plan(entries: Entries, rank: int, ranks: int, file_bytes: int) -> FilePlan:
    """Lays out the files, the same on every rank, and assigns their ranges to ranks that hold them.

    Weights, with rank 0's buffers, are in separate files under the model's names. Everything else is named ``KEY/NAME``
    and ordered by key, so that neighbours in ZeRO's flat tensors are neighbours in a file too.
    """
    file_plan, balancer = FilePlan(), _ByteBalancer(ranks)
    stems: dict[str, list[Place]] = {}
    order = {key: number for number, key in enumerate(dict.fromkeys(key for _, key in entries))}
    for place in sorted(entries, key=lambda place: order[place[1]]):
        stems.setdefault(_stem(place[1]), []).append(place)
    for stem, places in stems.items():
        files = _split(places, entries, file_bytes)
        for number, group in enumerate(files, start=1):
            name = f"{stem}-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else f"{stem}.safetensors"
            contents = [
                Content(each if stem == MODEL else f"{key}/{each}", *entries[each, key][:2]) for each, key in group
            ]
            file_plan.headers[name], starts = header(contents, {"format": "pt"})
            file_plan.sizes[name] = starts[-1]
            for place, content, begin in zip(group, contents, starts, strict=False):
                pieces = list(balancer.assign(entries[place], name, begin))
                file_plan.pieces[place] = [piece for owner, piece in pieces if owner == rank]
                where, shape = [[name, begin, math.prod(content.shape)]], list(content.shape)
                file_plan.tensors[place] = {"dtype": DTYPES[content.dtype], "shape": shape, "pieces": where}
                if stem == MODEL:
                    file_plan.weights[content.name] = name
    return file_plan


def _stem(key: str) -> str:
    if key in (WEIGHT, buffers_of(0)):
        return MODEL
    return BUFFERS if key.startswith(buffers_of(0)[:5]) else OPTIMIZER


def _split(places: Sequence[Place], entries: Entries, file_bytes: int) -> list[list[Place]]:
    """Returns the tensors of each file. The widest elements come first, as in safetensors' own files, so that each
    tensor is aligned to its elements for readers that map the file."""
    files: list[list[Place]] = []
    free_bytes = -1
    for place in sorted(places, key=lambda place: -entries[place].dtype.itemsize):
        if entries[place].bytes > free_bytes:
            files.append([])
            free_bytes = file_bytes
        files[-1].append(place)
        free_bytes -= entries[place].bytes
    return files


class _ByteBalancer:
    """Assigns ranges to ranks that hold them: to the same rank as before, until another has far fewer bytes."""

    def __init__(self, ranks: int) -> None:
        self._assigned, self._last = [0] * ranks, 0

    def assign(self, entry: Entry, file: str, begin: int) -> Iterator[tuple[int, Piece]]:
        """Yields the pieces of a tensor that begins at byte ``begin``, each with the rank that writes it."""
        width = entry.dtype.itemsize
        for (low, size), among in sorted(entry.holders.items()):
            step = max(1, size if len(among) == 1 else PIECE_BYTES // width)
            for first in range(low, low + size, step):
                count = min(step, low + size - first)
                least = min(among, key=self._assigned.__getitem__)
                if self._last not in among or self._assigned[self._last] - self._assigned[least] >= PIECE_BYTES:
                    self._last = least
                self._assigned[self._last] += count * width
                yield self._last, Piece(file, begin + first * width, first, count, count * width)
