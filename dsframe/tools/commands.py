"""The table of sub-commands, which imports none of them, and what their command lines have in common."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from dsframe.text import table_of

if TYPE_CHECKING:
    import argparse

Argv = Sequence[str] | None
"""Words of a command line; None: this process's."""
COMMANDS: dict[str, tuple[str, str]] = table_of(__file__)
"""Name -> ``module:function``, called with ``argv=``, and one line of help."""


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns a command's parser: ``parser`` of its module, or ``FUNCTION_parser`` where the function is not ``main``."""
    module, _, function = COMMANDS[name][0].partition(":")
    make = getattr(importlib.import_module(module), "parser" if function == "main" else f"{function}_parser")
    return cast("argparse.ArgumentParser", make())


def command(name: str, description: str, epilog: str | None = None, **more: Any) -> argparse.ArgumentParser:
    """The parser of ``dsframe NAME``. An ``epilog`` is printed as it is written."""
    import argparse

    from dsframe.arguments import Parser

    form = argparse.RawDescriptionHelpFormatter if epilog else argparse.HelpFormatter
    return Parser(prog=f"dsframe {name}", description=description, epilog=epilog, formatter_class=form, **more)


def add_average(parser: argparse.ArgumentParser) -> None:
    """Adds ``--average`` and ``--no-average`` to a command that reads a checkpoint; None where neither is given."""
    import argparse

    told = 'the average of the weights ("ema") instead of them (default: what the run evaluated)'
    parser.add_argument("--average", action=argparse.BooleanOptionalAction, help=told)


def add_overrides(parser: argparse.ArgumentParser, what: str = "one key") -> None:
    """Adds ``--set KEY=VALUE``, which may be given several times: ``options.overrides``."""
    help_ = f"override {what}"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides", help=help_)
