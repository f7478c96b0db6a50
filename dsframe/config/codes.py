"""The catalogue of codes: what each message's ``[code]`` means, why it matters, what to write, and a file that has the mistake.

``dsframe explain`` and docs/messages.md print it. A test runs every example and compares the codes here with those in the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dsframe.text import table_of


class Code(NamedTuple):
    """A code of messages about a file."""

    means: str
    """What is wrong, or what a note tells."""
    why: str
    """Why it matters."""
    write: str
    """What to write instead."""
    example: str = ""
    """A file that gets this code; none where the command alone does."""
    command: str = "check FILE"
    """How to see the message, after ``dsframe``."""


class Exit(NamedTuple):
    """One exit code of ``dsframe`` and ``python -m dsframe.train``."""

    code: str
    """The code that such a message ends with; empty where there is no message, or another one."""
    means: str
    do: str
    """What to do."""


_TABLE = table_of(__file__)
CODES: Mapping[str, Code] = {name: Code(**row) for name, row in _TABLE["codes"].items()}
"""Code -> its explanation."""
EXITS: Mapping[int, Exit] = {int(number): Exit(**row) for number, row in _TABLE["exits"].items()}
"""Exit code -> its explanation. 128 + N stands for signal N, as in a shell."""
