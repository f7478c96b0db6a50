"""Table of sub-commands, which imports none of them, and shared options."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import argparse

Argv = Sequence[str] | None
"""Words of a command line; None for this process's."""
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("dsframe.tools.init:main", "a commented file and a task to begin with, for one of six beginnings"),
    "check": ("dsframe.tools.check:main", "find every mistake in configuration files, before anything starts"),
    "plan": (
        "dsframe.tools.plan.command:main",
        "memory and communication before a run, and which strategies fit",
    ),
    "train": ("dsframe.train:main", "train as a configuration file says (one process; launchers start several)"),
    "launch": (
        "dsframe.tools.launch.command:main",
        "train on this machine or many, with the launcher that belongs to the file",
    ),
    "compare": (
        "dsframe.tools.compare:main",
        "finished runs: loss, metrics, speed, memory, and whether they are one training",
    ),
    "report": ("dsframe.tools.report.page:main", "a run's page, from what its directory holds: one HTML file"),
    "evaluate": ("dsframe.tools.evaluate:main", "a checkpoint's metrics on its evaluation data, on any engine"),
    "predict": ("dsframe.tools.evaluate:predict", "a checkpoint's outputs for each sample, in order, in a file"),
    "export": ("dsframe.tools.export:main", "a checkpoint's weights for other programs, transformers among them"),
    "doctor": ("dsframe.tools.doctor:main", "what this machine can run, and what it lacks"),
    "explain": ("dsframe.tools.explain:main", "what the code of a message or an exit code means, with an example"),
    "schema": ("dsframe.tools.schema:main", "the JSON Schema of the file, for editors"),
    "activate": ("dsframe.tools.activate:main", "what a shell needs for deepspeed ... -m and horovodrun as typed"),
}
"""Name -> ``module:function``, called with ``argv=``, and one line of help."""


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns a command's parser: its module's ``parser``, or ``FUNCTION_parser`` if the function is not ``main``."""
    module, _, function = COMMANDS[name][0].partition(":")
    make = getattr(importlib.import_module(module), "parser" if function == "main" else f"{function}_parser")
    return cast("argparse.ArgumentParser", make())


def command(name: str, description: str, epilog: str | None = None, **more: Any) -> argparse.ArgumentParser:
    """Returns the parser of ``dsframe NAME``. ``epilog`` is printed verbatim."""
    import argparse

    from dsframe.arguments import Parser

    form = argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter
    return Parser(prog=f"dsframe {name}", description=description, epilog=epilog, formatter_class=form, **more)


def add_average(parser: argparse.ArgumentParser) -> None:
    """Adds ``--average`` and ``--no-average`` to a command that reads a checkpoint; the default is None."""
    import argparse

    help_text = 'the average of the weights ("ema") instead of them (default: what the run evaluated)'
    parser.add_argument("--average", action=argparse.BooleanOptionalAction, help=help_text)


def add_overrides(parser: argparse.ArgumentParser, what: str = "one key") -> None:
    """Adds ``--set KEY=VALUE``, which may be repeated: ``options.overrides``."""
    help_ = f"override {what}"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=help_)
