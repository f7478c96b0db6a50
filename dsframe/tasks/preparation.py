"""Calls :meth:`Task.prepare` once for a folder before anybody reads, and ends all ranks with one message where it fails.

Ranks talk through a store of torch's, which there is under every launcher before there is an engine. The first process of each
host prepares, the others wait. Hosts that share the folder take turns by a lock on a file in it, and find what has been done by a
name that rank 0 has drawn for this start. A rank that waits looks whether the process that prepares is still there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from dsframe import errors
from dsframe.cluster.process_group import meet, rendezvous_address
from dsframe.cluster.world import World
from dsframe.data.files import data_root, writing
from dsframe.errors import DataError, DsframeError, WorldError
from dsframe.host.source_files import is_users
from dsframe.tasks.task import Say, Task

SILENT_SECONDS = 60.0
"""How long a process on another host that prepares may give no sign of life. On the same host its end is seen at once."""
_SIGN_SECONDS = 1.0
_LOOK_SECONDS = 0.05
_FAREWELL_SECONDS = 10.0
"""How long the process that has the store waits until the others have read how it went."""


def prepare(task: Task, world: World, say: Say) -> None:
    """**Collective.** Has the data prepared, if the task has something to prepare. Raises DsframeError, the same on every rank.

    Where ranks cannot meet (an MPI that gives no address), each calls it in turn.
    """
    if not task.prepares:
        return
    store = None
    if world.size > 1:
        with contextlib.suppress(WorldError):  # the launcher gives no address: the same on all ranks
            rendezvous_address(world)
            store = meet(world, *rendezvous_address(world), timedelta(seconds=SILENT_SECONDS))
    if store is None:
        alone(task, say)
        return
    _SharedPreparation(task, world, say, store).run()


def alone(task: Task, say: Say) -> None:
    """Prepares in this process, under the lock of the folder. Raises DsframeError."""
    if task.prepares:
        with _lock(task, say):
            _call(task, say)


@dataclass(frozen=True)
class _Process:
    """A process of the run."""

    rank: int
    first: bool
    """It prepares for its host."""
    host: str
    process: int
    started: float

    @property
    def ended(self) -> bool:
        """True if the process, of this host, is gone. Its number may be another one's by now."""
        try:
            process = psutil.Process(self.process)
            return bool(process.status() == psutil.STATUS_ZOMBIE or process.create_time() != self.started)
        except psutil.Error:
            return True


class _SharedPreparation:
    """The ranks of a run, one of each host preparing."""

    def __init__(self, task: Task, world: World, say: Say, store: Any) -> None:
        self._task, self._world, self._say, self._store = task, world, say, store
        process = psutil.Process()
        me = _Process(world.rank, world.local_rank == 0, socket.gethostname(), process.pid, process.create_time())
        store.set(f"who/{world.rank}", json.dumps(asdict(me)))
        if world.is_main:
            store.set("start", secrets.token_hex(8))
        texts = [store.get(f"who/{rank}") for rank in range(world.size)]
        everybody = [_Process(**json.loads(text)) for text in texts]
        self._me, self._first = me, [member for member in everybody if member.first]
        self._start = store.get("start").decode()
        self._signs: dict[int, tuple[bytes, float]] = {}

    def run(self) -> None:
        """Prepares or waits; then every rank has the same outcome. Raises DsframeError."""
        if self._me.first:
            self._store.set(f"outcome/{self._me.rank}", _failure_of(self._guarded))
        failure = self._wait()
        self._leave()
        if failure:
            raise _error(failure)

    def _guarded(self) -> None:
        """Prepares, unless another host has done so in the same folder, and gives signs of life meanwhile."""
        over = threading.Event()
        signs = threading.Thread(target=self._give_signs, args=(over,), name="dsframe-prepare", daemon=True)
        signs.start()
        try:
            with _lock(self._task, self._say) as folder:
                done = folder / f".prepared-{self._start}"
                if done.exists() or self._failed():
                    return
                _call(self._task, self._say)
                with writing(done):
                    done.touch()
        finally:
            over.set()
            signs.join(_FAREWELL_SECONDS)

    def _give_signs(self, over: threading.Event) -> None:
        count = 0
        while not over.is_set():
            count += 1
            with contextlib.suppress(RuntimeError):  # the store is gone, with rank 0
                self._store.set(f"sign/{self._me.rank}", str(count))
            over.wait(_SIGN_SECONDS)

    def _failed(self) -> bool:
        keys = [f"outcome/{preparer.rank}" for preparer in self._first]
        return any(self._store.get(key) for key in keys if self._store.check([key]))

    def _wait(self) -> str:
        """Returns the first failure, as :func:`_failure_of` has it; empty where all is well."""
        waiting = list(self._first)
        while waiting:
            for preparer in list(waiting):
                key = f"outcome/{preparer.rank}"
                try:
                    there = self._store.check([key])
                    if there and (failure := self._store.get(key).decode()):
                        return str(failure)
                    dead = not there and self._is_dead(preparer)
                except RuntimeError:  # the store is gone: rank 0 is one of those that prepare
                    dead, preparer, there = True, self._first[0], False
                if there:
                    waiting.remove(preparer)
                elif dead:
                    return _lost(preparer)
            time.sleep(_LOOK_SECONDS if waiting else 0.0)
        return ""

    def _is_dead(self, preparer: _Process) -> bool:
        if preparer.host == self._me.host:
            return preparer.ended and not self._store.check([f"outcome/{preparer.rank}"])
        key, now = f"sign/{preparer.rank}", time.monotonic()
        sign = self._store.get(key) if self._store.check([key]) else b""
        before, since = self._signs.get(preparer.rank, (b"none", now))
        if sign != before:
            self._signs[preparer.rank] = sign, now
            return False
        return now - since > SILENT_SECONDS

    def _leave(self) -> None:
        """Rank 0 stays until all have read how it went: the store may end with it. Removes what tells hosts of each other."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"read/{self._me.rank}", "1")
            limit = time.monotonic() + _FAREWELL_SECONDS * self._world.is_main
            keys = [f"read/{rank}" for rank in range(self._world.size)]
            while time.monotonic() < limit and not self._store.check(keys):
                time.sleep(_LOOK_SECONDS)
        if self._me.first:
            with contextlib.suppress(OSError):
                (_folder(self._task) / f".prepared-{self._start}").unlink(missing_ok=True)


def _call(task: Task, say: Say) -> None:
    try:
        task.prepare(say)
    except DsframeError:
        raise
    except Exception as error:  # of the user's code
        frames = traceback.extract_tb(error.__traceback__)
        raised_in = next((frame for frame in reversed(frames) if is_users(frame.filename)), frames[-1])
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(
            f"{type(task).__name__}.prepare() failed: {reason} ({raised_in.filename}:{raised_in.lineno})"
        ) from error


def _failure_of(work: Callable[[], None]) -> str:
    """Runs ``work``; returns its failure in a form that other ranks can raise again; empty where all is well."""
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


def _lost(lost: _Process) -> str:
    message = (
        f"the process that prepared the data (rank {lost.rank}, process {lost.process} on {lost.host}) ended before it was done; "
        "perhaps it was killed, or memory was short. Start again: what is half done is not used"
    )
    return json.dumps({"kind": "DataError", "message": message, "gone": True})


def _folder(task: Task) -> Path:
    return data_root(task.data_dir)


@contextlib.contextmanager
def _lock(task: Task, say: Say) -> Iterator[Path]:
    """The folder of the data, while no other process prepares the same there. Ends with the process, however that ends."""
    folder = _folder(task)
    cls = type(task)
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
        yield folder
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)
