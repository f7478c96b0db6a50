"""``dsframe compare RUN RUN ...``: compares finished runs in a table, and says whether they are the same training."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsframe.errors import DataError
from dsframe.run_dir.record import read_metrics
from dsframe.text import columns
from dsframe.tools.commands import Argv, command
from dsframe.tools.report import runs
from dsframe.tools.report.runs import Run, printable

EPILOG = """\
Whether model, data and file are the same comes first. Differences are to the first run. The last lines say
whether the first steps are those of one training.
"""
_EARLY, _ROUNDING, _ROUNDING_16 = 10, 1e-5, 2e-3
"""Up to this step the same training's losses differ by at most this on any engine (docs/promise.md), and in 16 bits."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("compare", "Several runs: loss, metrics, speed, memory.", EPILOG)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directories of finished runs")
    return parser


def main(argv: Argv = None) -> int:
    """Prints the table and returns 0. Raises DataError if a run is not finished."""
    options = parser().parse_args(argv)
    with runs.understood():
        compared = _read(dict(zip(runs.names(options.runs), options.runs, strict=True)))
        print("\n".join(_lines(compared)))
    return 0


def losses(directory: Path) -> dict[int, float]:
    """Returns the logged training losses by step. Raises DataError if there is no run."""
    records = read_metrics(directory)
    return {record["step"]: record["loss"] for record in records if record.get("loss") is not None}


def table(directories: Mapping[str, Path]) -> str:
    """Returns the comparison as text, by name. Raises DataError if a run is not finished."""
    return "\n".join(_lines(_read(directories)))


def _read(directories: Mapping[str, Path]) -> list[Run]:
    compared = [runs.read_run(directory, name) for name, directory in directories.items()]
    for run in compared:
        if not run.summary:
            raise DataError(f"{run.name} has no summary.json: it has not come to its end")
    return compared


def _lines(compared: Sequence[Run]) -> list[str]:
    curves = [dict(run.curve("loss")) for run in compared]
    common = sorted(set.intersection(*map(set, curves)))
    shown = [step for step in common if f"{step:.0f}".rstrip("0") in ("1", "2", "5") or step == common[-1]]
    names = ["", *(run.name for run in compared)]
    rows = runs.rows(compared)
    for step in shown:
        first = curves[0][step]
        others = (f"{curve[step]:.6f}  {curve[step] - first:+.1e}" for curve in curves[1:])
        rows.append([f"loss at step {step:,.0f}", f"{first:.6f}", *others])
    differing = runs.file_differences(compared)
    bound = _ROUNDING_16 if any(run.in_16_bits for run in compared) else _ROUNDING
    sentences = verdicts([run.name for run in compared], curves, bound)
    same = columns([[printable(cell) for cell in row] for row in runs.sameness(compared)], left=2)
    tables = [_table([names, *table]) for table in (differing, rows) if table]
    blocks = [same, *tables, [*map(printable, sentences)]] if len(compared) > 1 else tables
    return [line for block in blocks if block for line in ("", *block)][1:]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *lines = columns([[printable(cell) for cell in row] for row in rows], left=len(rows[0]))
    return [head, "-" * len(head), *lines]


def verdicts(names: Sequence[str], curves: Sequence[Mapping[float, float]], bound: float) -> list[str]:
    """Returns a sentence for each run but the first: whether its losses show the same training. ``bound``: largest
    difference due to rounding.

    Only the first ``_EARLY`` steps count, because training amplifies rounding later.
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
            verdict = f"not the same training as {names[0]}: at step {step:,.0f} the losses differ by"
            verdict += f" {apart[step]:.1e}, which is more than rounding"
        else:
            verdict = f"the same training as {names[0]}: up to step {steps[-1]:,.0f} the losses differ by"
            verdict += f" {max(apart.values()):.1e}, as rounding does"
        sentences.append(f"{name}: {verdict} (up to {bound:.0e})")
    return sentences
