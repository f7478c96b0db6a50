"""Trainings that a command runs through ``dsframe launch``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dsframe.host import supervise

LOG = "log.txt"


def train(file: Path, processes: int, directory: Path, arguments: Sequence[str], seconds: float) -> int:
    """Trains ``file`` in ``directory``, with output in its ``log.txt``. Returns the exit code.

    The training and everything it starts end with this process (``dsframe.host.supervise``). ``words``: more arguments
    of ``dsframe launch``. Raises TimeoutExpired after ``seconds``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "dsframe.cli", "launch", "--config", str(file), "-np", str(processes), *arguments]
    command += ["--run-dir", str(directory)]
    with (
        (directory / LOG).open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=supervise.die_with_parent) as started,
    ):
        try:
            return started.wait(seconds)
        except BaseException:
            started.kill()
            raise


def end_of_log(directory: Path) -> str:
    """Returns the last lines of a training's output."""
    return "\n".join((directory / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-20:])
