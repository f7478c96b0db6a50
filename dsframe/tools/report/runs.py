"""Reads runs' directories, and the numbers that pages and tables show."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsframe.errors import DataError
from dsframe.run_dir.record import read_config, read_metrics, read_origin, read_summary
from dsframe.text import Json, keys, reason

Value = float | str | None


def printable(text: str) -> str:
    """Returns ``text`` with control characters replaced, so that names from files cannot move a terminal's cursor."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


@dataclass(frozen=True)
class Run:
    """Content of a run's directory."""

    name: str
    records: Sequence[Json]
    summary: Json
    """Empty until the run has finished successfully."""
    origin: Json
    config: Json

    def curve(self, key: str) -> list[tuple[float, float]]:
        """Returns ``key`` by step, as logged; ``evaluation.NAME`` for a metric of the evaluations."""
        outer, _, inner = key.partition(".")
        points = []
        for record in self.records:
            value = record.get(outer)
            value = value.get(inner) if inner and isinstance(value, dict) else value
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                points.append((float(record["step"]), float(value)))
        return points

    @property
    def about(self) -> Json:
        """The run's own description: engine, model, data."""
        return self.summary or self.records[0].get("run", {})

    @property
    def unit(self) -> str:
        """Counted unit: samples or tokens."""
        return str(self.summary.get("unit", "units"))

    @property
    def in_16_bits(self) -> bool:
        sections = [self.config.get(name) for name in ("bf16", "fp16", "torch_autocast")]
        return any(isinstance(section, dict) and section.get("enabled") for section in sections)


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """Context for code that expects dsframe's records. Raises DataError if they are not."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        why = printable(reason(error, 200))
        message = f"the runs' records are damaged, or dsframe has not written them: {why}"
        raise DataError(message) from error


def read_run(directory: Path, name: str | None = None) -> Run:
    """Reads a run's directory. Raises DataError if there is no run."""
    records = read_metrics(directory)
    try:
        summary = read_summary(directory)
    except DataError:
        summary = {}
    name = name or directory.resolve().name
    return Run(name, records, summary, read_origin(directory), read_config(directory))


def names(runs: Sequence[Path]) -> list[str]:
    """Returns the shortest distinct ends of the paths."""
    for depth in range(1, max(len(run.resolve().parts) for run in runs) + 1):
        short = ["/".join(run.resolve().parts[-depth:]) for run in runs]
        if len(set(short)) == len(runs):
            return short
    return [str(run) for run in runs]


def differences(run: Run, other: Run) -> list[tuple[float, float]]:
    """Returns absolute differences of the training losses at the steps that both have logged."""
    others = dict(other.curve("loss"))
    return [(step, abs(loss - others[step])) for step, loss in run.curve("loss") if step in others]


def numbers(run: Run, first: Run) -> dict[str, Value]:
    """Returns unrounded values about ``run``, with units in the names, and losses compared with those of ``first``."""
    about = run.about
    losses = run.curve("loss")
    peaks = [size / 2**20 for size in run.summary.get("peak_memory_bytes", ())]
    phases = run.summary.get("startup_seconds")
    apart = [] if first is run else [value for _, value in differences(run, first)]
    return {
        "engine": about.get("description"),
        "processes": about.get("world_size"),
        "launcher": about.get("launcher"),
        "state": "finished" if run.summary else "not finished",
        "steps": run.summary.get("steps") or (int(losses[-1][0]) if losses else 0),
        "last training loss": losses[-1][1] if losses else None,
        "largest difference of the loss": max(apart, default=None),
        **{f"evaluation: {name}": value for name, value in run.summary.get("metrics", {}).items()},
        f"{run.unit} a second": run.summary.get("rate"),
        "training time, s": run.summary.get("seconds"),
        "start to engine, s": run.summary.get("start_seconds"),
        "time to first step, s": sum(phases.values()) if phases else None,
        "peak memory of the fullest rank, MiB": max(peaks, default=None),
        "peak memory by rank, MiB": ", ".join(f"{peak:,.0f}" for peak in peaks[:8]) or None,
    }


def sameness(runs: Sequence[Run]) -> list[list[str]]:
    """Returns whether the runs have the same model, data and file, as far as all have recorded it: a row for each."""
    differing = len(file_differences(runs))
    file = f"{differing} key{'s differ' if differing > 1 else ' differs'}" if differing else "the same"
    return [
        *([name, _same([keys(run.about.get(name, {})) for run in runs])] for name in ("model", "data")),
        ["file", file],
    ]


def _same(recorded: Sequence[Mapping[str, str]]) -> str:
    common = [key for key in recorded[0] if all(key in of_run for of_run in recorded)]
    if not common:
        return "not recorded by every run"
    differing = [key for key in common if len({of_run[key] for of_run in recorded}) > 1]
    descriptions = [_identity(key, [of_run[key] for of_run in recorded]) for key in differing]
    return f"not the same: {', '.join(descriptions)}" if descriptions else "the same"


def _identity(key: str, values: Sequence[str]) -> str:
    """Omits digests, which tell a reader nothing."""
    return key if key.startswith(("code of ", "sample ")) else f"{key} {' / '.join(values)}"


def file_differences(runs: Sequence[Run]) -> list[list[str]]:
    """Returns the keys that differ between the runs' files, with each run's value."""
    files = [keys(run.config) for run in runs]
    names = dict.fromkeys(key for file in files for key in file if key != "dsframe.run_dir")
    table = [[key, *(file.get(key, "") for file in files)] for key in names]
    return [row for row in table if len(set(row[1:])) > 1]


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Returns :func:`numbers` of the runs as a table, without empty rows."""
    of_runs = [numbers(run, runs[0]) for run in runs]
    keys = dict.fromkeys(key for values in of_runs for key in values)
    kept = [key for key in keys if any(values.get(key) is not None for values in of_runs)]
    return [[key, *(_shown(values.get(key)) for values in of_runs)] for key in kept]


def _shown(value: Value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:,.4g}" if value >= 1e-3 or value == 0 else f"{value:.2g}".replace("e-0", "e-")
