"""Prefixes the output of ranks other than 0 with the rank.

horovodrun prefixes every line itself (``[1]<stderr>:``); torchrun, deepspeed, mpirun and srun do not by default.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dsframe.cluster.world import World

if TYPE_CHECKING:
    from dsframe.config.value import Config


class PrefixedStream:
    """A stream that puts ``mark`` before each line and writes only complete lines, so that ranks' lines do not mix."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream, self._mark, self._part = stream, mark, ""

    def write(self, text: str) -> int:
        """Buffers incomplete lines. After carriage returns only the last text is written: a progress bar is one
        line."""
        *lines, part = (self._part + text).split("\n")
        self._part = _last(part) + "\r" * part.endswith("\r")
        if lines:
            marked = (self._mark * bool(line) + line.removeprefix(self._mark) for line in map(_last, lines))
            self._stream.write("".join(f"{line}\n" for line in marked))
            self._stream.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Prefixes lines too; the stream's own method would not."""
        self.write("".join(lines))

    def close_line(self) -> None:
        """Writes the buffered part."""
        if self._part:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _last(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


@contextmanager
def marked(world: World) -> Iterator[None]:
    """Context that prefixes this process's output. Rank 0's output is unchanged."""
    if world.is_main or world.launcher == "horovodrun":
        yield
        return
    mark, before = f"[rank {world.rank}] ", (sys.stdout, sys.stderr)
    out, err = PrefixedStream(sys.stdout, mark), PrefixedStream(sys.stderr, mark)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        out.close_line()
        err.close_line()
        sys.stdout, sys.stderr = before


def silence(*, verbose: bool, quiet: bool) -> None:
    """Silences libraries; call before torch is imported. When another rank has ended, torch prints 20 lines of C++
    frames. ``quiet`` silences wandb too."""
    if quiet:
        os.environ.setdefault("WANDB_SILENT", "true")
    if not verbose:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def directory_of(config: Config, engine: str, task: str) -> Path:
    """Returns the run's directory: the file's, else named after the file, or after ``task`` if there is no file."""
    return Path(config.settings.run_dir or f"runs/{config.path.stem if config.path else task}-{engine}")
