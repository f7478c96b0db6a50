"""Where each tensor of a state lies in the files of a checkpoint, and which rank writes which range of it.

Every rank tells the others once in a save what it holds; all come to the same plan without another word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dsframe.cluster.exchange import Ranks, all_gather_tensor, all_gather_text, same
from dsframe.errors import CheckpointError
from dsframe.model.state import WEIGHT, ParameterShard

MODEL, OPTIMIZER = "model", "optimizer"
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
"""A tensor of the state: the parameter's name (a buffer's), and the key."""
BUFFER = "buffer"
"""The key of a buffer."""


@dataclass(frozen=True)
class Entry:
    """One tensor on all ranks."""

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


def agree_on_parameters(ranks: Ranks, shards: Iterable[ParameterShard]) -> list[Parameter]:
    """**Collective.** Every parameter that some rank lists, in the order of the lists, rank after rank.

    Raises CheckpointError, on every rank, where the ranges leave a gap or overlap: a fault of the engine.
    """
    facts: list[Any] = []
    held: dict[Place, Range] = {}
    for shard in shards:
        kinds = [[key, list(tensor.shape), _text(tensor.dtype)] for key, tensor in shard.tensors.items()]
        facts.append([shard.name, dict(shard.scalars), kinds])
        held |= {(shard.name, key): (tensor.first, tensor.size) for key, tensor in shard.tensors.items()}
    every = _union(ranks, json.dumps(facts))
    places = [(name, key) for name, (_, tensors) in every.items() for key, _, _ in tensors]
    table = [held.get(place, (0, 0)) for place in places]
    if same(ranks, json.dumps(table)):
        columns = [table] * ranks.plan.world.size
    else:
        columns = [rows.tolist() for rows in all_gather_tensor(ranks, torch.tensor(table, dtype=torch.int64))]
    of = {place: [(rows[index][0], rows[index][1]) for rows in columns] for index, place in enumerate(places)}
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


def agree_on_buffers(ranks: Ranks, buffers: Mapping[str, torch.Tensor]) -> list[Content]:
    """**Collective.** Rank 0's buffers, on every rank."""
    local = json.dumps([[name, _text(buffer.dtype), list(buffer.shape)] for name, buffer in buffers.items()])
    of_main = local if same(ranks, local) else all_gather_text(ranks, local)[0]
    return [Content(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in json.loads(of_main)]


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
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
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
    tensors: dict[Place, dict[str, Any]] = field(default_factory=dict)
    """The manifest's entry of each tensor."""
    weights: dict[str, str] = field(default_factory=dict)
    """Name of a weight or a buffer -> its file, as transformers' index has it."""


def plan(
    parameters: Sequence[Parameter], buffers: Sequence[Content], rank: int, ranks: int, file_bytes: int = FILE_BYTES
) -> FilePlan:
    """Lays out the files, the same on every rank, and deals their ranges to those that hold them. ``buffers``: rank 0's.

    Weights lie by the model's names in files of their own, with the buffers; what the optimizer keeps about each as
    ``KEY/NAME``, key by key: ranges of neighbours in ZeRO's flat tensors follow one another in a file too.
    """
    every = {(each.name, key): entry for each in parameters for key, entry in each.tensors.items()}
    every |= {(name, BUFFER): Entry(shape, dtype, {}) for name, dtype, shape in buffers}
    keys = dict.fromkeys(key for _, key in every if key not in (WEIGHT, BUFFER))
    kept = [(name, key) for key in keys for each in parameters for name in [each.name] if key in each.tensors]
    file_plan, dealer = FilePlan(), _Dealer(ranks)
    for stem, places in ((MODEL, [place for place in every if place[1] not in keys]), (OPTIMIZER, kept)):
        files = _split(places, every, file_bytes)
        for number, group in enumerate(files, start=1):
            several = f"-{number:05}-of-{len(files):05}" * (len(files) > 1)
            name = f"{stem}{several}.safetensors"
            contents = [Content(_name_in_file(place), every[place].dtype, every[place].shape) for place in group]
            file_plan.headers[name], starts = header(contents, {"format": "pt"})
            file_plan.sizes[name] = starts[-1]
            for place, begin in zip(group, starts, strict=False):
                _lay(file_plan, dealer, rank, place, every[place], name, begin)
    return file_plan


def _name_in_file(place: Place) -> str:
    name, key = place
    return name if key in (WEIGHT, BUFFER) else f"{key}/{name}"


def _split(places: Sequence[Place], every: Mapping[Place, Entry], file_bytes: int) -> list[list[Place]]:
    """The tensors of each file. The widest elements come first, as in safetensors' own files: each is aligned to its elements,
    for readers that map the file."""
    files: list[list[Place]] = []
    left = 0
    for place in sorted(places, key=lambda place: -every[place].dtype.itemsize):
        if not files or every[place].bytes > left:
            files.append([])
            left = file_bytes
        files[-1].append(place)
        left -= every[place].bytes
    return files


def _lay(file_plan: FilePlan, dealer: _Dealer, rank: int, place: Place, entry: Entry, file: str, begin: int) -> None:
    width, shape = entry.dtype.itemsize, list(entry.shape)
    where = {"dtype": DTYPES[entry.dtype], "shape": shape, "pieces": [[file, begin, math.prod(shape)]]}
    file_plan.tensors[place] = where
    if place[1] in (WEIGHT, BUFFER):
        file_plan.weights[place[0]] = file
    holders = entry.holders or ({(0, math.prod(shape)): [0]} if math.prod(shape) else {})
    for (low, size), among in holders.items():
        step = size if len(among) == 1 else max(1, PIECE_BYTES // width)
        for first in range(low, low + size, step):
            count = min(step, low + size - first)
            if dealer.owner(among, count * width) == rank:
                file_plan.pieces.setdefault(place, []).append(
                    Piece(file, begin + first * width, first, count, count * width)
                )


class _Dealer:
    """Deals ranges to ranks that hold them: to the same one as before, until another has far fewer bytes."""

    def __init__(self, ranks: int) -> None:
        self._dealt, self._last = [0] * ranks, 0

    def owner(self, among: Sequence[int], count: int) -> int:
        """The rank that writes ``count`` bytes more."""
        least = min(among, key=self._dealt.__getitem__)
        if self._last not in among or self._dealt[self._last] - self._dealt[least] >= PIECE_BYTES:
            self._last = least
        self._dealt[self._last] += count
        return self._last
