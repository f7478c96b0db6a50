"""Standard output and standard error that never end a process: words are decoration, the work is not.

A full disk behind a log (ENOSPC), the end of a pipe (EPIPE) and a closed terminal (EIO) make every write raise OSError, in our own
lines and in those of libraries. Standard library only, and quick to import.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO


class TolerantStream:
    """A stream whose writes do not raise OSError; what cannot be written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or drops. Returns the length of ``text``."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As :meth:`write`."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flushes what can be."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive() -> None:
    """From now on this process's words do not end it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: 2>&-
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the process's end
        if not isinstance(stream, TolerantStream):
            setattr(sys, name, TolerantStream(stream))
