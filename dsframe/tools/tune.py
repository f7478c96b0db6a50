"""``dsframe tune``: a search for the values of some keys, each trial an ordinary run, by Optuna.

Optuna (extra ``tune``) proposes and prunes; its storage, an SQLite file, is next to the runs. A
search that was killed continues with the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsframe.config import DEFAULT_CONFIG, load
from dsframe.errors import DataError, TaskError
from dsframe.run_dir.record import read_metrics
from dsframe.text import columns
from dsframe.tools import subprocess_runs
from dsframe.tools.commands import add_overrides, command

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution

_RANGE = re.compile(r"([^:,]+)\.\.([^:,]+?)(?::(log|int))?")
_POLL_SECONDS = 0.1
_END_SECONDS = 60.0
"""A run that is told to end saves first; after so long it is killed."""


def distribution(text: str) -> tuple[str, BaseDistribution]:
    """``KEY=LOW..HIGH[:log|int]`` or ``KEY=VALUE,VALUE,...``: the key and its values. Raises ValueError."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    key, _, values = text.partition("=")
    match = _RANGE.fullmatch(values)
    if match is None:
        choices = tuple(dict.fromkeys(values.split(",")))
        if not key or len(choices) < 2:
            raise ValueError(f"{text!r}: write KEY=LOW..HIGH[:log|int] or KEY=VALUE,VALUE")
        return key, CategoricalDistribution(choices)
    low, high = float(match[1]), float(match[2])
    if not low < high or not math.isfinite(high - low):
        raise ValueError(f"{text!r}: the first number of a range is the smaller one")
    if match[3] == "int":
        return key, IntDistribution(int(low), int(high))
    return key, FloatDistribution(low, high, log=match[3] == "log")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("tune", (__doc__ or "").split("\n")[0].partition(": ")[2])
    add = parser.add_argument
    values = "LOW..HIGH, LOW..HIGH:log, LOW..HIGH:int or VALUE,VALUE; once for each key"
    add("--config", default=DEFAULT_CONFIG, metavar="FILE", help="a path, or a name in ds_configs/")
    add("-np", "--processes", type=int, default=1, metavar="N", help="of each trial (default 1)")
    add("--space", action="append", required=True, metavar="KEY=VALUES", help=values)
    add("--metric", required=True, metavar="NAME:min|max", help="of the evaluation; the last value counts")
    add("--trials", type=int, default=20, metavar="N", help="with those of earlier calls (default 20)")
    add("--seed", type=int, default=0, help="of the proposals (default 0)")
    add_overrides(parser, "one key in all trials")
    add("--out", type=Path, default=Path("runs/tune"), metavar="DIR", help="where runs and study.db go")
    add("--format", choices=("text", "json"), default="text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Searches, prints the table and returns 0; 1 where no trial finished. Raises DsframeErrors."""
    options = parser().parse_args(argv)
    metric, _, direction = options.metric.partition(":")
    if direction not in ("min", "max") or not metric:
        parser().error("--metric: write NAME:min or NAME:max, such as accuracy:max")
    if min(options.trials, options.processes) < 1:
        parser().error("-np and --trials must be at least 1")
    try:
        import optuna
        from optuna.trial import TrialState
    except ImportError:
        raise TaskError('dsframe tune needs optuna: pip install "dsframe[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        space = dict(map(distribution, options.space))
    except ValueError as error:
        parser().error(f"--space {error}")
    for key, values in space.items():  # a value that the file cannot have, before any trial
        for value in getattr(values, "choices", None) or (getattr(values, "high", None),):
            load(options.config, overrides=[*options.overrides, f"{key}={value}"])
    study = _study(options, direction)
    with _terminable():
        while sum(trial.state.is_finished() for trial in study.trials) < options.trials:
            trial = study.ask(space)
            state, value = _run(trial, metric, options)
            study.tell(trial, value, TrialState[state])
    return _show(study, metric, options)


def _study(options: argparse.Namespace, direction: str) -> Study:
    """The study in ``--out``, an earlier one if it searched the same. Raises DataError."""
    import optuna

    options.out.mkdir(parents=True, exist_ok=True)
    storage = options.out / "study.db"
    study = optuna.create_study(
        storage=f"sqlite:///{storage}",
        study_name="dsframe",
        direction="maximize" if direction == "max" else "minimize",
        sampler=optuna.samplers.TPESampler(seed=options.seed),
        load_if_exists=True,
    )
    digest = load(options.config, overrides=options.overrides).digest
    request = [digest, sorted(options.space), options.metric, options.processes]
    if study.user_attrs.get("request", request) != request:
        raise DataError(f"{storage} holds another search; choose another folder with --out")
    study.set_user_attr("request", request)
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):  # it was killed
        study.enqueue_trial(trial.params)
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        options.trials += 1
    return study


def _run(trial: Trial, metric: str, options: argparse.Namespace) -> tuple[str, float | None]:
    """Trains with the proposed values; returns how the trial ended, and its value. Raises TaskError."""
    directory = options.out / f"trial-{trial.number:04}"
    _say(trial, ", ".join(f"{key} {value}" for key, value in trial.params.items()))
    overrides = [*options.overrides, *(f"{key}={value}" for key, value in trial.params.items())]
    process = subprocess_runs.start(options.config, options.processes, directory, overrides=overrides)
    reported, last = -1, math.nan
    try:
        ended = False
        while not ended:
            time.sleep(_POLL_SECONDS)
            ended = process.poll() is not None  # asked first: what it has written by then is all
            for step, value in _evaluations(directory, metric):
                if step > reported and value is not None and math.isfinite(value):
                    reported, last = step, value
                    trial.report(value, step)
            if not ended and trial.should_prune():
                _say(trial, f"pruned after step {reported}, {metric} {last:.6g}")
                return "PRUNED", None
    finally:
        _end(process)
    if process.returncode or math.isnan(last):
        log = directory / subprocess_runs.LOG
        _say(trial, f"failed with exit code {process.returncode}; see {log}")
        return "FAIL", None
    _say(trial, f"{metric} {last:.6g}")
    return "COMPLETE", last


def _say(trial: Trial, text: str) -> None:
    print(f"trial {trial.number}: {text}", file=sys.stderr, flush=True)


def _evaluations(directory: Path, metric: str) -> Iterator[tuple[int, float | None]]:
    """Yields the metric of each evaluation of a run's record so far, with its step."""
    with contextlib.suppress(DataError):  # there is none yet
        for record in read_metrics(directory):
            evaluation = record.get("evaluation", {metric: None})
            if metric not in evaluation:
                choices = ", ".join(evaluation)
                raise TaskError(f"--metric: the evaluation has no {metric!r}; choose from {choices}")
            yield int(record["step"]), evaluation[metric]


def _end(process: subprocess_runs.Started) -> None:
    """Ends a run; it saves first where it can."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the search as Ctrl-C does: its run first."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(study: Study, metric: str, options: argparse.Namespace) -> int:
    rows = [
        {"trial": trial.number, "state": trial.state.name.lower(), metric: trial.value, **trial.params}
        for trial in study.trials
    ]
    any_complete = any(row["state"] == "complete" for row in rows)
    best = study.best_trial.number if any_complete else None
    if options.format == "json":
        print(json.dumps({"trials": rows, "best": best}, indent=2))
    else:
        heads = list(dict.fromkeys(name for row in rows for name in row))
        cells = ([_cell(row.get(name)) for name in heads] for row in rows)
        print("\n".join(columns([heads, *cells], 2)))
        if best is not None:
            print(f"\nbest: {options.out / f'trial-{best:04}'}, {metric} {study.best_value:.6g}")
    return 0 if any_complete else 1


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
