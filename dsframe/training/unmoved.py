"""A look at a task that leaves no trace: what it and its model change meanwhile is put back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dsframe.checkpoint import generators
from dsframe.engine import Engine
from dsframe.tasks.task import Task

_FEW = 1000
"""Entries of a list or dict that is copied for the look; a data set has more."""
_ELEMENTS = 1 << 22
"""Elements of a tensor that is copied for the look."""


def twin(task: Task) -> Task:
    """Returns a copy of ``task`` whose tensors, numbers and lists may change."""
    copied = copy.copy(task)
    vars(copied).update({name: _copied(value) for name, value in vars(task).items()})
    return copied


def changes(task: Task, copied: Task) -> tuple[set[str], set[str]]:
    """Returns the names of what the twin has changed: of a state that a loss may depend on, and of plain numbers."""
    state: set[str] = set()
    numbers: set[str] = set()
    before = vars(task)
    for name, value in vars(copied).items():
        changed = numbers if isinstance(value, (int, float)) else state
        made = name not in before and isinstance(value, Tensor)
        if name not in ("terms", "context") and (made or not _same(before.get(name), value)):
            changed.add(name)
    return state, numbers


@contextmanager
def unmoved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back the random generators, and the buffers, tensors and numbers of the modules of ``model``."""
    kept = generators.capture(device)
    values = [(vars(module), _plain_values(module)) for module in model.modules()]
    tensors = [tensor for tensor in model.buffers() if tensor.layout == torch.strided]
    tensors += [value for _, plain in values for value in plain.values() if isinstance(value, Tensor)]
    contents = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for attributes, plain in values:
            attributes.update(plain)
        with torch.no_grad():
            for tensor, content in zip(tensors, contents, strict=True):
                tensor.copy_(content)
        generators.restore(kept, device)


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """What a module keeps beside its parameters and buffers."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (int, float, Tensor)) and not name.startswith(("_", "ds_")) and name != "training"
    }


def _copied(value: Any, depth: int = 2) -> Any:
    """A copy whose tensors and numbers may change; modules, data sets and what cannot be copied stay as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= _ELEMENTS else value
    if isinstance(value, (list, set, dict, deque)) and len(value) <= _FEW:
        if isinstance(value, dict):
            return {key: _copied(item, depth - 1) for key, item in value.items()} if depth else dict(value)
        return type(value)(_copied(item, depth - 1) if depth else item for item in value)
    if isinstance(value, (nn.Module, Dataset)) or not depth or not type(value).__dict__.get("__dict__"):
        return value
    try:
        copied = copy.copy(value)
        vars(copied).update({name: _copied(item, depth - 1) for name, item in vars(value).items()})
    except Exception:  # an object that cannot be copied
        return value
    return copied


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and before.shape == after.shape and torch.equal(before, after)
    if isinstance(before, (int, float)):
        return before is after or before == after
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(value, after[key]) for key, value in before.items())
    if isinstance(before, (list, tuple, deque)) and isinstance(after, type(before)):
        return len(before) == len(after) and all(map(_same, before, after))
    if type(before) is type(after) and type(before).__dict__.get("__dict__") and not isinstance(before, nn.Module):
        return before is after or _same(vars(before), vars(after))
    return True


class HeldBuffers:
    """The buffers of the modules that a task holds, as they were when this was made."""

    def __init__(self, engine: Engine) -> None:
        watch, task = engine.built.watch, engine.plan.task
        names = {module: name for name, module in watch.model.named_modules()} if watch else {}  # the task may hold it
        self._held = [
            (
                f"{names.get(module, name)}.{key}".removeprefix("."),
                module in names,
                module._buffers,
                key,
                buffer,
                buffer.clone(),
            )
            for attribute, value in vars(task).items()
            if isinstance(value, nn.Module)
            for name, module in value.named_modules(prefix=attribute)
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.layout == torch.strided
        ]

    def changed(self, *, of_model: bool = False) -> set[str]:
        """Returns the names of those that have changed since: of the task's own modules, or of the model."""
        return {
            name
            for name, models, buffers, key, _, before in self._held
            if models == of_model and not _same(before, buffers[key])
        }

    def put_back(self) -> None:
        """Puts them back."""
        for _, _, buffers, key, was, before in self._held:
            buffers[key] = was
            if not torch.equal(was, before):  # autograd may need it as it is, and would see that it is written to
                was.copy_(before)
