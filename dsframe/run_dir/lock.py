"""Only one run uses a directory at a time: rank 0 holds a lock on a file in it, which ends with its process.

A record lock (``lockf``) and not ``flock``: it is the process's own, so workers that it has forked and that outlive it for a
moment do not hold it. No other part of dsframe may open the file: a process that closes it anywhere has let the lock go.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dsframe.cluster.world import World
from dsframe.errors import CheckpointError, ConfigError, DsframeError, Problem, WorldError
from dsframe.text import Say

PATIENCE_SECONDS = 10.0
"""How long a run that was killed may take until its process is gone."""
_LOCK = ".lock"
"""Who holds it: host, process, and Slurm's job where there is one; empty when nobody does, unless a run was killed."""


class RunLock:
    """This process's hold on a run's directory; a context manager, which releases the lock at its end."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._take_again: Callable[[], None] = lambda: None
        self._directory: tuple[Path, tuple[int, int] | None] = (Path(), None)

    @property
    def held(self) -> bool:
        """False on ranks other than 0, and where the file system knows no locks."""
        return self._descriptor is not None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self, directory: Path, world: World, say: Say) -> None:
        """Rank 0 makes the directory and claims it, before anything is set up; a former rank 0 releases the lock.

        Raises ConfigError if the directory cannot be written to, WorldError if another run uses it.
        """
        if self.held and world.is_main:
            return
        self.release()
        if not world.is_main:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            text = f"{directory} cannot be written to: {error.strerror}"
            remedy = "choose another with --run-dir"
            raise ConfigError([Problem("error", "dsframe.run_dir", text, remedy, code="run-dir")]) from None
        locked = False
        try:
            locked = _lock(descriptor, directory, say)
        except WorldError:
            if not _requeued(descriptor):
                raise
        finally:
            if not locked:
                os.close(descriptor)
        if not locked:
            return
        self._descriptor = descriptor
        self._directory = directory, _identity(directory)
        self._take_again = lambda: self.take(directory, world, say)
        with contextlib.suppress(OSError):  # a full disk: it is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor, f"{socket.gethostname()} {os.getpid()} {os.environ.get('SLURM_JOB_ID', '')}\n".encode(), 0
            )

    def renew(self, say: Say) -> None:
        """Looks whether the directory's name still leads to the one that this process holds, and else claims the new one.

        Raises CheckpointError where another run is there.
        """
        directory, held = self._directory
        if self._descriptor is None or held is None or _identity(directory) == held:
            return
        say(
            f"warning: {directory} was moved, deleted or replaced while this run went on; what comes next is in a new one"
        )
        earlier, self._descriptor = self._descriptor, None
        try:
            self._take_again()
        except DsframeError as error:
            self._descriptor = earlier
            raise CheckpointError(f"{directory} is not this run's any more: {error}") from None
        os.close(earlier)

    def release(self) -> None:
        """For the next run, also of this process."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


def _identity(directory: Path) -> tuple[int, int] | None:
    """Device and inode; None where nothing can be found out."""
    try:
        status = directory.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _holder(descriptor: int) -> tuple[str, str, str]:
    """Host, process and Slurm job of who holds it; empty where that is not known."""
    host, process, job = (*os.pread(descriptor, 512, 0).decode(errors="replace").split(), "", "", "")[:3]
    return host, process, job


def _requeued(descriptor: int) -> bool:
    """Whether Slurm started this job again: it has ended who held it, whose host may be down and its lock (NFS) still there."""
    job = os.environ.get("SLURM_JOB_ID")
    return bool(job) and os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and _holder(descriptor)[2] == job


def _lock(descriptor: int, directory: Path, say: Say) -> bool:
    """False where the file system knows no locks. Raises WorldError where another process has it, and keeps it."""
    deadline, announced = time.monotonic() + PATIENCE_SECONDS, False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return False
        host, process, _ = _holder(descriptor)
        who = f"another run (process {process} on {host})" if process else "another run"
        if time.monotonic() > deadline:
            here = host == socket.gethostname()
            gone = "" if here else f"; if {host or 'its host'} is down, remove {directory / _LOCK}"
            raise WorldError(f"{directory} is in use by {who}; stop it, or choose another with --run-dir{gone}")
        if not announced:
            say(f"{directory} is in use by {who}; waiting {PATIENCE_SECONDS:.0f} s for its end")
            announced = True
        time.sleep(0.1)
