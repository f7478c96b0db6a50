"""Training on several processes of this machine from a program that is one: a notebook, a script that goes on afterwards.

The task goes to them by a file (pickled by value where it is defined in the program itself, which they do not run), and
``dsframe launch`` starts them. What they print is printed here; what the run came to is read from its directory.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe import engines
from dsframe.config.value import Config
from dsframe.errors import ConfigError, DsframeError, Problem, TaskError, TrainingError
from dsframe.host import supervise
from dsframe.run_dir.output import directory_of

if TYPE_CHECKING:
    from dsframe.tasks.task import Task

_SCRIPT = """\
import pickle
import sys

import dsframe

sys.path[:0] = {path!r}
with open({task!r}, "rb") as file:  # written by the program that started this, in a folder that nobody else can write to
    task = pickle.load(file)
if __name__ == "__main__":
    dsframe.main(task)
"""
_END_SECONDS = 60.0


def train(task: Task, config: Config, processes: int, *, resume: str = "never") -> Path:
    """Trains on ``processes`` processes of this machine and returns the run's directory.

    Raises TaskError for a task that cannot be sent, else the error of the run's exit code; what was wrong is printed.
    """
    with tempfile.TemporaryDirectory(prefix="dsframe-fit-") as name:
        folder = Path(name)
        (folder / "task.pkl").write_bytes(_pickled(task))
        script = folder / f"{type(task).__name__}.py"
        script.write_text(
            _SCRIPT.format(path=[str(Path.cwd()), *filter(None, sys.path)], task=str(folder / "task.pkl"))
        )
        (folder / "file.json").write_text(json.dumps(config.written()))
        (folder / "file.json").chmod(0o600)
        directory = directory_of(config, engines.choose(config, "torchrun").name, type(task).__name__).absolute()
        command = [sys.executable, "-m", "dsframe", "launch", "--config", str(folder / "file.json")]
        command += ["--script", str(script), "-np", str(processes), "--run-dir", str(directory), "--resume", resume]
        code = _run(command)
    if code:
        raise _error(code, f"the run on {processes} processes ended with exit code {code}; see above")
    return directory


def _error(code: int, text: str) -> DsframeError:
    if code == ConfigError.exit_code:
        return ConfigError([Problem("error", "", text, code=ConfigError.code)])
    kinds = {kind.exit_code: kind for kind in DsframeError.__subclasses__()}
    return kinds.get(code, TrainingError)(text)


def _pickled(task: Task) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        if type(task).__module__ == "__main__":
            raise TaskError(
                f"{type(task).__name__} is defined in the program itself, which other processes do not run: pip install "
                "cloudpickle, or move the class to a module that this program imports"
            ) from None
        cloudpickle = pickle
    try:
        return bytes(cloudpickle.dumps(task))
    except Exception as error:  # whatever the task holds
        raise TaskError(f"{type(task).__name__} cannot be sent to other processes: {error}") from error


def _run(command: Sequence[str]) -> int:
    """Runs ``command``, prints what it prints, and returns its exit code; ends it where this program is interrupted."""
    # A notebook shows what Python prints, not what a child process does.
    process: Any = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=supervise.die_with_parent,
    )
    try:
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
        return int(process.wait())
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # it saves
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
