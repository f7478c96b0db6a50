"""Times the phases from a process's start to the end of its first step. One clock for a process; it has one run at a time.

Kept by rank 0 in ``metrics.jsonl`` and ``summary.json``; ``python -m benchmarks.startup`` prints it. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

_seconds: dict[str, float] = {}
_last = time.perf_counter()
_runs = 0


def begin() -> None:
    """A run starts. What the process did before its first one is the phase "python": the interpreter, the file, the check."""
    global _last, _runs
    now = time.perf_counter()
    _seconds.clear()
    if not _runs and (age := _age()) is not None:
        _seconds["python"] = age
    _last, _runs = now, _runs + 1


def done(name: str) -> None:
    """Ends a phase and names it ``name``; phases of one name are added."""
    global _last
    now = time.perf_counter()
    _seconds[name] = _seconds.get(name, 0.0) + now - _last
    _last = now


def seconds() -> Mapping[str, float]:
    """Returns the seconds of each phase, in the order of their first end."""
    return dict(_seconds)


def _age() -> float | None:
    """Seconds since this process was started, to a hundredth; None where the system does not say."""
    try:
        # After the name, which is in brackets and may hold anything: state is field 3, the start is field 22.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
