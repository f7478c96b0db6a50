"""Queries other processes, and defines stop signals. Standard library only, like :mod:`supervise`."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Signals that ask a training to save and stop. SIGHUP: the terminal or ssh session ended. SIGINT: Ctrl-C."""


def say_what_comes() -> None:
    """Tells the user what Ctrl-C does."""
    from dsframe.text import shown  # here, because launchers need it only now

    line = shown(
        "dsframe: note: stopping at the end of a step, then saving; Ctrl-C again ends at once, without saving",
        sys.stderr,
    )
    with contextlib.suppress(OSError):
        print("\n" * sys.stderr.isatty() + line, file=sys.stderr, flush=True)  # a terminal has written ^C


def output_of(
    command: Sequence[str], seconds: float, *, folder: Path | None = None, environ: Mapping[str, str] | None = None
) -> str | None:
    """Returns the output of a command; None if it does not exist, fails, or takes longer than ``seconds``."""
    import subprocess  # here, because launchers do not need it

    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def state_and_parent(pid: int) -> tuple[bytes, int]:
    """Returns a process's state letter and parent; (b"Z", 0) if it has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:2]
    except OSError:
        return b"Z", 0
    return state, int(parent)
