"""Ends a run that hangs, and says which rank waits where and which one is missing.

Every rank has a thread that looks at the time of its own last sign of life. The first that has waited too long calls the
others through a store of torch's (a small TCP server in a C++ thread of rank 0, or of torchrun, so it answers while rank 0 is
stuck); all leave there where they are, rank 0 prints the report, and all end. The store is there before the engine is: a rank that
hangs while the engine is set up or a checkpoint is read is named as well. No collective is involved and nothing is asked of the
library that is stuck, so it is the same for every engine. An engine that needs the same calls on all ranks has them compared
there after LOOK_SECONDS, long before the limit. Horovod's own stall check says nothing over Gloo (measured, 0.28.1),
and Gloo's own limit ends a run after 30 minutes without naming anybody.

Where rank 0's process is stopped or its host is cut off, the store's calls block without limit. So each is made in a thread that
is left behind where it does not come back, and nothing that the verdict's end depends on waits for one.
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
"""Factor on the limit for the first step: kernels are compiled, data are read for the first time."""
SETUP_SECONDS = 900.0
"""Shortest limit for the engine to be set up, and a checkpoint to be read: operators are compiled, models are built."""
ANSWER_SECONDS = 10.0
"""Time that rank 0 waits for the others' reports, and the others for rank 0 to print them."""
LOOK_SECONDS = 10.0
"""Ranks that have all stood still so long compare the modules that they have called."""
_MIXED_UP = re.compile(r"preamble|Detected a disagreement|[Mm]ismatch.*collective|collective.*[Mm]ismatch")
"""In the messages of libraries whose ranks have met in different collectives."""


class Watchdog:
    """Watches while it is entered, which it may be several times. :meth:`beat` costs about a tenth of a microsecond."""

    def __init__(self, world: World, seconds: float) -> None:
        """**Collective** where there are several ranks and something to watch: they meet.

        ``seconds``: the longest time between two signs of life; 0: never mind. Raises WorldError where they do not meet.
        """
        self._world, self._seconds = world, seconds
        self._limit = max(seconds * FIRST_FACTOR, SETUP_SECONDS)
        self._step = SET_UP
        self._beats = self._round = 0
        self._last = 0.0
        self._store: Any = _meet(world) if seconds and world.size > 1 else None
        self._calls: Any = None
        self._called = -1
        """The last round that another rank has called this one to."""
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def look_at(self, calls: Any) -> None:
        """**Collective** where there are ``calls``: what the engine knows of them (``BuiltModel.calls``)."""
        self._calls = calls
        if self._calls is not None and self._store is not None:
            self._calls.connect(self._store.clone())

    def __enter__(self) -> Watchdog:
        if self._seconds:
            self._last = time.monotonic()
            self._over = threading.Event()
            names = {hang.WATCHERS: self._watch} | ({f"{hang.WATCHERS}-calls": self._hear} if self._store else {})
            self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in names.items()]
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, cls: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(1.0)  # not inside torch's store when the interpreter is taken down
        if isinstance(error, RuntimeError) and _MIXED_UP.search(str(error)):
            limit = time.monotonic() + 2 * self._look_seconds + ANSWER_SECONDS  # the others wait for this rank by now
            while time.monotonic() < limit and self._calls is not None and self._store is not None:
                if difference := self._different_calls():
                    raise TaskError(difference) from None
                time.sleep(self._interval)

    def begin(self, step: int) -> None:
        """Set up; training continues after ``step``."""
        self._step, self._limit = step, self._seconds * FIRST_FACTOR
        self._last = time.monotonic()

    def beat(self) -> None:
        """A sign of life."""
        self._beats += 1
        self._last = time.monotonic()

    def alive(self) -> None:
        """A sign of life that not all ranks give equally often."""
        self._last = time.monotonic()

    def done(self, step: int) -> None:
        """``step`` has ended."""
        self._step, self._limit = step, self._seconds
        self.beat()

    def _watch(self) -> None:
        over, looked = self._over, time.monotonic()
        while not over.wait(self._interval):
            before, looked = looked, time.monotonic()
            if looked - before > self._interval + self._seconds / 2:
                self._last = looked  # this process itself stood still (Ctrl-Z, a frozen container): it counts anew
            idle = looked - self._last
            if idle > self._look_seconds and self._calls is not None:
                self._end_if_different()
            if idle > self._limit or self._called >= self._round:
                calls = _within(hang.last_collectives) or {}
                self._tell(hang.standing(self._step, self._beats, idle, calls))
                self._round, self._last = self._round + 1, time.monotonic()

    def _hear(self) -> None:
        """Asks the store whether another rank has called; alone, because the store may never answer."""
        over = self._over
        while not over.wait(self._interval):
            asked = self._round
            with contextlib.suppress(RuntimeError):  # the store is gone, with rank 0 or because the run ends
                if self._store.check([f"hang/{asked}"]):
                    self._called = asked

    def _different_calls(self) -> str:
        """Returns what ranks have called otherwise, if all stand still in one micro-batch; else, or where nothing differs, ""."""
        return self._try(lambda: self._calls.difference(self._store, str(self._beats))) or ""

    def _end_if_different(self) -> None:
        """Ends this process where its main thread stands in a collective that the others never enter."""
        difference = self._different_calls()
        if not difference:
            return
        try:
            _within(lambda: outcome.reporter().failed(TaskError.exit_code, difference))
            if self._world.is_main:
                _within(
                    lambda: print(f"dsframe: {TaskError(difference).printed}\n", end="", file=sys.stderr, flush=True)
                )
            time.sleep(2 * self._interval)  # the others have to read it, and rank 0 to say it
        finally:
            os._exit(TaskError.exit_code)

    @property
    def _look_seconds(self) -> float:
        return min(LOOK_SECONDS, self._seconds / 2)

    @property
    def _interval(self) -> float:
        return min(self._seconds / 4, 2.0)

    def _tell(self, status: hang.RankStatus) -> None:
        """Ends the process where it is a hang: said for ``dsframe launch``, printed, and told to the others. Else returns."""
        world = self._world
        verdict, text = "hang", ""
        try:
            verdict, text = self._compare_ranks(status)
        except Exception as error:  # better a report of only this rank than a run that hangs in silence
            text = f"[rank {world.rank}] error: the watchdog itself failed: {error!r}\n{self._alone(status)}"
        try:
            if text:
                reason = f"the run hangs {hang.moment(status.step)}; the report on standard error says who waits where"
                _within(lambda: outcome.reporter().failed(HangError.exit_code, reason))
                _within(lambda: print(f"{text}\n", end="", file=sys.stderr, flush=True))
            if world.is_main and self._store is not None:
                self._try(lambda: self._store.set(f"verdict/{self._round}", verdict))
                if verdict == "hang":
                    time.sleep(1.0)  # the store ends with this process; the others have now read from it
        finally:
            if verdict == "hang":
                os._exit(HangError.exit_code)

    def _compare_ranks(self, status: hang.RankStatus) -> tuple[str, str]:
        """Compares notes with the other ranks: "hang" or (one rank moves on) "slow", and what this rank is to print."""
        world = self._world
        if self._store is None:
            return "hang", self._alone(status)
        if not self._answer(status):
            return "hang", f"[rank {world.rank}] rank 0 does not answer\n{self._alone(status)}"
        if world.is_main:
            statuses = self._gather()
            if any(other.seconds < self._limit / 2 for other in statuses.values()):
                return "slow", ""
            return "hang", hang.diagnose(statuses, world.size, self._limit)
        if self._wait([f"verdict/{self._round}"], 2 * ANSWER_SECONDS):
            return (self._try(lambda: self._store.get(f"verdict/{self._round}")) or b"hang").decode(), ""
        return "hang", f"[rank {world.rank}] rank 0 says nothing\n{self._alone(status)}"

    def _alone(self, status: hang.RankStatus) -> str:
        return hang.diagnose({self._world.rank: status}, 1, self._limit)

    def _answer(self, status: hang.RankStatus) -> bool:
        def send() -> bool:
            self._store.set(f"hang/{self._round}", "1")
            self._store.set(f"standing/{self._round}/{self._world.rank}", json.dumps(asdict(status)))
            return True

        return bool(self._try(send))

    def _gather(self) -> dict[int, hang.RankStatus]:
        keys = {rank: f"standing/{self._round}/{rank}" for rank in range(self._world.size)}
        self._wait(list(keys.values()), ANSWER_SECONDS)
        there = {rank: key for rank, key in keys.items() if self._wait([key], 0.0)}
        texts = {rank: self._try(functools.partial(self._store.get, key)) for rank, key in there.items()}
        return {rank: hang.RankStatus(**json.loads(text)) for rank, text in texts.items() if text}

    def _wait(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._try(lambda: self._store.check(keys)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _try(self, action: Callable[[], Any]) -> Any:
        """Returns the result of ``action``; None if the store is gone (with rank 0, or at the end) or does not answer."""
        return _within(action) if self._store is not None else None


def _within(action: Callable[[], Any]) -> Any:
    """Returns the result of ``action``; None if it fails, or takes over ANSWER_SECONDS: then its thread is left behind."""
    result: list[Any] = []

    def work() -> None:
        # No store, a closed pipe, a closed stream, and records of another torch.
        with contextlib.suppress(RuntimeError, OSError, ValueError, LookupError):
            result.append(action())

    thread = threading.Thread(target=work, name=f"{hang.WATCHERS}-action", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return result[0] if result else None


def _meet(world: World) -> Any:
    """**Collective.** A store of all ranks; None where the launcher gives no address to meet at, which is the same on all."""
    try:
        address, port = rendezvous_address(world)
    except WorldError:
        return None
    return meet(world, address, port, timedelta(seconds=ANSWER_SECONDS))
