"""Calls ``Task.after_step``, which writes to weights after each update: directly in the optimizer's tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsframe.engines.state_replica import ParameterView
from dsframe.errors import TaskError
from dsframe.tasks.task import Task, gives

_BY_ELEMENT = frozenset("detach lift_fresh alias copy_ fill_ zero_ zeros_like masked_fill_ clone _to_copy".split())  # noqa: SIM905
"""Element-wise functions of torch without the tag ``pointwise``."""


def overridden(task: Task) -> bool:
    """True if the task writes to weights after updates."""
    return gives(task, "after_step")


@torch.no_grad()
def call(task: Task, views: Iterable[ParameterView]) -> None:
    """**Collective.** Calls the task with each weight. Raises TaskError if the task declares the function element-wise
    and it is not."""
    for view in views:
        master = view.master.detach()
        if task.after_step_elementwise:
            part = view.target(master)
            with _Elementwise(task):
                task.after_step(view.name, part)
            continue
        piece = view.cut(master)
        whole = view.whole(piece)
        task.after_step(view.name, whole)
        if whole is not piece:
            view.put(whole)


class _Elementwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises TaskError for an operation that is not element-wise."""

    def __init__(self, task: Task) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whose = type(task).__name__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if torch.Tag.pointwise not in func.tags and name not in _BY_ELEMENT:
            raise TaskError(
                f"{self._whose}.after_step: {name} is not element-wise, so it would give other numbers on "
                "parts of a weight; leave out after_step_elementwise"
            )
        return func(*args, **(kwargs or {}))
