"""``dsframe compare RUN RUN ...``: finished runs side by side."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsframe.errors import DataError
from dsframe.report.record import read_metrics, read_summary


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and returns 0; 6 (DataError) where a directory holds no finished run."""
    parser = argparse.ArgumentParser(
        prog="dsframe compare", description="Finished runs side by side: loss, metrics, speed, memory."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's directory; differences are to the first"
    )
    options = parser.parse_args(argv)
    try:
        print(table(options.runs))
    except DataError as error:
        parser.exit(error.exit_code, f"dsframe compare: {error}\n")
    return 0


def losses(directory: Path) -> dict[int, float]:
    """Training loss by step, as logged. Raises DataError where there is no run."""
    return {record["step"]: record["loss"] for record in read_metrics(directory) if record.get("loss") is not None}


def table(runs: Sequence[Path]) -> str:
    """The comparison as text, in columns. Raises DataError where a run did not come to its end."""
    summaries = [read_summary(run) for run in runs]
    curves = [losses(run) for run in runs]
    rows: list[list[str]] = [["", *(str(run) for run in runs)]]
    rows.append(["engine", *(summary["description"] for summary in summaries)])
    rows.append(["processes", *(f"{summary['world_size']} ({summary['launcher']})" for summary in summaries)])
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    rows += [
        _loss_row(step, curves) for step in common if str(step).rstrip("0") in ("1", "2", "5") or step == common[-1]
    ]
    if common and len(runs) > 1:
        worst = [max(abs(curve[step] - curves[0][step]) for step in common) for curve in curves[1:]]
        rows.append([f"largest of {len(common)} steps", "", *(f"{difference:+.1e}" for difference in worst)])
    for name in summaries[0]["metrics"]:
        rows.append([f"evaluation {name}", *(_figure(summary["metrics"].get(name), ".4f") for summary in summaries)])
    unit = summaries[0]["unit"]
    rows.append([f"{unit}/s", *(f"{summary['rate']:,.0f}" for summary in summaries)])
    rows.append(["training time, s", *(f"{summary['seconds']:.1f}" for summary in summaries)])
    rows.append(["start to engine, s", *(f"{summary['start_seconds']:.1f}" for summary in summaries)])
    rows.append(
        [
            "peak memory per rank, MiB",
            *("  ".join(f"{peak / 2**20:,.0f}" for peak in s["peak_memory_bytes"]) for s in summaries),
        ]
    )
    return _align(rows)


def _loss_row(step: int, curves: Sequence[dict[int, float]]) -> list[str]:
    first = curves[0][step]
    others = [f"{curve[step]:.6f}  {curve[step] - first:+.1e}" for curve in curves[1:]]
    return [f"loss at step {step:,}", f"{first:.6f}", *others]


def _figure(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)


def _align(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
