"""Objects of a model's own classes that hold tensors: torch sees into them from then on, as into tuples and dicts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_DEPTH = 3
"""Levels of attributes that are looked at for a tensor."""


def register(value: Any) -> set[type]:
    """Registers the classes of ``value``, and of what it contains, as nodes of torch's trees where they hold tensors.

    Casts of outputs and evaluations then treat their attributes as they treat the fields of a named tuple. For the rest of the
    process; objects are rebuilt without calling ``__init__``. Returns the classes that are new.
    """
    classes = {type(node) for node in _objects(value, _DEPTH)}
    for cls in classes:
        pytree.register_pytree_node(cls, _flatten, partial(_rebuilt, cls))
    return classes


def _objects(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (Tensor, str, bytes, int, float, nn.Module, type, type(None))):
        return
    cls = type(value)
    if cls in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value):
        parts = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(value, (dict, tuple, list)) else ():
            yield from _objects(part, depth)
    elif depth and not cls.__module__.startswith(("torch.", "builtins")) and (held := attributes(value)):
        inside = [node for part in held.values() for node in _objects(part, depth - 1)]
        yield from inside
        if inside or any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(list(held.values()))):
            yield value


def attributes(value: Any) -> dict[str, Any]:
    """Returns what an object holds, by name."""
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ()) if not name.startswith("__")]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _flatten(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    held = attributes(value)
    return list(held.values()), tuple(held)


def _rebuilt(cls: Any, leaves: Any, names: tuple[str, ...]) -> Any:
    made: Any = cls.__new__(cls)
    for name, leaf in zip(names, leaves, strict=True):
        object.__setattr__(made, name, leaf)
    return made
