"""Sets of many tar files that are read where they lie, as webdataset writes them.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import IO, Any

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

    A row is a dict: the parts of a sample by their suffix, with ``__key__``. Numbers (``cls``), texts, JSON, images (PIL, RGB) and
    ``npy`` are decoded by their suffix, anything else is bytes. ``row(dict)`` makes of it what the task trains on. It runs in the
    workers, and what it draws at random, as torchvision's transforms do, belongs to the sample.

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
        paths = documents.find_files(files, "shards", (".tar",))
        self._shards = _shards(paths, data_dir, say or (lambda line: None))
        self.sizes = np.array([len(shard.index) for shard in self._shards], np.int64)
        """How many samples each file has."""
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        row = self._shards[number].read(index - int(self._ends[number] - self.sizes[number]), self.columns)
        return row if self.row is None else self.row(row)

    def pictures(self) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
        """The images of all samples, each with its place and with what opens it."""
        for shard in self._shards:
            for number in range(len(shard.index)):
                for suffix in shard.suffixes(number):
                    if f".{suffix.rpartition('.')[2].lower()}" in SUFFIXES:
                        key = os.fsdecode(shard.index[number]["__key__"])
                        yield f"{shard.path}: {key}.{suffix}", partial(_in_memory, shard, number, suffix)

    def order(self, seed: int) -> Order:
        """The order of the samples: shards shuffled, then what lies in a window."""
        return _Windows(self.sizes, self.window, seed)


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


class _Shard:
    """A tar file and its index, a record for each sample, which has the place of each of its parts.

    What is read is checked against what there was when the index was made.
    """

    def __init__(self, path: Path, index: Any, facts: str) -> None:
        self.path, self.index, self.facts = path, index, facts

    def check(self) -> None:
        """Raises DataError where the file is gone or another one."""
        if _facts(self.path) != self.facts:
            raise DataError(
                f"{self.path}: was changed since its index was made; leave shards as they are while a training reads them"
            )

    def _bytes(self, offset: int, size: int) -> bytes:
        """Returns what lies there. Raises DataError where the file is gone, another one, or shorter."""
        with _readable(self.path):
            content = os.pread(_opened(self).number, size, offset)
        if len(content) != size:
            raise DataError(f"{self.path}: truncated: it ends before byte {offset + size:,}")
        return content

    def suffixes(self, number: int) -> list[str]:
        """The parts that a sample has."""
        return [suffix for suffix in self.index.dtype.names[1:] if self.index[number][suffix][0] >= 0]

    def part(self, number: int, suffix: str) -> bytes:
        """A part of a sample, as it lies there. Raises DataError."""
        return self._bytes(*self.index[number][suffix].tolist())

    @staticmethod
    def scan(path: Path) -> Any:
        """The index. Members next to each other are a sample, as webdataset groups them. Raises DataError."""
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

    def read(self, number: int, columns: Sequence[str] | None) -> dict[str, Any]:
        """One sample. Raises DataError."""
        record = self.index[number]
        sample: dict[str, Any] = {"__key__": os.fsdecode(record["__key__"])}
        for suffix in self.suffixes(number):
            if columns is not None and suffix not in columns:
                continue
            content = self.part(number, suffix)
            decode = _DECODERS.get(suffix.rpartition(".")[2].lower())
            try:
                sample[suffix] = content if decode is None else decode(content)
            except DataError:
                raise
            except Exception as error:  # of whatever reads such a file
                part = f"{sample['__key__']}.{suffix}"
                raise DataError(f"{self.path}: {part} cannot be decoded ({reason(error)})") from error
        return sample


def _in_memory(shard: _Shard, number: int, suffix: str) -> IO[bytes]:
    return io.BytesIO(shard.part(number, suffix))


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


def _shards(paths: list[Path], data_dir: str | None, say: Callable[[str], None]) -> list[_Shard]:
    """The files with their indexes, which are made where they are not there. Any number of processes may do so at once."""
    shards: list[_Shard] = []
    folder, last_message = data_root(data_dir) / "shards", time.monotonic()
    for number, path in enumerate(paths):
        facts = _facts(path)
        key = f"{FORM}\0{path.absolute()}\0{facts}\0None"
        kept = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
        if not kept.is_file():
            if time.monotonic() - last_message > _SAY_SECONDS:
                last_message = time.monotonic()
                say(f"indexing file {number + 1:,} of {len(paths):,}")
            with _readable(path):
                index = _Shard.scan(path)
            if not len(index):
                raise DataError(f"{path}: empty: there is no sample in it")
            with writing(kept), replacing(kept) as out:
                np.save(out, index, allow_pickle=False)
        shards.append(_Shard(path, np.load(kept, mmap_mode="r", allow_pickle=False), facts))
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
