"""What ranks other than 0 print: marked with their rank, or filed by rank, so that nobody has to guess who said it.

Launchers differ: horovodrun marks every line (``[1]<stderr>:``), torchrun, deepspeed, mpirun and srun mark none unless asked to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dsframe.checkpoint.store import numbered
from dsframe.cluster.world import World
from dsframe.config.schema.settings_report import Profile
from dsframe.errors import WorldError

if TYPE_CHECKING:
    from dsframe.config.value import Config

FOLDER = "output"
"""In the run's directory."""
_earlier: list[tuple[Path, int, int]] = []
"""This rank's file, its descriptor, and how many bytes of an earlier run it begins with, until it has a file of its own."""


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
def rank_output(world: World, how: str, directory: Path, *, append: bool) -> Iterator[None]:
    """Around what this process prints. Rank 0's goes where it always went.

    ``how``: "prefix", "files" (in ``directory``; libraries' own lines too, which do not pass Python) or "plain". ``append``: to an
    earlier attempt's files. Else :func:`begin_anew` moves those away: the directory may still be another run's.
    """
    if world.is_main or how == "plain" or (how == "prefix" and world.launcher == "horovodrun"):
        yield
    elif how == "files":
        with _filed(directory / FOLDER / f"rank{world.rank}.log", append=append):
            yield
    else:
        with _prefixed(f"[rank {world.rank}] "):
            yield


@contextmanager
def _prefixed(mark: str) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    out, err = PrefixedStream(sys.stdout, mark), PrefixedStream(sys.stderr, mark)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        out.close_line()
        err.close_line()
        sys.stdout, sys.stderr = before


@contextmanager
def _filed(path: Path, *, append: bool) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise WorldError(
            f"{path} cannot be written to: {error.strerror}; choose another --run-dir, or --rank-output prefix"
        ) from None
    kept = os.dup(1), os.dup(2)
    _flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    if not append and (size := os.fstat(target).st_size):
        _earlier.append((path, target, size))
    try:
        yield
    finally:
        _earlier.clear()
        os.close(target)
        _flush()
        for descriptor, number in zip(kept, (1, 2), strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


def begin_anew() -> None:
    """Moves this rank's file of an earlier run to ``rank1.log.1``, once rank 0 has claimed the directory."""
    while _earlier:
        path, earlier, size = _earlier.pop()
        with suppress(OSError):  # then the lines stay together
            current = os.pread(earlier, os.fstat(earlier).st_size - size, size)
            path.rename(numbered(path))
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            os.write(file, current)
            os.ftruncate(earlier, size)
            for number in (1, 2):
                os.dup2(file, number)
            os.close(file)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def silence(profile: Profile | None, *, verbose: bool, quiet: bool) -> None:
    """Before torch is imported: where another rank has ended it prints 20 lines of C++ frames, and its profiler says when it begins
    and ends. ``quiet``: loggers' packages say nothing either."""
    if quiet:
        os.environ.setdefault("WANDB_SILENT", "true")
    if not verbose:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if profile is not None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # more than any message has; measured, torch 2.13


def directory_of(config: Config, engine: str, task: str) -> Path:
    """Where the run's results are: as the file says, else named after the file, or after the ``task`` where there is none."""
    return Path(config.settings.run_dir or f"runs/{config.path.stem if config.path else task}-{engine}")
