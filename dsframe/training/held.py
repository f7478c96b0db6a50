"""What user code keeps beside parameters, buffers and the task: in attributes of modules, in globals, classes and closures.

Numbers, texts, tensors, and lists or dicts of few entries, as they were when they were held; and random generators.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsframe.engine import Engine
from dsframe.host import source_files
from dsframe.model import user_state
from dsframe.model.user_state import functions_of, generators_of, names_of, words_of
from dsframe.values import CONTAINERS, COUNTERS, FEW, attributes_of, copied, has_attributes, same


class Values:
    """Plain values of some name spaces, as they were when this was made."""

    def __init__(self, spaces: Iterable[_Space], is_plain: Callable[[Any], bool]) -> None:
        self._spaces, self._is_plain = list(spaces), is_plain
        self._held = [{key: (value, copied(value)) for key, value in self._plain(space)} for space in self._spaces]

    def changed(self) -> set[str]:
        """Returns the names of those that have changed or come since."""
        names = set()
        for space, held in zip(self._spaces, self._held, strict=True):
            for key, value in self._plain(space):
                before = held.get(key, (None, None))[1]
                if type(before) is not type(value) or not same(before, value):
                    names.add(space.label.format(key).removeprefix("."))
        return names

    def put_back(self) -> None:
        """Puts them back, in the same objects."""
        for space, held in zip(self._spaces, self._held, strict=True):
            now = dict(self._plain(space))
            for key in now.keys() - held.keys():
                space.drop(key)
            for key, (value, content) in held.items():
                _fill(value, content)
                if isinstance(value, COUNTERS):
                    space.put(key, copied(content))
                elif now.get(key) is not value:
                    space.put(key, value)

    def _plain(self, space: _Space) -> Iterator[tuple[str, Any]]:
        for key, value in list(space.values().items()):
            if key not in space.names:
                continue
            if isinstance(value, tuple) or type(value) in CONTAINERS:
                inside = list(value.values() if isinstance(value, dict) else value)
                if len(value) <= FEW and all(map(self._is_plain, tree_leaves(inside))):
                    yield key, value
            elif self._is_plain(value) or (space.holds_buffers and isinstance(value, Tensor)):
                yield key, value


@dataclass(frozen=True, eq=False)
class _Space:
    """Where names have values."""

    owner: Any
    """A dict, a class, an object, or a cell of a closure."""
    names: frozenset[str]
    """Those that are looked at."""
    label: str
    holds_buffers: bool = False

    def values(self) -> Mapping[str, Any]:
        if isinstance(self.owner, dict):
            return self.owner
        if isinstance(self.owner, type):
            return vars(self.owner)
        if not isinstance(self.owner, CellType):
            return attributes_of(self.owner)
        (name,) = self.names
        try:
            return {name: self.owner.cell_contents}
        except ValueError:  # not filled yet
            return {}

    def put(self, key: str, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[key] = value
        elif isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        else:
            setattr(self.owner, key, value)

    def drop(self, key: str) -> None:
        if isinstance(self.owner, dict):
            del self.owner[key]
        elif isinstance(self.owner, CellType):
            del self.owner.cell_contents
        else:
            delattr(self.owner, key)


def attributes(model: nn.Module, *, buffers: bool = False) -> Values:
    """Returns what the modules of ``model`` keep in attributes, and in those of objects of the user's classes there. Those that
    libraries keep there are left out: the code of the model's classes does not name them. ``buffers``: also in buffers that no
    checkpoint has."""
    modules = dict(model.named_modules())
    names = names_of(modules.values())
    spaces = [_Space(vars(module), names, f"{name}.{{}}") for name, module in modules.items()]
    for name, module in modules.items():
        objects = [(key, value) for key, value in vars(module).items() if key in names and has_attributes(value)]
        for key, value in objects:
            if [*_users_classes([type(value)])]:
                spaces.append(_Space(value, names_of([value]), f"{name}.{key}.{{}}"))
    for name, module in modules.items() if buffers else ():
        if (transient := frozenset(module._non_persistent_buffers_set)) and isinstance(module._buffers, dict):
            spaces.append(_Space(module._buffers, transient, f"{name}.{{}}", holds_buffers=True))
    return Values(spaces, _Plain(model))


def outside(engine: Engine) -> Values:
    """Returns what the user's code of model and task keeps in globals, in classes and in closures."""
    task, watch = engine.plan.task, engine.built.watch
    model = watch.model if watch else nn.Module()
    modules = list(model.modules())
    classes = {type(task), *map(type, modules)}
    functions = [function for cls in classes for function in functions_of(cls)]
    functions += [held for owner in (task, *modules) for held in vars(owner).values() if isinstance(held, FunctionType)]
    spaces = dict[int, _Space]()
    for function in _reached(functions):
        code, file = function.__code__, Path(function.__code__.co_filename).name
        words, of_file = words_of(code), function.__globals__
        before = spaces.get(id(of_file))
        names = words | (before.names if before else frozenset())
        spaces[id(of_file)] = _Space(of_file, names, f"{{}} of {file}")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            spaces[id(cell)] = _Space(cell, frozenset([name]), f"{{}} of a closure in {file}")
        for cls in _users_classes([*classes, *(of_file.get(word) for word in words)]):
            before = spaces.get(id(cls))
            names = words | (before.names if before else frozenset())
            spaces[id(cls)] = _Space(cls, names, f"{cls.__name__}.{{}}")
    return Values(spaces.values(), _Plain(model))


class _Plain:
    """Whether a value is a number, a text, None, or a tensor or an array that is no weight, no buffer, nor a name for one."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        # A shard of FSDP has no memory that torch shows.
        plain = [
            tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        ]
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in plain}

    def __call__(self, value: Any) -> bool:
        if isinstance(value, np.ndarray):
            return not value.dtype.hasobject and value.__array_interface__["data"][0] not in self._memory
        if not isinstance(value, Tensor):
            return isinstance(value, (int, float, complex, str, np.generic, type(None), *COUNTERS))
        if isinstance(value, nn.Parameter) or type(value) is not Tensor or value.layout != torch.strided:
            return False
        return value.untyped_storage().data_ptr() not in self._memory


def _reached(functions: Iterable[FunctionType]) -> Iterator[FunctionType]:
    """Yields the user's functions among ``functions``, and those that they call by a global name."""
    seen, ahead = set[CodeType](), [*functions]
    while ahead:
        function = ahead.pop()
        if function.__code__ in seen or not source_files.is_users(function.__code__.co_filename):
            continue
        seen.add(function.__code__)
        yield function
        for word in words_of(function.__code__):
            value = function.__globals__.get(word)
            if isinstance(value, FunctionType):
                ahead.append(value)
            ahead += [inner for cls in _users_classes([value]) for inner in functions_of(cls)]


def _users_classes(values: Iterable[Any]) -> Iterator[type]:
    for value in values:
        if isinstance(value, type) and value.__module__ != "builtins":
            file = getattr(sys.modules.get(value.__module__), "__file__", None)
            if file is None or source_files.is_users(file):
                yield value


class Generators(user_state.Generators):
    """NumPy's and Python's generators, and those that the task and the model's modules hold."""

    def __init__(self, engine: Engine) -> None:
        watch = engine.built.watch
        super().__init__(generators_of([engine.plan.task, *(watch.model.modules() if watch else ())]))


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    """Gives a tensor, array, list or dict its former content."""
    if isinstance(value, Tensor):
        if value is not content and not torch.equal(value, content):
            value.copy_(content)
    elif isinstance(value, np.ndarray):
        if value is not content and not same(content, value):
            value[...] = content
    elif type(value) in CONTAINERS and not same(content, value):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(copied(content))
