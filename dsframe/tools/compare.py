"""``dsframe compare RUN RUN ...``: finished runs side by side; ``dsframe compare A.json B.json -np N`` makes them first."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsframe.config import find, load
from dsframe.run_dir.record import read_config, read_metrics, read_summary
from dsframe.text import columns, printable
from dsframe.tools import subprocess_runs
from dsframe.tools.commands import add_overrides, command
from dsframe.tools.report import page, runs

EPILOG = """\
Files are trained by dsframe launch, each --repeats times and in turns, so that a machine that becomes slower does so for all.
Differences are to the first. "noise" is the largest difference of a loss between repeats of one run. The last lines say whether
the first steps are those of one training. Speeds and times of several repeats are the median, with the slowest and the fastest.
"sent" is counted if the file has comms_logger.
"""
_EARLY, _ROUNDING, _ROUNDING_16 = 10, 1e-5, 2e-3
"""Until this step the losses of one training differ by no more than this on any engine (docs/promise.md), in 16 bits by this."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("compare", "Runs side by side: loss, metrics, speed, memory.", EPILOG)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN|FILE.json", help="directories of finished runs, or files to train")
    add("-np", "--processes", type=int, default=1, metavar="N", help="processes of each training (default 1)")
    add("--engines", metavar="NAME,NAME", help="train each file on each of these")
    add("--repeats", type=int, default=1, metavar="N", help="trainings of each (default 1)")
    add_overrides(parser, "one key in all files")
    add(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        metavar="DIR",
        help="where the trainings go (default %(default)s)",
    )
    add("--html", type=Path, metavar="FILE.html", help="also as a page (default with files: DIR/report.html)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns 0. Raises the subclasses of DsframeError, and what a run that failed leaves with."""
    options = parser().parse_args(argv)
    if options.processes < 1 or options.repeats < 1:
        parser().error("-np and --repeats must be at least 1")
    are_runs = [Path(name).is_dir() for name in options.runs]
    if any(are_runs) and not all(are_runs):
        parser().error("either directories of finished runs or files to train, not both")
    target: Path | None = options.html
    if all(are_runs):
        if options.engines:
            parser().error("--engines is for files that are still to be trained")
        groups = {str(run): [Path(run)] for run in options.runs}
    else:
        groups = _train(options)
        target = target or options.out / "report.html"
    with runs.understood():
        print(table(groups))
    if target:
        with runs.understood():
            found = [runs.read_run(first, name, repeats) for name, (first, *repeats) in groups.items()]
            text = page.page(found).encode("utf-8", errors="replace")
        target.write_bytes(text)
        print(f"\n{target}")
    return 0


def _train(options: argparse.Namespace) -> dict[str, list[Path]]:
    """Trains every file on every engine, in turns; the directories by name."""
    engines: list[str | None] = options.engines.split(",") if options.engines else [None]
    files = [find(name) for name in options.runs]
    for file in files:  # all mistakes before the first training
        for engine in engines:
            load(file, overrides=[*options.overrides, *([f"dsframe.engine={engine}"] if engine else [])])
    overrides = options.overrides
    labels = runs.names([file.with_suffix("") for file in files])
    wanted = [
        (" ".join(part for part in (label if len(files) > 1 or not engine else "", engine) if part), file, engine)
        for label, file in zip(labels, files, strict=True)
        for engine in engines
    ]
    groups: dict[str, list[Path]] = {name: [] for name, _, _ in wanted}
    for repeat in range(1, options.repeats + 1):
        for name, file, engine in wanted:
            directory = options.out / f"{name.replace(' ', '-').replace('/', '-')}-{repeat}"
            print(f"dsframe compare: {name}, {repeat} of {options.repeats}", file=sys.stderr, flush=True)
            subprocess_runs.train(file, options.processes, directory, engine=engine, overrides=overrides)
            groups[name].append(directory)
    return groups


def losses(directory: Path) -> dict[int, float]:
    """Training loss by step, as logged. Raises DataError where there is no run."""
    return {record["step"]: record["loss"] for record in read_metrics(directory) if record.get("loss") is not None}


def table(groups: Mapping[str, Sequence[Path]]) -> str:
    """The comparison as text, in columns: by name, the directories of one run or of its repeats.

    Losses and metrics are those of the first repeat. Raises DataError where a run did not come to its end.
    """
    found = [runs.read_run(first, name, repeats) for name, (first, *repeats) in groups.items()]
    summaries = [read_summary(first) for first, *_ in groups.values()]
    for _, *repeats in groups.values():
        for repeat in repeats:
            read_summary(repeat)
    curves = [dict(run.curve("loss")) for run in found]
    rows: list[list[str]] = [["", *groups]]
    repeated = any(run.repeats for run in found)
    rows.append(["engine", *(summary["description"] for summary in summaries)])
    rows.append(["processes", *(f"{summary['world_size']} ({summary['launcher']})" for summary in summaries)])
    common = sorted(int(step) for step in set.intersection(*(set(curve) for curve in curves)))
    noise = _noise_by_step(found) if repeated else {}
    rows += [
        [*_loss_row(step, curves), *([f"{noise[step]:.1e}"] if step in noise else [])]
        for step in common
        if str(step).rstrip("0") in ("1", "2", "5") or step == common[-1]
    ]
    if common and len(groups) > 1:
        worst = [max(abs(curve[step] - curves[0][step]) for step in common) for curve in curves[1:]]
        rows.append([f"largest of {len(common)} steps", "", *(f"{difference:+.1e}" for difference in worst)])
    if repeated:
        rows.append(["largest to its repeats", *(_figure(runs.noise(run), ".1e") for run in found)])
    for name in summaries[0]["metrics"]:
        rows.append([f"evaluation {name}", *(_figure(summary["metrics"].get(name), ".4f") for summary in summaries)])
    units = [run.unit for run in found]
    same = len(set(units)) == 1
    rates = [f"{spread(run.all('rate'))}{'' if same else f' {run.unit}/s'}" for run in found]
    rows.append([f"{units[0]}/s" if same else "speed", *rates])
    rows.append(["training time, s", *(spread(run.all("seconds"), ".1f") for run in found)])
    rows.append(["start to engine, s", *(spread(run.all("start_seconds"), ".1f") for run in found)])
    rows.append(["time to first step, s", *(spread(run.first_step_after(), ".1f") for run in found)])
    peaks = ("  ".join(f"{peak / 2**20:,.0f}" for peak in summary["peak_memory_bytes"]) for summary in summaries)
    rows.append(["peak memory per rank, MiB", *peaks])
    network = [runs.communication(run) for run in found]
    for label, key, form in (
        ("sent by a rank a step, MB", "sent", ".4g"),
        ("predicted to be sent, MB", "predicted", ".4g"),
    ):
        if any(one[key] is not None for one in network):
            rows.append([label, *(_figure(one[key], form) for one in network)])
    if noise:
        rows[0].append("noise")
    width = max(map(len, rows))
    rows = [[printable(cell) for cell in (*row, *[""] * (width - len(row)))] for row in rows]
    head, *lines = columns(rows, left=len(rows[0]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    short = [_in_16_bits(first) for first, *_ in groups.values()]
    said = verdicts(list(groups), curves, max(noise.values(), default=None), in_16_bits=any(short))
    return "\n".join([head, "  ".join("-" * width for width in widths), *lines, *([""] if said else []), *said])


def verdicts(
    names: Sequence[str], curves: Sequence[Mapping[float, float]], noise: float | None, *, in_16_bits: bool
) -> list[str]:
    """Returns a sentence for each run but the first: whether it is the same training, as far as its losses tell.

    ``noise``: the largest difference of a run's losses to its repeats. The first ``_EARLY`` steps decide: later ones differ by
    rounding that the training has multiplied.
    """
    bound = _ROUNDING_16 if in_16_bits else _ROUNDING
    if noise is not None:
        bound = max(bound, 3 * noise)
    said = []
    for name, curve in zip(names[1:], curves[1:], strict=True):
        common = sorted(set(curve) & set(curves[0]))
        steps = [step for step in common if step <= _EARLY] or common
        if not steps:
            said.append(f"{printable(name)}: no step was logged by both runs")
            continue
        differences = {step: abs(curve[step] - curves[0][step]) for step in steps}
        largest = max(differences.values())
        if largest <= bound:
            what, where, why = "the same training as", f"up to step {steps[-1]:,.0f}", "as rounding does"
        else:
            step = next(step for step in steps if differences[step] > bound)
            what, where, why = "not the same training as", f"at step {step:,.0f}", "which is more than rounding"
            largest = differences[step]
        what = f"{what} {names[0]}: {where} the losses differ by {largest:.1e}, {why}"
        said.append(printable(f"{name}: {what} (up to {bound:.0e})"))
    return said


def _in_16_bits(directory: Path) -> bool:
    sections = map(read_config(directory).get, ("bf16", "fp16", "torch_autocast"))
    return any(isinstance(section, dict) and section.get("enabled") for section in sections)


def _noise_by_step(found: Sequence[runs.Run]) -> dict[float, float]:
    """The largest difference of a loss to that of a repeat, by step, over all runs that have repeats."""
    largest: dict[float, float] = {}
    for run in found:
        curve = dict(run.curve("loss"))
        for repeat in run.repeats:
            for step, loss in repeat.curve("loss"):
                if step in curve:
                    largest[step] = max(largest.get(step, 0.0), abs(loss - curve[step]))
    return largest


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """The median, and of several the smallest and the largest; nothing of none."""
    if not values:
        return ""
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}} to {max(values):{form}})"


def _loss_row(step: int, curves: Sequence[Mapping[float, float]]) -> list[str]:
    first = curves[0][step]
    others = [f"{curve[step]:.6f}  {curve[step] - first:+.1e}" for curve in curves[1:]]
    return [f"loss at step {step:,}", f"{first:.6f}", *others]


def _figure(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
