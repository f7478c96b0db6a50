"""Plain values and generators that user code keeps outside parameters, buffers and the task."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsframe.engine import Engine
from dsframe.model import user_spaces, user_state
from dsframe.model.user_spaces import ABSENT, Space
from dsframe.model.user_state import generators_of
from dsframe.tasks.task import Task
from dsframe.values import CONTAINERS, COUNTERS, FEW, attributes_of, copied, same

_SMALL = 1 << 20
"""In bytes."""


class Values:
    """A copy of the plain values of some namespaces."""

    def __init__(self, spaces: Iterable[Space], is_plain: Callable[[Any], bool], most: float = math.inf) -> None:
        """``most``: values of more bytes than this are ignored."""
        self._spaces, self._is_plain, self._most = list(spaces), is_plain, most
        self._held = [{key: (value, copied(value)) for key, value in self._plain(space)} for space in self._spaces]

    def changed(self) -> set[str]:
        """Returns the names of values that have changed or are new since then."""
        names = set()
        for space, held in zip(self._spaces, self._held, strict=True):
            for key, value in self._plain(space):
                before = held.get(key, (None, None))[1]
                if type(before) is not type(value) or not same(before, value):
                    names.add(space.label.format(key).removeprefix("."))
        return names

    def small(self) -> Values:
        """Returns a new copy of the current values, without large ones, to be kept for a long time."""
        return Values(self._spaces, self._is_plain, _SMALL)

    def put_back(self) -> None:
        """Restores the values in the same objects."""
        for space, held in zip(self._spaces, self._held, strict=True):
            now = dict(self._plain(space))
            for key in now.keys() - held.keys():
                space.put(key, ABSENT)
            for key, (value, content) in held.items():
                _fill(value, content)
                if isinstance(value, COUNTERS):
                    space.put(key, copied(content))
                elif now.get(key) is not value:
                    space.put(key, value)

    def _plain(self, space: Space) -> Iterator[tuple[str, Any]]:
        values = space.values()
        for key in values.keys() & space.names:
            value = values[key]
            if isinstance(value, tuple) or type(value) in CONTAINERS:
                entries = value.values() if isinstance(value, dict) else value
                leaves = tree_leaves(list(entries)) if len(value) <= FEW else []
                if all(map(self._is_plain, leaves)) and self._fit(leaves or [value]):
                    yield key, value
            elif (self._is_plain(value) or (space.holds_buffers and isinstance(value, Tensor))) and self._fit([value]):
                yield key, value

    def _fit(self, values: list[Any]) -> bool:
        return (
            self._most == math.inf
            or sum(getattr(value, "nbytes", 0) or sys.getsizeof(value) for value in values) <= self._most
        )


def modules_of(task: Task) -> nn.Module:
    """Returns a module whose children are the modules in a task's attributes, by attribute name."""
    every = nn.Module()
    every._modules.update({name: value for name, value in vars(task).items() if isinstance(value, nn.Module)})
    return every


def attributes(model: nn.Module, *, buffers: bool = False) -> Values:
    """Returns the attribute values of the modules of ``model``. ``buffers``: include non-persistent buffers."""
    spaces = user_spaces.attributes(model)
    for name, module in model.named_modules() if buffers else ():
        if (transient := frozenset(module._non_persistent_buffers_set)) and isinstance(module._buffers, dict):
            spaces.append(Space(module._buffers, transient, f"{name}.{{}}", holds_buffers=True))
    return Values(spaces, _Plain(model))


def outside(engine: Engine, *, of_gradients: bool = False) -> Values:
    """Returns values that the user's model and task code keeps in globals, classes and closures, and those of the task's hooks
    that hold it or a module. ``of_gradients``: only those of hooks on gradients."""
    watch = engine.built.watch
    model = watch.model if watch else nn.Module()
    owners = [] if of_gradients else [engine.plan.task, *model.modules()]
    hooks = [] if of_gradients else user_spaces.hooks_of(None)
    hooks += [hook for of_weight in engine.built.gradient_hooks.values() for hook in of_weight]
    for hook in () if of_gradients else engine.plan.task.hooks:
        hooks += [hook] * any(isinstance(value, (Task, nn.Module)) for value in attributes_of(hook).values())
    return Values(user_spaces.outside(owners, hooks), _Plain(model))


class _Plain:
    """Tells whether a value is a number, text, None, or a tensor or array outside weights and buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._memory = {
            tensor.untyped_storage().data_ptr()
            for tensor in (*model.parameters(), *model.buffers())
            if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided  # not a shard of FSDP
        }

    def __call__(self, value: Any) -> bool:
        if isinstance(value, np.ndarray):
            return not value.dtype.hasobject and value.__array_interface__["data"][0] not in self._memory
        if not isinstance(value, Tensor):
            return isinstance(value, (int, float, complex, str, np.generic, type(None), *COUNTERS))
        if isinstance(value, nn.Parameter) or type(value) is not Tensor or value.layout != torch.strided:
            return False
        return value.untyped_storage().data_ptr() not in self._memory


class Generators(user_state.Generators):
    """The generators of NumPy and Python, and those in the task and the model's modules."""

    def __init__(self, engine: Engine) -> None:
        watch = engine.built.watch
        super().__init__(generators_of([engine.plan.task, *(watch.model.modules() if watch else ())]))


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    if isinstance(value, Tensor):
        if value is not content and not torch.equal(value, content):
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        if value is not content and not same(content, value):
            value[...] = content
    elif type(value) in CONTAINERS and not same(content, value):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(copied(content))
