"""Tells whether a value belongs to one start of a program: a time, a path, a random name, a counter. It is no argument."""

from __future__ import annotations

import os
import re
import socket
import time
from datetime import datetime, timedelta, timezone
from pathlib import PurePath
from typing import Any

from torch.utils.hooks import RemovableHandle

_SINCE = 3600.0
"""In seconds. A time of this process is not older when it is examined."""
_STAMPS = (
    r"%Y\D?%m\D?%d|%y\D?%m\D?%d|%d\D?%m\D?%Y|%m\D?%d\D?%Y|%m\D?%d\D?%H|%d\D?%b|%b\D{0,2}%d"
    "|%H[:h._-][0-5][0-9]|%H[0-5][0-9][0-5][0-9]"
)
"""Patterns, for strftime, of a date and of a time within the hour."""
_RANDOM = "(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{8}|^tmp[a-z0-9_]{8}$"
"""The first digits of a UUID or a digest, and the names of :mod:`tempfile`."""
_PIDS = 1000
"""A smaller number is not taken for that of the process."""


def is_of_one_start(value: Any) -> bool:
    """Returns True if another start of the same file would give another value."""
    if isinstance(value, str):
        return _has_name_of_a_run(value)
    if isinstance(value, (int, float)):
        return _is_time(value) or value == os.getpid() >= _PIDS
    return isinstance(value, (PurePath, time.struct_time, RemovableHandle))


def _is_time(value: float) -> bool:
    by_clock = any(abs(time.time() * unit - value) < _SINCE * unit for unit in (1, 1e3, 1e6))
    return by_clock or (value % 1 > 0 and _SINCE < value <= time.monotonic() < value + _SINCE)


def _has_name_of_a_run(text: str) -> bool:
    """Returns True for a text with a present time, a random name, this host or this process."""
    stamps = [
        moment.strftime(_STAMPS)
        for now in (datetime.now(), datetime.now(timezone.utc))
        for moment in (now, now - timedelta(seconds=_SINCE))
    ]
    numbers = [f"{time.time():.0f}"[:-5], *([str(os.getpid())] if os.getpid() >= _PIDS else [])]
    at_start = [rf"(?<!\d){number}" for number in numbers]
    return bool(
        re.search("|".join([*stamps, *at_start, _RANDOM, re.escape(socket.gethostname())]), text, re.IGNORECASE)
    )
