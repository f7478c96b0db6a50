"""Ensures that only one run uses a directory: rank 0 locks a file in it, until its process ends.

Uses a record lock (``lockf``), which forked workers do not inherit, unlike ``flock``; so workers that outlive rank 0 do
not hold it. No other part of dsframe may open the file: closing any descriptor of it releases the lock.
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
"""How long a killed run's process may take to end."""
_LOCK = ".lock"
"""Contains host, process and Slurm job of the holder; empty if nobody holds it, unless a run was killed."""


class RunLock:
    """This process's lock on a run's directory; a context manager that releases it."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._take_again: Callable[[], None] = lambda: None
        self._directory: tuple[Path, tuple[int, int] | None] = (Path(), None)

    @property
    def held(self) -> bool:
        """False on ranks other than 0, and if the file system does not support locks."""
        return self._descriptor is not None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self, directory: Path, world: World, say: Say) -> None:
        """Creates and locks the directory on rank 0, before setup; a former rank 0 releases its lock.

        Raises ConfigError if the directory is not writable, WorldError if another run uses it.
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
        with contextlib.suppress(OSError):  # a full disk does not affect the lock
            os.ftruncate(descriptor, 0)
            os.pwrite(
                descriptor, f"{socket.gethostname()} {os.getpid()} {os.environ.get('SLURM_JOB_ID', '')}\n".encode(), 0
            )

    def renew(self, say: Say) -> None:
        """Checks that the directory is still the one that this process has locked, and otherwise locks the new one.

        Raises CheckpointError if another run uses it.
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
        """Releases the lock for the next run, including one of this process."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        status = directory.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _holder(descriptor: int) -> tuple[str, str, str]:
    """Returns host, process and Slurm job of the holder; empty if unknown."""
    host, process, job = (*os.pread(descriptor, 512, 0).decode(errors="replace").split(), "", "", "")[:3]
    return host, process, job


def _requeued(descriptor: int) -> bool:
    """True if Slurm has restarted this job, which ended the holder; its lock (NFS) may remain if its node is down."""
    job = os.environ.get("SLURM_JOB_ID")
    return bool(job) and os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and _holder(descriptor)[2] == job


def _lock(descriptor: int, directory: Path, say: Say) -> bool:
    """Locks the file. Returns False on file systems without locks. Raises WorldError if another process keeps it."""
    deadline, announced = time.monotonic() + PATIENCE_SECONDS, False
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return False
        host, process, _ = _holder(descriptor)
        holder_text = f"another run (process {process} on {host})" if process else "another run"
        if time.monotonic() > deadline:
            is_this_host = host == socket.gethostname()
            gone = "" if is_this_host else f"; if {host or 'its host'} is down, remove {directory / _LOCK}"
            raise WorldError(f"{directory} is in use by {holder_text}; stop it, or choose another with --run-dir{gone}")
        if not announced:
            say(f"{directory} is in use by {holder_text}; waiting {PATIENCE_SECONDS:.0f} s for its end")
            announced = True
        time.sleep(0.1)
