"""Trainings that a command makes for its own purposes, one after the other, each started by ``dsframe launch``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dsframe.errors import TrainingError

Started = subprocess.Popen[bytes]


def train(
    file: Path,
    processes: int,
    directory: Path,
    *,
    engine: str | None = None,
    overrides: Sequence[str] = (),
    words: Sequence[str] = (),
    wait: Callable[[Started], int] = Started.wait,
) -> None:
    """Trains ``file`` into ``directory``, from the start; what it says goes to ``log.txt`` there.

    ``words``: more arguments of ``dsframe launch``. ``wait``: waits for it and returns its exit code; where it raises instead,
    the training is ended. Raises TrainingError, with the end of the log, where the training fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dsframe.cli", "launch", "--config", str(file), "-np", str(processes), *words]
    command += ["--engine", engine] if engine else []
    command += [word for override in overrides for word in ("--set", override)]
    log = directory / "log.txt"
    with (
        log.open("wb") as output,
        subprocess.Popen([*command, "--run-dir", str(directory)], stdout=output, stderr=output) as started,
    ):
        try:
            code = wait(started)
        except BaseException:
            started.kill()  # nothing that it has started outlives it (dsframe.host.supervise)
            raise
    if code:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:])
        raise TrainingError(f"{file} on {processes} process(es) failed with exit code {code}; {log} ends with\n{end}")
