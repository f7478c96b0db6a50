"""``dsframe activate``: prints the shell line that makes ``deepspeed ... -m`` and ``horovodrun`` work as in the README.

DeepSpeed's launcher has no ``-m``, and neither launcher ends all of its processes after a signal. dsframe has a program
of each name that fixes this and then runs the installed one; its folder must come first on PATH.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from dsframe.host.source_files import shipped
from dsframe.tools.commands import Argv, command

EPILOG = """\
  eval "$(dsframe activate)"

The printed line puts two folders first on PATH: the one with dsframe's deepspeed, horovodrun and torchrun, and that of this
Python. It holds for this shell. dsframe launch and dsframe train do not need it.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    about = "Print what a shell runs so that the lines deepspeed ... -m and horovodrun ... work as typed."
    return command("activate", about, EPILOG)


def main(argv: Argv = None) -> int:
    """Prints the line and returns 0."""
    parser().parse_args(argv)
    first = [str(shipped("bin", "launch/bin")), str(Path(sys.executable).parent)]
    others = [entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry not in first]
    print(f"export PATH={shlex.quote(os.pathsep.join([*first, *others]))}; hash -r 2>/dev/null || true")
    if sys.stdout.isatty():
        print('dsframe: nothing is set yet; write: eval "$(dsframe activate)"', file=sys.stderr)
    return 0
