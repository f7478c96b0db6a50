"""``dsframe tune``: a search for the values of some keys, each trial an ordinary run, by Optuna (extra ``tune``).

Optuna proposes and prunes; its storage, an SQLite file, is next to the runs. A search that was killed continues with the same
command: trials that had ended count, one that was cut off is tried again.
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
from dataclasses import dataclass
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
    from optuna.trial import FrozenTrial

_RANGE = re.compile(r"^(?P<low>[^:,]+)\.\.(?P<high>[^:,]+?)(?::(?P<scale>log|int))?$")
_POLL_SECONDS = 0.1
_END_SECONDS = 60.0
"""A run that is told to end saves first; after so long it is killed."""
_REQUEST = "request"
"""Attribute of the study: what it was asked for."""
_CODE = "exit code"
"""Attribute of a trial whose run failed."""


@dataclass(frozen=True)
class Dimension:
    """The values that one key may have: a range, or some values."""

    key: str
    low: float = 0.0
    high: float = 0.0
    scale: str = ""
    """``log``, ``int`` or nothing, of a range."""
    choices: tuple[str, ...] = ()
    """Values as they are written after ``--set KEY=``."""

    def suggest(self, trial: Trial) -> str:
        """Returns what Optuna proposes for the key in ``trial``, as it is written after ``--set KEY=``."""
        if self.choices:
            return str(trial.suggest_categorical(self.key, self.choices))
        if self.scale == "int":
            return str(trial.suggest_int(self.key, int(self.low), int(self.high)))
        return repr(float(trial.suggest_float(self.key, self.low, self.high, log=self.scale == "log")))


def dimension(text: str) -> Dimension:
    """Parses ``KEY=LOW..HIGH[:log|int]`` or ``KEY=VALUE,VALUE,...``. Raises ValueError."""
    key, _, values = text.partition("=")
    if not key or not values:
        raise ValueError(f"{text!r}: write KEY=LOW..HIGH, KEY=LOW..HIGH:log, KEY=LOW..HIGH:int or KEY=VALUE,VALUE")
    if match := _RANGE.match(values):
        scale = match["scale"] or ""
        try:
            low, high = float(match["low"]), float(match["high"])
        except ValueError:
            raise ValueError(f"{text!r}: a range has numbers, such as {key}=1e-5..1e-2") from None
        if not low < high or not math.isfinite(high - low):
            raise ValueError(f"{text!r}: the first number of a range is the smaller one")
        if scale == "log" and low <= 0:
            raise ValueError(f"{text!r}: a logarithmic range begins above 0")
        if scale == "int" and not (low.is_integer() and high.is_integer()):
            raise ValueError(f"{text!r}: a range of int has whole numbers")
        return Dimension(key, low, high, scale)
    choices = tuple(dict.fromkeys(values.split(",")))
    if len(choices) < 2:
        raise ValueError(f"{text!r}: give a range, LOW..HIGH, or several values with commas between them")
    return Dimension(key, choices=choices)


class _TrialError(Exception):
    """The run of a trial failed; the search continues."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("tune", (__doc__ or "").split("\n")[0].partition(": ")[2])
    add = parser.add_argument
    values = "LOW..HIGH, LOW..HIGH:log, LOW..HIGH:int or VALUE,VALUE; once for each key"
    judged = "metric of the evaluation to optimize; a trial is judged by the last value"
    add("--config", default=DEFAULT_CONFIG, metavar="FILE", help="a path, or a name in ds_configs/")
    add("-np", "--processes", type=int, default=1, metavar="N", help="processes of each trial (default 1)")
    add("--space", action="append", required=True, metavar="KEY=VALUES", help=values)
    add("--metric", required=True, metavar="NAME:min|max", help=judged)
    add("--trials", type=int, default=20, metavar="N", help="in all, those of earlier calls included (default 20)")
    add("--seed", type=int, default=0, help="of the proposals (default 0)")
    add_overrides(parser, "one key in all trials")
    add("--out", type=Path, default=Path("runs/tune"), metavar="DIR", help="where runs and study.db go")
    add("--format", choices=("text", "json"), default="text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Searches, prints the table and returns 0; 1 where no trial came to its end. Raises the subclasses of DsframeError."""
    options = parser().parse_args(argv)
    try:
        space = [dimension(text) for text in options.space]
    except ValueError as error:
        parser().error(f"--space {error}")
    metric, _, direction = options.metric.partition(":")
    if direction not in ("min", "max") or not metric:
        parser().error("--metric: write NAME:min or NAME:max, such as accuracy:max")
    if min(options.trials, options.processes) < 1:
        parser().error("-np and --trials must be at least 1")
    for each in space:  # a value that the file cannot have is reported before any trial
        for value in each.choices or (str(int(each.high)) if each.scale == "int" else repr(each.high),):
            load(options.config, overrides=[*options.overrides, f"{each.key}={value}"])
    study = _study(options, direction)
    ended = [trial for trial in study.trials if trial.state.is_finished() and not _was_cut_off(trial)]
    with _terminable():
        study.optimize(
            lambda trial: _run(trial, space, metric, options),
            n_trials=max(0, options.trials - len(ended)),
            catch=(_TrialError,),
        )
    return _show(study, metric, options)


def _study(options: argparse.Namespace, direction: str) -> Study:
    """The study in ``--out``, an earlier one if it was asked for the same. Raises TaskError, DataError."""
    try:
        import optuna
    except ImportError:
        raise TaskError('dsframe tune needs optuna: pip install "dsframe[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    storage = options.out / "study.db"
    study = optuna.create_study(
        storage=f"sqlite:///{storage}",
        study_name="dsframe",
        direction="maximize" if direction == "max" else "minimize",
        sampler=optuna.samplers.TPESampler(seed=options.seed),
        pruner=optuna.pruners.MedianPruner(),
        load_if_exists=True,
    )
    request = {
        "config": load(options.config, overrides=options.overrides).digest,
        "space": sorted(options.space),
        "metric": options.metric,
        "processes": options.processes,
    }
    earlier = study.user_attrs.get(_REQUEST, request)
    if earlier != request:
        different = next(key for key in request if earlier.get(key) != request[key])
        raise DataError(f"{storage} holds a search with another {different}; choose another folder with --out")
    study.set_user_attr(_REQUEST, request)
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        if trial.params:
            study.enqueue_trial(trial.params)
    return study


def _run(trial: Trial, space: Sequence[Dimension], metric: str, options: argparse.Namespace) -> float:
    """Trains with the proposed values. Raises optuna's TrialPruned, _TrialError and TaskError."""
    from optuna import TrialPruned

    values = {each.key: each.suggest(trial) for each in space}
    directory = options.out / f"trial-{trial.number:04}"
    _say(trial, ", ".join(f"{key} {value}" for key, value in values.items()))
    overrides = [*options.overrides, *(f"{key}={value}" for key, value in values.items())]
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
                raise TrialPruned
    finally:
        _end(process)
    if process.returncode or math.isnan(last):
        _say(trial, f"failed, code {process.returncode}; {directory / subprocess_runs.LOG}")
        trial.set_user_attr(_CODE, process.returncode)
        raise _TrialError
    _say(trial, f"{metric} {last:.6g}")
    return last


def _was_cut_off(trial: FrozenTrial) -> bool:
    """True if the search was killed in this trial: it has failed, as Optuna sees it, without an exit code."""
    return trial.state.name == "FAIL" and _CODE not in trial.user_attrs


def _say(trial: Trial, text: str) -> None:
    print(f"trial {trial.number}: {text}", file=sys.stderr, flush=True)


def _evaluations(directory: Path, metric: str) -> Iterator[tuple[int, float | None]]:
    """Yields the metric of each evaluation of a run's record so far, with its step."""
    with contextlib.suppress(DataError):  # there is none yet
        for record in read_metrics(directory):
            evaluation = record.get("evaluation")
            if evaluation is None:
                continue
            if metric not in evaluation:
                known = ", ".join(evaluation)
                raise TaskError(f"--metric: the evaluation has no {metric!r}; choose from {known}")
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
    rows: list[dict[str, Any]] = [
        {"trial": trial.number, "state": trial.state.name.lower(), metric: trial.value, **trial.params}
        for trial in study.trials
        if not _was_cut_off(trial)
    ]
    whole = any(row["state"] == "complete" for row in rows)
    best = study.best_trial if whole else None
    if options.format == "json":
        print(json.dumps({"trials": rows, "best": best.number if best else None}, indent=2))
    else:
        head = list(rows[0]) if rows else []
        print("\n".join(columns([head, *([_cell(row.get(name)) for name in head] for row in rows)], 2)))
        if best is not None:
            print(f"\nbest: {options.out / f'trial-{best.number:04}'}, {metric} {best.value:.6g}")
    return 0 if best is not None else 1


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
