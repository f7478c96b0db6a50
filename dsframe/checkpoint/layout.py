"""Where each tensor of a state lies in the files of a checkpoint, and which rank writes which range of it.

Every rank tells the others once in a save what it holds; all come to the same plan without another word.
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
"""Tensors of so many bytes lie in one file, and at least one tensor."""
PIECE_BYTES = 16 << 20
"""A range that several ranks hold is written by them in turn, in pieces of so many bytes."""
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
    """The key of a rank's buffers. Rank 0's are everybody's, but for ranks that have others."""
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
    """**Collective** to read to its end where the engine gathers: what this rank holds of each parameter."""
    if isinstance(state.parameters, ShardedParameters):
        return state.parameters.shards
    return (whole_shard(parameter) for parameter in state.parameters)


def whole_shard(parameter: ParameterState) -> ParameterShard:
    """A parameter of which this rank holds everything."""
    tensors = {WEIGHT: parameter.weight, **parameter.moments}
    shards = {key: whole(tensor, full_precision(tensor.dtype)) for key, tensor in tensors.items()}
    return ParameterShard(parameter.name, shards, parameter.scalars)


def whole(tensor: Tensor, dtype: torch.dtype) -> TensorShard:
    """A tensor of which this rank holds everything, to be written as ``dtype``."""
    return TensorShard(tuple(tensor.shape), dtype, 0, tensor.numel(), lambda: tensor)


class Layout:
    """Where everything lies: made at a run's first save, and again where a rank holds other ranges than before."""

    def __init__(self, file_bytes: int = FILE_BYTES) -> None:
        """``file_bytes``: tensors of so many bytes lie in one file, and at least one tensor."""
        self._file_bytes = file_bytes
        self._held = ""
        self._entries, self._buffers = Entries(), Entries()
        self._plan = FilePlan()

    def agree(self, ranks: Ranks, state: EngineState) -> tuple[FilePlan, dict[str, dict[str, Number]]]:
        """**Collective.** Returns the plan for ``state``, and the scalars of each parameter in the order of the ranks' lists.

        Parameters that come from an iterator are used up. Raises CheckpointError, on every rank, where the ranges leave a gap
        or overlap: a fault of the engine.
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
    """**Collective.** The tensors of every parameter that some rank lists, in the order of the lists, rank after rank."""
    facts = [[name, [[key, shape, dtype] for key, shape, dtype, *_ in tensors]] for name, tensors in held]
    ranges = {(name, key): (first, size) for name, tensors in held for key, _, _, first, size in tensors}
    kinds_of = dict[Place, Any]()
    for text in _gathered(ranks, json.dumps(facts)):
        listed = {name for name, _ in kinds_of}
        for name, kinds in json.loads(text):
            if name not in listed:
                kinds_of |= {(name, key): kind for key, *kind in kinds}
    table = [ranges.get(place, (0, 0)) for place in kinds_of]
    columns = [table] * ranks.plan.world.size
    if not same(ranks, json.dumps(table)):
        columns = [rows.tolist() for rows in all_gather_tensor(ranks, torch.tensor(table, dtype=torch.int64))]
    return {
        place: Entry(getattr(torch, dtype), tuple(shape), _holders(place, shape, [rows[index] for rows in columns]))
        for index, (place, (shape, dtype)) in enumerate(kinds_of.items())
    }


def _agree_on_buffers(ranks: Ranks, buffers: Mapping[str, Tensor]) -> Entries:
    """**Collective.** Rank 0's buffers, and those of each rank that has others, as with BatchNorm's statistics."""
    hasher, kinds = xxhash.xxh3_128(), []
    for name, buffer in buffers.items():
        kinds.append([name, buffer.shape, _text(buffer.dtype)])
        hasher.update(flat_copy(buffer).view(torch.uint8).numpy().data)
    of_ranks = _gathered(ranks, json.dumps([kinds, hasher.hexdigest()]))
    return {
        (name, buffers_of(rank)): Entry(getattr(torch, dtype), tuple(shape), {(0, math.prod(shape)): [rank]})
        for rank, text in enumerate(of_ranks)
        if rank == 0 or text != of_ranks[0]
        for name, shape, dtype in json.loads(text)[0]
    }


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gathered(ranks: Ranks, text: str) -> list[str]:
    """**Collective.** Every rank's text, or one where all have the same: then nothing but a digest is sent."""
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
    """Returns the first bytes of a safetensors file whose ``tensors`` follow in this order, and where each begins in the file;
    last where the file ends. https://huggingface.co/docs/safetensors: the length of a JSON header (8 bytes, little-endian),
    the header, and then the bytes.

    Raises CheckpointError for a dtype that the format does not have.
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
    """What goes where."""

    headers: dict[str, bytes] = field(default_factory=dict)
    """File -> its first bytes."""
    sizes: dict[str, int] = field(default_factory=dict)
    """File -> all its bytes."""
    pieces: dict[Place, list[Piece]] = field(default_factory=dict)
    """What this rank writes of each tensor, in order."""
    tensors: dict[Place, Json] = field(default_factory=dict)
    """The manifest's entry of each tensor."""
    weights: dict[str, str] = field(default_factory=dict)
    """Name of a weight or a buffer -> its file, as transformers' index has it."""


def _plan(entries: Entries, rank: int, ranks: int, file_bytes: int) -> FilePlan:
    """Lays out the files, the same on every rank, and deals their ranges to those that hold them.

    Weights lie by the model's names in files of their own, with rank 0's buffers; the rest as ``KEY/NAME``, key by key: ranges
    of neighbours in ZeRO's flat tensors follow one another in a file too.
    """
    file_plan, dealer = FilePlan(), _Dealer(ranks)
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
                pieces = list(dealer.deal(entries[place], name, begin))
                file_plan.pieces[place] = [piece for owner, piece in pieces if owner == rank]
                where, shape = [[name, begin, math.prod(content.shape)]], list(content.shape)
                file_plan.tensors[place] = {"dtype": DTYPES[content.dtype], "shape": shape, "pieces": where}
                if stem == MODEL:
                    file_plan.weights[content.name] = name
    return file_plan


def _stem(key: str) -> str:
    """The name of the files of a key."""
    if key in (WEIGHT, buffers_of(0)):
        return MODEL
    return BUFFERS if key.startswith(buffers_of(0)[:5]) else OPTIMIZER


def _split(places: Sequence[Place], entries: Entries, file_bytes: int) -> list[list[Place]]:
    """The tensors of each file. The widest elements come first, as in safetensors' own files: each is aligned to its elements,
    for readers that map the file."""
    files: list[list[Place]] = []
    left = -1
    for place in sorted(places, key=lambda place: -entries[place].dtype.itemsize):
        if entries[place].bytes > left:
            files.append([])
            left = file_bytes
        files[-1].append(place)
        left -= entries[place].bytes
    return files


class _Dealer:
    """Deals ranges to ranks that hold them: to the same one as before, until another has far fewer bytes."""

    def __init__(self, ranks: int) -> None:
        self._dealt, self._last = [0] * ranks, 0

    def deal(self, entry: Entry, file: str, begin: int) -> Iterator[tuple[int, Piece]]:
        """Every range of a tensor that begins at byte ``begin``, and who writes it."""
        width = entry.dtype.itemsize
        for (low, size), among in sorted(entry.holders.items()):
            step = max(1, size if len(among) == 1 else PIECE_BYTES // width)
            for first in range(low, low + size, step):
                count = min(step, low + size - first)
                least = min(among, key=self._dealt.__getitem__)
                if self._last not in among or self._dealt[self._last] - self._dealt[least] >= PIECE_BYTES:
                    self._last = least
                self._dealt[self._last] += count * width
                yield self._last, Piece(file, begin + first * width, first, count, count * width)
