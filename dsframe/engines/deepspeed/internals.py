"""All private names of DeepSpeed that dsframe reads, sets or calls, and what they must mean.

To review a new release, go through this table. ``tests/unit/test_internals.py`` checks that nothing else is used and
that each name is where the table says. The meaning is tested by ``tests/engines/test_contract.py``,
``tests/engines/test_patches.py``, ``make equivalence`` and ``make portability``.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from dsframe.errors import EngineError
from dsframe.text import table_of

INTERNALS: dict[str, dict[str, str]] = table_of(__file__)
"""File in DeepSpeed's package -> name -> what it must mean. A name that is in several files is listed once."""


def missing(folder: Path) -> list[str]:
    """Returns the names that are no longer where the table says, as ``FILE: NAME``. ``folder``: of DeepSpeed's package."""
    absent = []
    for file, names in INTERNALS.items():
        path = folder / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        pattern = r"\b(?:def|class) {0}\b|\b{0}\s*(?::[^=\n]*)?=|\b{0},|hasattr\(\w+, '{0}'\)"
        absent += [f"{file}: {name}" for name in names if not re.search(pattern.format(name), text)]
    return absent


def package() -> Path:
    """Returns the folder of DeepSpeed's package, without importing it."""
    return Path(str(importlib.metadata.distribution("deepspeed").locate_file("deepspeed")))


def check(version: str) -> None:
    """Checks an untested release. Raises EngineError if names are missing."""
    if absent := missing(package()):
        more = f" and {len(absent) - 3} more" * (len(absent) > 3)
        raise EngineError(
            f"DeepSpeed {version} has no longer what dsframe needs inside of it: {', '.join(absent[:3])}{more}; "
            "install deepspeed==0.19.8"
        )
