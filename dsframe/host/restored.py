"""What a run changes in the process that calls it is put back when it ends: a notebook, or a search over settings, goes on."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_running: list[ExitStack] = []
"""Of each run in progress, what is to be called at its end."""


@contextmanager
def restored() -> Iterator[None]:
    """At its end the environment, the filters of warnings and ``sys.excepthook`` are as before, and what :func:`at_end` has heard
    of is put back, the last first."""
    before, excepthook = dict(os.environ), sys.excepthook
    with ExitStack() as stack, warnings.catch_warnings():
        _running.append(stack)
        try:
            yield
        finally:
            _running.remove(stack)
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
            sys.excepthook = excepthook


def at_end(put_back: Callable[..., Any], *arguments: Any) -> None:
    """Has ``put_back(*arguments)`` called when the run ends, also by an error. Where there is no run the change stays."""
    if _running:
        _running[-1].callback(put_back, *arguments)
