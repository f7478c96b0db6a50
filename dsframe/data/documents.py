"""Reads documents from JSONL, parquet, text files, and folders saved by the library ``datasets``.

Reads a few documents at a time, so memory does not depend on the file size. Errors name file and line.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from dsframe.data.files import data_root, replacing, writing
from dsframe.errors import DataError
from dsframe.text import one_line

PIECE = 1 << 20
"""Bytes of a text file read at a time; a piece ends at a line end if possible."""
_ROWS = 256
"""Rows of parquet and saved data sets in memory at once."""
_SAVED = "dataset_info.json", "state.json"
_SPLITS = "dataset_dict.json"
HUB = "hub:"
"""Prefix of the name of a data set of the Hugging Face hub."""
_DOWNLOAD = """
import sys
sys.path.remove("") if "" in sys.path else None  # the working folder may have a datasets.py
import datasets
name, config, split, folder = sys.argv[1:]
try:
    datasets.load_dataset(name, config or None, split=split).save_to_disk(folder)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
"""
_RECENT_NANOSECONDS = 2_000_000_000
"""The digest of a file that changed more recently is not cached: it may change again within a clock tick."""


@dataclass(frozen=True)
class Row:
    """A document, or a piece of one."""

    place: str
    """``file:line``, or file and row number, for messages."""
    value: Any
    """A mapping of columns; for a text file its text."""
    last: bool = True
    """False if the document continues in the next row."""
    others: Sequence[str] = ()
    """Columns of the file that were not read."""


def find_files(patterns: str | Sequence[str], key: str) -> list[Path]:
    """Returns the files and saved folders that match ``patterns``, sorted per pattern. ``key``: config key, for
    messages.

    Raises DataError for patterns without a match, files matched twice, and unsupported file types.
    """
    pattern_of: dict[Path, tuple[Path, str]] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        names = matching(pattern)
        if not names:
            raise DataError(f"{key}: {pattern}: no such file (searched from {Path.cwd()})")
        for path in names:
            if path.is_dir() and len(names) > 1 and not (path / _SAVED[0]).is_file():
                continue  # "**" matches folders too
            _check_kind(path, key)
            if (absolute := path.absolute()) in pattern_of:
                raise DataError(
                    f"{key}: {path} is named twice, by {pattern_of[absolute][1]} and {pattern}; remove one of them"
                )
            pattern_of[absolute] = path, pattern
    if not pattern_of:
        raise DataError(f"{key}: names no file")
    return [path for path, _ in pattern_of.values()]


def matching(pattern: str) -> list[Path]:
    """Returns the file of this name, which may have brackets; if there is none, what matches the pattern, sorted."""
    expanded = os.path.expanduser(pattern)  # noqa: PTH111  # a glob is not a path
    if os.path.lexists(expanded):
        return [Path(expanded)]
    return sorted(Path(name) for name in glob.glob(expanded, recursive=True))  # noqa: PTH207  # absolute ones too


def _check_kind(path: Path, key: str) -> None:
    if path.is_dir():
        if (path / _SPLITS).is_file():
            names = ", ".join(str(path / name) for name in json.loads((path / _SPLITS).read_text())["splits"])
            raise DataError(f"{key}: {path} holds several data sets; name one of them: {names}")
        if not all((path / name).is_file() for name in _SAVED):
            raise DataError(
                f'{key}: {path} is a folder, but none that datasets.save_to_disk wrote; name its files: "{path}/**/*.jsonl"'
            )
    elif not path.is_file():
        raise DataError(f"{key}: {path} is neither a file nor a folder (a pipe, a broken link?)")
    elif path.suffix not in _READERS:
        raise DataError(f"{key}: {path}: files of {', '.join(_READERS)} are read, and folders of datasets.save_to_disk")


def rows(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yields the rows of a file or folder. Reads only ``columns``, except of JSONL. Raises DataError."""
    if path.is_dir():
        yield from _saved(path, columns)
    else:
        try:
            yield from _READERS[path.suffix](path, columns)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                source = f"{path}:{number}"
                yield Row(source, _parsed(line, source))


def _parsed(line: bytes, source: str) -> dict[str, Any]:
    """Parses a line of JSON read from ``source``. Raises DataError if it is not an object."""
    try:
        value = json.loads(line.rstrip(), object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        why = f"{error.msg}, column {error.colno}"
        raise DataError(f"{source}: not JSON ({why}); each line is one JSON object") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # a number with thousands of digits; nested too deeply
        raise DataError(f"{source}: not JSON that can be read ({error})") from None
    if not isinstance(value, dict):
        raise DataError(f"{source}: {type(value).__name__} in place of a JSON object with columns")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f'"{next(name for name in names if names.count(name) > 1)}" is there twice')
    return unique


def _text(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yields the file in pieces that end with a line, or at least with a character."""
    remainder, done = b"", 0
    with path.open("rb") as file:
        while len(block := file.read(PIECE)) == PIECE:
            content = remainder + block
            end = content.rfind(b"\n") + 1 or len(content) - 3
            while 0 < end < len(content) and content[end] & 0xC0 == 0x80:  # inside a character
                end -= 1
            text, remainder = content[:end], content[end:]
            yield Row(str(path), _decoded(text, path, done), last=False)
            done += len(text)
    yield Row(str(path), _decoded(remainder + block, path, done))


def _decoded(content: bytes, path: Path, done: int) -> str:
    try:
        text = content.decode("utf-8" if done else "utf-8-sig")  # some editors write a byte order mark
        if "\0" in text:
            raise DataError(f"{path}: has NUL characters, so it is not UTF-8 text; convert it, from UTF-16 perhaps")
        return text.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason} at byte {done + error.start})") from None


def _parquet(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f'{path}: needs pyarrow, which is not installed: pip install "dsframe[parquet]"') from None
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            available, others = _chosen(file.schema_arrow.names, columns)
            if len({*available}) < len(available):
                raise DataError(
                    f"{path}: a column is there twice, and one of them would be lost: {', '.join(available)}"
                )
            number = 0
            for batch in file.iter_batches(batch_size=_ROWS, columns=available):
                for value in _values(batch):
                    yield Row(f"{path}, row {number}", value, others=others)
                    number += 1
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a parquet file, truncated, or damaged ({one_line(error)})") from None


def _chosen(names: Sequence[str], columns: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns which of a file's columns are read, and the others."""
    return [name for name in names if name in columns], [name for name in names if name not in columns]


def _datasets(source: Path | str) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(f'{source}: needs datasets, which is not installed: pip install "dsframe[datasets]"') from None
    return datasets


def local(pattern: str, data_dir: str | None) -> str:
    """Returns the pattern, or for a data set of the Hugging Face hub, ``hub:NAME:CONFIG@SPLIT``, its folder.

    Downloads a missing data set; safe for concurrent processes. Raises DataError.
    """
    if not pattern.startswith(HUB):
        return pattern
    name, _, split = pattern.removeprefix(HUB).partition("@")
    name, _, config = name.partition(":")
    folder = data_root(data_dir) / "hub" / re.sub(r"[^\w.-]+", "--", f"{name}--{config}--{split or 'train'}")
    if not (folder / _SAVED[0]).is_file():
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as partial:
                _download(pattern, [name, config, split or "train", f"{partial}/whole"])
                try:
                    Path(partial, "whole").rename(folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # unless another process was first
                        raise
    return str(folder)


def _download(pattern: str, arguments: Sequence[str]) -> None:
    """Downloads in a subprocess: this process is offline after importing transformers. Raises DataError."""
    _datasets(pattern)
    ended = subprocess.run(
        [sys.executable, "-c", _DOWNLOAD, *arguments], stderr=subprocess.PIPE, text=True, check=False
    )
    if ended.returncode:
        why = ended.stderr.strip().rpartition("\n")[2][:400] or f"exit code {ended.returncode}"
        raise DataError(
            f"{pattern}: cannot be downloaded ({why}); without a network, name a folder that datasets.save_to_disk wrote"
        )


def _saved(path: Path, columns: Sequence[str]) -> Iterator[Row]:
    datasets = _datasets(path)
    try:
        dataset = datasets.load_from_disk(str(path), keep_in_memory=False)
    except Exception as error:  # of pyarrow, JSON or the library
        raise DataError(f"{path}: cannot be read by datasets ({one_line(error)})") from error
    available, others = _chosen(dataset.column_names, columns)
    chosen = dataset.select_columns(available).with_format("arrow").iter(_ROWS)
    # A data set without columns has no rows, and a row names the columns that there are.
    values = (value for batch in chosen for value in _values(batch)) if available else [{}]
    for number, value in enumerate(values):
        yield Row(f"{path}, row {number}", value, others=others)


def _values(batch: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of an Arrow table as JSON has them."""
    types = {field.name: field.type for field in batch.schema}
    for row in batch.to_pylist():
        yield {name: _value(value, types[name]) for name, value in row.items() if value is not None}


def _value(value: Any, kind: Any) -> Any:
    """Returns a value of an Arrow type without nulls: Arrow gives every object all keys of its column, with null for missing
    ones. In JSON, which is stored as text, a null was written. A map comes as a list of pairs and becomes an object."""
    if value is None:
        return None
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if item_type := getattr(kind, "item_type", None):
        return {key: _value(part, item_type) for key, part in value if part is not None}
    if isinstance(value, dict):
        return {key: _value(part, kind.field(key).type) for key, part in value.items() if part is not None}
    return [_value(part, kind.value_type) for part in value] if isinstance(value, list) else value


def missing(source: str, wanted: Sequence[str], available: Sequence[str]) -> str:
    """Returns the message for missing columns: a text's, or several of a conversation."""
    named = " or ".join(f'"{name}"' for name in wanted)
    has = ", ".join(map(repr, available)) or "none"
    remedy = '; name the column of the text in "field"' if len(wanted) == 1 else ""
    return f"{source}: no column {named}, or it is null; it has {has}{remedy}"


_READERS = {".jsonl": _jsonl, ".parquet": _parquet, ".txt": _text}


def digest(paths: Sequence[Path], data_dir: str | None) -> str:
    """Returns a digest of the files' content, in order. Raises DataError.

    The digest is cached with the data for files of the same device, inode, size, and modification and inode change
    time. Programs can set the modification time, but not the inode change time.
    """
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [file for file in files if file.is_file()]
    key, newest = xxh3_128(), 0
    for file in files:
        status = _stat(file)
        facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        key.update(f"{file.suffix}\0{facts}\0".encode())
        newest = max(newest, status.st_mtime_ns, status.st_ctime_ns)
    kept = data_root(data_dir) / "tokens" / "sources" / key.hexdigest()
    began = time.time_ns()
    if kept.is_file() and len(cached_digest := kept.read_text()) == 32:
        return cached_digest
    content = xxh3_128()
    for file in files:
        content.update(f"{file.suffix}\0{_stat(file).st_size}\0".encode())
        with file.open("rb") as opened:
            while block := opened.read(8 << 20):
                content.update(block)
    if began - newest > _RECENT_NANOSECONDS:
        with writing(kept), replacing(kept) as out:
            out.write(content.hexdigest().encode())
    return content.hexdigest()


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from error


def column(row: Row, name: str) -> Any:
    """Returns a column of a row. Raises DataError if it is missing."""
    if not isinstance(row.value, Mapping):
        return row.value
    if name not in row.value:
        raise DataError(missing(row.place, [name], [*row.value, *row.others]))
    return row.value[name]
