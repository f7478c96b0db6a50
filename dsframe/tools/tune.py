"""``dsframe tune``: a search for the values of some keys, each trial an ordinary run, by Optuna.

Optuna (extra ``tune``) proposes; its storage, an SQLite file, is next to the runs. A search that was
killed continues with the same command.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsframe.config import default_config, load
from dsframe.errors import DataError, TaskError, TrainingError
from dsframe.run_dir.record import read_summary
from dsframe.text import columns
from dsframe.tools import subprocess_runs
from dsframe.tools.commands import add_overrides, command

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.distributions import BaseDistribution
    from optuna.trial import TrialState

_RANGE = re.compile(r"([^:,]+)\.\.([^:,]+?)(?::(log|int))?")


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
    try:
        low, high = float(match[1]), float(match[2])
        if not low < high or not math.isfinite(high - low):
            raise ValueError("the first number of a range is the smaller one")
        if match[3] == "int":
            return key, IntDistribution(int(low), int(high))
        return key, FloatDistribution(low, high, log=match[3] == "log")
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("tune", (__doc__ or "").split("\n")[0].partition(": ")[2])
    add = parser.add_argument
    values = "LOW..HIGH, LOW..HIGH:log, LOW..HIGH:int or VALUE,VALUE; once for each key"
    add("--config", default=default_config(), metavar="FILE", help="a path, or a name in ds_configs/")
    add("-np", "--processes", type=int, default=1, metavar="N", help="of each trial (default 1)")
    add("--space", action="append", required=True, metavar="KEY=VALUES", help=values)
    add("--metric", required=True, metavar="NAME:min|max", help="of the last evaluation")
    add("--trials", type=int, default=20, metavar="N", help="with those of earlier calls (default 20)")
    add("--seed", type=int, default=0, help="of the proposals (default 0)")
    add_overrides(parser, "one key in all trials")
    add("--out", type=Path, default=Path("runs/tune"), metavar="DIR", help="where runs and study.db go")
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
    while sum(trial.state.is_finished() for trial in study.trials) < options.trials:
        trial = study.ask(space)
        study.tell(trial, *_run(trial, metric, options))
    return _show(study, metric, options.out)


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


def _run(trial: Trial, metric: str, options: argparse.Namespace) -> tuple[float | None, TrialState]:
    """Trains with the proposed values; returns the metric, and how the trial ended. Raises TaskError."""
    from optuna.trial import TrialState

    directory = options.out / f"trial-{trial.number:04}"
    values = [f"{key}={value}" for key, value in trial.params.items()]
    print(f"trial {trial.number}: {', '.join(values)}", file=sys.stderr, flush=True)
    try:
        overrides = [*options.overrides, *values]
        subprocess_runs.train(Path(options.config), options.processes, directory, overrides=overrides)
    except TrainingError as error:
        print(f"trial {trial.number} failed: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return None, TrialState.FAIL
    metrics = read_summary(directory)["metrics"]
    if metric not in metrics:
        raise TaskError(f"--metric: the evaluation has no {metric!r}; choose from {', '.join(metrics)}")
    value = metrics[metric]
    finite = value is not None and math.isfinite(value)
    return (value, TrialState.COMPLETE) if finite else (None, TrialState.FAIL)


def _show(study: Study, metric: str, out: Path) -> int:
    """Prints the trials; 0 where one has finished."""
    keys = list(dict.fromkeys(key for trial in study.trials for key in trial.params))
    rows = [["trial", "state", metric, *keys]]
    for trial in study.trials:
        values = [trial.value, *map(trial.params.get, keys)]
        cells = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in values)
        rows.append([str(trial.number), trial.state.name.lower(), *cells])
    print("\n".join(columns(rows, 2)))
    if not any(trial.value is not None for trial in study.trials):
        return 1
    print(f"\nbest: {out / f'trial-{study.best_trial.number:04}'}, {metric} {study.best_value:.6g}")
    return 0
