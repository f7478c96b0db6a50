"""``dsframe scale``: one file trained on several numbers of processes: time, speed-up and efficiency.

Strong scaling keeps the global batch, and each process has less to do. Weak scaling keeps the batch of each process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsframe.config import DEFAULT_CONFIG, Config, load
from dsframe.config.read import secrets
from dsframe.engines import TABLE, named
from dsframe.errors import ConfigError, Problem
from dsframe.run_dir.record import read_summary
from dsframe.text import columns
from dsframe.tools import subprocess_runs
from dsframe.tools.commands import add_overrides, command
from dsframe.tools.report import pictures
from dsframe.tools.report.pictures import Axis, Chart, Line


@dataclass(frozen=True)
class Point:
    """One number of processes."""

    processes: int
    samples: int
    """Of a step, on all processes."""
    seconds: float
    """Of a step: the median of the repeats."""
    slowest: float
    crowded: bool = False
    """Whether processes had to share this machine's cores or GPUs."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("scale", __doc__.split("\n")[0].partition(": ")[2])
    add = parser.add_argument
    add("--config", default=DEFAULT_CONFIG, metavar="FILE", help="a path, or a name in ds_configs/")
    add(
        "-np",
        "--processes",
        required=True,
        metavar="N,N,...",
        help="numbers of processes to measure; speed-up is relative to the first",
    )
    add("--engine", help="short for --set dsframe.engine=...")
    add_overrides(parser)
    add("--kinds", choices=("strong", "weak", "both"), default="both")
    add("--repeats", type=int, default=1, metavar="N", help="trainings of each, in turns (default 1)")
    add("--out", type=Path, default=Path("runs/scale"), metavar="DIR", help="where trainings, table and plot go")
    add("--format", choices=("text", "json"), default="text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints the tables and returns 0. Raises the subclasses of DsframeError."""
    options = parser().parse_args(argv)
    try:
        counts = [int(word) for word in options.processes.split(",")]
    except ValueError as error:
        parser().error(str(error))
    if min(counts) < 1 or options.repeats < 1:
        parser().error("numbers of processes and of repeats must be at least 1")
    overrides = [*options.overrides, *([f"dsframe.engine={options.engine}"] if options.engine else [])]
    config = load(options.config, overrides=overrides)
    kinds = ("strong", "weak") if options.kinds == "both" else (options.kinds,)
    options.out.mkdir(parents=True, exist_ok=True)
    files = {(kind, n): file_for(config, kind, counts[0], n) for kind in kinds for n in dict.fromkeys(counts)}
    seconds = _measure(files, options)
    results = {kind: _points(config, kind, counts, seconds) for kind in kinds}
    report = {kind: [asdict(point) for point in points] for kind, points in results.items()}
    (options.out / "scale.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    tables = "\n\n".join(table(kind, points) for kind, points in results.items())
    print(json.dumps(report, indent=2) if options.format == "json" else tables)
    if pictures.available():
        pictures.write(options.out / "scale.svg", draw(results))
    print(f"\n{options.out / 'scale.svg' if pictures.available() else pictures.MISSING}", file=sys.stderr)
    return 0


def file_for(config: Config, kind: str, first: int, processes: int) -> dict[str, Any]:
    """The file for so many processes: the same global batch as on ``first`` (strong), or the same share of each (weak).

    Raises ConfigError where the global batch does not divide.
    """
    replicas = _replicas(config)
    base = config.batch(first, replicas=replicas)
    micro, steps = base.micro_batch_size, base.accumulation_steps
    file = config.written()
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        file.pop(key, None)
    file |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    other = load(file).batch(processes, replicas=replicas)
    if kind == "strong":
        share, rest = divmod(base.train_batch_size, other.data_parallel_size)
        while share % steps:  # fewer micro-batches where a share has fewer samples than before
            steps -= 1
        if rest or not share:
            message = f"{base.train_batch_size} samples cannot be divided among {other.data_parallel_size} processes"
            remedy = "leave that number of processes out"
            raise ConfigError([Problem("error", "train_batch_size", message, remedy, str(config.path), code="batch")])
        file |= {"train_micro_batch_size_per_gpu": share // steps, "gradient_accumulation_steps": steps}
    return file


def _replicas(config: Config) -> bool:
    return TABLE[named(config.settings.engine)].replicas


def _measure(
    files: dict[tuple[str, int], dict[str, Any]], options: argparse.Namespace
) -> dict[tuple[str, int], list[float]]:
    """Seconds of a step, of each repeat."""
    found: dict[tuple[str, int], list[float]] = {key: [] for key in files}
    for repeat in range(1, options.repeats + 1):
        for (kind, processes), file in files.items():
            same = next((key for key in files if key[1] == processes and files[key] == file), (kind, processes))
            if same != (kind, processes):
                found[kind, processes] = found[same]
                continue
            directory = options.out / f"{kind}-np{processes}-{repeat}"
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / "file.json"
            path.write_text(json.dumps(secrets.without(file), indent=2) + "\n", encoding="utf-8")
            what = f"{kind}, {processes} process(es), {repeat} of {options.repeats}"
            print(f"dsframe scale: {what}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as private:  # nobody else reads there
                if secrets.without(file) != file:
                    path = Path(private) / "file.json"
                    path.write_text(json.dumps(file), encoding="utf-8")
                subprocess_runs.train(path, processes, directory)
            summary = read_summary(directory)
            found[kind, processes].append(summary["units_per_step"] / summary["rate"])
    return found


def _points(
    config: Config, kind: str, counts: Sequence[int], seconds: dict[tuple[str, int], list[float]]
) -> list[Point]:
    replicas = _replicas(config)
    points = []
    for processes in sorted(set(counts)):
        batch = load(file_for(config, kind, counts[0], processes)).batch(processes, replicas=replicas)
        times = seconds[kind, processes]
        crowded = processes > _devices()
        points.append(Point(processes, batch.train_batch_size, statistics.median(times), max(times), crowded))
    return points


def _devices() -> int:
    """How many processes of this host run without taking turns."""
    import torch

    return torch.cuda.device_count() or len(os.sched_getaffinity(0))


def table(kind: str, points: Sequence[Point]) -> str:
    """Time, speed-up and efficiency of each number of processes."""
    first = points[0]
    heads = "processes,samples a step,ms a step,slowest,samples/s,speed-up,ideal,efficiency"
    rows = [heads.split(",")]
    for point in points:
        ratio = speed_up(point, first)
        values = (point.seconds * 1e3, point.slowest * 1e3, point.samples / point.seconds)
        ideal = point.processes / first.processes
        rows.append(
            [
                f"{point.processes:,}{'*' * point.crowded}",
                f"{point.samples:,}",
                *(f"{value:,.4g}" for value in values),
                f"{ratio:.2f}",
                f"{ideal:.3g}",
                f"{ratio / ideal:.0%}",
            ]
        )
    lines = columns(rows, left=0)
    if any(point.crowded for point in points):
        here = f"this machine's {_devices()} cores or GPUs"
        lines.append(f"* more processes than {here}: they take turns, and cannot be faster")
    return "\n".join([f"{kind} scaling", *lines])


def speed_up(point: Point, first: Point) -> float:
    """Samples a second, as a multiple of those of ``first``."""
    return point.samples / point.seconds / (first.samples / first.seconds)


def draw(results: dict[str, list[Point]]) -> list[Chart]:
    """Returns a chart for each kind: speed-up over processes, measured and ideal."""
    charts = []
    for kind, points in results.items():
        first = points[0]
        fair = [point for point in points if not point.crowded]
        crowded = [*fair[-1:], *(point for point in points if point.crowded)] if len(fair) < len(points) else []
        lines = [
            Line("ideal", [(p.processes, p.processes / first.processes) for p in points], dashed=True, series=4),
            Line("measured, cores shared", [(p.processes, speed_up(p, first)) for p in crowded], series=3),
            Line("measured", [(p.processes, speed_up(p, first)) for p in fair], series=0),
        ]
        kept = "global batch" if kind == "strong" else "batch on each process"
        label = f"samples a second, as a multiple of those of {first.processes} process{'es' * (first.processes > 1)}"
        axes = Axis("processes", log=True, whole=True), Axis(label, log=True, whole=True)
        charts.append(Chart(f"{kind.capitalize()} scaling: the same {kept}", *axes, lines))
    return charts
