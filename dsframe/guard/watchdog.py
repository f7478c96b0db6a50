"""Ends a run that hangs, and reports where each rank waits and which one is missing.

A thread of each rank checks the time since its last sign of life. The first rank over the limit notifies the others
through a torch store (a TCP server in a C++ thread of rank 0 or torchrun, which answers while rank 0 hangs). All write
their state there, rank 0 prints the report, and all exit. The store exists before the engine, so set-up and the reading
of checkpoints are covered.

This uses no collective and nothing of the library that hangs, so it works with every engine. If an engine needs the
same calls on all ranks, they are compared through the store after LOOK_SECONDS, long before the limit. Horovod's stall
check reports nothing over Gloo (measured, 0.28.1), and Gloo's own limit ends a run after 30 minutes without naming a
rank.

If rank 0 is stopped or its node is cut off, calls of the store block without limit. So each runs in a thread that can
be abandoned, and ending the process never depends on one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from dsframe.cluster.process_group import meet, rendezvous_address
from dsframe.cluster.world import World
from dsframe.errors import HangError, TaskError, WorldError
from dsframe.guard import hang
from dsframe.guard.hang import SET_UP
from dsframe.run_dir import outcome

FIRST_FACTOR = 3.0
"""Factor on the limit for the first step, in which kernels are compiled and data are first read."""
SETUP_SECONDS = 900.0
"""Minimum limit for setting up the engine and reading a checkpoint: operators are compiled, models are built."""
ANSWER_SECONDS = 10.0
"""Time that rank 0 waits for the others' reports, and the others for rank 0 to print them."""
LOOK_SECONDS = 10.0
"""Ranks that have all made no progress for this time compare the modules that they have called."""
_MIXED_UP = re.compile(r"preamble|Detected a disagreement|[Mm]ismatch.*collective|collective.*[Mm]ismatch")
"""Matches library messages about ranks that met in different collectives."""


class Watchdog:
    """Watches the run inside its context, which may be entered repeatedly. :meth:`beat` costs about 0.1 us."""

    def __init__(self, world: World, seconds: float) -> None:
        """**Collective** with several ranks and a limit: connects the ranks. ``seconds``: the longest time between two
        signs of life; 0: no limit. Raises WorldError if the ranks cannot connect."""
        self._world, self._seconds = world, seconds
        self._limit = max(seconds * FIRST_FACTOR, SETUP_SECONDS)
        self._step = SET_UP
        self._beats = self._round = 0
        self._last = 0.0
        self._store: Any = _create_store(world) if seconds and world.size > 1 else None
        self._calls: Any = None
        self._called = -1
        """The last round to which another rank has called this one."""
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def look_at(self, calls: Any) -> None:
        """**Collective** if there are ``calls``: the engine's record of module calls (``BuiltModel.calls``)."""
        self._calls = calls
        if self._calls is not None and self._store is not None:
            self._calls.connect(self._store.clone())

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self._last = time.monotonic()
            self._over = threading.Event()
            names = {hang.WATCHERS: self._watch} | ({f"{hang.WATCHERS}-calls": self._poll_calls} if self._store else {})
            self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in names.items()]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, cls: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(1.0)  # torch's store must not be in use when the interpreter shuts down
        if isinstance(error, RuntimeError) and _MIXED_UP.search(str(error)):
            limit = time.monotonic() + 2 * self._look_seconds + ANSWER_SECONDS  # by now the others wait for this rank
            while time.monotonic() < limit and self._calls is not None and self._store is not None:
                if difference := self._different_calls():
                    raise TaskError(difference) from None
                time.sleep(self._interval)

    def begin(self, step: int) -> None:
        """Starts the limit for the first step. Training continues after ``step``."""
        self._step, self._limit = step, self._seconds * FIRST_FACTOR
        self._last = time.monotonic()

    def beat(self) -> None:
        """Records a sign of life."""
        self._beats += 1
        self._last = time.monotonic()

    def alive(self) -> None:
        """Records a sign of life that not all ranks give equally often."""
        self._last = time.monotonic()

    def done(self, step: int) -> None:
        """Records the end of ``step``."""
        self._step, self._limit = step, self._seconds
        self.beat()

    def _watch(self) -> None:
        over, looked = self._over, time.monotonic()
        while not over.wait(self._interval):
            before, looked = looked, time.monotonic()
            if looked - before > self._interval + self._seconds / 2:
                self._last = looked  # this process itself was stopped (Ctrl-Z, a frozen container)
            idle = looked - self._last
            if idle > self._look_seconds and self._calls is not None:
                self._end_if_different()
            if idle > self._limit or self._called >= self._round:
                calls = _with_timeout(hang.last_collectives) or {}
                self._report(hang.standing(self._step, self._beats, idle, calls))
                self._round, self._last = self._round + 1, time.monotonic()

    def _poll_calls(self) -> None:
        """Asks the store whether another rank has called. Has its own thread, because the store may never answer."""
        over = self._over
        while not over.wait(self._interval):
            asked = self._round
            with contextlib.suppress(RuntimeError):  # the store is gone, with rank 0 or because the run ends
                if self._store.check([f"hang/{asked}"]):
                    self._called = asked

    def _different_calls(self) -> str:
        """Returns how the calls of ranks differ if all are stuck in one micro-batch; else ""."""
        return self._ask_store(lambda: self._calls.difference(self._store, str(self._beats))) or ""

    def _end_if_different(self) -> None:
        """Ends this process if its main thread is in a collective that other ranks never enter."""
        difference = self._different_calls()
        if not difference:
            return
        try:
            _with_timeout(lambda: outcome.reporter().failed(TaskError.exit_code, difference))
            if self._world.is_main:
                _with_timeout(
                    lambda: print(f"dsframe: {TaskError(difference).printed}\n", end="", file=sys.stderr, flush=True)
                )
            time.sleep(2 * self._interval)  # for the others to read it, and rank 0 to print it
        finally:
            os._exit(TaskError.exit_code)

    @property
    def _look_seconds(self) -> float:
        return min(LOOK_SECONDS, self._seconds / 2)

    @property
    def _interval(self) -> float:
        return min(self._seconds / 4, 2.0)

    def _report(self, status: hang.RankStatus) -> None:
        """If it is a hang, reports it to ``dsframe launch``, stderr and other ranks, and ends the process."""
        world = self._world
        verdict, text = "hang", ""
        try:
            verdict, text = self._compare_ranks(status)
        except Exception as error:  # a report of only this rank is better than a silent hang
            text = f"[rank {world.rank}] error: the watchdog itself failed: {error!r}\n{self._local_report(status)}"
        try:
            if text:
                reason = f"the run hangs {hang.moment(status.step)}; the report on standard error says who waits where"
                _with_timeout(lambda: outcome.reporter().failed(HangError.exit_code, reason))
                _with_timeout(lambda: print(f"{text}\n", end="", file=sys.stderr, flush=True))
            if world.is_main and self._store is not None:
                self._ask_store(lambda: self._store.set(f"verdict/{self._round}", verdict))
                if verdict == "hang":
                    time.sleep(1.0)  # the store ends with this process; the others have now read from it
        finally:
            if verdict == "hang":
                os._exit(HangError.exit_code)

    def _compare_ranks(self, status: hang.RankStatus) -> tuple[str, str]:
        """Compares states with other ranks. Returns "hang" or (one rank progresses) "slow", and the text to print."""
        world = self._world
        if self._store is None:
            return "hang", self._local_report(status)
        if not self._send_status(status):
            return "hang", f"[rank {world.rank}] rank 0 does not answer\n{self._local_report(status)}"
        if world.is_main:
            statuses = self._collect_statuses()
            if any(other.seconds < self._limit / 2 for other in statuses.values()):
                return "slow", ""
            return "hang", hang.diagnose(statuses, world.size, self._limit)
        if self._wait([f"verdict/{self._round}"], 2 * ANSWER_SECONDS):
            return (self._ask_store(lambda: self._store.get(f"verdict/{self._round}")) or b"hang").decode(), ""
        return "hang", f"[rank {world.rank}] rank 0 says nothing\n{self._local_report(status)}"

    def _local_report(self, status: hang.RankStatus) -> str:
        return hang.diagnose({self._world.rank: status}, 1, self._limit)

    def _send_status(self, status: hang.RankStatus) -> bool:
        def send() -> bool:
            self._store.set(f"hang/{self._round}", "1")
            self._store.set(f"standing/{self._round}/{self._world.rank}", json.dumps(asdict(status)))
            return True

        return bool(self._ask_store(send))

    def _collect_statuses(self) -> dict[int, hang.RankStatus]:
        keys = {rank: f"standing/{self._round}/{rank}" for rank in range(self._world.size)}
        self._wait(list(keys.values()), ANSWER_SECONDS)
        there = {rank: key for rank, key in keys.items() if self._wait([key], 0.0)}
        texts = {rank: self._ask_store(functools.partial(self._store.get, key)) for rank, key in there.items()}
        return {rank: hang.RankStatus(**json.loads(text)) for rank, text in texts.items() if text}

    def _wait(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._ask_store(lambda: self._store.check(keys)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _ask_store(self, action: Callable[[], Any]) -> Any:
        """Returns the result of ``action``; None if the store is gone (with rank 0, or at the end) or does not
        answer."""
        return _with_timeout(action) if self._store is not None else None


def _with_timeout(action: Callable[[], Any]) -> Any:
    """Returns the result of ``action``; None if it fails, or after ANSWER_SECONDS, leaving its thread behind."""
    result: list[Any] = []

    def work() -> None:
        # No store, a closed pipe, a closed stream, or records of another torch version.
        with contextlib.suppress(RuntimeError, OSError, ValueError, LookupError):
            result.append(action())

    thread = threading.Thread(target=work, name=f"{hang.WATCHERS}-action", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return result[0] if result else None


def _create_store(world: World) -> Any:
    """**Collective.** Returns a store of all ranks; None, on every rank, if the launcher gives no address."""
    try:
        address, port = rendezvous_address(world)
    except WorldError:
        return None
    return meet(world, address, port, timedelta(seconds=ANSWER_SECONDS))
