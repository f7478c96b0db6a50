"""Standard output and error streams whose failure does not end a process. A full disk behind a log (ENOSPC), a closed
pipe (EPIPE) and a closed terminal (EIO) make every write raise OSError, in dsframe and in libraries. Standard library
only, and quick to import."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO


class TolerantStream:
    """A stream whose writes do not raise OSError. Text that cannot be written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes or drops ``text``. Returns its length."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Writes or drops all ``lines``."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flushes, ignoring errors."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive() -> None:
    """Makes standard output and error tolerant for the rest of the process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: 2>&-
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the process's end
        if not isinstance(stream, TolerantStream):
            setattr(sys, name, TolerantStream(stream))
