"""Trainings that a command makes for its own purposes, one after the other, each started by ``dsframe launch``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dsframe.errors import TrainingError


def train(
    file: Path, processes: int, directory: Path, *, engine: str | None = None, overrides: Sequence[str] = ()
) -> None:
    """Trains ``file`` into ``directory``, from the start; what it says goes to ``log.txt`` there.

    Raises TrainingError, with the end of the log, where the training fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dsframe.cli", "launch", "--config", str(file), "-np", str(processes)]
    command += ["--engine", engine] if engine else []
    command += [word for override in overrides for word in ("--set", override)]
    log = directory / "log.txt"
    with log.open("wb") as output:
        done = subprocess.run([*command, "--run-dir", str(directory)], stdout=output, stderr=output, check=False)
    if done.returncode:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:])
        raise TrainingError(
            f"{file} on {processes} process(es) failed with exit code {done.returncode}; {log} ends with\n{end}"
        )
