"""Computes digests of the user's source files, to detect code that has changed since a checkpoint was written."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from xxhash import xxh3_64_hexdigest

from dsframe.host.source_files import is_users


def sources() -> dict[str, str]:
    """Returns a digest of each imported module of the user's: the task's, its model's, the script's. Includes all
    modules, because a task's dependencies are unknown: a constant does not know its module."""
    digests = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__mp_main__" and isinstance(file, str) and is_users(file):  # multiprocessing's name for __main__
            with suppress(OSError):  # in an archive, or removed
                digests[_name(name, module, file)] = xxh3_64_hexdigest(Path(file).read_bytes())
    return digests


def _name(name: str, module: ModuleType, file: str) -> str:
    """Returns a name that is the same for a file started as a script, by ``-m``, or imported."""
    if name != "__main__":
        return name
    return module.__spec__.name if module.__spec__ else Path(file).stem
