"""Times the phases from a process's start to the end of its first step. A process has one clock, and one run at a time.
Rank 0 writes the times to ``metrics.jsonl`` and ``summary.json``; ``python -m benchmarks.startup`` prints them. Does
not import torch."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

_seconds: dict[str, float] = {}
_last = time.perf_counter()
_runs = 0


def begin() -> None:
    """Starts a run. Time before the first is the phase "python": the interpreter, the file, the check."""
    global _last, _runs
    now = time.perf_counter()
    _seconds.clear()
    if not _runs and (age := _age()) is not None:
        _seconds["python"] = age
    _last, _runs = now, _runs + 1


def done(name: str) -> None:
    """Ends a phase named ``name``; phases of the same name are added up."""
    global _last
    now = time.perf_counter()
    _seconds[name] = _seconds.get(name, 0.0) + now - _last
    _last = now


def seconds() -> Mapping[str, float]:
    """Returns the seconds of each phase, in the order of their first end."""
    return dict(_seconds)


def _age() -> float | None:
    """Returns the seconds since this process started, to 0.01 s; None if unavailable."""
    try:
        # The name, in brackets, may hold anything. After it, the state is field 3 and the start time field 22.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
