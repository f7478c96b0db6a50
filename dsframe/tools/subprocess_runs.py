"""Trainings that a command makes for its own purposes, one after the other, each started by ``dsframe launch``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dsframe.errors import TrainingError
from dsframe.host import supervise

Started = subprocess.Popen[bytes]


LOG = "log.txt"


def start(file: str | Path, processes: int, directory: Path, *, words: Sequence[str] = ()) -> Started:
    """Starts a training of ``file`` into ``directory``; what it says is added to ``log.txt`` there. Arguments as for :func:`train`.

    It ends with this process, and whatever it has started ends with it (``dsframe.host.supervise``).
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dsframe.cli", "launch", "--config", str(file), "-np", str(processes), *words]
    command += ["--run-dir", str(directory)]
    with (directory / LOG).open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=supervise.die_with_parent)


def train(
    file: Path,
    processes: int,
    directory: Path,
    *,
    engine: str | None = None,
    words: Sequence[str] = (),
    wait: Callable[[Started], int] = Started.wait,
) -> None:
    """Trains ``file`` into ``directory``, from the start; what it says goes to ``log.txt`` there.

    ``words``: more arguments of ``dsframe launch``. ``wait``: waits for it and returns its exit code; where it raises instead,
    the training is ended. Raises TrainingError, with the end of the log, where the training fails.
    """
    log = directory / LOG
    log.unlink(missing_ok=True)
    words = [*words, *(["--engine", engine] if engine else [])]
    with start(file, processes, directory, words=words) as started:
        try:
            code = wait(started)
        except BaseException:
            started.kill()
            raise
    if code:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:])
        raise TrainingError(f"{file} on {processes} process(es) failed with exit code {code}; {log} ends with\n{end}")
