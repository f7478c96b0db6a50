"""``dsframe-check FILE``: what ``dsframe check FILE`` is, with pydantic and rapidfuzz as its only dependencies."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = {"explain": "dsframe.tools.explain", "schema": "dsframe.tools.schema"}
"""First word of the command line -> what it means; any other word is a file to check."""


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the files of the command line, explains a code or prints the JSON Schema; returns the exit code."""
    sys.path.insert(0, str(Path(__file__).parent / "tree"))  # before a dsframe that is installed as well
    from dsframe.errors import exit_code_of

    words = list(sys.argv[1:] if argv is None else argv)
    module = COMMANDS.get(words[0]) if words else None
    if module:
        words = words[1:]
    return exit_code_of(lambda: importlib.import_module(module or "dsframe.tools.check").main(argv=words))
