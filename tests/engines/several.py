"""Several engines, one after another, in the processes of one job: they share the process group of the first.

Only for measurements and tests that compare engines; a run has one engine, and closes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from dsframe import process_group

_open = process_group.open_process_group


@contextmanager
def one_process_group() -> Iterator[None]:
    """**Collective.** Inside it engines find a process group that is open already; it is closed at the end."""

    def once(*arguments: object) -> None:
        if not dist.is_initialized():
            _open(*arguments)  # type: ignore[arg-type]

    with mock.patch.object(process_group, "open_process_group", once):
        yield
    process_group.close_process_group()
