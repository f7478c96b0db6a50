"""What a file says and a library reads in the environment: put there for one training, and taken back before the next one."""

from __future__ import annotations

import os

from dsframe.errors import EngineError

_ours: dict[str, tuple[str, str | None]] = {}
"""What this module has put into the environment, and what was there before: for a further run in this process nobody's word."""


def put(name: str, value: str) -> None:
    """Until :func:`take_back`."""
    _ours[name] = (value, _ours[name][1] if name in _ours else os.environ.get(name))
    os.environ[name] = value


def take_back() -> None:
    """What was there before comes back; leaves what somebody else has changed since."""
    for name, (value, before) in _ours.items():
        if os.environ.get(name) == value:
            if before is None:
                del os.environ[name]
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
