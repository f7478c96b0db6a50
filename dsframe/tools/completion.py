"""``dsframe completion``: what a shell reads to complete commands, options and file names. shtab writes it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsframe.config.codes import CODES
from dsframe.engines import TABLE
from dsframe.errors import DsframeError
from dsframe.tools import explain
from dsframe.tools.commands import COMMANDS, command, parser_of

EPILOG = """\
  bash:  dsframe completion bash >~/.local/share/bash-completion/completions/dsframe
  zsh:   dsframe completion zsh >~/.zfunc/_dsframe      (with ~/.zfunc in fpath, before compinit)
  fish:  dsframe completion fish >~/.config/fish/completions/dsframe.fish
  tcsh:  dsframe completion tcsh >~/.dsframe.csh        (source it in ~/.tcshrc)
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Print a shell's completion for dsframe (needs shtab: pip install 'dsframe[completion]')."
    parser = command("completion", about, EPILOG)
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "tcsh"))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the script, and returns 0. Raises DsframeError where shtab is not installed."""
    shell = parser().parse_args(argv).shell
    try:
        import shtab
    except ImportError:
        raise DsframeError("completion needs shtab: pip install 'dsframe[completion]'") from None
    whole = argparse.ArgumentParser(prog="dsframe")
    commands = whole.add_subparsers()
    for name, (_, text) in COMMANDS.items():
        parts = [parser_of(part) for part in ([name, "train"] if name == "launch" else [name])]
        for action in [action for part in parts for action in part._actions]:
            _teach(action, shtab.FILE)
        commands.add_parser(name, parents=parts, add_help=False, help=text, conflict_handler="resolve")
    print(shtab.complete(whole, shell=shell))
    return 0


def _teach(action: Any, file: Any) -> None:
    """Says what an option takes: files, engines, codes, or keys of the file."""
    if action.dest == "engine":
        action.choices = list(TABLE)
    elif action.dest in ("set", "overrides", "codes"):
        action.choices = [*([*CODES] if action.dest == "codes" else []), *explain.keys()]
    elif (
        action.type is Path
        or action.metavar in ("FILE", "RUN", "FOLDER", "PATH")
        or action.dest in ("files", "directory")
    ):
        action.complete = file
