"""Environment variables through which a file's settings reach a library: set for one training, restored before the next."""

from __future__ import annotations

import os

from dsframe.errors import EngineError

_ours: dict[str, tuple[str | None, str | None]] = {}
"""Variables that this module has set or removed (None), and their values before, to be restored for a further run."""


def put(name: str, value: str) -> None:
    """Sets a variable until :func:`take_back`."""
    _ours[name] = (value, _ours[name][1] if name in _ours else os.environ.get(name))
    os.environ[name] = value


def remove(name: str) -> None:
    """Takes a variable out until :func:`take_back`."""
    _ours[name] = (None, _ours[name][1] if name in _ours else os.environ.get(name))
    os.environ.pop(name, None)


def take_back() -> None:
    """Restores the values before; leaves variables that somebody else has changed since."""
    for name, (value, before) in _ours.items():
        if os.environ.get(name) == value:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before
    _ours.clear()


def number(name: str, wanted: float | None, default: float | None) -> float | None:
    """Puts into the environment what the file says (``wanted``), else leaves what is there, else ``default``.

    Returns what file or environment say; None where they are silent. Raises EngineError for what is no number there.
    """
    given = os.environ.get(name)
    if wanted is not None:
        put(name, str(wanted))
        return wanted
    if not given:
        if default is not None:
            put(name, str(default))
        return None
    try:
        return float(given)
    except ValueError:
        raise EngineError(f"{name}={given!r} is not a number") from None
