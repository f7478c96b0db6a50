"""What a model's own code may move in a forward pass, beside weights, buffers and torch's generators."""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn


def functions_of(cls: type) -> list[FunctionType]:
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


def words_of(code: CodeType) -> frozenset[str]:
    """Returns the names and texts in ``code`` and in the functions inside of it."""
    words, codes = set[str](), [code]
    while codes:
        code = codes.pop()
        words |= {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(words)


class Generators:
    """NumPy's and Python's generators, and those in attributes of ``holders``, as they were when this was made."""

    def __init__(self, holders: Iterable[object]) -> None:
        kinds = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
        values = (value for holder in holders for value in vars(holder).values())
        self._process = _of_process()
        self._held = [(value, state_of(value)) for value in values if isinstance(value, kinds)]

    def changed(self) -> bool:
        """Returns whether one has moved since."""
        return _of_process() != self._process or any(state_of(value) != before for value, before in self._held)

    def put_back(self, *, process: bool = False) -> None:
        """Puts those back that are held, in the same objects. ``process``: those of NumPy and Python, too."""
        for value, before in self._held:
            if isinstance(value, torch.Generator):
                value.set_state(torch.frombuffer(bytearray(before), dtype=torch.uint8))
                continue
            was = pickle.loads(before)
            if isinstance(value, random.Random):
                value.setstate(was.getstate())
            elif isinstance(value, np.random.RandomState):
                value.set_state(was.get_state())
            else:
                value.bit_generator.state = was.bit_generator.state
        if process:
            pythons, (name, keys, *rest) = self._process
            random.setstate(pythons)
            np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


def state_of(generator: Any) -> bytes:
    if isinstance(generator, torch.Generator):  # pickled twice it gives other bytes
        return generator.get_state().numpy().tobytes()
    return pickle.dumps(generator)


def _of_process() -> tuple[Any, tuple[Any, ...]]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest)


class Numbers:
    """Numbers and texts in attributes of modules that the modules' own code names, as they were when this was made."""

    def __init__(self, modules: Iterable[nn.Module], names: frozenset[str]) -> None:
        self._of = [
            (vars(module), name, value)
            for module in modules
            for name, value in vars(module).items()
            if name in names and isinstance(value, (int, float, str, type(None)))
        ]

    @staticmethod
    def names(modules: Iterable[nn.Module]) -> frozenset[str]:
        """Returns the names that the code of the modules' classes has: what libraries keep in attributes is not among them."""
        functions = [function for cls in {type(module) for module in modules} for function in functions_of(cls)]
        return (
            frozenset[str]().union(*(words_of(function.__code__) for function in functions)) - vars(nn.Module()).keys()
        )

    def changed(self) -> Numbers:
        """Returns those that are others now, as they were."""
        some = Numbers((), frozenset())
        some._of = [(space, name, value) for space, name, value in self._of if space.get(name) is not value]
        return some

    def swap(self) -> None:
        """Puts them back, and keeps those of now in their place."""
        now = [(space, name, space.get(name)) for space, name, _ in self._of]
        for space, name, value in self._of:
            space[name] = value
        self._of = now
