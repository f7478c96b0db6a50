"""Detects uses of the model's parts that a pipeline stage does not have: ``model()`` may have stored the whole model.

While the task computes a loss or metrics, every such use is an error. Otherwise the initial value would be used (an
auxiliary loss, a buffer that is now None) or a part be missing (a penalty on all weights), silently.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dsframe.errors import TaskError


@dataclass(frozen=True)
class _About:
    name: str
    dropped: frozenset[str] = frozenset()
    """Names of its direct tensors that were removed."""
    holds_layers: bool = False
    """True if other engines call it, and a pipeline only its layers."""


_NOW: dict[int, _About] = {}
"""Facts about modules by id, inside of :meth:`MissingParts.refused`."""


def _refuse(what: str) -> NoReturn:
    raise TaskError(
        f"a pipeline's loss and metrics have only the layers of their own stage, and the task uses {what}: return what it needs "
        'from the layers, keep constants in the task itself, or train with "zero_optimization" instead of "pipeline"'
    )


def _special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


class _OtherLayer:
    """A layer of another stage, or a part of one."""

    def __init_subclass__(cls) -> None:
        """Bypasses the user's method, which may register classes."""

    def __getattribute__(self, name: str) -> Any:
        if _special(name):
            return super().__getattribute__(name)
        _refuse(f"{_NOW[id(self)].name}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(f"{_NOW[id(self)].name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        _refuse(f"{_NOW[id(self)].name}()")


class _Around:
    """A module that is in no layer: it contains layers, or only the loss uses it."""

    def __init_subclass__(cls) -> None:
        """Bypasses the user's method, which may register classes."""

    def __getattribute__(self, name: str) -> Any:
        if _special(name):
            return super().__getattribute__(name)
        about = _NOW[id(self)]
        if name in about.dropped:
            _refuse(f"{about.name}.{name}")
        if name in ("_parameters", "_buffers") and about.dropped:
            _refuse(f"{about.name}.{min(about.dropped)}")
        value = super().__getattribute__(name)
        if about.holds_layers and not name.startswith("_") and (value is None or isinstance(value, (float, Tensor))):
            _refuse(f"{about.name}.{name}")  # may be set by its forward pass, which no stage runs
        return value

    def __getattr__(self, name: str) -> Any:
        about = _NOW[id(self)]
        if about.holds_layers and not _special(name) and name not in _modules(self):
            _refuse(f"{about.name}.{name}")
        return super().__getattr__(name)  # type: ignore[misc]  # nn.Module's


def _modules(module: Any) -> dict[str, nn.Module]:
    held: dict[str, nn.Module] = module.__dict__["_modules"]
    return held


class _OtherParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        _refuse("a weight of another stage")


class _OtherBuffer(Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any) -> NoReturn:
        _refuse("a buffer of another stage")


@cache
def _refusing(original_class: Any, refusing: type) -> type:
    return types.new_class(original_class.__name__, (refusing, original_class))


class MissingParts:
    """Modules and tensors that this stage does not have, held by weak references."""

    def __init__(self) -> None:
        self._modules: list[tuple[weakref.ref[nn.Module], _About, type]] = []
        self._tensors: list[weakref.ref[Tensor]] = []

    def add(self, model: nn.Module, stage: nn.Module, layers: nn.Module | None = None) -> None:
        """Adds everything in ``model`` that is not in ``stage``. ``layers``: the layers of all stages, if the model has
        more than those; then their tensors are removed from it."""
        stage_modules = {id(module) for module in stage.modules()}
        tensors = {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
        in_layers = {id(module) for module in (layers or model).modules()} - {id(layers or model)}
        for name, module in model.named_modules():
            if id(module) in stage_modules:
                continue
            dropped = set[str]()
            for held in (module._parameters, module._buffers):
                for key, tensor in held.items():
                    if tensor is not None and id(tensor) not in tensors:
                        self._tensors.append(weakref.ref(tensor))
                        dropped.add(key)
                        if layers is not None:
                            held[key] = None
            among = id(module) in in_layers
            holds = any(id(part) in in_layers for part in module.modules())
            about = _About(f"the model's {name}" if name else "the model", frozenset(dropped), holds)
            self._modules.append((weakref.ref(module), about, _OtherLayer if among else _Around))

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Inside, every use of these modules and tensors raises TaskError."""
        if _NOW:
            yield
            return
        before: list[tuple[Any, type]] = []
        try:
            for reference, about, refusing in self._modules:
                if (module := reference()) is not None:
                    _NOW[id(module)] = about
                    original_class: Any = type(module)
                    before.append((module, original_class))
                    object.__setattr__(module, "__class__", _refusing(original_class, refusing))
            for of_tensor in self._tensors:
                if (tensor := of_tensor()) is not None and type(tensor) in _TENSORS:
                    before.append((tensor, type(tensor)))
                    object.__setattr__(tensor, "__class__", _TENSORS[type(tensor)])
            yield
        finally:
            for held, original in before:
                object.__setattr__(held, "__class__", original)
            _NOW.clear()


_TENSORS: dict[type, type] = {nn.Parameter: _OtherParameter, torch.Tensor: _OtherBuffer}
