"""Ends a run that hangs, and says which rank waits where and which one is missing.

Every rank has a thread that looks at the time of its own last sign of life. The first that has waited too long calls the
others through a store of torch's (a small TCP server in a C++ thread of rank 0, so it answers while rank 0 is stuck); all leave
there where they are, rank 0 prints the report, and all end. No collective is involved and nothing is asked of the library that
is stuck, so it is the same for every engine. Horovod's own stall check says nothing over Gloo (measured, 0.28.1), and Gloo's
own limit ends a run after 30 minutes without naming anybody.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from dsframe.checkpoint.share import Ranks, share
from dsframe.errors import HangError
from dsframe.report import hang
from dsframe.world import World

FIRST_FACTOR = 3.0
"""The first step may take so many times longer: kernels are compiled, data are read for the first time."""
ANSWER_SECONDS = 10.0
"""So long rank 0 waits for the others' reports, and the others for rank 0 to have printed them."""


class Watchdog:
    """Watches while it is entered. :meth:`beat` costs about a tenth of a microsecond."""

    def __init__(self, ranks: Ranks, seconds: float) -> None:
        """``seconds``: the longest time between two signs of life; 0: never mind."""
        self._ranks, self._seconds = ranks, seconds
        self._limit = seconds * FIRST_FACTOR
        self._step = self._beats = self._round = 0
        self._last = 0.0
        self._store: Any = None
        self._over = threading.Event()

    def __enter__(self) -> Watchdog:
        """**Collective**, unless there is nothing to watch."""
        if self._seconds:
            if self._ranks.plan.world.size > 1:
                self._store = _open_store(self._ranks)
            self._last = time.monotonic()
            threading.Thread(target=self._watch, name="dsframe-watchdog", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()

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
        while not self._over.wait(min(self._seconds / 4, 2.0)):
            idle = time.monotonic() - self._last
            if idle > self._limit or self._called():
                if self._tell(hang.standing(self._step, self._beats, idle)):
                    os._exit(HangError.exit_code)
                self._round, self._last = self._round + 1, time.monotonic()

    def _called(self) -> bool:
        return bool(self._try(lambda: self._store.check([f"hang/{self._round}"])))

    def _tell(self, own: hang.Standing) -> bool:
        """Compares notes with the other ranks: whether it is a hang (not while one rank moves on), which then has been told."""
        world: World = self._ranks.plan.world
        alone = hang.diagnose({world.rank: own}, 1, self._limit)
        text, verdict = "", "hang"
        if self._store is None:
            text = alone
        elif not self._answer(own):
            text = f"[rank {world.rank}] rank 0 does not answer\n{alone}"
        elif world.is_main:
            found = self._gather()
            if any(one.seconds < self._limit / 2 for one in found.values()):
                verdict = "slow"
            else:
                text = hang.diagnose(found, world.size, self._limit)
        elif self._wait([f"verdict/{self._round}"], 2 * ANSWER_SECONDS):
            verdict = (self._try(lambda: self._store.get(f"verdict/{self._round}")) or b"hang").decode()
        else:
            text = f"[rank {world.rank}] rank 0 says nothing\n{alone}"
        if text:
            print(f"{text}\n", end="", file=sys.stderr, flush=True)
        if world.is_main and self._store is not None:
            self._try(lambda: self._store.set(f"verdict/{self._round}", verdict))
            if verdict == "hang":
                time.sleep(1.0)  # the store ends with this process; the others have now read from it
        return verdict == "hang"

    def _answer(self, own: hang.Standing) -> bool:
        def send() -> bool:
            self._store.set(f"hang/{self._round}", "1")
            self._store.set(f"standing/{self._round}/{self._ranks.plan.world.rank}", json.dumps(asdict(own)))
            return True

        return bool(self._try(send))

    def _gather(self) -> dict[int, hang.Standing]:
        keys = {rank: f"standing/{self._round}/{rank}" for rank in range(self._ranks.plan.world.size)}
        self._wait(list(keys.values()), ANSWER_SECONDS)
        there = {rank: key for rank, key in keys.items() if self._wait([key], 0.0)}
        return {rank: hang.Standing(**json.loads(self._store.get(key))) for rank, key in there.items()}

    def _wait(self, keys: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._try(lambda: self._store.check(keys)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _try(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returns; None where the store is gone, with rank 0 or because the run ends."""
        try:
            return action() if self._store is not None else None
        except RuntimeError:
            return None


def _open_store(ranks: Ranks) -> Any:
    """**Collective.** The store that all ranks reach, listening on one address only; None on a rank that cannot reach it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    world: World = ranks.plan.world
    listening, said = None, ""
    if world.is_main:
        listening = _listen(world)
        said = json.dumps(listening.getsockname()[:2])
    address, port = json.loads(share(ranks, said)[0])
    descriptor = listening.detach() if listening else None
    try:
        return TCPStore(
            address,
            port,
            is_master=world.is_main,
            timeout=timedelta(seconds=ANSWER_SECONDS),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        print(f"[rank {world.rank}] dsframe: the watchdog cannot reach rank 0: {error}", file=sys.stderr, flush=True)
        return None


def _listen(world: World) -> socket.socket:
    """A listening socket on the loopback interface where all ranks are on one host, else on rank 0's own address there."""
    name = world.master_address or os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    address = "127.0.0.1" if world.local_size == world.size else socket.gethostbyname(name)
    listening = socket.socket()
    listening.bind((address, 0))
    listening.listen(world.size)
    return listening
