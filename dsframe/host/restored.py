"""Restores what a run changes in the calling process, such as a notebook or a search over settings."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

_running: list[ExitStack] = []
"""Callbacks at the end of each running run."""


@contextmanager
def restored() -> Iterator[None]:
    """At exit, restores the environment, warning filters and ``sys.excepthook``, and calls the callbacks of
    :func:`at_end`, last one first."""
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
    """Calls ``put_back(*arguments)`` when the run ends, even by an error. Outside a run the change is permanent."""
    if _running:
        _running[-1].callback(put_back, *arguments)
