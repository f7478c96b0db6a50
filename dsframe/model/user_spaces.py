"""Finds where user code keeps values outside parameters: attributes, globals, classes and closures."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from dsframe.host import source_files
from dsframe.model.user_state import functions_of, words_of
from dsframe.values import attributes_of, has_attributes

ABSENT = object()
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module with its hooks."""


@dataclass(frozen=True, eq=False)
class Space:
    """A namespace."""

    owner: Any
    """A dict, a class, an object, or a closure cell."""
    names: frozenset[str]
    """The names that are inspected."""
    label: str
    holds_buffers: bool = False

    def values(self) -> Mapping[str, Any]:
        if isinstance(self.owner, CellType):
            return {} if self.owner == CellType() else {"cell_contents": self.owner.cell_contents}
        if isinstance(self.owner, dict):
            return self.owner
        return vars(self.owner) if isinstance(self.owner, type) else attributes_of(self.owner)

    def put(self, key: str, value: Any) -> None:
        """Sets a value without the user's ``__setattr__``. ABSENT deletes the name."""
        base = type if isinstance(self.owner, type) else object
        if isinstance(self.owner, dict) and value is ABSENT:
            self.owner.pop(key, None)
        elif isinstance(self.owner, dict):
            self.owner[key] = value
        elif value is ABSENT:
            base.__delattr__(self.owner, key)
        else:
            base.__setattr__(self.owner, key, value)


def code_of(owners: Collection[object]) -> set[CodeType]:
    """Returns the code of the owners' classes, and of the user's functions that they call or contain."""
    functions = {
        *_reachable_functions(owners),
        *(function for cls in {*map(type, owners)} for function in functions_of(cls)),
    }
    return {function.__code__ for function in functions}


def names_of(owners: Collection[object]) -> frozenset[str]:
    """Returns the names in that code, without the attributes of nn.Module."""
    return frozenset[str]().union(*map(words_of, code_of(owners))) - vars(nn.Module()).keys()


def attributes(model: nn.Module) -> list[Space]:
    """Returns the attributes of the modules of ``model``, and of objects of the user's classes in them."""
    modules = dict(model.named_modules())
    constants = (getattr(module, "__constants__", ()) for module in modules.values())  # such as p of a Dropout
    names = names_of(modules.values()).union(*constants)  # one large set shared by all
    spaces = [Space(vars(module), names, f"{name}.{{}}") for name, module in modules.items()]
    objects = [(name, key, value) for name, module in modules.items() for key, value in vars(module).items()]
    for name, key, value in objects:
        if key in names and has_attributes(value) and [*_users_classes([type(value)])]:
            spaces.append(Space(value, names.union(attributes_of(value)), f"{name}.{key}.{{}}"))
    return spaces


def hooks_of(module: nn.Module | None) -> list[Any]:
    """Returns the user's hooks on a module and its own parameters, or on every module."""
    owner, prefix = (module, "") if module is not None else (nn.modules.module, "_global")
    hooks = [hook for kind in HOOKS for hook in getattr(owner, prefix + kind).values()]
    for parameter in module.parameters(recurse=False) if module is not None else ():
        hooks += (parameter._backward_hooks or {}).values()
    return [hook for hook in hooks if source_files.is_users(_file_of(getattr(hook, "func", hook)))]


def _file_of(hook: Any) -> str:
    """Returns the file of a hook's code; that of a library for hooks without code, such as C functions."""
    function: Any = inspect.unwrap(hook) if hasattr(hook, "__code__") else type(hook).__call__
    return function.__code__.co_filename if hasattr(function, "__code__") else inspect.__file__


def outside(owners: Collection[object], further: Iterable[Any] = ()) -> list[Space]:
    """Returns the globals, classes and closures that the user's code of ``owners`` (modules and tasks) refers to, and
    that of their hooks and of ``further`` ones, with the attributes of objects that are hooks."""
    spaces, names = dict[int, Space](), defaultdict[int, frozenset[str]](frozenset)
    hooks = [*further, *(hook for owner in owners if isinstance(owner, nn.Module) for hook in hooks_of(owner))]
    for hook in hooks:
        if isinstance(hook, partial):
            given = {**{str(place): value for place, value in enumerate(hook.args)}, **hook.keywords}
            label = f"argument {{}} of {getattr(hook.func, '__name__', 'a hook')}"
            spaces[id(hook)] = Space(given, frozenset(given), label)
            hooks += [hook.func, *(value for value in given.values() if [*_users_classes([type(value)])])]
    objects = [getattr(hook, "__self__", hook) for hook in hooks if not isinstance(hook, partial)]
    objects = [who for who in objects if has_attributes(who) and all(who is not owner for owner in owners)]
    for who in objects:
        spaces[id(who)] = Space(who, names_of([who]).union(attributes_of(who)), f"{{}} of {type(who).__name__}")
    owners = [*owners, *objects]
    for function in _reachable_functions(owners, hooks):
        code, file = function.__code__, Path(function.__code__.co_filename).name
        words, of_file = words_of(code), function.__globals__
        names[id(of_file)] |= words
        spaces[id(of_file)] = Space(of_file, names[id(of_file)], f"{{}} of {file}")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            spaces[id(cell)] = Space(cell, frozenset(["cell_contents"]), f"{name} of a closure in {file}")
        for cls in _users_classes([*map(type, owners), *_used_by(function)]):
            names[id(cls)] |= words.union(*(words_of(method.__code__) for method in functions_of(cls)))
            spaces[id(cls)] = Space(cls, names[id(cls)], f"{cls.__name__}.{{}}")
    return [*spaces.values()]


def _reachable_functions(owners: Collection[object], further: Iterable[Any] = ()) -> Iterator[FunctionType]:
    """Yields the user's functions in ``owners``, their classes and ``further``, and those that they call by a global
    name."""
    values = [*further, *(value for owner in owners for value in attributes_of(owner).values())]
    held = [value for value in values if isinstance(value, (FunctionType, MethodType))]
    functions = [getattr(function, "__func__", function) for function in map(inspect.unwrap, held)]
    seen, ahead = set[CodeType](), [function for function in functions if isinstance(function, FunctionType)]
    ahead += [function for cls in {*map(type, owners)} for function in functions_of(cls)]
    while ahead:
        function = ahead.pop()
        if function.__code__ in seen or not source_files.is_users(function.__code__.co_filename):
            continue
        seen.add(function.__code__)
        yield function
        for value in _used_by(function):
            if isinstance(value, FunctionType):
                ahead.append(value)
            ahead += [inner for cls in _users_classes([value]) for inner in functions_of(cls)]


def _used_by(function: FunctionType) -> list[Any]:
    """Returns the globals that a function names, and the values of its closure."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [*(function.__globals__.get(word) for word in words_of(function.__code__)), *cells]


def _users_classes(values: Iterable[Any]) -> Iterator[type]:
    for value in values:
        if isinstance(value, type) and value.__module__ != "builtins":
            file = getattr(sys.modules.get(value.__module__), "__file__", None)
            if file is None or source_files.is_users(file):
                yield value
