"""Runs a job to its end: restarts it from the newest checkpoint if it failed, unless it would only fail again.

Whether a run succeeded is what its processes said (``report.outcome``), not the launcher's exit code.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsframe.checkpoint.store import Store, step_of
from dsframe.engines.deepspeed.jit import extensions_directory
from dsframe.errors import ConfigError, EngineError, StoppedError, TaskError, WorldError
from dsframe.host import supervise
from dsframe.host.leftovers import stale_locks, unused_buffers
from dsframe.run_dir import outcome
from dsframe.run_dir.outcome import Outcome

LONGEST_WAIT_SECONDS = 60.0
NEVER_AGAIN = frozenset({ConfigError.exit_code, EngineError.exit_code, TaskError.exit_code})
"""Exit codes of mistakes that a restart does not change."""
SILENT_REPEATS = 3
"""Number of failures without a message (kills) at one step that end a run: two may be chance. Two equal errors are not."""


@dataclass(frozen=True)
class Failure:
    """The failure of an attempt."""

    step: int
    """The last step that was finished, as far as anybody knows."""
    reason: str
    """Empty where no process could say one."""
    rank: int | None
    code: int
    moved: bool = False
    """Steps were done before it, so that the task's code works in general."""

    def repeats(self, other: Failure) -> bool:
        """True if it is the same as ``other``, whichever rank was the first to say it."""
        return (self.step, self.reason) == (other.step, other.reason)

    def __str__(self) -> str:
        who = f"rank {self.rank}: " if self.rank is not None and self.reason else ""
        return f"after step {self.step}: {who}{self.reason or 'a process was killed, or ended without a message'}"


class Attempts:
    """The attempts of one job."""

    def __init__(self, directory: Path, *, restarts: int, wait_seconds: float) -> None:
        """``directory``: the run's. ``wait_seconds``: before the first restart, and doubled as long as nothing new is saved."""
        self._restarts, self._first_wait = restarts, wait_seconds
        self._store = Store(directory / "checkpoints")
        self._failures: list[Failure] = []
        self.report = directory / f"outcome-{os.urandom(4).hex()}.jsonl"
        """The file in which the processes say how they ended; this launch's own: another one may start meanwhile."""

    def run(self, attempt: Callable[[bool, list[int]], int]) -> int:
        """Attempts until one succeeds or none would; returns the exit code of the whole.

        ``attempt(resume, received)`` runs the job once, from the newest checkpoint if ``resume``, and returns the launcher's exit
        code; it appends the signals that came meanwhile to ``received``.
        """
        try:
            return self._run(attempt)
        finally:
            with contextlib.suppress(OSError):
                self.report.unlink(missing_ok=True)

    def _run(self, attempt: Callable[[bool, list[int]], int]) -> int:
        began, saved, wait = False, False, self._first_wait
        while True:
            clean()
            self.report.parent.mkdir(parents=True, exist_ok=True)
            self.report.unlink(missing_ok=True)
            newest = self._newest()
            received: list[int] = []
            code = attempt(began and newest is not None, received)
            clean()
            found = outcome.read(self.report)
            began = began or found.began
            if found.done:
                if code:
                    say(f"training finished; the launcher then exited with {code}, which is safe to ignore")
                return 0
            if found.code == StoppedError.exit_code:
                return StoppedError.exit_code
            if supervise.ENDING & {*received}:
                return code or 128 + received[-1]
            self._failures.append(_failure(found, code, newest))
            now = self._newest()
            saved = saved or (began and now is not None)
            if final := self._final() or (self._gone() if saved and now is None else ""):
                say(final)
                return self._failures[-1].code
            wait = self._first_wait if now != newest else wait
            say(f"failed {self._failures[-1]}; restarting in {wait:.0f} s ({len(self._failures)} of {self._restarts})")
            if number := supervise.wait_for_signal(wait):
                return 128 + number
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _newest(self) -> int | None:
        found = self._store.newest_first()
        return step_of(found[0]) if found else None

    def _final(self) -> str:
        """Returns why there is no further attempt; empty if there is one."""
        last = self._failures[-1]
        same = 0
        while same < len(self._failures) and self._failures[-1 - same].repeats(last):
            same += 1
        hopeless = last.code in NEVER_AGAIN and not (last.code == TaskError.exit_code and last.moved)
        if self._restarts and last.reason and hopeless:
            return f"failed {last}; a restart would not change that"
        passing = last.code == WorldError.exit_code  # a port in use, a host away: may be over the next time
        if self._restarts and not passing and same >= (2 if last.reason else SILENT_REPEATS):
            return f"failed {same} times in a row {last}; a restart would not change that"
        if len(self._failures) > self._restarts:
            return f"failed {last}" + (f"; all {self._restarts} restarts are used" if self._restarts else "")
        return ""

    def _gone(self) -> str:
        """Returns why a run whose checkpoints were lost is not started over: nobody would notice until it is over."""
        damaged = f" (damaged: {', '.join(names)})" if (names := self._store.damaged()) else ""
        return (
            f"failed {self._failures[-1]}; {self._store.directory} has no complete checkpoint any more{damaged}, so a restart "
            "would begin at step 0; restore one and use --resume auto, or start over with --resume never"
        )


def _failure(found: Outcome, code: int, newest: int | None) -> Failure:
    step = found.step if found.step is not None else newest or 0
    reason = found.message
    if not reason and not code and found.code is None:
        reason = "the launcher ended with 0, but no process said that training is complete"
    return Failure(step, reason, found.rank, found.code or code or 1, step > (newest or 0))


def clean() -> None:
    """Removes leftovers of killed runs on this host: the next run would wait for their locks, and memory fills up."""
    locks, buffers = stale_locks(extensions_directory()), unused_buffers()
    for path in (*locks, *buffers):
        path.unlink(missing_ok=True)
    if locks or buffers:
        size = f"{len(buffers)} buffers in /dev/shm" if buffers else ""
        say("removed leftovers of killed runs: " + ", ".join(filter(None, [size, *map(str, locks)])))


def say(line: str) -> None:
    """One line of ours among those of the run."""
    print(f"dsframe launch: {line}\n", end="", file=sys.stderr, flush=True)
