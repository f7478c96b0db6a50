"""Files written as byte ranges, each by the process that holds the bytes, with a checksum for each run of bytes.

Checksums are computed while writing, so no byte is read again. A file is complete if the runs of all processes are
contiguous from its first byte to its last. Nothing here is collective, and nothing imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from dsframe.errors import CheckpointError

RUN_BYTES = 64 << 20
"""Longest run with one checksum. The limit lets several processes verify a large file together."""
_CHUNK = 8 << 20
"""Bytes that are hashed and written at once, while they are in the processor's cache."""
_READ = 1 << 20

Run = tuple[int, int, str]
"""First byte, number of bytes, and XXH3-128 in hexadecimal (https://xxhash.com, as fast as memory). It detects damage;
it is not a signature."""


@dataclass(frozen=True)
class FileEntry:
    """The manifest's entry of one file."""

    bytes: int
    checksums: Sequence[Sequence[Any]]
    """``[number of bytes, XXH3-128]`` of each run, in order; together they cover the file."""


def write_at(descriptor: int, content: memoryview, begin: int) -> None:
    """Writes ``content`` from byte ``begin`` on; used for every byte of a checkpoint's tensors. Raises OSError."""
    while content:
        written = os.pwrite(descriptor, content, begin)
        if not written:
            raise OSError(errno.EIO, "no byte could be written")
        content, begin = content[written:], begin + written


class RangeWriter:
    """One process's part of files that several processes write. Every method raises OSError."""

    def __init__(self, folder: Path, *, several_hosts: bool = False, ahead: bool = False) -> None:
        """``several_hosts``: other nodes may write other bytes of the same page over a network. ``ahead``: start
        writing to the disk at once; otherwise :meth:`finish` waits for all of it."""
        self.runs: dict[str, list[Run]] = {}
        """File -> the runs that this process has written."""
        self._folder, self._several_hosts, self._ahead = folder, several_hosts, ahead
        self._descriptors: dict[tuple[str, int], int] = {}

    def put(self, name: str, begin: int, content: bytes | memoryview) -> None:
        """Writes ``content`` starting at byte ``begin`` of a file, which is created if necessary."""
        every = memoryview(content).cast("B")
        for low in range(0, len(every), RUN_BYTES):
            run, checksum = every[low : low + RUN_BYTES], xxhash.xxh3_128()
            for at in range(0, len(run), _CHUNK):
                checksum.update(run[at : at + _CHUNK])
                with naming(self._folder / name):
                    self._write(name, begin + low + at, run[at : at + _CHUNK])
            self.runs.setdefault(name, []).append((begin + low, len(run), checksum.hexdigest()))

    def finish(self, sign_of_life: Callable[[], None] = lambda: None) -> None:
        """Returns when everything is on the disk. ``sign_of_life`` is called after each file."""
        for (name, _), descriptor in self._descriptors.items():
            with naming(self._folder / name):
                os.fsync(descriptor)
            sign_of_life()

    def close(self) -> None:
        """Closes the files."""
        while self._descriptors:
            with contextlib.suppress(OSError):  # a file that was not finished is incomplete anyway
                os.close(self._descriptors.popitem()[1])

    def _write(self, name: str, begin: int, piece: memoryview) -> None:
        if not self._several_hosts:
            write_at(self._descriptor(name), piece, begin)
        else:
            # A node that writes less than a page over NFS sends the whole page, with zeros for what it does not know,
            # unless it writes synchronously (Linux, fs/nfs/write.c, nfs_can_extend_write). No other node writes to a
            # whole page.
            end, page = begin + len(piece), mmap.PAGESIZE
            first = min(-(-begin // page) * page, end)
            last = max(end // page * page, first)
            for number, (low, high) in enumerate(itertools.pairwise([begin, first, last, end])):
                edge = 0 if number == 1 else os.O_DSYNC
                if low < high:
                    write_at(self._descriptor(name, edge), piece[low - begin : high - begin], low)
        if self._ahead:
            # Linux starts to write these pages to the disk and drops none before, so that fsync has little left to do.
            os.posix_fadvise(self._descriptor(name), begin, len(piece), os.POSIX_FADV_DONTNEED)

    def _descriptor(self, name: str, flags: int = 0) -> int:
        if (name, flags) not in self._descriptors:
            opened = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | flags, 0o666)
            self._descriptors[name, flags] = opened
        return self._descriptors[name, flags]


def combined(name: str, size: int, runs: Iterable[Sequence[Any]]) -> FileEntry:
    """Returns the entry of a file of ``size`` bytes, given the runs of all processes. Raises CheckpointError if they
    leave a gap or overlap, which is a bug."""
    end, ordered = 0, sorted((begin, length, checksum) for begin, length, checksum in runs)
    for begin, length, _ in ordered:
        if begin != end:
            raise CheckpointError(f"{name}: what the ranks have written leaves a gap, or overlaps, at byte {end:,}")
        end += length
    if end != size:
        raise CheckpointError(f"{name}: what the ranks have written ends at byte {end:,} of {size:,}")
    return FileEntry(size, [[length, checksum] for _, length, checksum in ordered])


def write(path: Path, *pieces: bytes | memoryview) -> FileEntry:
    """Writes a new file of these ``pieces`` (at least one byte); it is on the disk on return. Raises OSError."""
    path.unlink(missing_ok=True)  # remains of an interrupted save
    writer, end = RangeWriter(path.parent, ahead=True), 0
    try:
        for piece in pieces:
            writer.put(path.name, end, piece)
            end += memoryview(piece).nbytes
        writer.finish()
    finally:
        writer.close()
    return combined(path.name, end, writer.runs[path.name])


def damage_of(path: Path, entry: Mapping[str, Any], share: slice) -> str:
    """Returns what is wrong with a file, or ""; reads only this ``share`` of its runs. Raises OSError."""
    if path.is_symlink():  # it may lead anywhere
        return f"{path.name} is a symbolic link, not a file"
    if (size := path.stat().st_size) != entry["bytes"]:  # checked before opening: a pipe would block
        return f"{path.name} has {size:,} bytes instead of {entry['bytes']:,}"
    ends = itertools.accumulate(length for length, _ in entry["checksums"])
    runs = [(end - length, length, wanted) for end, (length, wanted) in zip(ends, entry["checksums"], strict=True)]
    if not runs[share]:
        return ""
    with path.open("rb", buffering=0) as file:
        whole = all(checksum_of(file.fileno(), begin, length) == wanted for begin, length, wanted in runs[share])
    return "" if whole else f"{path.name} was altered: its checksum differs"


def checksum_of(descriptor: int, begin: int, length: int) -> str:
    """Returns the XXH3-128 of a range of bytes, or of what exists of it. Raises OSError."""
    hasher, end = xxhash.xxh3_128(), begin + length
    while chunk := os.pread(descriptor, min(_READ, end - begin), begin):
        hasher.update(chunk)
        begin += len(chunk)
    return hasher.hexdigest()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError raised inside; errors of writing have none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def catch_io_error(action: Callable[[], Any]) -> str:
    """Calls ``action`` and returns its OSError or CheckpointError as text, "" if there is none."""
    try:
        action()
    except OSError as error:
        return f"{error.filename or ''}: {error.strerror}".removeprefix(": ")
    except CheckpointError as error:
        return str(error)
    return ""


def remove(path: Path) -> None:
    """Removes a folder with its content, a file, or a link without its target, if it exists. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Makes new and renamed names in ``path`` durable: they are the folder's content, not the file's. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
