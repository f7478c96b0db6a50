"""What ranks other than 0 print: marked with their rank, so that nobody has to guess who said it.

Launchers differ: horovodrun marks every line (``[1]<stderr>:``), torchrun, deepspeed, mpirun and srun mark none unless asked to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dsframe.cluster.world import World
from dsframe.config.schema.settings_report import Profile

if TYPE_CHECKING:
    from dsframe.config.value import Config


class PrefixedStream:
    """A stream that puts ``mark`` before each line, and writes lines whole, so that those of other ranks do not get into them."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream, self._mark, self._part = stream, mark, ""

    def write(self, text: str) -> int:
        """Holds back what is not a line yet. Of what carriage returns write over, the last stays: a bar that moves is one line."""
        *lines, part = (self._part + text).split("\n")
        self._part = _last(part) + "\r" * part.endswith("\r")
        if lines:
            self._stream.write("".join(self._marked(_last(line)) + "\n" for line in lines))
            self._stream.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Prefixed too: the stream's own would write past the mark."""
        self.write("".join(lines))

    def close_line(self) -> None:
        """Writes what is held back."""
        if self._part:
            self.write("\n")

    def _marked(self, line: str) -> str:
        return line if line.startswith(self._mark) or not line else self._mark + line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _last(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


@contextmanager
def marked(world: World) -> Iterator[None]:
    """Around what this process prints. Rank 0's goes where it always went."""
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


def silence(profile: Profile | None, *, verbose: bool, quiet: bool) -> None:
    """Before torch is imported: where another rank has ended it prints 20 lines of C++ frames, and its profiler says when it begins
    and ends. ``quiet``: wandb says nothing either."""
    if quiet:
        os.environ.setdefault("WANDB_SILENT", "true")
    if not verbose:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if profile is not None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # more than any message has; measured, torch 2.13


def directory_of(config: Config, engine: str, task: str) -> Path:
    """Where the run's results are: as the file says, else named after the file, or after the ``task`` where there is none."""
    return Path(config.settings.run_dir or f"runs/{config.path.stem if config.path else task}-{engine}")
