"""Jobs that leave nothing behind: no process, and no buffer in shared memory, however they end.

Launchers put ranks into sessions of their own (torchrun, horovodrun), which the end of the launcher does not reach. So every
process of a job carries a mark in its environment, by which it is found.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any

import psutil

from dsframe.host import supervise
from dsframe.host.leftovers import unused_buffers

MARK = "DSFRAME_BENCHMARK"


@dataclass(frozen=True)
class Job:
    """A job that was started, and all processes that it has started."""

    process: subprocess.Popen[Any]
    """The launcher."""
    mark: str

    def members(self):
        """The living processes of the job."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # another user's, or gone meanwhile
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def end(self):
        """Kills what still lives, stopped or not, and removes what killed ranks leave in shared memory."""
        for attempt in range(100):  # who was just being started is found the next time
            if not (members := self.members()):
                break
            for member in members:
                with contextlib.suppress(psutil.Error):
                    if attempt < 50 and _removes_semaphores(member):
                        member.resume()
                    else:
                        member.kill()
            time.sleep(0.05)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        for path in unused_buffers():
            path.unlink(missing_ok=True)


def _removes_semaphores(process):
    """Whether this is Python's own, which takes the names of a program's semaphores from /dev/shm when the program is gone, and
    then ends."""
    return any("multiprocessing.resource_tracker" in word for word in process.cmdline())


def start(command, *, env=None, **options):
    """Starts a job in a session of its own; ``options`` are ``subprocess.Popen``'s. Whoever starts it ends it.

    A program that is killed cannot: then Linux sends its launchers SIGTERM, at which they end their ranks.
    """
    mark = uuid.uuid4().hex
    environment = {**(os.environ if env is None else env), MARK: mark}
    options = {"stdin": subprocess.DEVNULL, "preexec_fn": supervise.die_with_parent, **options}
    return Job(subprocess.Popen(command, env=environment, start_new_session=True, **options), mark)


def heed_sigterm():
    """Lets SIGTERM, as ``timeout`` sends it, end this program like an exception, so that its jobs end as well.

    Only the first one: ``timeout`` sends it to the program and then to its process group, and the second would interrupt
    the end of the jobs.
    """

    def leave(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)


@contextlib.contextmanager
def job(command, **options):
    """A job that is over after the block."""
    started = start(command, **options)
    try:
        yield started
    finally:
        started.end()


def run(command, *, timeout, **options):
    """A job to its end, and what it printed. Raises subprocess.TimeoutExpired where it takes more than ``timeout`` seconds."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with job(command, **pipes, **options) as started:
        said, complained = started.process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(list(command), started.process.returncode, said, complained)
