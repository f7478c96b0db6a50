"""Runs a job to its end, restarting it from the newest checkpoint unless it would only fail again.

Success is decided by the processes' reports (``run_dir.outcome``), not by the launcher's exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
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
from dsframe.text import shown

LONGEST_WAIT_SECONDS = 60.0
SILENT_REPEATS = 3
"""Failures without a message (kills) at the same step that end a run; two may be chance."""
NO_CHANGE = "a restart would not change that"


@dataclass(frozen=True)
class Failure:
    """The failure of an attempt."""

    step: int
    """The last finished step, as far as known."""
    reason: str
    """Empty if no process reported one."""
    rank: int | None
    code: int
    moved: bool
    """True if the attempt finished steps, so the task's code works in general."""

    @classmethod
    def of(cls, ended: Outcome, code: int, newest: int | None, now: int | None) -> Failure:
        """``code``: the launcher's. ``newest``, ``now``: step of the newest checkpoint before and after the attempt."""
        step = ended.step if ended.step is not None else now or 0
        reason = ended.message
        if not reason and not code and ended.code is None:
            reason = "the launcher ended with 0, but no process said that training is complete"
        return cls(step, reason, ended.rank, ended.code or code or 1, step > (newest or 0))

    @property
    def is_final(self) -> bool:
        """True for errors that a restart does not fix."""
        if self.code == TaskError.exit_code:
            return bool(self.reason) and not self.moved
        return bool(self.reason) and self.code in (ConfigError.exit_code, EngineError.exit_code)

    def __str__(self) -> str:
        prefix = f"rank {self.rank}: " if self.rank is not None and self.reason else ""
        return f"after step {self.step}: {prefix}{self.reason or 'a process was killed, or ended without a message'}"


class Attempts:
    """The attempts of one job."""

    def __init__(self, directory: Path, *, restarts: int, wait_seconds: float) -> None:
        """``wait_seconds``: before the first restart; doubled while nothing new is saved."""
        self._restarts, self._first_wait = restarts, wait_seconds
        self._store = Store(directory / "checkpoints")
        self._failures: list[Failure] = []
        self.report = directory / f"outcome-{os.urandom(4).hex()}.jsonl"
        """Where processes report how they ended; specific to this launch, since another one may start meanwhile."""

    def run(self, attempt: Callable[[bool, list[int]], int]) -> int:
        """Repeats attempts until one succeeds or a restart is useless; returns the exit code of the job.

        ``attempt(resume, received)`` runs the job once, from the newest checkpoint if ``resume``, and returns the
        launcher's exit code. It appends the signals received meanwhile to ``received``.
        """
        began = saved = False
        wait = self._first_wait
        self.report.parent.mkdir(parents=True, exist_ok=True)
        while True:
            newest = self._newest()
            received: list[int] = []
            code, ended = self._once(attempt, began and newest is not None, received)
            began = began or ended.began
            if ended.done:
                if code:
                    say(f"training finished; the launcher then exited with {code}, which is safe to ignore")
                return 0
            if ended.code == StoppedError.exit_code:
                return StoppedError.exit_code
            if supervise.ENDING & {*received}:
                if ended.code is None:  # launchers have their own exit codes for signals
                    say(f"ended by {signal.Signals(received[-1]).name}")
                return ended.code or 128 + received[-1]
            now = self._newest()
            failure = Failure.of(ended, code, newest, now)
            self._failures.append(failure)
            saved = saved or (began and now is not None)
            if why := self._why_no_restart(lost=saved and now is None):
                if self._restarts or not ended.message:  # else the process has reported the same
                    say(f"failed {why}")
                return failure.code
            wait = self._first_wait if now != newest else wait
            say(f"failed {failure}; restarting in {wait:.0f} s ({len(self._failures)} of {self._restarts})")
            if number := supervise.wait_for_signal(wait):
                return 128 + number
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _once(
        self, attempt: Callable[[bool, list[int]], int], resume: bool, received: list[int]
    ) -> tuple[int, Outcome]:
        clean()
        try:
            code = attempt(resume, received)
            clean()
            return code, outcome.read(self.report)
        finally:
            with contextlib.suppress(OSError):
                self.report.unlink(missing_ok=True)

    def _newest(self) -> int | None:
        checkpoints = self._store.newest_first()
        return step_of(checkpoints[0]) if checkpoints else None

    def _why_no_restart(self, *, lost: bool) -> str:
        """Returns why there is no further attempt; empty if there is one. ``lost``: the checkpoints are gone."""
        last, restarts = self._failures[-1], self._restarts
        if len(self._failures) > restarts:
            used = f"; all {restarts} restarts are used" if restarts else ""
            return f"{last}{used}" + (
                "; continue with --resume auto" if last.moved and self._newest() is not None else ""
            )
        if last.is_final:
            return f"{last}; {NO_CHANGE}"
        repeats = self._failures[-2:] if last.reason else self._failures[-SILENT_REPEATS:]
        enough = len(repeats) == (2 if last.reason else SILENT_REPEATS)
        same = len({(failure.step, failure.reason) for failure in repeats}) == 1
        if enough and same and last.code != WorldError.exit_code:  # a port in use may be free next time
            return f"{len(repeats)} times in a row {last}; {NO_CHANGE}"
        if lost:  # a restart from the beginning would go unnoticed until the end
            damaged = ", ".join(self._store.damaged())
            problem = f"{self._store.directory} has no complete checkpoint any more"
            problem += f" (damaged: {damaged})" if damaged else ""
            return f"{last}; {problem}; restore one and use --resume auto, or start over with --resume never"
        return ""


def clean() -> None:
    """Removes leftovers of killed runs on this node that block the next run or fill its memory."""
    locks, buffers = stale_locks(extensions_directory()), unused_buffers()
    for path in (*locks, *buffers):
        path.unlink(missing_ok=True)
    if locks or buffers:
        size = [f"{len(buffers)} buffers in /dev/shm"] if buffers else []
        say("removed leftovers of killed runs: " + ", ".join([*size, *map(str, locks)]))


def say(line: str) -> None:
    """Prints one line of dsframe launch."""
    print(shown(f"dsframe launch: {line}", sys.stderr) + "\n", end="", file=sys.stderr, flush=True)
