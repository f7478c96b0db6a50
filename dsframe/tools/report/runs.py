"""What runs' directories hold, and the figures that are made of it: of one run, or of one and its repeats."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsframe.checkpoint.store import Store
from dsframe.errors import DataError
from dsframe.run_dir.record import read_config, read_metrics, read_origin, read_summary
from dsframe.text import printable, reason
from dsframe.tools.plan import report_prediction

Figure = float | str | None
Figures = dict[str, dict[str, Figure]]
"""By heading: figures by name, with the unit in the name."""


@dataclass(frozen=True)
class Run:
    """What a run's directory holds."""

    name: str
    records: Sequence[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while it runs, and after a failure."""
    origin: dict[str, Any]
    config: dict[str, Any]
    checkpoints: Sequence[tuple[str, int]] = ()
    """Name and bytes of each, newest first."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """By the plan, of a finished run; ``problem`` where it cannot be predicted."""
    repeats: Sequence[Run] = ()
    """The same training again, for what differs from one time to the next; itself not among them."""

    def curve(self, key: str) -> list[tuple[float, float]]:
        """``key`` by step, as logged; ``evaluation.NAME`` for a metric of the evaluations."""
        outer, _, inner = key.partition(".")
        found = []
        for record in self.records:
            value = record.get(outer)
            value = value.get(inner) if inner and isinstance(value, dict) else value
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                found.append((float(record["step"]), float(value)))
        return found

    def all(self, key: str) -> list[Any]:
        """``key`` of the summaries of this run and its repeats, where there is one."""
        found = [one.summary.get(key) for one in (self, *self.repeats) if one.summary]
        return [value for value in found if value is not None]

    @property
    def unit(self) -> str:
        """What is counted: samples or tokens."""
        return str((self.summary or {}).get("unit", "units"))

    def step_seconds(self) -> list[float]:
        """Of this run and of its repeats."""
        return [units / rate for units, rate in zip(self.all("units_per_step"), self.all("rate"), strict=True) if rate]

    def first_step_after(self) -> list[float]:
        """Seconds from the start of rank 0's process (without the record of that: of its run) to the end of its first step; of
        this run and of its repeats."""
        summaries = [one.summary for one in (self, *self.repeats) if one.summary]
        return [
            sum(phases.values())
            if (phases := one.get("startup_seconds"))
            else one["start_seconds"] + one["first_step_seconds"]
            for one in summaries
            if "first_step_seconds" in one
        ]


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Around what takes records for dsframe's own: raises DataError where they are of other kinds, as somebody else's may be."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = printable(reason(error, 200))
        raise DataError(f"the runs' records are damaged, or dsframe has not written them: {why}") from error


def read_run(directory: Path, name: str | None = None, repeats: Sequence[Path] = ()) -> Run:
    """A run with its prediction, which takes seconds: its model is run without memory. Raises DataError where there is no run."""
    found = _read(directory)
    guess = report_prediction.predicted(directory, found.summary) if found.summary else {}
    return replace(found, name=name or found.name, predicted=guess, repeats=tuple(_read(one) for one in repeats))


def _read(directory: Path) -> Run:
    records = read_metrics(directory)
    try:
        summary: dict[str, Any] | None = read_summary(directory)
    except DataError:
        summary = None
    saved = list(_checkpoints(directory))
    return Run(directory.resolve().name, records, summary, read_origin(directory), read_config(directory), saved)


def _checkpoints(directory: Path) -> Iterator[tuple[str, int]]:
    for folder in Store(directory / "checkpoints").newest_first():
        with contextlib.suppress(OSError):  # a run that goes on removes old ones meanwhile
            yield folder.name, sum(file.stat().st_size for file in folder.iterdir())


def names(runs: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    for depth in range(1, max(len(run.resolve().parts) for run in runs) + 1):
        short = ["/".join(run.resolve().parts[-depth:]) for run in runs]
        if len(set(short)) == len(runs):
            return short
    return [str(run) for run in runs]


def apart(run: Run, other: Run) -> list[tuple[float, float]]:
    """Absolute difference of the training losses, by the steps that both have logged."""
    theirs = dict(other.curve("loss"))
    return [(at, abs(loss - theirs[at])) for at, loss in run.curve("loss") if at in theirs]


def largest(run: Run, other: Run) -> float | None:
    """The largest of :func:`apart`; None where no step is common."""
    return max((difference for _, difference in apart(run, other)), default=None)


def noise(run: Run) -> float | None:
    """The largest difference of the losses to the repeats; None where there are none."""
    found = (largest(run, repeat) for repeat in run.repeats)
    return max((value for value in found if value is not None), default=None)


def communication(run: Run) -> dict[str, float | None]:
    """MB that a rank sends in a step: counted on rank 0, where the file has ``comms_logger``, and predicted."""
    guess, counted = run.predicted.get("sent_bytes_per_step"), run.curve("sent_bytes")
    return {
        "sent": counted[-1][1] / 1e6 if counted else None,
        "predicted": sum(guess.values()) / 1e6 if guess is not None else None,
    }


def figures(run: Run, first: Run) -> Figures:
    """What is known of ``run``, unrounded; its losses are compared with those of ``first``."""
    about = run.summary or run.records[0].get("run", {})
    summary = run.summary or {}
    losses, predicted = run.curve("loss"), run.predicted
    rates = run.all("rate")
    training: dict[str, Figure] = {
        "engine": about.get("description"),
        "processes": about.get("world_size"),
        "launcher": about.get("launcher"),
        "state": "finished" if run.summary else "not finished",
        "steps": summary.get("steps") or (int(losses[-1][0]) if losses else 0),
        "last training loss": losses[-1][1] if losses else None,
    }
    if first is not run:
        training[f"largest difference of the loss to {first.name}"] = largest(run, first)
    if run.repeats:
        training["largest difference of the loss to its repeats"] = noise(run)
    training |= {f"evaluation: {name}": value for name, value in summary.get("metrics", {}).items()}
    speed: dict[str, Figure] = {f"{run.unit} a second": _median(rates)}
    if len(rates) > 1:
        speed |= {"slowest of the repeats": min(rates), "fastest of the repeats": max(rates), "repeats": len(rates)}
    speed |= {
        "step, ms": _median(run.step_seconds(), 1e3),
        "start to engine, s": _median(run.all("start_seconds")),
        "time to first step, s": _median(run.first_step_after()),
        "training time, s": _median(run.all("seconds")),
    }
    return {
        "Training": training,
        "Speed": speed,
        "Memory": _memory(run, predicted),
        "Communication": _communication(run),
    }


def _memory(run: Run, predicted: Mapping[str, Any]) -> dict[str, Figure]:
    peaks = [value / 2**20 for value in (run.all("peak_memory_bytes") or [[]])[0]]
    few = 1 < len(peaks) <= 8
    return {
        "peak memory of the fullest rank, MiB": max(peaks, default=None),
        "peak memory, predicted, MiB": predicted["memory_bytes"] / 2**20 if "memory_bytes" in predicted else None,
        "peak memory by rank, MiB": ", ".join(f"{peak:,.0f}" for peak in peaks) if few else None,
    }


def _communication(run: Run) -> dict[str, Figure]:
    known = communication(run)
    return {"sent by a rank in a step, MB": known["sent"], "sent, predicted, MB": known["predicted"]}


def _median(values: Sequence[float], scale: float = 1.0) -> float | None:
    return statistics.median(values) * scale if values else None
