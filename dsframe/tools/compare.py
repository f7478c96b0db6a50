"""``dsframe compare RUN RUN ...``: finished runs in one table; ``dsframe compare A.json B.json``
trains them first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsframe.config import find, load
from dsframe.errors import DataError
from dsframe.run_dir.record import read_metrics
from dsframe.text import columns, printable
from dsframe.tools import subprocess_runs
from dsframe.tools.commands import add_overrides, command
from dsframe.tools.report import page, runs
from dsframe.tools.report.runs import Run

EPILOG = """\
Files are trained by dsframe launch, each --repeats times and in turns, so that a machine that becomes
slower does so for all. Differences are to the first; times of several repeats are medians. The last
lines say whether the first steps are those of one training. "sent" is counted if the file has
comms_logger.
"""
_EARLY, _ROUNDING, _ROUNDING_16 = 10, 1e-5, 2e-3
"""Until this step the losses of one training differ by no more than this on any engine
(docs/promise.md), in 16 bits by this."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("compare", "Several runs: loss, metrics, speed, memory.", EPILOG)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN|FILE.json", help="directories of finished runs, or files to train")
    add("-np", "--processes", type=int, default=1, metavar="N", help="of each training (default 1)")
    add("--engines", metavar="NAME,NAME", help="train each file on each of these")
    add("--repeats", type=int, default=1, metavar="N", help="trainings of each (default 1)")
    add_overrides(parser, "one key in all files")
    add("--out", type=Path, default=Path("runs/compare"), metavar="DIR", help="where the trainings go")
    add("--html", type=Path, metavar="FILE.html", help="also as a page (with files: DIR/report.html)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns 0. Raises the subclasses of DsframeError."""
    options = parser().parse_args(argv)
    if options.processes < 1 or options.repeats < 1:
        parser().error("-np and --repeats must be at least 1")
    directories = [Path(name).is_dir() for name in options.runs]
    if any(directories) and not all(directories):
        parser().error("either directories of finished runs or files to train, not both")
    target: Path | None = options.html
    if all(directories):
        if options.engines:
            parser().error("--engines is for files that are still to be trained")
        groups = {str(run): [Path(run)] for run in options.runs}
    else:
        groups = _train(options)
        target = target or options.out / "report.html"
    with runs.understood():
        compared = _read(groups)
        print("\n".join(_lines(compared)))
        if target:
            target.write_bytes(page.page(compared).encode("utf-8", errors="replace"))
            print(f"\n{target}")
    return 0


def _train(options: argparse.Namespace) -> dict[str, list[Path]]:
    """Trains every file on every engine, in turns; the directories by name."""
    engines: list[str | None] = options.engines.split(",") if options.engines else [None]
    files = [find(name) for name in options.runs]
    labels = runs.names([file.with_suffix("") for file in files])
    wanted = {}
    for label, file in zip(labels, files, strict=True):
        for engine in engines:
            chosen = [f"dsframe.engine={engine}"] if engine else []
            load(file, overrides=[*options.overrides, *chosen])  # all mistakes before the first training
            name = engine if engine and len(files) == 1 else f"{label} {engine or ''}".strip()
            wanted[name] = file, engine
    groups: dict[str, list[Path]] = {name: [] for name in wanted}
    for repeat in range(1, options.repeats + 1):
        for name, (file, engine) in wanted.items():
            directory = options.out / f"{name.replace(' ', '-').replace('/', '-')}-{repeat}"
            print(f"dsframe compare: {name}, {repeat} of {options.repeats}", file=sys.stderr, flush=True)
            overrides = options.overrides
            subprocess_runs.train(file, options.processes, directory, engine=engine, overrides=overrides)
            groups[name].append(directory)
    return groups


def losses(directory: Path) -> dict[int, float]:
    """Training loss by step, as logged. Raises DataError where there is no run."""
    records = read_metrics(directory)
    return {record["step"]: record["loss"] for record in records if record.get("loss") is not None}


def table(groups: Mapping[str, Sequence[Path]]) -> str:
    """The comparison as text: by name, the directories of one run and its repeats. Raises DataError
    where a run did not come to its end."""
    return "\n".join(_lines(_read(groups)))


def _read(groups: Mapping[str, Sequence[Path]]) -> list[Run]:
    compared = [runs.read_run(first, name, repeats) for name, (first, *repeats) in groups.items()]
    for run in compared:
        if not all(one.summary for one in (run, *run.repeats)):
            raise DataError(f"{run.name} has no summary.json: it has not come to its end")
    return compared


def _lines(compared: Sequence[Run]) -> list[str]:
    curves = [dict(run.curve("loss")) for run in compared]
    common = sorted(set.intersection(*map(set, curves)))
    shown = [step for step in common if f"{step:.0f}".rstrip("0") in ("1", "2", "5") or step == common[-1]]
    rows = [["", *(run.name for run in compared)], *runs.rows(compared)]
    for step in shown:
        first = curves[0][step]
        others = (f"{curve[step]:.6f}  {curve[step] - first:+.1e}" for curve in curves[1:])
        rows.append([f"loss at step {step:,.0f}", f"{first:.6f}", *others])
    head, *lines = columns([[printable(cell) for cell in row] for row in rows], left=len(rows[0]))
    noise = [runs.largest(run, run.repeats) or 0.0 for run in compared]
    bound = _ROUNDING_16 if any(run.in_16_bits for run in compared) else _ROUNDING
    bound = max(bound, 3 * max(noise))
    said = verdicts([run.name for run in compared], curves, bound)
    return [head, "-" * len(head), *lines, *([""] if said else []), *map(printable, said)]


def verdicts(names: Sequence[str], curves: Sequence[Mapping[float, float]], bound: float) -> list[str]:
    """Returns a sentence for each run but the first: whether it is the same training, as far as its
    losses tell. ``bound``: by what rounding, or a repeat of one run, makes losses differ.

    The first ``_EARLY`` steps decide: later ones differ by rounding that the training has multiplied.
    """
    sentences = []
    for name, curve in zip(names[1:], curves[1:], strict=True):
        common = sorted(set(curve) & set(curves[0]))
        steps = [step for step in common if step <= _EARLY] or common
        if not steps:
            sentences.append(f"{name}: no step was logged by both runs")
            continue
        apart = {step: abs(curve[step] - curves[0][step]) for step in steps}
        different = [step for step in steps if apart[step] > bound]
        if different:
            step = different[0]
            what = f"not the same training as {names[0]}: at step {step:,.0f} the losses differ by"
            what += f" {apart[step]:.1e}, which is more than rounding"
        else:
            what = f"the same training as {names[0]}: up to step {steps[-1]:,.0f} the losses differ by"
            what += f" {max(apart.values()):.1e}, as rounding does"
        sentences.append(f"{name}: {what} (up to {bound:.0e})")
    return sentences
