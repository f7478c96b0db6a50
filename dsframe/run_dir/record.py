"""A run's directory: ``run.json`` and ``config.json`` describe the run, ``metrics.jsonl`` is written during it, and
``summary.json`` after success.

Written only by rank 0. The files are plain JSON and can be read during the run. A full disk does not end training:
lines are kept until they can be written, and files are replaced only when complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from dsframe.checkpoint.store import numbered
from dsframe.config.read.secrets import redact
from dsframe.config.read.suggest import near_path
from dsframe.data.files import replacing
from dsframe.errors import DataError
from dsframe.host import processes
from dsframe.run_dir.names import LOGGER_ID, TENSORBOARD
from dsframe.text import Json, Say, without_nonfinite
from dsframe.version import __version__

if TYPE_CHECKING:
    from dsframe.config.value import Config
    from dsframe.model.plan import Plan
    from dsframe.results import Summary

_PACKAGES = ("torch", "deepspeed", "horovod", "numpy", "torchvision", "transformers")
_METRICS = "metrics.jsonl"
_SUMMARY = "summary.json"
_ORIGIN = "run.json"
"""What was started, with which versions, on which machine."""
CONFIG = "config.json"
"""The resolved file with overrides: ``--config RUN/config.json`` repeats the training."""


class Loggers(Protocol):
    """Destinations of metrics besides the run's directory (``run_dir.loggers``)."""

    def write(self, record: Json) -> None:
        """Writes a record of ``metrics.jsonl``."""

    def close(self, *, finished: bool = True) -> None:
        """Flushes pending metrics."""


MakeLoggers = Callable[["Config", Json, Path, int, int], Loggers]
"""Arguments: file, the record's description of the run, directory, global batch size, steps of an earlier run."""


def provenance() -> Json:
    """Returns the origin of a run's metrics as JSON values, with the versions of all installed packages, used or not."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": redact([*_program(), *sys.argv[1:]]),
        "directory": str(Path.cwd()),
        "git": git(Path.cwd()),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "versions": {"python": platform.python_version(), "dsframe": __version__}
        | {name: _version(name) for name in _PACKAGES},
    }


def _program() -> list[str]:
    """Returns how Python was started; with ``-m`` the module's name, not its file."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return ["python", "-m", spec.name] if spec is not None else ["python", sys.argv[0]]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git(directory: Path) -> Json | None:
    """Returns the commit of ``directory``, and whether files differ from it; None without git."""

    commit = processes.output_of(["git", "rev-parse", "HEAD"], 10, folder=directory)
    if commit is None:
        return None
    changed = processes.output_of(["git", "status", "--porcelain", "-uno"], 10, folder=directory)
    return {"commit": commit.strip(), "changed": bool(changed)}


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


class Record:
    """Rank 0's record of a run. Moves an earlier run's record in the same directory to ``earlier.1`` (2, ...)."""

    def __init__(self, plan: Plan, about: Json, done_steps: int = 0, *, loggers: MakeLoggers, say: Say) -> None:
        """``about``: what the plan does not know of the run. ``done_steps``: steps of an earlier run to continue
        from."""
        directory = plan.directory
        self._directory, self._say, self._warned = directory, say, False
        with self.surviving():
            if not done_steps and (moved := _set_aside(directory)):
                say(f"the record of an earlier run is now in {moved}")
            (directory / _SUMMARY).unlink(missing_ok=True)
        self._about = {
            "config": str(plan.config.path),
            "config_digest": plan.config.digest,
            "launcher": plan.world.launcher,
            "world_size": plan.world.size,
            "device": plan.device.type,
            "train_batch_size": plan.batch.train_batch_size,
            **about,
        }
        with self.surviving():
            # Secrets are removed, but a command line may contain other private data.
            _write(directory / _ORIGIN, provenance(), mode=0o600)
            _write(directory / CONFIG, plan.config.shown(), mode=0o600)
        before = _lines_until(directory / _METRICS, done_steps) if done_steps else []
        self._file: FileIO | None = None
        self._partial, self._begun = directory / f"{_METRICS}.partial", False
        """Name of ``metrics.jsonl`` until it contains an earlier run's lines."""
        self._waiting = "".join(before).encode()
        self._loggers = loggers(
            plan.config, self._about, directory, plan.batch.train_batch_size, done_steps if before else 0
        )
        self.write({"run": self._about})

    def write(self, record: Json) -> None:
        """Writes one line of ``metrics.jsonl``."""
        clean = without_nonfinite(record)
        self._add(clean)
        self._loggers.write(clean)

    def started(self, phases: Mapping[str, float]) -> None:
        """Records the end of the first step. ``phases``: seconds since the process's start, by activity."""
        self._about["startup_seconds"] = dict(phases)
        self._add({"startup_seconds": dict(phases), "at": time.time()})

    def _add(self, line: Json) -> None:
        self._waiting += (json.dumps(line) + "\n").encode()
        with self.surviving():
            self._flush()

    def _flush(self) -> None:
        """Writes pending lines after the last written byte, completing a partial line. Raises OSError."""
        if self._file is None:
            self._file = self._partial.open("wb", buffering=0)
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        if not self._begun:
            self._partial.replace(self._directory / _METRICS)
            self._begun = True
        self._warned = False

    def close(self, *, finished: bool) -> None:
        """Ends the record; written files stay."""
        self._warned = False  # last chance to write: warn again
        with self.surviving():
            self._flush()
        if self._file:
            with self.surviving():
                self._file.close()
        self._loggers.close(finished=finished)

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """Context for writing into the run's directory: a write error is printed once and does not end training."""
        try:
            yield
        except (OSError, DataError) as error:
            if not self._warned:
                self._say(
                    f"warning: the record in {self._directory} cannot be written ({error}); the training does not depend on it, "
                    "and metrics.jsonl is completed as soon as it can be"
                )
            self._warned = True

    def finish(self, summary: Summary) -> None:
        """Writes ``summary.json``, whose presence means that the run has finished."""
        self.close(finished=True)
        content = {**self._about, **asdict(summary)}
        del content["directory"]  # it may be moved
        with self.surviving():
            _write(self._directory / _SUMMARY, content)


def _set_aside(directory: Path) -> Path | None:
    """Moves the record of a run that has trained. Returns the new folder; None if there is no record."""
    metrics = directory / _METRICS
    if not any(_step(line) > 0 for line in _lines_until(metrics, math.inf)):
        return None
    target = numbered(directory / "earlier")
    target.mkdir()
    for name in (_METRICS, _SUMMARY, _ORIGIN, CONFIG, TENSORBOARD, LOGGER_ID):
        if (directory / name).exists():
            (directory / name).rename(target / name)
    return target


def _write(path: Path, content: Json, mode: int = 0o666) -> None:
    """Writes JSON. Raises OSError."""
    with replacing(path, mode) as file:
        file.write((json.dumps(without_nonfinite(content), indent=2) + "\n").encode())


def _lines_until(path: Path, step: float) -> list[str]:
    """Returns the recorded lines up to ``step``; later steps are trained again."""
    if not path.is_file():  # opening a pipe would block
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and _step(line) <= step]


def _step(line: str) -> float:
    """Returns the step of a line of ``metrics.jsonl``; infinite if the line is damaged."""
    try:
        return float(json.loads(line).get("step", 0))
    except (ValueError, AttributeError, TypeError):
        return math.inf


def read_metrics(directory: Path) -> list[Json]:
    """Returns the records of a run, in order, without an incomplete last line. Raises DataError if there are none."""
    path = directory / _METRICS
    try:
        text = _text(path)
    except OSError as error:
        raise DataError(f"{directory} holds no run ({path.name}: {error.strerror}){near_path(directory)}") from None
    return [_object(path, line) for line in text.split("\n")[:-1]]


def read_summary(directory: Path) -> Json:
    """Returns the results of a finished run. Raises DataError if the run has not finished."""
    path = directory / _SUMMARY
    try:
        return _object(path, _text(path))
    except OSError as error:
        raise DataError(f"{directory} holds no finished run: {error}") from None


_LARGEST_BYTES = 1 << 30


def _text(path: Path) -> str:
    """Returns a regular file's text: the directory may be someone else's, with pipes or devices. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_BYTES:
            raise OSError(errno.EINVAL, "not a file that dsframe has written", str(path))
        return file.read().decode("utf-8", errors="replace")


def _object(path: Path, text: str) -> Json:
    """Parses a JSON object. Raises DataError if ``text`` is not one."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged, or dsframe has not written it: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged, or dsframe has not written it: {type(content).__name__} is not an object")
    return content


def finished(directory: Path, steps: int) -> bool:
    """True if a run of so many steps has finished in this directory."""
    try:
        return bool(read_summary(directory)["steps"] == steps)
    except (DataError, ValueError):  # truncated by a full disk
        return False


def read_origin(directory: Path) -> Json:
    """Returns the origin of a run's metrics; empty if it is not recorded."""
    return _read(directory / _ORIGIN)


def read_config(directory: Path) -> Json:
    """Returns the file of the run; empty if it is not recorded."""
    return _read(directory / CONFIG)


def _read(path: Path) -> Json:
    try:
        return _object(path, _text(path))
    except OSError:
        return {}
