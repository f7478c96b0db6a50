"""Signals in the processes that read a data set."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

from dsframe.host.processes import STOP_SIGNALS

_LOOK_SECONDS = 1.0


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Is to be entered while workers start. Signals are blocked in them, so that none ends them before they are ready, and they
    collect no garbage of this process: who collects the process group of an earlier run waits for threads it does not have."""
    before, collects = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_signals(worker: int) -> None:
    """Makes this worker of a torch ``DataLoader`` end only with its parent, and at once.

    Launchers and clusters send a stop to every process of a job, and the training still needs its workers to finish the step and
    save. To ignore SIGTERM would be too much: torch and Python end workers by it and may then wait for them without a limit. So
    it counts where the parent sent it. Programs that a data set starts inherit the blocked signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # not inherited from a fork server
    gc.freeze()
    gc.enable()
    sys.excepthook = _without_resets
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Above this process there may be a fork server, not the parent.
    threading.Thread(target=_end_with, args=(parent.pid, os.getppid()), name="dsframe-signals", daemon=True).start()


def _without_resets(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A ``sys.excepthook`` that is silent when the training ends while it takes a tensor from this worker.

    Python's ``resource_sharer`` hands tensors over in a thread, and calls the hook for a closed connection.
    """
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(cls, error, trace)


def _end_with(parent: int | None, above: int) -> None:
    while True:
        arrived = signal.sigtimedwait(STOP_SIGNALS, _LOOK_SECONDS)
        sent = arrived is not None and arrived.si_signo == signal.SIGTERM and arrived.si_pid == parent
        if sent or os.getppid() != above:  # or the parent is gone, whatever the data set is doing
            os._exit(0)  # another code would make the parent raise
