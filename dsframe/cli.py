"""The ``dsframe`` command: a table of sub-commands, each imported when it is called.

Importing this module costs nothing; ``dsframe check`` never imports torch, DeepSpeed or Horovod.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence

from dsframe.errors import DsframeError

COMMANDS: dict[str, tuple[str, str]] = {
    "check": ("dsframe.tools.check:main", "find every mistake in configuration files, before anything starts"),
    "plan": (
        "dsframe.tools.plan.command:main",
        "memory, communication and time before a run, and which strategies fit",
    ),
    "train": ("dsframe.train:main", "train as a configuration file says (one process; launchers start several)"),
    "launch": (
        "dsframe.tools.launch.command:main",
        "train on this machine or many, with the launcher that belongs to the file",
    ),
    "compare": ("dsframe.tools.compare:main", "runs side by side: loss, metrics, speed, memory; trains files first"),
    "scale": ("dsframe.tools.scale:main", "one file on several numbers of processes: time, speed-up, efficiency"),
    "tune": ("dsframe.tools.tune:main", "a search for values of keys: each trial an ordinary run, proposed by Optuna"),
    "report": ("dsframe.tools.report.page:main", "a run's page, from what its directory holds: one HTML file"),
    "evaluate": ("dsframe.tools.evaluate:main", "a checkpoint's metrics on its evaluation data, on any engine"),
    "predict": ("dsframe.tools.evaluate:predict", "a checkpoint's outputs for each sample, in order, in a file"),
    "generate": ("dsframe.tools.generate:main", "text from a checkpoint of a language model"),
    "export": (
        "dsframe.tools.export:main",
        "a checkpoint for other programs, transformers and DeepSpeed among them",
    ),
    "convert": (
        "dsframe.tools.convert_config:main",
        "a file from Accelerate's, the HF Trainer's or Lightning's settings",
    ),
    "import": ("dsframe.tools.convert:main", "a checkpoint of DeepSpeed's own, to go on from"),
    "doctor": ("dsframe.tools.doctor:main", "what this machine can run, and what it lacks"),
    "explain": ("dsframe.tools.explain:main", "what the code of a message or an exit code means, with an example"),
    "schema": ("dsframe.tools.schema:main", "the JSON Schema of the file, or its reference in Markdown"),
}
"""Name -> ``module:function``, called with ``argv=``, and one line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code. A mistake of the user's ends in its message, without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"dsframe {version('dsframe')}")
        except PackageNotFoundError:
            print("dsframe, not installed as a package")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        from dsframe.config.read.suggest import closest

        similar = closest(name, COMMANDS, 3)
        hint = f'did you mean "{similar}"?' if similar else f"there are {', '.join(COMMANDS)}"
        print(f'dsframe: error: no command "{name}"; {hint}', file=sys.stderr)
        return 2
    module, _, function = COMMANDS[name][0].partition(":")
    if name == "check":
        gc.disable()  # it makes many small objects and ends: collecting them takes 20 of its 170 ms
    try:
        return int(getattr(importlib.import_module(module), function)(argv=rest) or 0)
    except DsframeError as error:
        print(error.printed, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def usage() -> str:
    """The help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: dsframe COMMAND [options]", "", *lines, "", "dsframe COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
