"""Standard output and standard error that never end a process: words are decoration, the work is not.

A full disk behind a log (ENOSPC), the end of a pipe (EPIPE) and a closed terminal (EIO) make every write raise OSError, in our own
lines and in those of libraries. Standard library only, and quick to import.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

NOTE = "output-lost.txt"
"""In the run's directory: since when lines did not get out, and why."""


class TolerantStream:
    """A stream whose writes do not raise OSError; what cannot be written is dropped, and noted once in ``directory``."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._noted = stream, False
        self.directory: Path | None = None

    def write(self, text: str) -> int:
        """Writes, or drops. Returns the length of ``text``."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._note(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As :meth:`write`."""
        self.write("".join(lines))

    def flush(self) -> None:
        """Flushes what can be."""
        try:
            self._stream.flush()
        except OSError as error:
            self._note(error)

    def _note(self, error: OSError) -> None:
        if self._noted or self.directory is None:
            return
        line = f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {self._stream.name}: {error.strerror}: lines are lost\n"
        with contextlib.suppress(OSError), (self.directory / NOTE).open("a", encoding="utf-8") as file:
            file.write(line)
            self._noted = True  # not where the run's directory is yet to be made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive(directory: Path | None = None) -> None:
    """From now on this process's words do not end it. ``directory``: where a loss is noted, as soon as it is known."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: 2>&-
            stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the process's end
        if not isinstance(stream, TolerantStream):
            stream = TolerantStream(stream)
        stream.directory = directory or stream.directory
        setattr(sys, name, stream)
