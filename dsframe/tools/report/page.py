"""``dsframe report RUN``: a run, or several beside each other, as one HTML file that needs nothing but itself."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from dsframe.data.files import replacing
from dsframe.text import printable
from dsframe.tools.commands import command
from dsframe.tools.plan.report_prediction import format_prediction
from dsframe.tools.report.pictures import COLOURS, MISSING, Axis, Bar, Bars, Chart, Line, available, inline
from dsframe.tools.report.runs import Figure, Figures, Run, apart, figures, largest, names, read_run, understood

_STYLE = """
:root{color-scheme:light dark;--ink:#16181c;--soft:#555b66;--paper:#fff;--rule:#e4e6ea;--tint:#f4f5f7}
@media(prefers-color-scheme:dark){:root{--ink:#eceef2;--soft:#a5acb8;--paper:#15171b;--rule:#33373f;--tint:#1f2228}
}
body{font:15px/1.5 Helvetica,Arial,sans-serif;color:var(--ink);background:var(--paper);max-width:1310px;margin:1.6em auto;
padding:0 1.2em}h1{font-size:1.6em;margin:.2em 0;overflow-wrap:anywhere}h2{font-size:1.15em;margin:1.8em 0 .3em}
p{max-width:60em;margin:.35em 0}.lead{font-size:1.05em}.note,caption{color:var(--soft)}.wide{overflow-x:auto}
table{border-collapse:collapse;margin:.8em 0}th,td{padding:.2em 0 .2em 1.6em;text-align:right;vertical-align:top}
th:first-child{padding-left:0;text-align:left;font-weight:normal;color:var(--soft)}td{font-variant-numeric:tabular-nums}
tr{border-bottom:1px solid var(--rule)}thead th{white-space:nowrap}tr.head th{padding-top:1em;color:var(--ink);font-weight:bold}
.origin td{text-align:left}pre{background:var(--tint);padding:.8em;overflow:auto}
.columns{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:.6em 1.6em;align-items:start}
@media(max-width:1050px){.columns{grid-template-columns:minmax(0,1fr)}}figure{margin:0 0 .8em}
svg{display:block;width:100%;max-width:760px;height:auto}
.mark{display:inline-block;width:.8em;height:.8em;border:1px solid var(--paper)}
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("report", "A run's page, from what its directory holds.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory; several are overlaid")
    add("-o", "--output", type=Path, metavar="FILE.html", help="default: RUN/report.html")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page, prints predictions beside measurements, returns 0. Raises DataError where a directory holds no run."""
    options = parser().parse_args(argv)
    target = options.output or options.runs[0] / "report.html"
    with understood():
        found = [read_run(run, name) for run, name in zip(options.runs, names(options.runs), strict=True)]
        text = page(found).encode("utf-8", errors="replace")
        lines = [f"{run.name}: {format_prediction(run.summary, run.predicted)}" for run in found if run.summary]
    if options.output:
        target.write_bytes(text)
    else:  # a directory that may be another's: a link there is not followed
        with replacing(target) as file:
            file.write(text)
    for line in [*lines, str(target)]:
        print(printable(line))
    return 0


def page(runs: Sequence[Run]) -> str:
    """The HTML text. Every figure of the tables is in it once more as JSON, in ``<script id="figures">``."""
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    found = [figures(run, runs[0]) for run in runs]
    left, right, below = charts(runs)
    parts = [f"<h1>{escape(title)}</h1>", *(f'<p class="lead">{escape(line)}</p>' for line in findings(runs))]
    columns = [left, right] if right else [[one] for one in left]
    if not available():
        parts.append(f'<p class="note">{escape(MISSING)}</p>')
    parts.append(f'<div class="columns">{"".join(f"<div>{_figures(column)}</div>" for column in columns)}')
    parts.append(f"{_figures(below)}</div>")
    parts.append(f'<h2>In figures</h2><div class="wide">{_table(runs, found)}</div>')
    for run in runs:
        parts += _origin(run)
    flat = [{name: value for section in one.values() for name, value in section.items()} for one in found]
    data = json.dumps({run.name: one for run, one in zip(runs, flat, strict=True)}).replace("<", "\\u003c")
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n"
        f'<script type="application/json" id="figures">{data}</script>\n</body></html>\n'
    )


_FILES = (
    "In its directory: <code>run.json</code> (the above), <code>config.json</code> (the file that ran, with every override: "
    "<code>--config RUN/config.json</code> trains it again), <code>metrics.jsonl</code> (what was logged), "
    "<code>summary.json</code> (the figures of a finished run), <code>checkpoints</code>; <code>dsframe report RUN</code> makes "
    "this page from them."
)


def findings(runs: Sequence[Run]) -> list[str]:
    """What a comparison comes to, in a sentence each: who is how far from the first, and who is fastest."""
    first, *others = runs
    found = []
    far = [(value, run) for run in others if (value := largest(run, first)) is not None]
    if far:
        worst, run = max(far, key=lambda pair: pair[0])
        steps = len(apart(run, first))
        found.append(
            f"Training loss: over {steps} logged steps no run differs from {first.name} by more than {worst:.1e} ({run.name})."
            if worst
            else f"Training loss: the same in all runs, over {steps} logged steps."
        )
    rated = [(statistics.median(run.all("rate")), run) for run in runs if run.all("rate")]
    if len(rated) > 1:
        (best, run), (least, slowest) = (pick(rated, key=lambda pair: pair[0]) for pick in (max, min))
        ranges = f"; their ranges overlap: {run.name} {_range(run)}, {slowest.name} {_range(slowest)}"
        overlap = len(run.all("rate")) > 1 and min(run.all("rate")) <= max(slowest.all("rate"))
        found.append(
            f"Speed: {run.name} is fastest with {best:,.0f} {run.unit} a second, {best / least:.2f} times {slowest.name}"
            f"{ranges if overlap else ''}."
        )
    return found


def _range(run: Run) -> str:
    rates = run.all("rate")
    return f"{min(rates):,.0f} to {max(rates):,.0f}"


Pictures = list[Chart | Bars]


def charts(runs: Sequence[Run]) -> tuple[Pictures, Pictures, Pictures]:
    """The losses and how far they are apart; bars, of several runs; the others, as far as recorded."""
    steps = Axis("optimizer step", whole=True)
    wanted = [
        ("Training loss", "loss", Axis("mean over the global batch")),
        ("Gradient norm", "gradient_norm", Axis("L2 norm before clipping", log=True)),
        ("Learning rate", "learning_rate", Axis("per update")),
        ("Speed during training", "rate", Axis(f"{runs[0].unit} a second, all ranks together")),
    ]
    metrics = sorted({name for run in runs for record in run.records for name in record.get("evaluation", {})})
    wanted += [(f"Evaluation: {name}", f"evaluation.{name}", Axis("over all held-out samples")) for name in metrics]
    found: list[tuple[str, Chart | Bars]] = []
    for title, key, axis in wanted:
        lines = [Line(run.name, run.curve(key), series=place) for place, run in enumerate(runs)]
        if key == "rate":
            lines = [replace(line, points=[(at, rate) for at, rate in line.points if rate > 0]) for line in lines]
        if any(len(line.points) > 1 for line in lines):  # one point is in the table
            found.append((key, Chart(title, steps, axis, lines)))
    left = [picture for key, picture in found if key == "loss"]
    differences = [Line(run.name, apart(run, runs[0]), series=place) for place, run in enumerate(runs) if place]
    above = [value for line in differences for _, value in line.points if value > 0]
    if above:
        floor = 10.0 ** (math.floor(math.log10(min(above))) - 1)
        axis = Axis("absolute difference", log=True, floor=float(f"{floor:.0e}"))
        left.append(Chart(f"Difference of the training loss to {runs[0].name}", steps, axis, differences))
    return left, _bars(runs) if len(runs) > 1 else [], [picture for key, picture in found if key != "loss"]


def _bars(runs: Sequence[Run]) -> Pictures:
    """Speed, start and memory of several runs, each left out where no run has it."""
    speed, start, memory = [], [], []
    for place, run in enumerate(runs):
        if rates := run.all("rate"):
            middle = statistics.median(rates)
            said = f"{middle:,.0f}" + (f" ({min(rates):,.0f} to {max(rates):,.0f})" if len(rates) > 1 else "")
            speed.append(Bar(run.name, middle, said, place, rates if len(rates) > 1 else ()))
        if after := run.first_step_after():
            middle = statistics.median(after)
            start.append(Bar(run.name, middle, f"{middle:.1f} s", place, after if len(after) > 1 else ()))
        if peaks := [peak / 2**20 for peak in (run.all("peak_memory_bytes") or [()])[0]]:
            said = f"{max(peaks):,.0f} MiB" + (f" (least {min(peaks):,.0f})" if len(peaks) > 1 else "")
            memory.append(Bar(run.name, max(peaks), said, place, peaks if len(peaks) > 1 else ()))
    wanted = [
        ("Speed", f"{runs[0].unit} a second, all ranks; median, dots are repeats", speed),
        ("Peak memory", "MiB of the fullest rank; dots are ranks", memory),
        ("Time to first step", "seconds from the start of rank 0's process to the end of its first step", start),
    ]
    return [Bars(title, label, rows) for title, label, rows in wanted if rows]


def _figures(pictures: Pictures) -> str:
    return "".join(f"<figure>{inline(picture)}</figure>" for picture in pictures) if available() else ""


def _table(runs: Sequence[Run], found: Sequence[Figures]) -> str:
    heads = "".join(
        f'<th scope="col"><span class="mark" style="background:{COLOURS[place % len(COLOURS)]}"></span> {escape(run.name)}</th>'
        if len(runs) > 1
        else '<th scope="col"></th>'
        for place, run in enumerate(runs)
    )
    rows = []
    for heading in found[0]:
        keys = list(dict.fromkeys(key for one in found for key in one[heading]))
        kept = {key: [one[heading].get(key) for one in found] for key in keys}
        kept = {key: values for key, values in kept.items() if any(value is not None for value in values)}
        if kept:
            rows.append(f'<tr class="head"><th colspan="{len(runs) + 1}">{escape(heading)}</th></tr>')
        for key, values in kept.items():
            cells = "".join(f"<td>{escape(_shown(value))}</td>" for value in values)
            rows.append(f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>')
    return f"<table><thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _shown(value: Figure) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:,.4g}" if value >= 1e-3 or value == 0 else f"{value:.2g}".replace("e-0", "e-")


def _origin(run: Run) -> list[str]:
    """Where the figures come from, and the file that ran."""
    parts = [f"<h2>Where {escape(run.name)} comes from</h2>"]
    origin = dict(run.origin)
    versions = {name: value for name, value in (origin.pop("versions", None) or {}).items() if value}
    commit = origin.pop("git", None)
    rows = {
        "command": shlex.join(origin.pop("command", [])),
        "started": origin.pop("started", ""),
        "directory": origin.pop("directory", ""),
        "git commit": f"{commit['commit']}{' with changes' if commit['changed'] else ''}" if commit else "",
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
        "machine": ", ".join(
            _machine(key, origin[key]) for key in ("host", "cpu", "cores", "gpus", "system") if origin.get(key)
        ),
    }
    rows["checkpoints"] = ", ".join(f"{name} ({size / 1e6:,.3g} MB)" for name, size in run.checkpoints)
    cells = "".join(f"<tr><th>{key}</th><td>{escape(value)}</td></tr>" for key, value in rows.items() if value)
    parts.append(f'<table class="origin">{cells}</table>' if cells else '<p class="note">no run.json</p>')
    if run.config:
        text = escape(json.dumps(run.config, indent=2))
        parts.append(f'<p class="note">{_FILES}</p>')
        parts.append(f"<details><summary>The file that ran</summary><pre>{text}</pre></details>")
    return parts


def _machine(key: str, value: object) -> str:
    return f"{value} cores" if key == "cores" else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
