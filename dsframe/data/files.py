"""Where data sets lie, and files that are complete or missing."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dsframe.errors import DataError


def data_root(data_dir: str | None) -> Path:
    """Returns ``data_dir``, else ``$DSFRAME_DATA``, else ``~/.cache/dsframe/data``."""
    return Path(data_dir or os.environ.get("DSFRAME_DATA") or "~/.cache/dsframe/data").expanduser()


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
