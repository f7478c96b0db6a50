"""Makes tensors in objects of a model's own classes visible to torch and libraries, like those in tuples and dicts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dsframe.errors import TaskError
from dsframe.values import attributes_of, tensors_of

_DEPTH = 3
"""Levels of attributes that are searched for tensors."""
_REGISTERED: set[type] = set()
_TRANSPARENT = (Tensor, tuple, list, dict, type(None))
"""Types that every library searches."""


def register(value: Any) -> None:
    """Registers the classes of ``value``, and of objects in it, as pytree nodes if they contain tensors. Casts of
    outputs and evaluations then treat their attributes like fields of a named tuple. Lasts until the process ends;
    objects are rebuilt without calling ``__init__``."""
    for cls in {type(node) for node in _objects(value, _DEPTH)} - _REGISTERED - {deque}:
        pytree.register_pytree_node(cls, _flatten, partial(_rebuilt, cls), flatten_with_keys_fn=_flatten_with_keys)
        _REGISTERED.add(cls)


def show(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Makes tensors visible to hooks: those in objects that ``modules`` take and return, and those left in attributes,
    such as an auxiliary loss. Applies to hooks that a library adds before it calls the returned function. Without it,
    they do not find such tensors, and miss a module's backward pass."""
    modules = list(modules)
    shown = [
        (module, _Shown(), _Shown(refuses=True, parts=_users_parts(module, {*modules} - {module})))
        for module in modules
        if not _is_torchs(module)
    ]
    for module, inputs, outputs in shown:
        module.register_forward_pre_hook(inputs.show)
        module.register_forward_hook(outputs.show)

    def close() -> None:
        for module, inputs, outputs in shown:
            module.register_forward_pre_hook(inputs.take)
            module.register_forward_hook(outputs.take)

    return close


class _Shown:
    """Replaces a module's inputs or outputs by a tuple with a list of the tensors in their objects, and back."""

    _places: list[tuple[Any, Any]] | None = None
    """Object and attribute, or deque and index, of each tensor; None if libraries see all of them."""

    def __init__(self, *, refuses: bool = False, parts: Iterable[nn.Module] = ()) -> None:
        self._refuses, self._attributes = refuses, [vars(part) for part in parts]

    def show(self, module: nn.Module, *values: Any) -> Any:
        value = values[-1]
        register(value)
        if self._refuses and not isinstance(value, Tensor) and torch.is_grad_enabled():
            _refuse_hidden(module, value)
        places = _places(value)
        held = [part for of in self._attributes for name, part in of.items() if name not in _OF_MODULES]
        tensors = tensors_of([part for part in held if isinstance(part, _TRANSPARENT)])
        left = [tensor for tensor in tensors if tensor.grad_fn is not None]
        self._places = places if places or left or not isinstance(value, _TRANSPARENT) else None
        parts = (node[name] if isinstance(node, deque) else getattr(node, name) for node, name in places)
        return None if self._places is None else (value, list(parts), left)

    def take(self, _: nn.Module, *values: Any) -> Any:
        if self._places is None:
            return None
        value, tensors, _ = values[-1]
        for (node, name), tensor in zip(self._places, tensors, strict=True):
            if isinstance(node, deque):
                node[name] = tensor
            else:
                object.__setattr__(node, name, tensor)
        return value


def _refuse_hidden(module: nn.Module, value: Any) -> None:
    """Raises TaskError if the output of ``module`` contains a tensor with a gradient that no hook can see, for example
    in a function. Its backward pass would then run outside the library's hooks."""
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, Tensor) and _hides(leaf, _DEPTH):
            name = type(module).__name__.removeprefix("FSDP")
            raise TaskError(
                f"{name} returns a {type(leaf).__name__} that holds tensors with gradients, which libraries that shard weights "
                "cannot see: return the tensors themselves, and make it of them in the loss, or choose an engine that keeps whole "
                "weights on each rank (ddp, horovod, or ZeRO 0 to 2)"
            )


def _hides(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return value.grad_fn is not None
    if isinstance(value, nn.Module) or not depth:
        return False
    inside: list[Any] = []
    if isinstance(value, FunctionType):
        inside = [_content(cell) for cell in value.__closure__ or ()]
        inside += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, (MethodType, BuiltinMethodType)):
        inside = [value.__self__]
    elif isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, Iterator):  # its contents show only when it is consumed
        return True
    elif isinstance(value, (tuple, list, set, frozenset, deque)):
        inside = list(value)
    elif isinstance(value, Mapping):
        inside = list(value.values())
    elif not type(value).__module__.startswith(_FOREIGN):
        inside = list(attributes_of(value).values())
    return any(_hides(part, depth - 1) for part in inside)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.") and not isinstance(module, nn.Sequential)


def _users_parts(module: nn.Module, others: set[nn.Module]) -> Iterator[nn.Module]:
    """Yields ``module`` and the modules inside it, without ``others`` and torch's layers."""
    if not _is_torchs(module):
        yield module
    for child in module.children():
        if child not in others:
            yield from _users_parts(child, others)


_OF_MODULES = vars(nn.Module()).keys()


def _places(value: Any) -> list[tuple[Any, Any]]:
    return [
        (node, name)
        for node in _objects(value, _DEPTH)
        for name, part in (enumerate(node) if isinstance(node, deque) else attributes_of(node).items())
        if isinstance(part, (Tensor, tuple, list, dict)) and tensors_of(part)
    ]


def _objects(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (Tensor, str, bytes, int, float, nn.Module, type, type(None))):
        return
    cls = type(value)
    if cls not in _REGISTERED and (cls in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value)):
        parts = value.values() if isinstance(value, dict) else value
        for part in parts if isinstance(value, (dict, tuple, list, deque)) else ():
            yield from _objects(part, depth)
        if isinstance(value, deque) and tensors_of(value):  # a pytree node, but unknown to FSDP
            yield value
    elif depth and not cls.__module__.startswith(_FOREIGN) and (held := attributes_of(value)):
        inside = [node for part in held.values() for node in _objects(part, depth - 1)]
        yield from inside
        if inside or tensors_of(list(held.values())):
            yield value


_FOREIGN = ("torch.nn.", "torch.utils.", "torch._", "builtins")


def _flatten(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    held = attributes_of(value)
    return list(held.values()), tuple(held)


def _flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    held = attributes_of(value)
    return [(pytree.GetAttrKey(name), part) for name, part in held.items()], tuple(held)


def _rebuilt(cls: Any, leaves: Any, names: tuple[str, ...]) -> Any:
    made: Any = cls.__new__(cls)
    for name, leaf in zip(names, leaves, strict=True):
        object.__setattr__(made, name, leaf)
    return made
