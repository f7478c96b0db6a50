"""``dsframe completion``: what a shell reads to complete commands, options and file names. shtab writes it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dsframe.errors import DsframeError
from dsframe.tools.commands import COMMANDS, command, parser_of

EPILOG = """\
  bash:  dsframe completion bash >~/.local/share/bash-completion/completions/dsframe
  zsh:   dsframe completion zsh >~/.zfunc/_dsframe      (with ~/.zfunc in fpath, before compinit)
  tcsh:  dsframe completion tcsh >~/.dsframe.csh        (source it in ~/.tcshrc)
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Print a shell's completion for dsframe (needs shtab: pip install 'dsframe[completion]')."
    parser = command("completion", about, EPILOG)
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
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
        commands.add_parser(name, parents=[parser_of(name)], add_help=False, help=text)
    print(shtab.complete(whole, shell=shell))
    return 0
