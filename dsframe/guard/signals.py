"""Handles Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: saves after the step and exits with 75. A second Ctrl-C exits now."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import TracebackType

import torch

from dsframe.cluster.exchange import Ranks
from dsframe.host.processes import STOP_SIGNALS, say_what_comes

GRACE_SECONDS = 25.0
"""Time for a rank to reach the end of its step after SIGTERM; DeepSpeed's launcher and torchrun send SIGKILL after 30
s. There is no limit after SIGUSR1, whose lead time the sender chooses."""
ECHO_SECONDS = 5.0
"""One signal to a launcher can arrive twice: from the sender to the whole job, and forwarded by the launcher."""
ECHO_OF_CTRL_C_SECONDS = 0.5
"""The same for Ctrl-C, which users press twice on purpose."""
AGREE_SECONDS = 2.0
"""Interval at which ranks ask each other if one received a signal."""


class StopRequest:
    """Handles signals inside its context. A thread waits for them, because the main thread may be in a collective.

    All ranks must stop after the same step, though signals reach them at different times or only one of them.
    Exchanging after each step would make every step wait for the slowest rank; so about every two seconds they make one
    all-reduce of three numbers: whether a rank got a signal, the time since the last exchange, from which all compute
    the next step for it, and whether a rank is in ``trouble`` that the others do not know of.
    """

    def __init__(self, ranks: Ranks, first_step: int, trouble: Callable[[], bool] = lambda: False) -> None:
        """``first_step``: the number of completed steps."""
        self._trouble = trouble
        self.trouble = False
        """True if a rank was in trouble at the last exchange; the same on all ranks."""
        self._ranks = ranks
        self._asked_at, self._since, self._next = first_step, time.perf_counter(), first_step + 1
        self._received: int | None = None
        self._saving = False
        self._saved_at = -math.inf
        self._previous: dict[signal.Signals, object] = {}
        self._old_descriptor = -1
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            # Python lets only the main thread handle signals. A program that trains in another thread handles them
            # itself.
            return self
        read, write = self._pipe = os.pipe()
        os.set_blocking(write, False)
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run outlives its terminal
            self._previous[number] = signal.signal(number, lambda *_: None)  # the thread handles it
        self._old_descriptor = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, args=(read,), name="dsframe-signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, cls: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._old_descriptor)
        for number, handler in self._previous.items():
            # After a stop, a launcher's second SIGTERM must not interrupt the shutdown.
            signal.signal(number, signal.SIG_IGN if self._received is not None else handler)  # type: ignore[arg-type]
        os.write(self._pipe[1], b"\0")
        os.close(self._pipe[1])
        self._pipe = None
        self._thread.join(1.0)  # it refers to the engine, whose model would outlive `fit`

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Encloses the writing of a checkpoint: a signal's grace time starts at its end."""
        before, self._saving = self._saving, True
        try:
            yield
        finally:
            self._saving, self._saved_at = before, time.monotonic()

    @property
    def name(self) -> str:
        """Name of the received signal; "" if another rank received it."""
        if self._received == signal.SIGINT:
            return "Ctrl-C"
        return "" if self._received is None else signal.Signals(self._received).name

    def agreed(self, step: int) -> bool:
        """**Collective** on the steps that all ranks agree on. Returns True to save after ``step`` and exit."""
        if step < self._next:
            return False
        now = time.perf_counter()
        plan = self._ranks.plan
        votes = torch.tensor(
            [float(self._received is not None), now - self._since, float(self._trouble())],
            dtype=torch.float64,
            device=plan.device,
        )
        wishes, seconds, troubles = self._ranks.sum_over_ranks(votes).tolist()
        step_seconds = seconds / plan.world.size / (step - self._asked_at)
        self._next = step + max(1, min(int(AGREE_SECONDS / max(step_seconds, 1e-6)), 100_000))
        self._asked_at, self._since = step, now
        self._saving, self.trouble = wishes > 0, troubles > 0
        return self._saving

    @contextmanager
    def between_batches(self) -> Iterator[Callable[[int], bool]]:
        """Yields :meth:`agreed` for use in a long evaluation: called on all ranks with the number of batches done."""
        kept, since, began = (self._asked_at, self._next), self._since, time.perf_counter()
        self._asked_at, self._next, self._since = 0, 1, began
        try:
            yield self.agreed
        finally:
            (self._asked_at, self._next), self._since = kept, since + time.perf_counter() - began

    def _listen(self, read: int) -> None:
        arrived = 0.0
        while True:
            first = self._received
            hurries = first in (signal.SIGTERM, signal.SIGHUP)
            if not wait([read], GRACE_SECONDS if hurries else None):  # not select, which takes descriptors below 1024
                if self._saving or time.monotonic() - self._saved_at < GRACE_SECONDS:
                    continue
                _exit_now(first or signal.SIGTERM, f"no step ended within {GRACE_SECONDS:.0f} s of the signal")
            number = os.read(read, 1)[0]
            if number == 0:
                os.close(read)
                return
            if number in STOP_SIGNALS:
                if first is None:
                    self._received, arrived = number, time.monotonic()
                elif time.monotonic() - arrived > (ECHO_OF_CTRL_C_SECONDS if number == signal.SIGINT else ECHO_SECONDS):
                    _exit_now(number, "a second signal")
                else:
                    continue
                if number == signal.SIGINT and self._ranks.plan.world.is_main:
                    say_what_comes()


def _exit_now(number: int, why: str) -> None:
    try:
        print(f"dsframe: warning: {why}: leaving without saving", file=sys.stderr, flush=True)
    finally:  # also if the terminal is closed
        os._exit(128 + number)
