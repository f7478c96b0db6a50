"""``dsframe check``: reports every problem of a configuration file before anything starts.

Exit codes: 0 no errors, 1 warnings with ``--strict``, 2 errors or wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from dsframe import engines
from dsframe.config.load import examine, find, read_text
from dsframe.config.resolve import inherit
from dsframe.config.resolve.batch import MICRO, STEPS, TRAIN, Batch, replica_size
from dsframe.config.resolve.facts import Facts
from dsframe.config.value import Config, Examined
from dsframe.errors import ConfigError, Problem
from dsframe.text import shown
from dsframe.tools.commands import Argv, add_overrides, command

EPILOG = """\
exit codes:
  0  no errors (there may be warnings and notes)
  1  warnings, with --strict
  2  errors, or wrong usage of this command

An error makes DeepSpeed fail, or silently train something else than the file says. A warning is a key without effect
or an old spelling. A note explains a value, such as that of "auto". `dsframe explain CODE` explains the code in brackets.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = command("check", "Find every mistake in DeepSpeed configuration files.", EPILOG)
    add = result.add_argument
    add("files", nargs="+", metavar="FILE", help='a path, a name in ds_configs/, or "-" for standard input')
    add("-np", "--processes", type=int, metavar="N", help="number of processes of the run: checks the batch sizes")
    add(
        "--engine",
        metavar="NAME",
        help="check what this engine supports (default: the engine of the file's dsframe section)",
    )
    add_overrides(result, "one key, as in training")
    add("--strict", action="store_true", help="warnings are errors")
    add("--resolved", action="store_true", help='print the file that would run: "auto" and sizes with their reasons')
    # dsframe launch sets them: the run itself prints inherited values, and a program has a task of its own
    result.set_defaults(starts=False, program=False)
    return result


def main(argv: Argv = None) -> int:
    """Checks the files on the command line and returns the exit code."""
    options = parser().parse_args(argv)
    if options.processes is not None and options.processes < 1:
        parser().error("--processes must be at least 1")
    worst = 0
    reports = []
    for name in options.files:
        text, problem, label = _text(name)
        examined = Examined((problem,), None) if problem is not None else _examine(text, label, options)
        severities = {finding.severity for finding in examined.problems}
        code = 2 if "error" in severities else 1 if options.strict and "warning" in severities else 0
        worst = max(worst, code)
        reports.append((label, examined))
    show(reports, options)
    return worst


def _text(name: str) -> tuple[str, Problem | None, str]:
    if name == "-":
        try:
            return sys.stdin.buffer.read().decode("utf-8"), None, "<stdin>"
        except UnicodeDecodeError as error:
            message = f"not UTF-8 text (byte {error.start})"
            return "", Problem("error", "", message, "", "<stdin>", code="syntax"), "<stdin>"
    try:
        path = find(name)
    except ConfigError as error:
        return "", error.problems[0], name
    text, problem = read_text(path)
    return text, problem, str(path)


def _examine(text: str, label: str, options: argparse.Namespace) -> Examined:
    facts = Facts(world_size=options.processes, engine=options.engine)
    path = None if label == "<stdin>" else Path(label)
    return judged(examine(text, label, options.overrides, facts, path), label, options)


def judged(examined: Examined, label: str, options: argparse.Namespace) -> Examined:
    """Adds the engine's problems and notes to an examined file."""
    if examined.config is None:
        return examined
    if options.processes and _ignores_splits(examined.config, options):
        facts = Facts(world_size=options.processes, engine=options.engine, replicas=True)
        examined = examined.config.examine(facts)
    config = examined.config
    assert config is not None
    clean = not any(problem.severity == "error" for problem in examined.problems)
    engine_problems: list[Problem] = []
    if clean:
        engine_problems += _engine(config, options, label)
    return replace(examined, problems=examined.problems + tuple(engine_problems))


def _engine_of(config: Config, options: argparse.Namespace) -> str:
    return engines.named(options.engine or config.settings.engine)


def _ignores_splits(config: Config, options: argparse.Namespace) -> bool:
    """True if the file splits a model over ranks but the engine does not."""
    if replica_size(config.deepspeed)[0] == 1:
        return False
    entry = engines.TABLE.get(_engine_of(config, options))
    return entry is not None and entry.replicas


def _engine(config: Config, options: argparse.Namespace, label: str) -> list[Problem]:
    """Returns the engine's problems and notes. A file without a dsframe section is for DeepSpeed itself."""
    if options.engine is None and "dsframe" not in config.written():
        return []
    name = _engine_of(config, options)
    if name not in engines.TABLE:
        from dsframe.config.read.suggest import did_you_mean

        remedy = did_you_mean(name, engines.TABLE, 3, f"choose from {', '.join(engines.TABLE)}")
        return [Problem("error", "", f'no engine "{name}"', remedy, "--engine", code="value")]
    problems, lines = engines.examine(config, name, options.processes)
    position = config.position(("dsframe", "engine"))
    notes = [Problem("note", "dsframe.engine", text, "", label, *position, code="engine") for text in lines]
    return [replace(problem, file=label) for problem in problems] + notes


def show(reports: list[tuple[str, Examined]], options: argparse.Namespace) -> None:
    """Prints the problems of each file."""
    for label, examined in reports:
        _print_text(label, examined, options)


_FORMATS = ("bf16.enabled", "fp16.enabled")
"""Keys whose "auto" chooses the number format; always shown separately."""


def _print_text(label: str, examined: Examined, options: argparse.Namespace) -> None:
    problems = examined.problems
    # With --resolved, standard output is the resolved file, whose comments explain "auto".
    out = sys.stderr if options.resolved else sys.stdout
    by_auto = [problem for problem in problems if problem.code == "auto" and problem.severity == "note"]
    by_auto = [problem for problem in by_auto if problem.path not in _FORMATS]
    quiet = by_auto if len(by_auto) > 2 or options.resolved else []
    for problem in problems:
        if problem not in quiet:
            print(shown(str(problem), out), file=out)
    if quiet and not options.resolved:
        print(f'{label}: note: {len(quiet)} values are "auto"; --resolved shows what they become, and why')
    count = {severity: sum(p.severity == severity for p in problems) for severity in ("error", "warning", "note")}
    config = examined.config
    if config is not None and not count["error"] and not options.program and (note := of_no_task(config)):
        print(shown(f"{label}: {note}", out), file=out)
    if (options.resolved or options.processes) and config is not None and not count["error"]:
        if options.resolved:
            print(resolved(config, options.processes))
        else:
            print(shown(f"{label}: {_batch_line(config.batch(options.processes))}", out))
    inherited_line = inherit.sentence(config.inherited) if config is not None and not options.starts else ""
    if inherited_line and not options.resolved and not count["error"]:
        print(shown(f"{label}: {inherited_line}", out))
    parts = [f"{number} {name}{'s' * (number > 1)}" for name, number in count.items() if number and name != "note"]
    if not options.resolved or count["error"]:
        print(f"{label}: {', '.join(parts) if parts else 'no problems'}", file=out)


def of_no_task(config: Config) -> str:
    """Returns a note if the file names no task, else ""."""
    if "task" in config.settings.model_fields_set:
        return ""
    problem = 'no "task" in "dsframe": unless a program gives its own, this is the built-in image classifier'
    return f'note: {problem}; write "task": {{"name": "module:Class"}}'


def _batch_line(batch: Batch) -> str:
    text = (
        f"batch {batch.train_batch_size} = {batch.micro_batch_size} (micro) x {batch.accumulation_steps} (accumulation) "
        f"x {batch.data_parallel_size} (data-parallel ranks)"
    )
    return text + (f"; derived: {', '.join(batch.derived)}" if batch.derived else "")


def resolved(config: Config, world_size: int | None) -> str:
    """Returns the resolved file as JSON, with reasons in comments below, and the batch sizes for a given world size."""
    file = config.shown()
    reasons = [(each.path, f"{json.dumps(each.was)}: {each.reason}") for each in config.resolved]
    for inherited in config.inherited:
        section = file
        for part in inherited.path[:-1]:
            section = section.setdefault(str(part), {})
        section[str(inherited.path[-1])] = inherited.value
        reasons.append((inherited.path, inherited.reason))
    lines = [f"// {'.'.join(map(str, path))}: {reason}" for path, reason in reasons]
    if world_size is not None:
        handed = config.for_deepspeed(world_size)
        file = {key: handed[key] for key in (TRAIN, MICRO, STEPS)} | file
        lines += [f"// derived: {line}" for line in config.batch(world_size).derived]
    return "\n".join([json.dumps(file, indent=2), *lines])
