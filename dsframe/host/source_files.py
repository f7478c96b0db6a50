"""Which source files are the user's: neither dsframe's own, nor Python's, nor those of installed packages."""

from __future__ import annotations

import sysconfig
from pathlib import Path

OURS = str(Path(__file__).resolve().parent.parent)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")})


def is_ours(file: str) -> bool:
    """True if ``file``, an absolute path, is one of dsframe's."""
    return file.startswith(OURS + "/")


def is_users(file: str) -> bool:
    """True if ``file``, an absolute path, is the user's."""
    return not (is_ours(file) or file.startswith(LIBRARIES))
