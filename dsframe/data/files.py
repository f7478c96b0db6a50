"""Readers of data-set files. They check their input and name the file in DataErrors."""

from __future__ import annotations

import contextlib
import gzip
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from dsframe.errors import DataError


def data_root(data_dir: str | None) -> Path:
    """Returns ``data_dir``, else ``$DSFRAME_DATA``, else ``~/.cache/dsframe/data``."""
    return Path(data_dir or os.environ.get("DSFRAME_DATA") or "~/.cache/dsframe/data").expanduser()


def read_bytes(path: Path) -> bytes:
    """Returns the file's content, decompressed if the name ends in ``.gz``."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or damaged ({error}); delete it and fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context for writing ``path`` in the data cache. Turns OSError into DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path} ({error.strerror}); set data_dir or $DSFRAME_DATA") from error


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Context with a file that replaces ``path`` at the end, or is removed on failure.

    Safe for concurrent processes: each writes its own file and renames it. ``mode``: permissions, less the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as out:
        try:
            yield out
            out.flush()
            partial.replace(path)
        except BaseException:
            partial.unlink()
            raise


def mapped(path: Path, size: int, offset: int = 0) -> Tensor:
    """Returns ``size`` bytes of the file, uint8 ``[size]``, memory mapped and shared by the processes of a node.

    Raises DataError.
    """
    if size == 0:
        raise DataError(f"{path}: empty")
    try:
        # copy-on-write, because torch warns about read-only arrays
        return torch.from_numpy(np.memmap(path, np.uint8, mode="c", shape=(size,), offset=offset))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
