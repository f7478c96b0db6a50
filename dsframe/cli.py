"""The ``dsframe`` command: sub-commands, each imported when it is called.

Importing this module is cheap; ``dsframe check`` never imports torch, DeepSpeed or Horovod.
"""

from __future__ import annotations

import gc
import importlib
import sys

from dsframe.errors import exit_code_of
from dsframe.tools.commands import COMMANDS, Argv


def main(argv: Argv = None) -> int:
    """Runs one sub-command and returns its exit code. A DsframeError prints its message, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from dsframe.version import __version__

        print(f"dsframe {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        from dsframe.config.read.suggest import did_you_mean

        hint = did_you_mean(name, COMMANDS, 3, f"there are {', '.join(COMMANDS)}")
        print(f'dsframe: error: no command "{name}"; {hint}', file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name][0].partition(":")
    if name == "check":
        gc.disable()  # it makes many small objects and ends: garbage collection takes 20 of its 170 ms
    return exit_code_of(lambda: getattr(importlib.import_module(module), function)(argv=rest))


def usage() -> str:
    """Returns the help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: dsframe COMMAND [options]", "", *lines, "", "dsframe COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
