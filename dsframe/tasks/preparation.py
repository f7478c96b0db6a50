"""Calls :meth:`Task.prepare` once for each folder before any rank reads, and ends all ranks with one message if it
fails.

Ranks communicate through a torch store, which every launcher allows before there is an engine. The first process of
each node prepares, the others wait. Nodes that share the folder take turns, by a lock on a file in it. A preparing
process gives signs of life to the waiting ones.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from dsframe import errors
from dsframe.cluster.process_group import meet, rendezvous_address
from dsframe.cluster.world import World
from dsframe.data.files import data_root, writing
from dsframe.errors import DataError, DsframeError, WorldError
from dsframe.host.source_files import is_users
from dsframe.tasks.task import Task
from dsframe.text import Say, reason

SILENT_SECONDS = 60.0
"""Longest time without a sign of life from a preparing process."""
_SIGN_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_FAREWELL_SECONDS = 10.0
"""Time that the store's process waits until the others have read the outcome."""


def prepare(task: Task, world: World, say: Say) -> None:
    """**Collective.** Prepares the data, if the task has something to prepare. Raises DsframeError, the same on every
    rank. If ranks cannot connect (an MPI that gives no address), each prepares in turn."""
    if not task.prepares:
        return
    store = None
    if world.size > 1:
        with contextlib.suppress(WorldError):  # no address from the launcher: the same on all ranks
            rendezvous_address(world)
            store = meet(world, *rendezvous_address(world), timedelta(seconds=SILENT_SECONDS))
    if store is None:
        alone(task, say)
        return
    _SharedPreparation(task, world, say, store).run()


def alone(task: Task, say: Say) -> None:
    """Prepares in this process, holding the folder's lock. Raises DsframeError."""
    if task.prepares:
        with _lock(task, say):
            _call(task, say)


class _SharedPreparation:
    """The preparation by several ranks, one on each node."""

    def __init__(self, task: Task, world: World, say: Say, store: Any) -> None:
        self._task, self._world, self._say, self._store = task, world, say, store
        self._signs: dict[int, tuple[bytes, float]] = {}

    def run(self) -> None:
        """Prepares or waits, until every rank has the same outcome. Raises DsframeError."""
        failure = _failure_of(self._prepare_with_signs) if self._world.local_rank == 0 else ""
        try:
            self._store.set(f"outcome/{self._world.rank}", failure)
            failure = self._wait()
            self._wait_for_readers()
        except RuntimeError:  # the store is gone, with rank 0
            failure = failure or _lost_process(0)
        if failure:
            raise _error(failure)

    def _prepare_with_signs(self) -> None:
        over = threading.Event()
        signs = threading.Thread(target=self._give_signs, args=(over,), name="dsframe-prepare", daemon=True)
        signs.start()
        try:
            alone(self._task, self._say)
        finally:
            over.set()
            signs.join(_FAREWELL_SECONDS)

    def _give_signs(self, over: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, with rank 0
            while not over.is_set():
                self._store.set(f"sign/{self._world.rank}", str(time.monotonic()))
                over.wait(_SIGN_SECONDS)

    def _wait(self) -> str:
        """Returns the first failure, as from :func:`_failure_of`; "" if there is none."""
        waiting = list(range(self._world.size))
        while waiting:
            for rank in list(waiting):
                if self._store.check([f"outcome/{rank}"]):
                    waiting.remove(rank)
                    if failure := self._store.get(f"outcome/{rank}").decode():
                        return str(failure)
                elif self._is_silent(rank):
                    return _lost_process(rank)
            time.sleep(_LOOK_SECONDS if waiting else 0.0)
        return ""

    def _is_silent(self, rank: int) -> bool:
        """Returns True if a rank that prepares has given no sign of life for too long. Others give none."""
        if not self._store.check([f"sign/{rank}"]):
            return False
        sign, now = self._store.get(f"sign/{rank}"), time.monotonic()
        before, since = self._signs.setdefault(rank, (sign, now))
        if sign != before:
            self._signs[rank] = sign, now
        return sign == before and now - since > SILENT_SECONDS

    def _wait_for_readers(self) -> None:
        """Keeps rank 0 until all have read the outcome, because the store may end with it."""
        self._store.set(f"read/{self._world.rank}", "1")
        limit = time.monotonic() + _FAREWELL_SECONDS * self._world.is_main
        keys = [f"read/{rank}" for rank in range(self._world.size)]
        while time.monotonic() < limit and not self._store.check(keys):
            time.sleep(_LOOK_SECONDS)


def _call(task: Task, say: Say) -> None:
    try:
        task.prepare(say)
    except DsframeError:
        raise
    except Exception as error:  # from the user's code
        frames = traceback.extract_tb(error.__traceback__)
        raised_in = next((frame for frame in reversed(frames) if is_users(frame.filename)), frames[-1])
        raise DataError(
            f"{type(task).__name__}.prepare() failed: {reason(error)} ({raised_in.filename}:{raised_in.lineno})"
        ) from error


def _failure_of(work: Callable[[], None]) -> str:
    """Runs ``work``. Returns its failure in a form that other ranks can raise again; "" on success."""
    try:
        work()
    except DsframeError as error:
        return json.dumps({"kind": type(error).__name__, "message": str(error)})
    return ""


def _error(text: str) -> DsframeError:
    failure = json.loads(text)
    error_class = getattr(errors, failure["kind"])
    error: DsframeError = (
        DataError(failure["message"]) if error_class is errors.ConfigError else error_class(failure["message"])
    )
    error.first_is_gone = failure.get("gone", False)
    return error


def _lost_process(rank: int) -> str:
    message = (
        f"the process that prepared the data (rank {rank}) ended before it was done; perhaps it was killed, or memory was short. "
        "Start again: what is half done is not used"
    )
    return json.dumps({"kind": "DataError", "message": message, "gone": True})


@contextlib.contextmanager
def _lock(task: Task, say: Say) -> Iterator[None]:
    """Prevents other processes from preparing the same data in the folder. The lock ends with the process."""
    folder, cls = data_root(task.data_dir), type(task)
    path = folder / f".{cls.__module__}.{cls.__qualname__}{task.prepared_as}.lock".replace("<", "").replace(">", "")
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        announced = False
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break  # a file system without locks
            if not announced:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
                say(f"{holder} prepares the same data in {folder}; waiting until it is done")
                announced = True
            time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
