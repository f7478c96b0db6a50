"""``dsframe tune``: a search for the values of some keys, each trial an ordinary run, by Optuna (extra ``tune``).

Optuna proposes and prunes; its storage, an SQLite file, is beside the runs. The proposal of a trial follows from the seed, its
number and the results of those before it, so that a search that was killed goes on to the trials of an undisturbed one: a trial
that was cut off is tried again under its number, from its newest checkpoint if it has one. With ``--parallel`` proposals depend
also on which trials have ended by then.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsframe.config import DEFAULT_CONFIG, load
from dsframe.errors import DataError, TaskError
from dsframe.run_dir.record import read_metrics
from dsframe.text import columns
from dsframe.tools import subprocess_runs, tune_batch
from dsframe.tools.commands import add_overrides, command

_NAME = "dsframe"
_PLACE, _CODE, _ASKED = "place", "code", "asked"
"""Attributes of trials and of the study."""
_RANGE = re.compile(r"^(?P<low>[^:,]+)\.\.(?P<high>[^:,]+?)(?::(?P<kind>log|int))?$")
_POLL_SECONDS = 0.1
_END_SECONDS = 60.0
"""A run that is told to end saves first; after so long it is killed."""


@dataclass(frozen=True)
class Dimension:
    """The values that one key may have: a range, or some values."""

    key: str
    low: float = 0.0
    high: float = 0.0
    kind: str = ""
    """``log``, ``int`` or nothing, of a range."""
    choices: tuple[str, ...] = ()
    """Values as they are written after ``--set KEY=``."""

    def ask(self, trial: Any) -> str:
        """Returns what Optuna proposes for the key in ``trial``, as it is written after ``--set KEY=``."""
        if self.choices:
            return str(trial.suggest_categorical(self.key, self.choices))
        if self.kind == "int":
            return str(trial.suggest_int(self.key, int(self.low), int(self.high)))
        return repr(float(trial.suggest_float(self.key, self.low, self.high, log=self.kind == "log")))


def dimension(text: str) -> Dimension:
    """Parses ``KEY=LOW..HIGH[:log|int]`` or ``KEY=VALUE,VALUE,...``. Raises ValueError."""
    key, equals, values = text.partition("=")
    if not key or not equals or not values:
        raise ValueError(f"{text!r}: write KEY=LOW..HIGH, KEY=LOW..HIGH:log, KEY=LOW..HIGH:int or KEY=VALUE,VALUE")
    if found := _RANGE.match(values):
        try:
            low, high = float(found["low"]), float(found["high"])
        except ValueError:
            raise ValueError(f"{text!r}: a range has numbers, such as {key}=1e-5..1e-2") from None
        kind = found["kind"] or ""
        if not low < high or not math.isfinite(high - low):
            raise ValueError(f"{text!r}: the first number of a range is the smaller one")
        if kind == "log" and low <= 0:
            raise ValueError(f"{text!r}: a logarithmic range begins above 0")
        if kind == "int" and not (low.is_integer() and high.is_integer()):
            raise ValueError(f"{text!r}: a range of int has whole numbers")
        return Dimension(key, low, high, kind)
    if len(choices := tuple(dict.fromkeys(values.split(",")))) < 2:
        raise ValueError(f"{text!r}: give a range, LOW..HIGH, or several values with commas between them")
    return Dimension(key, choices=choices)


@dataclass
class Run:
    """One trial's training, under way."""

    trial: Any
    directory: Path
    process: subprocess_runs.Started
    reported: int = -1
    """The step of the last evaluation that Optuna knows."""
    value: float | None = None
    pruned: bool = False
    told_at: float | None = None
    """When it was told to end, ``time.monotonic``."""


@dataclass
class Search:
    """A search, as the command line asks for it."""

    study: Any
    space: Sequence[Dimension]
    metric: str
    options: argparse.Namespace
    running: list[Run] = field(default_factory=list)

    def done(self) -> list[Any]:
        """Returns the trials that have ended by themselves."""
        return [one for one in self.study.trials if one.state.is_finished() and not _cut_off(one)]

    def run(self) -> None:
        """Trains until there are as many trials as were asked for; ends all of them where it is interrupted."""
        self._take_up()
        try:
            while (open_places := self.options.trials - len(self.done()) - len(self.running)) > 0 or self.running:
                if open_places > 0 and len(self.running) < self.options.parallel:
                    self.running.append(self._start())
                    continue
                for one in [*self.running]:
                    self._look(one)
                time.sleep(_POLL_SECONDS)
        finally:
            for one in self.running:
                _end(one.process)

    def _take_up(self) -> None:
        """Trials that were cut off fail, as Optuna sees them, and their values are tried again under their number."""
        from optuna.trial import TrialState

        for one in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(one.number, state=TrialState.FAIL)
            if one.params and _PLACE in one.user_attrs:  # else it was killed before it had begun
                self.study.enqueue_trial(one.params, user_attrs={_PLACE: one.user_attrs[_PLACE]})

    def _start(self) -> Run:
        from optuna.samplers import TPESampler

        known = [one for one in self.study.trials if not _cut_off(one)]
        place = len(known)
        if not any(one.state.name == "WAITING" for one in known):
            seed = self.options.seed * 100_003 + place
            self.study.sampler = TPESampler(seed=seed, n_startup_trials=self.options.startup)
        trial = self.study.ask()
        place = trial.user_attrs.get(_PLACE, place)
        values = {one.key: one.ask(trial) for one in self.space}
        trial.set_user_attr(_PLACE, place)
        directory = self.options.out / f"trial-{place:04}"
        overrides = [*self.options.overrides, *(f"{key}={value}" for key, value in values.items())]
        file, processes, words = self.options.config, self.options.processes, ["--resume", "auto"]
        process = subprocess_runs.start(file, processes, directory, overrides=overrides, words=words)
        _say(place, ", ".join(f"{key} {value}" for key, value in values.items()))
        return Run(trial, directory, process)

    def _look(self, run: Run) -> None:
        ended = run.process.poll() is not None  # asked first: what it has written by then is all
        for step, evaluation in _evaluations(run.directory):
            if step <= run.reported or run.pruned:
                continue
            if self.metric not in evaluation:
                known = ", ".join(evaluation)
                raise TaskError(f"--metric: the evaluation has no {self.metric!r}; choose from {known}")
            run.reported, run.value = step, evaluation[self.metric]
            if run.value is None or not math.isfinite(run.value):
                continue
            run.trial.report(run.value, step)
            if self.options.prune and not ended and run.trial.should_prune():
                run.pruned, run.told_at = True, time.monotonic()
                run.process.terminate()
        if run.told_at is not None and not ended and time.monotonic() - run.told_at > _END_SECONDS:
            run.process.kill()
        if ended:
            self._tell(run)

    def _tell(self, run: Run) -> None:
        from optuna.trial import TrialState

        self.running.remove(run)
        place = run.trial.user_attrs[_PLACE]
        if run.pruned:
            self.study.tell(run.trial, state=TrialState.PRUNED)
            _say(place, f"pruned after step {run.reported}, {self.metric} {run.value:.6g}")
        elif run.process.returncode or run.value is None or not math.isfinite(run.value):
            run.trial.set_user_attr(_CODE, run.process.returncode)
            self.study.tell(run.trial, state=TrialState.FAIL)
            _say(place, f"failed, code {run.process.returncode}; {run.directory / subprocess_runs.LOG}")
        else:
            self.study.tell(run.trial, run.value)
            _say(place, f"{self.metric} {run.value:.6g}")


def _say(place: int, text: str) -> None:
    print(f"trial {place}: {text}", file=sys.stderr, flush=True)


def _cut_off(trial: Any) -> bool:
    """True of a trial that has failed, as Optuna sees it, without an exit code: its search was killed."""
    return trial.state.name == "FAIL" and _CODE not in trial.user_attrs


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command("tune", (__doc__ or "").split("\n")[0].partition(": ")[2])
    add = parser.add_argument
    add("--config", default=DEFAULT_CONFIG, metavar="FILE", help="a path, or a name in ds_configs/")
    add("-np", "--processes", type=int, default=1, metavar="N", help="processes of each trial (default 1)")
    add("--batch", action="store_true", help="find the largest micro-batch that fits, instead of a search")
    add("--memory", metavar="4GB", help="with --batch: what a rank may take; default: until memory is out")
    add(
        "--space",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="LOW..HIGH, LOW..HIGH:log, LOW..HIGH:int or VALUE,VALUE; once for each key",
    )
    add(
        "--metric",
        default="",
        metavar="NAME:min|max",
        help="metric of the evaluation to optimize; a trial is judged by the last value",
    )
    add("--trials", type=int, default=20, metavar="N", help="in all, those of earlier calls included (default 20)")
    add("--parallel", type=int, default=1, metavar="N", help="trials at the same time (default 1)")
    add("--seed", type=int, default=0, help="of the proposals (default 0)")
    add("--startup", type=int, default=10, metavar="N", help="proposals drawn at random first (default 10)")
    add("--no-prune", action="store_false", dest="prune", help="let every trial come to its end")
    add_overrides(parser, "one key in all trials")
    add("--out", type=Path, default=Path("runs/tune"), metavar="DIR", help="where runs and study.db go")
    add("--format", choices=("text", "json"), default="text")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Searches, prints the table and returns 0; 1 where no trial came to its end. Raises the subclasses of DsframeError."""
    options = parser().parse_args(argv)
    if options.batch:
        if options.space or options.metric or options.processes < 1:
            parser().error("--batch takes neither --space nor --metric, and at least one process")
        return tune_batch.find(options)
    if options.memory or not options.space:
        parser().error("--space KEY=VALUES is missing" if not options.space else "--memory is for --batch")
    try:
        space = [dimension(text) for text in options.space]
    except ValueError as error:
        parser().error(f"--space {error}")
    metric, _, direction = options.metric.partition(":")
    if direction not in ("min", "max") or not metric:
        parser().error("--metric: write NAME:min or NAME:max, such as accuracy:max")
    if min(options.trials, options.parallel, options.processes) < 1:
        parser().error("-np, --trials and --parallel must be at least 1")
    for one in space:  # a value that the file cannot have is found before any trial
        for value in one.choices or (str(int(one.high)) if one.kind == "int" else repr(one.high),):
            load(options.config, overrides=[*options.overrides, f"{one.key}={value}"])
    search = Search(_study(options, direction), space, metric, options)
    with _interruptible():
        search.run()
    return _show(search, direction)


def _study(options: argparse.Namespace, direction: str) -> Any:
    """The study in ``--out``, an earlier one if it asked for the same. Raises TaskError, DataError."""
    try:
        import optuna
    except ImportError:
        raise TaskError('dsframe tune needs optuna: pip install "dsframe[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options.out.mkdir(parents=True, exist_ok=True)
    place = options.out / "study.db"
    study = optuna.create_study(
        storage=f"sqlite:///{place}",
        study_name=_NAME,
        direction="maximize" if direction == "max" else "minimize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=5),
        load_if_exists=True,
    )
    asked = {
        "config": str(load(options.config, overrides=options.overrides).digest),
        "space": sorted(options.space),
        "metric": options.metric,
        "processes": options.processes,
        "seed": options.seed,
        "startup": options.startup,
        "prune": options.prune,
    }
    before = study.user_attrs.get(_ASKED)
    if before is not None and before != asked:
        other = next(key for key in asked if before.get(key) != asked[key])
        raise DataError(f"{place} holds a search with another {other}; choose another folder with --out")
    study.set_user_attr(_ASKED, asked)
    return study


def _evaluations(directory: Path) -> Iterator[tuple[int, Mapping[str, float | None]]]:
    """Yields each evaluation of a run's record so far, with its step."""
    with contextlib.suppress(DataError):  # there is none yet
        for record in read_metrics(directory):
            if "evaluation" in record:
                yield int(record["step"]), record["evaluation"]


def _end(process: subprocess_runs.Started) -> None:
    """Ends a run; it saves first where it can."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()
        process.wait()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the search as Ctrl-C does: its runs first."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(search: Search, direction: str) -> int:
    trials = sorted(search.done(), key=lambda one: int(one.user_attrs.get(_PLACE, one.number)))
    rows = []
    for one in trials:
        figures = {"trial": one.user_attrs.get(_PLACE), "state": one.state.name.lower(), search.metric: one.value}
        rows.append({**figures, **one.params})
    whole = [one for one in trials if one.state.name == "COMPLETE"]
    best = (max if direction == "max" else min)(whole, key=lambda one: one.value) if whole else None
    if search.options.format == "json":
        print(json.dumps({"trials": rows, "best": None if best is None else best.user_attrs[_PLACE]}, indent=2))
    else:
        head = list(rows[0]) if rows else []
        print("\n".join(columns([head, *([_cell(row[name]) for name in head] for row in rows)], 2)))
        if best is not None:
            place = search.options.out / f"trial-{best.user_attrs[_PLACE]:04}"
            print(f"\nbest: {place}, {search.metric} {best.value:.6g}")
    return 0 if best is not None else 1


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
