"""A run's directory: ``run.json`` and ``config.json`` say what runs, ``metrics.jsonl`` is written as it happens, and
``summary.json`` when the run has succeeded.

Only rank 0 keeps a record. The files hold plain JSON and can be read while the run continues. A disk that is full ends no training:
lines wait until they can be written, and a file that replaces another is whole before it does.
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
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dsframe.checkpoint.store import numbered
from dsframe.config.read.secrets import redact
from dsframe.config.read.suggest import near_path
from dsframe.data.files import replacing
from dsframe.errors import DataError
from dsframe.host import processes
from dsframe.run_dir.names import LOGGER_ID, TENSORBOARD
from dsframe.text import Json, Say
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
"""The file that ran, with overrides, "auto" resolved: ``--config RUN/config.json`` is the same training again."""


class Loggers(Protocol):
    """Where metrics go beside the run's directory (``run_dir.loggers``)."""

    def write(self, record: Json) -> None:
        """A record of ``metrics.jsonl``."""

    def close(self, *, finished: bool = True) -> None:
        """Sends what is still held."""


MakeLoggers = Callable[["Config", Json, Path, int, int], Loggers]
"""Of the file, what the record says of the run, its directory, the global batch, and steps of an earlier run."""


def provenance() -> Json:
    """Where a run's metrics come from: plain values, as JSON has them.

    Versions are those that are installed, whether the run uses them or not.
    """
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
    """How Python was told what to run: a module's file name says no more than ``-m`` and its name would."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return ["python", "-m", spec.name] if spec is not None else ["python", sys.argv[0]]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git(directory: Path) -> Json | None:
    """The commit that ``directory`` is at, and whether files differ from it; None where it is under no git."""

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
    """What rank 0 writes down. The record of an earlier run in the same directory is moved into ``earlier.1`` (2, ...)."""

    def __init__(
        self,
        plan: Plan,
        about: Json,
        done_steps: int = 0,
        *,
        loggers: MakeLoggers,
        say: Say,
    ) -> None:
        """``about``: what the plan does not know of the run. ``done_steps``: steps of an earlier run to continue from."""
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
            # Secrets are hidden, but what a command line holds is open.
            _write(directory / _ORIGIN, provenance(), mode=0o600)
            _write(directory / CONFIG, plan.config.shown(), mode=0o600)
        before = _lines_until(directory / _METRICS, done_steps) if done_steps else []
        self._file: FileIO | None = None
        self._partial, self._begun = directory / f"{_METRICS}.partial", False
        """The name of ``metrics.jsonl`` until it has what an earlier run has left there, which waits first."""
        self._waiting = "".join(before).encode()
        self._loggers = loggers(
            plan.config, self._about, directory, plan.batch.train_batch_size, done_steps if before else 0
        )
        self.write({"run": self._about})

    def write(self, record: Json) -> None:
        """One line of ``metrics.jsonl``."""
        clean = _clean(record)
        self._add(clean)
        self._loggers.write(clean)

    def started(self, phases: Mapping[str, float]) -> None:
        """The first step has ended. ``phases``: seconds since the process's start, by what they were spent on."""
        self._about["startup_seconds"] = dict(phases)
        self._add({"startup_seconds": dict(phases), "at": time.time()})

    def _add(self, line: Json) -> None:
        self._waiting += (json.dumps(line) + "\n").encode()
        with self.surviving():
            self._flush()

    def _flush(self) -> None:
        """Writes what waits, after the last byte that is there: half a line is made whole. Raises OSError."""
        if self._file is None:
            self._file = self._partial.open("wb", buffering=0)
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        if not self._begun:
            self._partial.replace(self._directory / _METRICS)
            self._begun = True
        self._warned = False

    def close(self, *, finished: bool) -> None:
        """The run ends; what was written stays."""
        self._warned = False  # what does not get there now never does
        with self.surviving():
            self._flush()
        if self._file:
            with self.surviving():
                self._file.close()
        self._loggers.close(finished=finished)

    @contextlib.contextmanager
    def surviving(self) -> Iterator[None]:
        """Around what writes into the run's directory: a disk that does not let it is named once, and ends no training."""
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
        """Writes ``summary.json``; its presence says that the run came to its end."""
        self.close(finished=True)
        content = {**self._about, **asdict(summary)}
        del content["directory"]  # which may be moved
        with self.surviving():
            _write(self._directory / _SUMMARY, content)


def _set_aside(directory: Path) -> Path | None:
    """Moves the record of a run that has trained, with its loggers' files. Returns where to; None where there is none."""
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
    """Raises OSError."""
    with replacing(path, mode) as file:
        file.write((json.dumps(_clean(content), indent=2) + "\n").encode())


def _clean(value: Any) -> Any:
    """``value`` with null for every number that is not finite: JSON has none of those."""
    if isinstance(value, Mapping):
        return {key: _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_until(path: Path, step: float) -> list[str]:
    """What was recorded up to ``step``: the steps after it are trained again."""
    if not path.is_file():  # a pipe would wait
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and _step(line) <= step]


def _step(line: str) -> float:
    """Of a line of ``metrics.jsonl``; infinite where a disk has damaged it."""
    try:
        return float(json.loads(line).get("step", 0))
    except (ValueError, AttributeError, TypeError):
        return math.inf


def read_metrics(directory: Path) -> list[Json]:
    """The records of a run, in order; a last line that a crash cut off is left out. Raises DataError where there are none."""
    path = directory / _METRICS
    try:
        text = _text(path)
    except OSError as error:
        raise DataError(f"{directory} holds no run ({path.name}: {error.strerror}){near_path(directory)}") from None
    return [_object(path, line) for line in text.split("\n")[:-1]]


def read_summary(directory: Path) -> Json:
    """What a finished run came to. Raises DataError where the run did not come to its end."""
    path = directory / _SUMMARY
    try:
        return _object(path, _text(path))
    except OSError as error:
        raise DataError(f"{directory} holds no finished run: {error}") from None


_LARGEST_BYTES = 1 << 30


def _text(path: Path) -> str:
    """A regular file's text: a directory may come from somebody else, with pipes and devices in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_BYTES:
            raise OSError(errno.EINVAL, "not a file that dsframe has written", str(path))
        return file.read().decode("utf-8", errors="replace")


def _object(path: Path, text: str) -> Json:
    """Raises DataError where ``text`` is no JSON object."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged, or dsframe has not written it: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged, or dsframe has not written it: {type(content).__name__} is no object")
    return content


def finished(directory: Path, steps: int) -> bool:
    """Whether a run of so many steps has come to its end there."""
    try:
        return bool(read_summary(directory)["steps"] == steps)
    except (DataError, ValueError):  # cut off by a full disk
        return False


def read_origin(directory: Path) -> Json:
    """Where a run's metrics come from; empty for a directory without it."""
    return _read(directory / _ORIGIN)


def read_config(directory: Path) -> Json:
    """The file that ran; empty for a directory without it."""
    return _read(directory / CONFIG)


def _read(path: Path) -> Json:
    try:
        return _object(path, _text(path))
    except OSError:
        return {}
