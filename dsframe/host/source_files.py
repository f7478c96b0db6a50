"""Which source files are the user's, and where those lie that dsframe brings in addition to its modules."""

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


def shipped(name: str, in_repository: str) -> Path:
    """Returns a folder that dsframe brings: ``name`` in the installed package, else ``in_repository``."""
    installed = Path(OURS, name)
    return installed if installed.is_dir() else Path(OURS).parent / in_repository
