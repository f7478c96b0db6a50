"""Every name inside DeepSpeed that dsframe reads, sets or calls beyond its public interface, and what it must mean.

A new release is read by this table: each file, name by name. ``tests/unit/test_internals.py`` has that nothing is used which is
not here, and that each name is where the table says. The meaning is proven by the contract (``tests/engines/test_contract.py``),
by ``tests/engines/test_patches.py`` and by the matrices of ``make equivalence`` and ``make portability``.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from dsframe.errors import EngineError
from dsframe.text import table_of

INTERNALS: dict[str, dict[str, str]] = table_of(__file__)
"""File of DeepSpeed's package -> name -> what it must mean. Of names that several files have, one of them."""


def missing(folder: Path) -> list[str]:
    """The names that are no more where the table says, as ``FILE: NAME``. ``folder``: of DeepSpeed's package."""
    gone = []
    for file, names in INTERNALS.items():
        path = folder / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        pattern = r"\b(?:def|class) {0}\b|\b{0}\s*(?::[^=\n]*)?=|\b{0},|hasattr\(\w+, '{0}'\)"
        gone += [f"{file}: {name}" for name in names if not re.search(pattern.format(name), text)]
    return gone


def package() -> Path:
    """The folder of DeepSpeed's package, which need not be imported."""
    return Path(str(importlib.metadata.distribution("deepspeed").locate_file("deepspeed")))


def check(version: str) -> None:
    """For a release that nobody has tried. Raises EngineError where names have gone."""
    if gone := missing(package()):
        more = f" and {len(gone) - 3} more" * (len(gone) > 3)
        raise EngineError(
            f"DeepSpeed {version} has no longer what dsframe needs inside of it: {', '.join(gone[:3])}{more}; "
            "install deepspeed==0.19.8"
        )
