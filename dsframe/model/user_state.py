"""State that a model's own code may change in a forward pass, except weights, buffers and torch's generators."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn


def functions_of(cls: type) -> list[FunctionType]:
    """Returns the functions of a class, without those of nn.Module and dsframe's tasks."""
    members: list[Any] = [
        value
        for base in cls.__mro__
        if base not in nn.Module.__mro__ and not base.__module__.startswith(("torch.", "deepspeed.", "dsframe."))
        for value in vars(base).values()
    ]
    functions = [
        inspect.unwrap(getattr(value, "__func__", value))
        for value in members
        if callable(value) or hasattr(value, "__func__")
    ]
    return [function for function in functions if isinstance(function, FunctionType)]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yields ``code`` and the code of functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def words_of(code: CodeType) -> frozenset[str]:
    """Returns the names and texts in ``code`` and in the functions inside it."""
    parts = (part for inner in codes_in(code) for part in (*inner.co_names, *inner.co_consts))
    return frozenset(part for part in parts if isinstance(part, str))


def is_generator(value: object) -> bool:
    """Returns True for a random generator with a state."""
    return isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom)


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def generators_of(holders: Iterable[object]) -> list[Any]:
    """Returns the random generators in attributes of ``holders``."""
    return [value for holder in holders for value in vars(holder).values() if is_generator(value)]


class Generators:
    """The state of random generators: those of NumPy and Python, and ``held`` ones."""

    def __init__(self, held: Sequence[Any], *, process: bool = True) -> None:
        """``process``: include NumPy's and Python's, which takes 50 us."""
        self._process = _of_process() if process else None
        self._held = [(value, _state(value)) for value in held]

    def process_changed(self) -> bool:
        """Returns True if NumPy's or Python's generator has moved since then."""
        return self._process is not None and _of_process() != self._process

    def changed(self) -> bool:
        """Returns True if any generator has moved since then."""
        return self.process_changed() or self.held_changed()

    def held_changed(self) -> bool:
        """Returns True if a held generator has moved since then."""
        return any(state_of(value) != _comparable(before) for value, before in self._held)

    def put_back(self, *, process: bool = False) -> None:
        """Restores the held generators in place. ``process``: also those of NumPy and Python."""
        for value, before in self._held:
            if isinstance(value, random.Random):
                value.setstate(before)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = before
            else:
                value.set_state(before)
        if process and self._process is not None:
            pythons, (name, keys, *rest) = self._process
            random.setstate(pythons)
            np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


def state_of(generator: Any) -> Any:
    """Returns the state as a value that can be compared and sent to another process."""
    return _comparable(_state(generator))


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _comparable(state: Any) -> bytes | str:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)  # arrays in it are short enough


def _of_process() -> tuple[Any, tuple[Any, ...]]:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, np.asarray(keys).tobytes(), *rest)
