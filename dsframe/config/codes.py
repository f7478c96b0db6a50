"""Catalogue of message codes: meaning, reason, remedy, and an example file with the mistake.

Printed by ``dsframe explain`` and docs/messages.md. A test runs the examples and compares the codes with the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dsframe.text import table_of


class Code(NamedTuple):
    """One code of the messages about a file."""

    means: str
    """What is wrong, or what a note says."""
    why: str
    write: str
    """What to write instead."""
    example: str = ""
    """A file that produces this code; empty if only the command does."""
    command: str = "check FILE"
    """Arguments of ``dsframe`` that show the message."""


class Exit(NamedTuple):
    """One exit code of ``dsframe`` and ``python -m dsframe.train``."""

    code: str
    """Code at the end of the message; empty if there is no message or its code varies."""
    means: str
    do: str


_TABLE = table_of(__file__)
CODES: Mapping[str, Code] = {name: Code(**row) for name, row in _TABLE["codes"].items()}
EXITS: Mapping[int, Exit] = {int(number): Exit(**row) for number, row in _TABLE["exits"].items()}
"""Exit code -> explanation. 128 + N stands for signal N, as in a shell."""
