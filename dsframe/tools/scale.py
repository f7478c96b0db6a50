"""``dsframe scale``: one file trained on several numbers of processes: time, speed-up and efficiency.

Strong scaling keeps the global batch, and each process has less to do. Weak scaling keeps the batch
of each process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsframe.config import Config, default_config, load
from dsframe.config.read import secrets
from dsframe.engines import TABLE, named
from dsframe.errors import ConfigError
from dsframe.run_dir.record import read_summary
from dsframe.text import columns
from dsframe.tools import subprocess_runs
from dsframe.tools.commands import add_overrides, command

KINDS = ("strong", "weak")
_HEADS = ("processes", "samples a step", "ms a step", "samples/s", "speed-up", "efficiency")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("scale", __doc__.split("\n")[0].partition(": ")[2])
    add = parser.add_argument
    add("--config", default=default_config(), metavar="FILE", help="a path, or a name in ds_configs/")
    counts = "numbers of processes to measure; speed-up is relative to the first"
    add("-np", "--processes", required=True, metavar="N,N,...", help=counts)
    add_overrides(parser)
    add("--kinds", choices=(*KINDS, "both"), default="both")
    add("--repeats", type=int, default=1, metavar="N", help="trainings of each, in turns (default 1)")
    add("--out", type=Path, default=Path("runs/scale"), metavar="DIR", help="where the trainings go")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints the tables and returns 0. Raises the subclasses of DsframeError."""
    options = parser().parse_args(argv)
    try:
        counts = list(dict.fromkeys(int(word) for word in options.processes.split(",")))
    except ValueError as error:
        parser().error(str(error))
    if min(counts) < 1 or options.repeats < 1:
        parser().error("numbers of processes and of repeats must be at least 1")
    config = load(options.config, overrides=options.overrides)
    kinds = KINDS if options.kinds == "both" else (options.kinds,)
    files = {(kind, n): file_for(config, kind, counts[0], n) for kind in kinds for n in counts}
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in files}
    for repeat in range(1, options.repeats + 1):
        for (kind, processes), file in files.items():
            print(f"dsframe scale: {kind}, {processes} process(es), {repeat}", file=sys.stderr, flush=True)
            directory = options.out / f"{kind}-np{processes}-{repeat}"
            seconds[kind, processes].append(_step_seconds(file, processes, directory))
    report = {kind: [_point(files[kind, n], n, seconds[kind, n]) for n in counts] for kind in kinds}
    (options.out / "scale.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print("\n\n".join(table(kind, points) for kind, points in report.items()))
    return 0


def _replicas(config: Config) -> bool:
    return TABLE[named(config.settings.engine)].replicas


def file_for(config: Config, kind: str, first: int, processes: int) -> dict[str, Any]:
    """The file for so many processes, with the batch of each process as on ``first`` (weak), or the
    global batch (strong). Raises ConfigError where the global batch does not divide."""
    base = config.batch(first, replicas=_replicas(config))
    micro, steps = base.micro_batch_size, base.accumulation_steps
    file = config.written()
    file.pop("train_batch_size", None)
    file |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
    if kind == "weak":
        return file
    ranks = load(file).batch(processes, replicas=_replicas(config)).data_parallel_size
    share, rest = divmod(base.train_batch_size, ranks)
    if rest or not share:
        message = f"{base.train_batch_size} samples cannot be divided among {ranks} processes"
        remedy = "leave that number of processes out"
        raise ConfigError([config.error(("train_batch_size",), message, remedy, code="batch")])
    while share % steps:  # fewer micro-batches where a rank has fewer samples than before
        steps -= 1
    return file | {
        "train_micro_batch_size_per_gpu": share // steps,
        "gradient_accumulation_steps": steps,
    }


def _step_seconds(file: dict[str, Any], processes: int, directory: Path) -> float:
    """Trains, and returns the seconds of a step."""
    with tempfile.TemporaryDirectory() as private:  # the file may hold passwords
        path = Path(private) / "file.json"
        path.write_text(json.dumps(file), encoding="utf-8")
        subprocess_runs.train(path, processes, directory)
    written = json.dumps(secrets.without(file), indent=2) + "\n"
    (directory / "file.json").write_text(written, encoding="utf-8")
    summary = read_summary(directory)
    return float(summary["units_per_step"] / summary["rate"])


def _point(file: dict[str, Any], processes: int, seconds: Sequence[float]) -> dict[str, Any]:
    config = load(file)
    batch = config.batch(processes, replicas=_replicas(config))
    median = statistics.median(seconds)
    return {"processes": processes, "samples": batch.train_batch_size, "seconds": median, "all": [*seconds]}


def table(kind: str, points: Sequence[dict[str, Any]]) -> str:
    """Time, speed-up and efficiency of each number of processes."""
    rates = [point["samples"] / point["seconds"] for point in points]
    rows: list[Sequence[str]] = [_HEADS]
    for point, rate in zip(points, rates, strict=True):
        speed_up = rate / rates[0]
        efficiency = speed_up * points[0]["processes"] / point["processes"]
        numbers = (f"{point['processes']:,}", f"{point['samples']:,}", f"{point['seconds'] * 1e3:,.4g}")
        rows.append([*numbers, f"{rate:,.4g}", f"{speed_up:.2f}", f"{efficiency:.0%}"])
    return "\n".join([f"{kind} scaling", *columns(rows, left=0)])
