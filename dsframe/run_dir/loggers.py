"""TensorBoard, Weights & Biases, CSV and Comet, as DeepSpeed's own sections ask for them, the same on every engine.

DeepSpeed 0.19.8 writes nothing but the learning rate when the program calls backward itself. So the sections are taken off
before DeepSpeed sees them, and rank 0 writes what ``metrics.jsonl`` has, ``train/loss`` and ``eval/accuracy``, over optimizer
steps, as other tools do; ``train/samples`` counts the samples.

None of them ends a training: one that fails is said once, with the reason, and gets nothing more.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import math
import os
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsframe.config.features import needed_packages
from dsframe.config.read.findings import dotted
from dsframe.config.read.secrets import anonymous, redact
from dsframe.config.value import Config
from dsframe.errors import Problem
from dsframe.run_dir.names import CSV, LOGGER_ID, TENSORBOARD
from dsframe.text import reason

_TRAINING, _EVALUATION = "train/", "eval/"
"""What the names of metrics begin with."""


def missing(config: Config) -> list[Problem]:
    """What the file asks for without its package."""
    problems = []
    for path, package in needed_packages(config.deepspeed, config.settings):
        if importlib.util.find_spec(package) is None:
            message = f"needs the package {package}, which is not installed"
            remedy = f"pip install {package}, or take it out"
            problem = config.error(path, message, remedy, code="not-installed")
            problems.append(replace(problem, path=dotted(path[:-1])))
    return problems


class Logger(ABC):
    """One destination of metrics. Only rank 0 has one."""

    @abstractmethod
    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """``metrics``: finite numbers, by DeepSpeed's names."""

    def log_image(self, name: str, pixels: Any, step: int) -> None:  # noqa: B027 - not all take images
        """``pixels``: a uint8 array ``[height, width, channels]``."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Sends what is still held. ``finished``: the training was not stopped, and has not failed."""


class Loggers:
    """All that a file asks for."""

    def __init__(
        self, config: Config, about: Mapping[str, Any], directory: Path, train_batch_size: int, done_steps: int
    ) -> None:
        """``about``: the run, for those that keep a description. ``done_steps``: of an earlier run, whose metrics stay."""
        file = config.deepspeed
        self._batch = train_batch_size
        known: Mapping[str, tuple[Any, Callable[[], Logger]]] = {
            "tensorboard": (
                file.tensorboard,
                lambda: _TensorBoard(_folder(file.tensorboard, directory / TENSORBOARD), directory, done_steps),
            ),
            "csv_monitor": (
                file.csv_monitor,
                lambda: _Csv(_folder(file.csv_monitor, directory / CSV), directory, done_steps),
            ),
            "wandb": (file.wandb, lambda: _Wandb(file.wandb, about, directory, resumed=done_steps > 0)),
            "comet": (file.comet, lambda: _Comet(file.comet, train_batch_size)),
        }
        self._all: dict[str, Logger] = {}
        self._failed: set[str] = set()
        for name, (section, make) in known.items():
            if section.enabled:
                with _survived(name):
                    self._all[name] = make()

    def write(self, record: Mapping[str, Any]) -> None:
        """What a record of ``metrics.jsonl`` has; numbers that are not finite and what is no number are left out."""
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
            self._failed.add(name)  # stays there where it fails
            with _survived(name):
                self._all[name].write(metrics, record["step"])
                self._failed.remove(name)

    def log_image(self, name: str, step: int, pixels: Any) -> None:
        """``pixels``: a uint8 array ``[height, width, channels]``."""
        for logger_name, logger in self._all.items():
            with _survived(logger_name):
                logger.log_image(name, pixels, step)

    def close(self, *, finished: bool = True) -> None:
        """Sends what is still held. One that has failed, which everybody knows, may still be able to say that the run is over."""
        for name, logger in self._all.items():
            with contextlib.suppress(Exception) if name in self._failed else _survived(name):
                logger.close(finished=finished)


@contextlib.contextmanager
def _survived(name: str) -> Iterator[None]:
    """Around what a logger does: says what fails, without the accounts that addresses in it may name."""
    try:
        yield
    except Exception as error:  # a package's own, of any kind
        why = anonymous(reason(error))[:400]
        what = f"{name} failed and gets no more metrics; the training continues, and metrics.jsonl has them all"
        print(f"dsframe: {what} ({why})", file=sys.stderr, flush=True)


def _folder(section: Any, default: Path) -> Path:
    """The section's ``output_path/job_name``, as DeepSpeed has it, or ``default`` where it names no path."""
    return Path(str(section.output_path), str(section.job_name)) if section.output_path else default


def _run_id(directory: Path) -> str:
    """What tells this run's files from other runs' in a folder that they share. A run that starts again keeps its own."""
    note = directory / LOGGER_ID
    if not note.exists():
        note.write_text(f"{uuid.uuid4().hex}\n", encoding="utf-8")
    return note.read_text(encoding="utf-8").strip()


class _TensorBoard(Logger):
    """Of the files in its folder only those that this run has written are ever removed: when it begins again."""

    def __init__(self, folder: Path, directory: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        suffix = f".dsframe-{_run_id(directory)}"
        for old in [] if done else folder.glob(f"events.out.tfevents.*{suffix}"):
            old.unlink()
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None, filename_suffix=suffix)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_image(self, name: str, pixels: Any, step: int) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        self._writer.close()


class _Csv(Logger):
    """A table for each metric, with lines of step and value.

    Tables of another run or another program stay as they are: in a folder that has some, this run writes into a folder of its own.
    A run that starts again takes off its lines after the checkpoint.
    """

    def __init__(self, folder: Path, directory: Path, done: int) -> None:
        run_id, owner = _run_id(directory), folder / ".dsframe-run"
        is_ours = owner.read_text(encoding="utf-8").strip() == run_id if owner.exists() else not [*folder.glob("*.csv")]
        self._folder = folder if is_ours else folder / run_id[:8]
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / owner.name).write_text(f"{run_id}\n", encoding="utf-8")
        for old in (
            path for name in (_TRAINING, _EVALUATION) for path in self._folder.glob(f"{_file_name(name)}*.csv")
        ):
            head, *rows = old.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) or [""]
            if head.startswith("step,"):
                kept = [row for row in rows if (at := row.partition(",")[0]).isdecimal() and int(at) <= done]
                old.write_text("".join([head, *kept]), encoding="utf-8")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            path = self._folder / f"{_file_name(name)}.csv"
            head: Sequence[Any] = [] if path.exists() else [("step", name.rpartition("/")[2])]
            with path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([*head, (step, value)])

    def close(self, *, finished: bool) -> None:
        pass


def _file_name(figure: str) -> str:
    return figure.replace("/", "_").replace(" ", "_")


@contextlib.contextmanager
def _without_secrets() -> Iterator[None]:
    """While wandb and Comet write down the command.

    Another list, which stays as it is: Comet keeps the list itself (3.58, ``env_logging.get_command``), and a thread of its own
    writes down what is in it later.
    """
    words, sys.argv = sys.argv, redact(sys.argv)
    try:
        yield
    finally:
        sys.argv = words


class _Wandb(Logger):
    def __init__(self, section: Any, about: Mapping[str, Any], directory: Path, *, resumed: bool) -> None:
        import wandb

        note = directory / "wandb-run-id"
        known = note.read_text(encoding="utf-8").strip() if resumed and note.exists() else None
        with _without_secrets():
            self._run: Any = wandb.init(
                project=section.project,
                group=section.group,
                entity=section.team,
                config=dict(about),
                dir=str(directory),
                id=known,
                resume="allow" if known else None,
            )
        note.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_image(self, name: str, pixels: Any, step: int) -> None:
        import wandb

        self._run.log({name: wandb.Image(pixels)}, step=step)

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=int(not finished))


class _Comet(Logger):
    def __init__(self, section: Any, batch: int) -> None:
        # It would log what goes to TensorBoard once more, or warn that it came too late, and print a summary.
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        os.environ.setdefault("COMET_DISPLAY_SUMMARY_LEVEL", "0")
        import comet_ml

        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        with _without_secrets():
            self._run: Any = comet_ml.start(**{name: getattr(section, name) for name in names})
        if section.experiment_name is not None:
            self._run.set_name(section.experiment_name)
        self._interval, self._last = section.samples_log_interval / batch, -math.inf

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        if step != self._last and step - self._last < self._interval:
            return
        self._last = step
        for name, value in metrics.items():
            self._run.log_metric(name, value, step=step)

    def log_image(self, name: str, pixels: Any, step: int) -> None:
        self._run.log_image(pixels, name=name, step=step)

    def close(self, *, finished: bool) -> None:
        self._run.end()
