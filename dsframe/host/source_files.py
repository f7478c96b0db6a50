"""Tells the user's source files from others, and finds additional files that dsframe ships."""

from __future__ import annotations

import sysconfig
from pathlib import Path

OURS = str(Path(__file__).resolve().parent.parent)
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")})


def is_ours(file: str) -> bool:
    """Returns True if ``file``, an absolute path, belongs to dsframe."""
    return file.startswith(OURS + "/")


def is_users(file: str) -> bool:
    """Returns True if ``file``, an absolute path, belongs to the user."""
    return not (is_ours(file) or file.startswith(LIBRARIES))


def shipped(name: str, in_repository: str) -> Path:
    """Returns a shipped folder: ``name`` in the installed package, else ``in_repository``."""
    installed = Path(OURS, name)
    return installed if installed.is_dir() else Path(OURS).parent / in_repository
