"""TensorBoard and Weights & Biases as in DeepSpeed's sections, the same on every engine.

DeepSpeed 0.19.8 logs only the learning rate if the program itself calls backward. So the sections are removed before
DeepSpeed reads the file, and rank 0 logs the content of ``metrics.jsonl``, such as ``train/loss`` and
``eval/accuracy``, by optimizer step; ``train/samples`` counts the samples.

A logger never ends a training: if it fails, the reason is printed once and it gets no more metrics.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsframe.config.features import needed_packages
from dsframe.config.read.findings import dotted
from dsframe.config.read.secrets import anonymous, redact
from dsframe.config.value import Config
from dsframe.errors import Problem
from dsframe.results import Metrics
from dsframe.run_dir.names import LOGGER_ID, TENSORBOARD
from dsframe.text import Json, reason

_TRAINING, _EVALUATION = "train/", "eval/"
"""Prefixes of metric names."""


def missing(config: Config) -> list[Problem]:
    """Returns problems for loggers whose package is missing."""
    problems = []
    for path, package in needed_packages(config.deepspeed, config.settings):
        if importlib.util.find_spec(package) is None:
            message = f"needs the package {package}, which is not installed"
            remedy = f"pip install {package}, or take it out"
            problem = config.error(path, message, remedy, code="not-installed")
            problems.append(replace(problem, path=dotted(path[:-1])))
    return problems


class Logger(ABC):
    """One destination of metrics, on rank 0 only."""

    @abstractmethod
    def write(self, metrics: Metrics, step: int) -> None:
        """Writes finite numbers by name."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Flushes pending metrics. ``finished``: the training was not stopped and has not failed."""


class Loggers:
    """All loggers of a file."""

    def __init__(self, config: Config, about: Json, directory: Path, train_batch_size: int, done_steps: int) -> None:
        """``about``: description of the run. ``done_steps``: steps of an earlier run, whose metrics stay."""
        file = config.deepspeed
        self._batch = train_batch_size
        factories: Mapping[str, tuple[Any, Callable[[], Logger]]] = {
            "tensorboard": (
                file.tensorboard,
                lambda: _TensorBoard(_folder(file.tensorboard, directory / TENSORBOARD), directory, done_steps),
            ),
            "wandb": (file.wandb, lambda: _Wandb(file.wandb, about, directory, resumed=done_steps > 0)),
        }
        self._all: dict[str, Logger] = {}
        self._failed: set[str] = set()
        for name, (section, make) in factories.items():
            if section.enabled:
                with _survived(name):
                    self._all[name] = make()

    def write(self, record: Json) -> None:
        """Writes a record of ``metrics.jsonl``, without non-finite and non-numeric values."""
        if not self._all or "step" not in record:
            return
        others = {name: value for name, value in record.items() if name not in ("step", "evaluation")}
        named = {f"{_TRAINING}{name}": value for name, value in others.items()}
        named |= {f"{_EVALUATION}{name}": value for name, value in record.get("evaluation", {}).items()}
        if others:
            named[f"{_TRAINING}samples"] = record["step"] * self._batch
        numbers = {name: float(value) for name, value in named.items() if isinstance(value, int | float)}
        metrics = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for name in [name for name in self._all if name not in self._failed]:
            self._failed.add(name)  # until the write succeeds
            with _survived(name):
                self._all[name].write(metrics, record["step"])
                self._failed.remove(name)

    def close(self, *, finished: bool = True) -> None:
        """Flushes pending metrics. Failed loggers are closed silently: they may still be able to mark the run as
        ended."""
        for name, logger in self._all.items():
            with contextlib.suppress(Exception) if name in self._failed else _survived(name):
                logger.close(finished=finished)


@contextlib.contextmanager
def _survived(name: str) -> Iterator[None]:
    """Context for a logger's code: prints failures, without credentials in URLs."""
    try:
        yield
    except Exception as error:  # packages may raise anything
        why = anonymous(reason(error))[:400]
        message = f"{name} failed and gets no more metrics; the training continues, and metrics.jsonl has them all"
        print(f"dsframe: {message} ({why})", file=sys.stderr, flush=True)


def _folder(section: Any, default: Path) -> Path:
    """Returns ``output_path/job_name``, as DeepSpeed does, or ``default`` without ``output_path``."""
    return Path(str(section.output_path), str(section.job_name)) if section.output_path else default


def _run_id(directory: Path) -> str:
    """Returns an id that identifies this run's files in a shared folder. A resumed run keeps it."""
    note = directory / LOGGER_ID
    if not note.exists():
        note.write_text(f"{uuid.uuid4().hex}\n", encoding="utf-8")
    return note.read_text(encoding="utf-8").strip()


class _TensorBoard(Logger):
    """Deletes only files of this run from its folder, and only when the run starts over."""

    def __init__(self, folder: Path, directory: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        suffix = f".dsframe-{_run_id(directory)}"
        for old in [] if done else folder.glob(f"events.out.tfevents.*{suffix}"):
            old.unlink()
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None, filename_suffix=suffix)

    def write(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


@contextlib.contextmanager
def _without_secrets() -> Iterator[None]:
    """Context that hides secrets in sys.argv, while wandb records the command."""
    arguments, sys.argv = sys.argv, redact(sys.argv)
    try:
        yield
    finally:
        sys.argv = arguments


class _Wandb(Logger):
    def __init__(self, section: Any, about: Json, directory: Path, *, resumed: bool) -> None:
        import wandb

        note = directory / "wandb-run-id"
        run_id = note.read_text(encoding="utf-8").strip() if resumed and note.exists() else None
        with _without_secrets():
            self._run: Any = wandb.init(
                project=section.project,
                group=section.group,
                entity=section.team,
                config=dict(about),
                dir=str(directory),
                id=run_id,
                resume="allow" if run_id else None,
            )
        note.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, metrics: Metrics, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=int(not finished))
