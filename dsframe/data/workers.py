"""Signal handling in data loader workers."""

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
    """Context for starting workers: with stop signals blocked, so that none ends them before they are ready, and
    without garbage collection, which for an earlier run's process group would wait for threads that a worker lacks."""
    before, collects = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_signals(worker: int) -> None:
    """Makes this worker of a torch ``DataLoader`` end only with its parent, and then at once.

    Launchers and clusters send a stop signal to every process of a job, but training needs its workers to finish the
    step and save. SIGTERM cannot be ignored: torch and Python end workers by it and may then wait for ever. So it
    counts only if the parent sent it. Programs that a data set starts inherit the blocked signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a fork server does not pass it on
    gc.freeze()
    gc.enable()
    sys.excepthook = _without_resets
    parent = multiprocessing.parent_process()
    assert parent is not None
    # The process above may be a fork server instead of the parent.
    threading.Thread(target=_end_with, args=(parent.pid, os.getppid()), name="dsframe-signals", daemon=True).start()


def _without_resets(cls: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A ``sys.excepthook`` that is silent if the training ends while it takes a tensor from this worker.

    Python's ``resource_sharer`` sends tensors in a thread and calls the hook when the connection closes.
    """
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(cls, error, trace)


def _end_with(parent: int | None, above: int) -> None:
    while True:
        arrived = signal.sigtimedwait(STOP_SIGNALS, _LOOK_SECONDS)
        sent = arrived is not None and arrived.si_signo == signal.SIGTERM and arrived.si_pid == parent
        if sent or os.getppid() != above:  # or the parent is gone
            os._exit(0)  # another code would make the parent raise
