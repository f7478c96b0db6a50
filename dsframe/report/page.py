"""``dsframe report RUN``: a run, or several beside each other, as one HTML file that needs nothing but itself."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from dsframe.errors import DataError
from dsframe.report.record import read_config, read_metrics, read_origin, read_summary
from dsframe.report.svg import Axis, Line, chart

_STYLE = """
body{font:15px/1.5 Helvetica,Arial,sans-serif;color:#111;background:#fff;max-width:62em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:.6em 0}th,td{padding:.2em .9em .2em 0;text-align:left;vertical-align:top}
td.n{text-align:right;font-variant-numeric:tabular-nums}tr{border-bottom:1px solid #ddd}h2{margin:1.6em 0 .3em}
pre{background:#f5f5f5;padding:.8em;overflow:auto}svg{max-width:100%;height:auto;display:block;margin:.4em 0}
.note{color:#555}
"""
EQUAL = 1e-9
"""Where a difference of zero is drawn on a logarithmic axis: below what fp32 losses can differ by."""


@dataclass(frozen=True)
class Run:
    """What a run's directory holds."""

    name: str
    records: Sequence[dict[str, Any]]
    summary: dict[str, Any] | None
    """None while it runs, and after a failure."""
    origin: dict[str, Any]
    config: dict[str, Any]

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


def read_run(directory: Path, name: str | None = None) -> Run:
    """Raises DataError where there is no run."""
    records = read_metrics(directory)
    try:
        summary: dict[str, Any] | None = read_summary(directory)
    except DataError:
        summary = None
    return Run(name or directory.name, records, summary, read_origin(directory), read_config(directory))


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page and returns 0. Raises DataError where a directory holds no run."""
    parser = argparse.ArgumentParser(prog="dsframe report", description="A run's page, from what its directory holds.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory; several are overlaid")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.html", help="default: RUN/report.html")
    options = parser.parse_args(argv)
    target = options.output or options.runs[0] / "report.html"
    write(options.runs, target)
    print(target)
    return 0


def write(runs: Sequence[Path], target: Path) -> None:
    """The page of some runs' directories. Raises DataError where one holds no run."""
    found = [read_run(run, name) for run, name in zip(runs, names(runs), strict=True)]
    target.write_text(page(found), encoding="utf-8")


def names(runs: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    for depth in range(1, max(len(run.resolve().parts) for run in runs) + 1):
        short = ["/".join(run.resolve().parts[-depth:]) for run in runs]
        if len(set(short)) == len(runs):
            return short
    return [str(run) for run in runs]


def page(runs: Sequence[Run]) -> str:
    """The HTML text. Every figure of the tables is in it once more as JSON, in ``<script id="figures">``."""
    title = " beside ".join(run.name for run in runs)
    parts = [f"<h1>{escape(title)}</h1>"]
    figures = [_figures(run) for run in runs]
    parts.append(_table(runs, figures))
    parts += [f"<figure>{picture}</figure>" for picture in charts(runs)]
    for run in runs:
        parts += _origin(run)
    data = json.dumps({run.name: found for run, found in zip(runs, figures, strict=True)}).replace("<", "\\u003c")
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'</head><body>\n{body}\n<script type="application/json" id="figures">{data}</script>\n</body></html>\n'
    )


def charts(runs: Sequence[Run]) -> list[str]:
    """Each as ``<svg>``, those left out for which nothing was recorded."""
    unit = next((run.summary["unit"] for run in runs if run.summary), "units")
    steps = Axis("optimizer step", whole=True)
    wanted = [
        ("Training loss", "loss", Axis("loss, mean over the global batch")),
        ("Gradient norm before clipping", "gradient_norm", Axis("L2 norm", log=True)),
        ("Learning rate", "learning_rate", Axis("learning rate")),
        ("Speed", "rate", Axis(f"{unit} a second, all ranks")),
    ]
    metrics = sorted({name for run in runs for record in run.records for name in record.get("evaluation", {})})
    wanted += [(f"Evaluation: {name}", f"evaluation.{name}", Axis(name)) for name in metrics]
    found = []
    for title, key, axis in wanted:
        lines = [Line(run.name, run.curve(key), series=number) for number, run in enumerate(runs)]
        if key == "rate":
            lines = [replace(line, points=[(at, rate) for at, rate in line.points if rate > 0]) for line in lines]
        if any(line.points for line in lines):
            found.append(chart(title, steps, axis, lines))
    if len(runs) > 1:
        first = dict(runs[0].curve("loss"))
        apart = [
            Line(
                run.name, [(at, abs(loss - first[at])) for at, loss in run.curve("loss") if at in first], series=number
            )
            for number, run in enumerate(runs[1:], start=1)
        ]
        if any(difference > 0 for line in apart for _, difference in line.points):
            label = Axis(f"absolute difference of the loss ({EQUAL:g}: none)", log=True)
            apart = [replace(line, points=[(at, max(value, EQUAL)) for at, value in line.points]) for line in apart]
            found.insert(1, chart(f"Difference of the training loss to {runs[0].name}", steps, label, apart))
    return found


def _figures(run: Run) -> dict[str, float | str | None]:
    """What the table shows, unrounded."""
    about = run.summary or run.records[0].get("run", {})
    summary = run.summary or {}
    losses = run.curve("loss")
    predicted = summary.get("predicted", {})
    peaks = summary.get("peak_memory_bytes", [])
    seconds = predicted.get("seconds_per_step")
    rate = summary.get("rate")
    units = summary.get("units_per_step")
    step_seconds = units / rate if units and rate else None
    sent = predicted.get("sent_bytes_per_step")
    found: dict[str, float | str | None] = {
        "engine": about.get("description"),
        "processes": about.get("world_size"),
        "state": "finished" if run.summary else "not finished",
        "steps": summary.get("steps") or (losses[-1][0] if losses else 0),
        "last training loss": losses[-1][1] if losses else None,
    }
    found |= {f"evaluation {name}": value for name, value in summary.get("metrics", {}).items()}
    found |= {
        f"{summary.get('unit', 'units')} a second": rate,
        "training time, s": summary.get("seconds"),
        "start to engine, s": about.get("start_seconds"),
        "first step, s": summary.get("first_step_seconds"),
        "step, measured, ms": step_seconds * 1e3 if step_seconds else None,
        "step, predicted, ms": seconds * 1e3 if seconds else None,
        "memory of the fullest rank, measured, MiB": max(peaks) / 2**20 if peaks else None,
        "memory of the fullest rank, predicted, MiB": predicted["memory_bytes"] / 2**20
        if "memory_bytes" in predicted
        else None,
        "sent by a rank in a step, predicted, MB": sum(sent.values()) / 1e6 if sent is not None else None,
    }
    return found


def _table(runs: Sequence[Run], figures: Sequence[dict[str, float | str | None]]) -> str:
    rows = ["<tr><th></th>" + "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "</tr>"]
    for key in dict.fromkeys(key for found in figures for key in found):
        values = [found.get(key) for found in figures]
        if any(value is not None for value in values):
            cells = "".join(f'<td class="n">{escape(_shown(value))}</td>' for value in values)
            rows.append(f"<tr><th>{escape(key)}</th>{cells}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _shown(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.5g}"


def _origin(run: Run) -> list[str]:
    """Where the figures come from, and the file that ran."""
    parts = [f"<h2>{escape(run.name)}</h2>"]
    origin = dict(run.origin)
    versions = {name: value for name, value in (origin.pop("versions", None) or {}).items() if value}
    commit = origin.pop("git", None)
    rows = {
        "command": shlex.join(origin.pop("command", [])),
        "started": origin.pop("started", ""),
        "git commit": f"{commit['commit']}{' with changes' if commit['changed'] else ''}" if commit else "",
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        "machine": ", ".join(str(origin[key]) for key in ("host", "cpu", "cores", "gpus", "system") if origin.get(key)),
    }
    cells = "".join(f"<tr><th>{key}</th><td>{escape(value)}</td></tr>" for key, value in rows.items() if value)
    parts.append(f"<table>{cells}</table>" if cells else '<p class="note">no run.json</p>')
    if run.config:
        text = escape(json.dumps(run.config, indent=2))
        parts.append(f"<details><summary>The file that ran</summary><pre>{text}</pre></details>")
    return parts
