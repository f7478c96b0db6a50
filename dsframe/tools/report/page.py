"""``dsframe report RUN``: writes one or several runs as a self-contained HTML file."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dsframe.data.files import replacing
from dsframe.tools.commands import Argv, command
from dsframe.tools.report.pictures import MISSING, Chart, Line, available, ink, inline
from dsframe.tools.report.runs import Run, names, printable, read_run, rows, understood

_STYLE = """
:root{color-scheme:light dark;--ink:#16181c;--soft:#555b66;--paper:#fff;--rule:#e4e6ea;--tint:#f4f5f7}
@media(prefers-color-scheme:dark){
:root{--ink:#eceef2;--soft:#a5acb8;--paper:#15171b;--rule:#33373f;--tint:#1f2228}}
body{font:15px/1.5 Helvetica,Arial,sans-serif;color:var(--ink);background:var(--paper);
max-width:1310px;margin:1.6em auto;padding:0 1.2em}h1{font-size:1.6em;overflow-wrap:anywhere}
h2{font-size:1.15em;margin:1.8em 0 .3em}.note{color:var(--soft)}.wide{overflow-x:auto}
table{border-collapse:collapse;margin:.8em 0}tr{border-bottom:1px solid var(--rule)}
th,td{padding:.2em 0 .2em 1.6em;text-align:right;vertical-align:top}
th:first-child{padding-left:0;text-align:left;font-weight:normal;color:var(--soft);min-width:8em;overflow-wrap:anywhere}
td{font-variant-numeric:tabular-nums}.origin td{text-align:left;overflow-wrap:anywhere}
pre{background:var(--tint);padding:.8em;overflow:auto}figure{margin:0 0 .8em;overflow-x:auto}
.columns{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:.6em 1.6em}
@media(max-width:1050px){.columns{grid-template-columns:minmax(0,1fr)}}
svg{display:block;width:100%;min-width:320px;max-width:760px;height:auto}svg text{fill:currentColor}
.mark{display:inline-block;width:.8em;height:.8em;border:1px solid var(--paper)}
"""
_CURVES = (
    ("Gradient norm", "gradient_norm", "L2 norm before clipping", True),
    ("Learning rate", "learning_rate", "per update", False),
    ("Speed during training", "rate", "samples or tokens a second, all ranks", True),
)
_FILES = (
    "In its directory: <code>run.json</code> (the above), <code>config.json</code> (the file that ran, "
    "with every override: <code>--config RUN/config.json</code> trains it again), "
    "<code>metrics.jsonl</code> (what was logged), <code>summary.json</code> (the results), "
    "<code>checkpoints</code>."
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("report", "A run's page, from what its directory holds.")
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's directory; several are overlaid")
    add("-o", "--output", type=Path, metavar="FILE.html", help="default: RUN/report.html")
    return parser


def main(argv: Argv = None) -> int:
    """Writes the page, prints its path and returns 0. Raises DataError."""
    options = parser().parse_args(argv)
    target = options.output or options.runs[0] / "report.html"
    with understood():
        runs = list(map(read_run, options.runs, names(options.runs)))
        text = page(runs).encode("utf-8", errors="replace")
    if options.output:
        target.write_bytes(text)
    else:  # the directory may be someone else's: do not follow a link there
        with replacing(target) as file:
            file.write(text)
    print(printable(str(target)))
    return 0


def page(runs: Sequence[Run]) -> str:
    """Returns the HTML text."""
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    pictures = "".join(f"<figure>{inline(chart)}</figure>" for chart in charts(runs)) if available() else ""
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<div class="columns">{pictures}</div>' if pictures else f'<p class="note">{escape(MISSING)}</p>',
        _table(runs, rows(runs)),
        *(_origin(run) for run in runs),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Returns the charts of recorded curves."""
    recorded = (record.get("evaluation", {}) for run in runs for record in run.records)
    metrics = sorted({name for evaluation in recorded for name in evaluation})
    validation = [name for name in metrics if name.rpartition("/")[2] == "loss"]
    panels = [_losses(runs, validation)]
    wanted = [*_CURVES]
    for name in metrics:
        if name not in validation:
            wanted.append((f"Evaluation: {name}", f"evaluation.{name}", "over all validation samples", False))
    for title, key, label, log in wanted:
        lines = [Line(run.name, run.curve(key), index) for index, run in enumerate(runs)]
        panels.append(Chart(title, label, lines, log))
    # A single point is in the table.
    return [panel for panel in panels if any(len(line.points) > 1 for line in panel.lines)]


def _losses(runs: Sequence[Run], validation: Sequence[str]) -> Chart:
    """Returns training and validation (dashed) loss in one chart; of several runs in the run's colour."""
    alone = len(runs) == 1
    lines = [Line("training" if alone else run.name, run.curve("loss"), index) for index, run in enumerate(runs)]
    for number, name in enumerate(validation, 1):
        title = f"validation {name.rpartition('/')[0]}".strip()
        for index, run in enumerate(runs):
            points = run.curve(f"evaluation.{name}")
            lines.append(Line(title if alone else "_", points, number if alone else index, dashed=True))
    return Chart("Loss", "solid: training, dashed: validation", lines)


def _table(runs: Sequence[Run], cells: Sequence[Sequence[str]]) -> str:
    marks = (f'<span class="mark" style="background:{ink(index)}"></span>' for index in range(len(runs)))
    heads = "".join(f"<th>{mark} {escape(run.name)}</th>" for mark, run in zip(marks, runs, strict=True))
    lines = (
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for key, *values in cells
    )
    return f'<div class="wide"><table><tr><th></th>{heads}</tr>{"".join(lines)}</table></div>'


def _origin(run: Run) -> str:
    """Returns HTML with the run's origin and its config file."""
    origin = dict(run.origin)
    origin["command"] = shlex.join(origin.get("command", []))
    cells = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(_plain(value))}</td></tr>" for key, value in origin.items() if value
    )
    text = escape(json.dumps(run.config, indent=2))
    return (
        f'<h2>Where {escape(run.name)} comes from</h2><table class="origin">{cells}</table>'
        f'<p class="note">{_FILES}</p><details><summary>The file that ran</summary><pre>{text}</pre></details>'
    )


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(part)}" for key, part in value.items() if part)
    return ", ".join(map(_plain, value)) if isinstance(value, list) else str(value)
