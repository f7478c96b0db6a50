"""What user code keeps beside parameters, buffers and the task: in attributes of modules, in globals, classes and closures.

Numbers, texts, tensors, and lists or dicts of few entries, as they were when they were held; and random generators.
"""

from __future__ import annotations

import inspect
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsframe.checkpoint import generators
from dsframe.engine import Engine
from dsframe.host import source_files
from dsframe.values import FEW, copied, same


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
                if now.get(key) is not value:
                    space.put(key, value)

    def _plain(self, space: _Space) -> Iterator[tuple[str, Any]]:
        for key, value in list(space.values().items()):
            if key not in space.names:
                continue
            if isinstance(value, tuple) or type(value) in (list, deque, dict):
                if len(value) <= FEW and all(map(self._is_plain, tree_leaves(value))):
                    yield key, value
            elif self._is_plain(value) or (space.holds_buffers and isinstance(value, Tensor)):
                yield key, value


@dataclass(frozen=True, eq=False)
class _Space:
    """Where names have values."""

    owner: Any
    """A dict, a class, or a cell of a closure."""
    names: frozenset[str]
    """Those that are looked at."""
    label: str
    holds_buffers: bool = False

    def values(self) -> Mapping[str, Any]:
        if isinstance(self.owner, dict):
            return self.owner
        if isinstance(self.owner, type):
            return vars(self.owner)
        (name,) = self.names
        try:
            return {name: self.owner.cell_contents}
        except ValueError:  # not filled yet
            return {}

    def put(self, key: str, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[key] = value
        elif isinstance(self.owner, type):
            setattr(self.owner, key, value)
        else:
            self.owner.cell_contents = value

    def drop(self, key: str) -> None:
        if isinstance(self.owner, dict):
            del self.owner[key]
        elif isinstance(self.owner, type):
            delattr(self.owner, key)
        else:
            del self.owner.cell_contents


def attributes(model: nn.Module, *, buffers: bool = False) -> Values:
    """Returns what the modules of ``model`` keep in attributes. Those that libraries keep there are left out: the code of the
    model's classes does not name them. ``buffers``: also in buffers that no checkpoint has."""
    modules = dict(model.named_modules())
    functions = [function for cls in {type(module) for module in modules.values()} for function in _functions(cls)]
    names = frozenset[str]().union(*(_words(function.__code__) for function in functions)) - vars(nn.Module()).keys()
    spaces = [_Space(vars(module), names, f"{name}.{{}}") for name, module in modules.items()]
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
    functions = [function for cls in classes for function in _functions(cls)]
    functions += [held for owner in (task, *modules) for held in vars(owner).values() if isinstance(held, FunctionType)]
    spaces = dict[int, _Space]()
    for function in _reached(functions):
        code, file = function.__code__, Path(function.__code__.co_filename).name
        words, of_file = _words(code), function.__globals__
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
    """Whether a value is a number, a text or None, or a tensor that is no weight, no buffer, and no other name for one."""

    def __init__(self, model: nn.Module) -> None:
        tensors = [*model.parameters(), *model.buffers()]
        # A shard of FSDP has no memory that torch shows.
        plain = [
            tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        ]
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in plain}

    def __call__(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return isinstance(value, (int, float, str, type(None)))
        if isinstance(value, nn.Parameter) or type(value) is not Tensor or value.layout != torch.strided:
            return False
        return value.untyped_storage().data_ptr() not in self._memory


def _functions(cls: type) -> list[FunctionType]:
    """Returns the functions of a class, but for those that each module has, and those of dsframe's tasks."""
    own: list[Any] = [
        value
        for base in cls.__mro__
        if base not in nn.Module.__mro__ and not base.__module__.startswith(("torch.", "deepspeed.", "dsframe."))
        for value in vars(base).values()
    ]
    functions = [
        inspect.unwrap(getattr(value, "__func__", value))
        for value in own
        if callable(value) or hasattr(value, "__func__")
    ]
    return [function for function in functions if isinstance(function, FunctionType)]


def _reached(functions: Iterable[FunctionType]) -> Iterator[FunctionType]:
    """Yields the user's functions among ``functions``, and those that they call by a global name."""
    seen, ahead = set[CodeType](), [*functions]
    while ahead:
        function = ahead.pop()
        if function.__code__ in seen or not source_files.is_users(function.__code__.co_filename):
            continue
        seen.add(function.__code__)
        yield function
        for word in _words(function.__code__):
            value = function.__globals__.get(word)
            if isinstance(value, FunctionType):
                ahead.append(value)
            ahead += [inner for cls in _users_classes([value]) for inner in _functions(cls)]


def _users_classes(values: Iterable[Any]) -> Iterator[type]:
    for value in values:
        if isinstance(value, type) and value.__module__ != "builtins":
            file = getattr(sys.modules.get(value.__module__), "__file__", None)
            if file is None or source_files.is_users(file):
                yield value


def _words(code: CodeType) -> frozenset[str]:
    """Returns the names and texts in ``code`` and in the functions inside of it."""
    words, codes = set[str](), [code]
    while codes:
        code = codes.pop()
        words |= {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(words)


class Generators:
    """NumPy's and Python's generators, and those that the task and the model's modules hold; as they were when this was made."""

    def __init__(self, engine: Engine) -> None:
        watch = engine.built.watch
        holders = [engine.plan.task, *(watch.model.modules() if watch else ())]
        kinds: tuple[type, ...] = (torch.Generator, random.Random)
        numpys = sys.modules.get(
            "numpy.random"
        )  # importing it takes 2.6 MiB; who holds one of its generators has done so
        if numpys is not None:
            kinds += (numpys.Generator, numpys.RandomState)
        values = (value for holder in holders for value in vars(holder).values())
        self._process = _of_process()
        self._held = [(value, _state(value)) for value in values if isinstance(value, kinds)]

    def changed(self) -> bool:
        """Returns whether one has moved since."""
        return _of_process() != self._process or any(_state(value) != before for value, before in self._held)

    def put_back(self) -> None:
        """Puts those back that are held, in the same objects."""
        for value, before in self._held:
            if isinstance(value, torch.Generator):
                value.set_state(torch.frombuffer(bytearray(before), dtype=torch.uint8))
                continue
            was = pickle.loads(before)
            if isinstance(value, random.Random):
                value.setstate(was.getstate())
            elif hasattr(value, "set_state"):
                value.set_state(was.get_state())
            else:
                value.bit_generator.state = was.bit_generator.state


def _state(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):  # pickled twice it gives other bytes
        return generator.get_state().numpy().tobytes()
    return pickle.dumps(generator)


def _of_process() -> tuple[Any, Any]:
    kept = generators.capture(torch.device("cpu"))
    return kept["numpy"], kept["python"]


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    """Gives a tensor, list or dict its former content."""
    if isinstance(value, Tensor):
        if value is not content and not torch.equal(value, content):
            value.copy_(content)
    elif type(value) in (list, deque, dict) and not same(content, value):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(copied(content))
