"""Sets of many files that are read where they lie: tar shards as webdataset writes them, parquet, JSON lines, also compressed.

An index says where each sample lies, so that any sample can be read without those before it. It is made once and kept with the
data, one file for each shard. An epoch takes the shards in a drawn order and shuffles within a window of the samples that follow:
memory and reading ahead depend on the window, and where training stands only on the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dsframe.data import documents
from dsframe.data.files import data_root, replacing, writing
from dsframe.data.folder import SUFFIXES, pillow, rgb
from dsframe.data.sampler import Order, Part, permutation
from dsframe.data.source import draws
from dsframe.errors import DataError
from dsframe.text import reason

WINDOW = 8192
FORM = 1
"""Version of the index: part of its name."""
_GROUPS, _WINDOW = 0x67727073, 0x77696E64  # streams of draws of their own
_OPEN_FILES = 32
_SAY_SECONDS = 5.0
_MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]+)$")
"""A sample of a tar file: members next to each other whose names are the same up to the first dot."""
_BLOCK = 512
_MOST_SUFFIXES = 32


class Shards(Dataset[Any]):
    """A map-style data set of rows in files, in the order of their names. It can be larger than memory.

    A row is a dict: of JSON lines the object, of parquet the columns (lists of numbers as arrays), of a tar file the parts of a
    sample by their suffix, with ``__key__``. Numbers (``cls``), texts, JSON, images (PIL, RGB) and ``npy`` are decoded by their
    suffix, anything else is bytes. ``row(dict)`` makes of it what the task trains on. It runs in the workers, and what it draws at
    random, as torchvision's transforms do, belongs to the sample.

    Made first in :meth:`Task.prepare`, so that one process makes the index. ``data_dir``: where that lies, as for tasks.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        row: Callable[[dict[str, Any]], Any] | None = None,
        *,
        columns: Sequence[str] | None = None,
        window: int = WINDOW,
        data_dir: str | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """``files``: paths or patterns. ``window``: samples that are shuffled at once. Raises DataError."""
        if window < 1:
            raise DataError(f"shards: window {window}; give 1 (shards are shuffled, but not what is in them) or more")
        self.row = row
        self.columns = None if columns is None else list(columns)
        self.window = window
        paths = documents.find_files(files, "shards", tuple(_KINDS))
        self._shards = _shards(paths, self.columns, data_dir, say or (lambda line: None))
        self.sizes = np.concatenate([shard.groups for shard in self._shards])
        """How many samples each group has, int64: groups are shuffled, and those that must be decoded whole are read at once."""
        self._ends = np.cumsum(self.sizes)
        self._first_group = np.cumsum([0] + [len(shard.groups) for shard in self._shards])
        self._cache: OrderedDict[int, Sequence[Any]] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        group = int(np.searchsorted(self._ends, index, side="right"))
        number = index - int(self._ends[group] - self.sizes[group])
        shard_number = int(np.searchsorted(self._first_group, group, side="right")) - 1
        shard = self._shards[shard_number]
        whole = self._whole(group, shard, group - int(self._first_group[shard_number])) if shard.whole else None
        row = shard.read(whole, number)
        return row if self.row is None else self.row(row)

    def _whole(self, group: int, shard: _Shard, number: int) -> Any:
        """A group that is decoded. As many are kept as a window can lie in."""
        if group not in self._cache:
            self._cache[group] = shard.group(number)
            kept = sum(int(self.sizes[cached]) for cached in self._cache)
            while kept > self.window + 2 * int(self.sizes.max()) and len(self._cache) > 1:
                kept -= int(self.sizes[self._cache.popitem(last=False)[0]])
        self._cache.move_to_end(group)
        return self._cache[group]

    def order(self, seed: int) -> Order:
        """The order of the samples: shards (of parquet: row groups) shuffled, then what lies in a window."""
        return _Windows(self.sizes, self.window, seed)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": OrderedDict()}


class _Windows(Order):
    """Groups in a drawn order, one after the other; the samples of each window of them in a drawn order."""

    def __init__(self, sizes: Any, window: int, seed: int) -> None:
        super().__init__(int(sizes.sum()), seed)
        self._sizes, self._window = torch.from_numpy(sizes), window
        self._begins = self._sizes.cumsum(0) - self._sizes

    def take(self, epoch: int, start: int, count: int) -> list[Part]:
        parts = []
        while count:
            window, at = divmod(start, self._window)
            parts.append(self._shuffled(epoch, window)[at : at + count])
            start, count = start + len(parts[-1]), count - len(parts[-1])
        return [(epoch, torch.cat(parts))]

    def about(self) -> dict[str, Any]:
        return {"window": self._window, "groups": len(self._sizes)}

    @cached_property
    def _groups(self) -> Callable[[int], tuple[Tensor, Tensor]]:
        def drawn(epoch: int) -> tuple[Tensor, Tensor]:
            order = permutation(len(self._sizes), self.seed + _GROUPS, epoch)
            return order, self._sizes[order].cumsum(0)

        return lru_cache(maxsize=2)(drawn)

    @cached_property
    def _shuffled(self) -> Callable[[int, int], Tensor]:
        def drawn(epoch: int, window: int) -> Tensor:
            order, ends = self._groups(epoch)
            first = window * self._window
            places = torch.arange(first, min(first + self._window, self.samples))
            places = places[torch.argsort(draws(self.seed, epoch, places, _WINDOW), stable=True)]
            nth = torch.searchsorted(ends, places, right=True)
            return self._begins[order[nth]] + places - (ends[nth] - self._sizes[order[nth]])

        return lru_cache(maxsize=3)(drawn)


class _Shard(ABC):
    """A file and its index. What is read is checked against what there was when the index was made."""

    whole = False
    """True if a group of samples is decoded at once."""

    def __init__(self, path: Path, index: Any, facts: str, columns: list[str] | None) -> None:
        self.path, self.index, self.facts, self.columns = path, index, facts, columns

    @property
    def groups(self) -> Any:
        """Returns how many samples each group has, int64."""
        return self.index["rows"] if self.whole else np.array([len(self.index)], np.int64)

    @staticmethod
    @abstractmethod
    def scan(path: Path, columns: list[str] | None) -> Any:
        """The index: an array of records. Raises DataError."""

    def group(self, number: int) -> Any:
        """A group of samples, decoded; nothing where each is read by itself. Raises DataError."""
        return ()

    @abstractmethod
    def read(self, group: Any, number: int) -> dict[str, Any]:
        """One sample, of a group that is decoded where they are. Raises DataError."""

    def check(self) -> None:
        """Raises DataError where the file is gone or another one."""
        if _facts(self.path) != self.facts:
            raise DataError(
                f"{self.path}: was changed since its index was made; leave shards as they are while a training reads them"
            )

    def bytes(self, offset: int, size: int) -> bytes:
        """Returns what lies there. Raises DataError where the file is gone, another one, or shorter."""
        with _readable(self.path):
            content = os.pread(_opened(self).number, size, offset)
        if len(content) != size:
            raise DataError(f"{self.path}: truncated: it ends before byte {offset + size:,}")
        return content


class _Tar(_Shard):
    """Members of a tar file, as webdataset groups them. A record has the place of each part of a sample."""

    @staticmethod
    def scan(path: Path, columns: list[str] | None) -> Any:
        keys: list[str] = []
        parts: list[dict[str, tuple[int, int]]] = []
        try:
            with tarfile.open(path, "r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
                    named = _MEMBER.match(member.name)
                    if not member.isreg() or member.sparse is not None or named is None:
                        continue
                    key, suffix = named.groups()
                    if not keys or keys[-1] != key:
                        keys.append(key)
                        parts.append({})
                    if suffix in parts[-1]:
                        raise DataError(f"{path}: sample {key} has {suffix} twice")
                    parts[-1][suffix] = member.offset_data, member.size
                end = tar.offset
        except tarfile.TarError as error:
            raise DataError(
                f"{path}: no tar file, truncated, or damaged ({error}); compressed ones must be unpacked"
            ) from None
        with path.open("rb") as file:  # tarfile takes whatever is no member for the end
            file.seek(end)
            if file.read(_BLOCK) != bytes(_BLOCK):
                raise DataError(
                    f"{path}: truncated or damaged: at byte {end:,} is neither a member nor the end of a tar file"
                )
        suffixes = sorted({suffix for sample in parts for suffix in sample})
        if len(suffixes) > _MOST_SUFFIXES:
            raise DataError(
                f"{path}: samples have {len(suffixes)} different suffixes; a sample's parts are named KEY.SUFFIX, with the first "
                "dot of the name between them"
            )
        names = np.array([os.fsencode(key) for key in keys] or [b""])[: len(keys)]
        index = np.empty(len(keys), [("__key__", names.dtype), *((suffix, "<i8", (2,)) for suffix in suffixes)])
        index["__key__"] = names
        for suffix in suffixes:
            index[suffix] = [sample.get(suffix, (-1, -1)) for sample in parts]
        return index

    def read(self, group: Any, number: int) -> dict[str, Any]:
        record = self.index[number]
        sample: dict[str, Any] = {"__key__": os.fsdecode(record["__key__"])}
        for suffix in self.index.dtype.names[1:]:
            offset, size = record[suffix].tolist()
            if offset < 0 or (self.columns is not None and suffix not in self.columns):
                continue
            content = self.bytes(offset, size)
            decode = _DECODERS.get(suffix.rpartition(".")[2].lower())
            try:
                sample[suffix] = content if decode is None else decode(content)
            except DataError:
                raise
            except Exception as error:  # of whatever reads such a file
                part = f"{sample['__key__']}.{suffix}"
                raise DataError(f"{self.path}: {part} cannot be decoded ({reason(error)})") from error
        return sample


def _image(content: bytes) -> Any:
    with pillow().open(io.BytesIO(content)) as file:
        return rgb(file)


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "index", "id"), int),
    **dict.fromkeys(("txt", "text"), lambda content: content.decode("utf-8")),
    "json": json.loads,
    "npy": lambda content: np.load(io.BytesIO(content), allow_pickle=False),
    **dict.fromkeys((suffix.removeprefix(".") for suffix in SUFFIXES), _image),
}


class _Lines(_Shard):
    """JSON lines. A record has the place and the number of each line that is not empty."""

    @staticmethod
    def scan(path: Path, columns: list[str] | None) -> Any:
        index, offset = [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    index.append((offset, len(line), number))
                offset += len(line)
        return np.array(index, [("offset", "<i8"), ("size", "<i8"), ("line", "<i8")])

    def read(self, group: Any, number: int) -> dict[str, Any]:
        offset, size, line = self.index[number].tolist()
        return self.chosen(documents.parsed(self.bytes(offset, size), f"{self.path}:{line}"), f"{self.path}:{line}")

    def chosen(self, row: dict[str, Any], source: str) -> dict[str, Any]:
        """The columns that are asked for. Raises DataError where one is not there."""
        if self.columns is None:
            return row
        if gone := [name for name in self.columns if name not in row]:
            raise DataError(documents.missing(source, gone, list(row)).partition("; name the")[0])
        return {name: row[name] for name in self.columns}


class _CompressedLines(_Lines):
    """JSON lines that must be unpacked from the start: the whole file is a group, and in memory."""

    whole = True

    @staticmethod
    def scan(path: Path, columns: list[str] | None) -> Any:
        with documents.opened(path) as file:
            return np.array([(sum(1 for line in file if line.strip()),)], [("rows", "<i8")])

    def group(self, number: int) -> Any:
        self.check()
        with documents.opened(self.path) as file:
            return [(line, line_number) for line_number, line in enumerate(file, 1) if line.strip()]

    def read(self, group: Any, number: int) -> dict[str, Any]:
        line, line_number = group[number]
        return self.chosen(documents.parsed(line, f"{self.path}:{line_number}"), f"{self.path}:{line_number}")


class _Parquet(_Shard):
    """Row groups of a parquet file, which are decoded whole. A record has the rows of each, and a digest of the columns."""

    whole = True

    @staticmethod
    def scan(path: Path, columns: list[str] | None) -> Any:
        with documents.parquet_file(path) as file:
            schema = file.schema_arrow
            if gone := [name for name in columns or [] if name not in schema.names]:
                raise DataError(documents.missing(str(path), gone, schema.names).partition("; name the")[0])
            columns_text = _describe(schema, columns)
            digest = hashlib.sha256(columns_text.encode()).hexdigest()[:32]
            rows = [(file.metadata.row_group(number).num_rows, digest) for number in range(file.num_row_groups)]
            return np.array(rows, [("rows", "<i8"), ("columns", "S32")])

    def group(self, number: int) -> Any:
        self.check()
        with documents.parquet_file(self.path) as file:
            table = file.read_row_group(number, columns=self.columns)
        return {name: _values(table.column(name).combine_chunks()) for name in table.column_names}

    def read(self, group: Any, number: int) -> dict[str, Any]:
        return {name: value(number) for name, value in group.items()}

    def describe_columns(self) -> str:
        """Names and types of its columns."""
        with documents.parquet_file(self.path) as file:
            return _describe(file.schema_arrow, self.columns)


def _values(column: Any) -> Callable[[int], Any]:
    """Returns what gives the value of a row: an array for a list of numbers, which is fast, else what Python has for it."""
    from pyarrow import types

    def numeric(kind: Any) -> bool:
        return bool(types.is_integer(kind) or types.is_floating(kind))

    if column.null_count == 0 and numeric(column.type):
        numbers = column.to_numpy()
        return lambda row: numbers[row].item()
    lists = types.is_list(column.type) or types.is_large_list(column.type)
    if lists and numeric(column.type.value_type) and not column.null_count and not column.values.null_count:
        values, ends = column.values.to_numpy(), column.offsets.to_numpy()
        return lambda row: values[ends[row] : ends[row + 1]].copy()  # else it cannot be written to
    return lambda row: column[row].as_py()


def _describe(schema: Any, columns: list[str] | None) -> str:
    return ", ".join(f"{column.name} ({column.type})" for column in schema if columns is None or column.name in columns)


_KINDS: Mapping[str, type[_Shard]] = {
    ".tar": _Tar,
    ".parquet": _Parquet,
    ".jsonl": _Lines,
    ".jsonl.zst": _CompressedLines,
    ".jsonl.gz": _CompressedLines,
}


def _shards(
    paths: list[Path], columns: list[str] | None, data_dir: str | None, say: Callable[[str], None]
) -> list[_Shard]:
    """The files with their indexes, which are made where they are not there. Any number of processes may do so at once."""
    shards: list[_Shard] = []
    folder, last_message = data_root(data_dir) / "shards", time.monotonic()
    for number, path in enumerate(paths):
        shard_class, facts = _KINDS[documents.kind_of(path, _KINDS)], _facts(path)
        key = f"{FORM}\0{path.absolute()}\0{facts}\0{columns if shard_class is _Parquet else None}"
        kept = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
        if not kept.is_file():
            if time.monotonic() - last_message > _SAY_SECONDS:
                last_message = time.monotonic()
                say(f"indexing file {number + 1:,} of {len(paths):,}")
            with _readable(path):
                index = shard_class.scan(path, columns)
            if not len(index) or ("rows" in index.dtype.names and not index["rows"].sum()):
                raise DataError(f"{path}: empty: there is no sample in it")
            with writing(kept), replacing(kept) as out:
                np.save(out, index, allow_pickle=False)
        shards.append(shard_class(path, np.load(kept, mmap_mode="r", allow_pickle=False), facts, columns))
        first = shards[0]
        if (
            isinstance(first, _Parquet)
            and isinstance(shards[-1], _Parquet)
            and shards[-1].index["columns"][0] != first.index["columns"][0]
        ):
            raise DataError(
                f"{path}: has the columns {shards[-1].describe_columns()}, "
                f"but {first.path} has {first.describe_columns()}; "
                "all files need the same: name those that you use in columns"
            )
    return shards


class _Descriptor:
    """A file that is open as long as this object is there; in forked processes too, which have no position in common."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


@lru_cache(maxsize=_OPEN_FILES)
def _opened(shard: _Shard) -> _Descriptor:
    shard.check()
    return _Descriptor(shard.path)


def _facts(path: Path) -> str:
    """Returns what changes when the file does."""
    with _readable(path):
        status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); shards must stay while a training reads them"
        ) from error
