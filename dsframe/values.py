"""Copies and comparisons of values that user code keeps: numbers, strings, tensors, containers and objects of them."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from dataclasses import is_dataclass
from operator import is_
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset

Tensors = dict[str, Tensor]
"""Tensors by name."""
FEW = 1000
"""Longest list or dict whose entries are copied too; a longer one, such as a data set, keeps its entries."""
ELEMENTS = 1 << 22
"""Most elements of a tensor, an array or a container that is copied."""
CONTAINERS = (list, deque, set, dict, defaultdict, OrderedDict, Counter)
"""Classes of containers whose content is restored."""
COUNTERS: tuple[type, ...] = (itertools.count, type(iter(range(0))), type(iter([])), type(iter(())))
"""Classes of iterators whose position is restored, by replacing them with a copy."""


def tensors_of(value: Any) -> list[Tensor]:
    """Returns the tensors in nested containers, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def elements(tensors: Iterable[Tensor]) -> int:
    """Returns the total number of elements."""
    return sum(tensor.numel() for tensor in tensors)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def copied(value: Any, depth: int = 2) -> Any:
    """Returns a copy whose tensors and numbers may change; modules, data sets and uncopyable objects stay the same."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= ELEMENTS else value
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= ELEMENTS else value
    base: Any = next((cls for cls in (list, dict, deque, set) if isinstance(value, cls)), None)
    if (base and len(value) > ELEMENTS) or not (
        base or isinstance(value, COUNTERS) or (depth and has_attributes(value))
    ):
        return value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from Python 3.12 on it warns that 3.14 cannot copy itertools.count
            twin = copy.copy(value)
        if base not in (None, set) and depth and len(value) <= FEW:  # elements of a set do not change
            for key, item in dict.items(value) if base is dict else enumerate(value):
                base.__setitem__(twin, key, copied(item, depth - 1))
        apart = twin is not value and not isinstance(value, COUNTERS)  # a logger is its own copy
        for name, item in attributes_of(value).items() if apart else ():
            object.__setattr__(twin, name, copied(item, depth - 1))
    except Exception:  # an object that cannot be copied
        return value
    return twin


def has_attributes(value: Any) -> bool:
    """True if the object has attributes in ``__dict__`` or ``__slots__``; False for modules, data and classes with
    ``__del__``."""
    others = (nn.Module, Dataset, Tensor, type, FunctionType, ModuleType)
    if isinstance(value, others) or hasattr(type(value), "__del__"):
        return False
    return hasattr(value, "__dict__") or any("__slots__" in vars(cls) for cls in type(value).__mro__)


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of such an object."""
    with_slots = [vars(cls) for cls in type(value).__mro__ if "__slots__" in vars(cls)]
    slots = [name for of in with_slots for name, slot in of.items() if isinstance(slot, MemberDescriptorType)]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def filled(given: Any, copy: Any) -> Any:
    """Returns ``copy``, which was made of the arguments ``given``, with the lists, dicts and dataclasses of ``given``, which get
    its contents: a module may add values to them for its caller."""
    if given is copy or type(given) is not type(copy):
        return copy
    if type(given) is tuple:
        return tuple(map(filled, given, copy))
    if isinstance(given, (list, dict)):
        for key in given if isinstance(given, dict) else range(len(given)):
            given[key] = filled(given[key], copy[key])
    for name, value in attributes_of(copy).items() if is_dataclass(given) else ():
        object.__setattr__(given, name, filled(getattr(given, name), value))
    return given if isinstance(given, (list, dict)) or is_dataclass(given) else copy


def same(before: Any, after: Any) -> bool:
    """Returns whether two plain values, or two objects of plain values, are equal; True if they cannot be compared."""
    if before is after or before is None or after is None:
        return before is after
    if isinstance(before, Tensor) and before.is_nested:
        return isinstance(after, Tensor) and after.is_nested and same(list(before.unbind()), list(after.unbind()))
    if isinstance(before, Tensor) and before.layout != torch.strided:
        return isinstance(after, Tensor) and before.shape == after.shape and same(_entries(before), _entries(after))
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and before.shape == after.shape and torch.equal(before, after)
    if isinstance(before, (np.ndarray, np.generic)) and not before.dtype.hasobject:
        alike = type(before) is type(after) and (before.dtype, before.shape) == (after.dtype, after.shape)
        return alike and before.tobytes() == after.tobytes()
    if isinstance(before, (int, float, complex, str, bytes, set)):
        return bool(before == after)
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(same(value, after[key]) for key, value in before.items())
    if isinstance(before, (list, tuple, deque)) and isinstance(after, type(before)):
        return len(before) == len(after) and (all(map(is_, before, after)) or all(map(same, before, after)))
    if isinstance(before, COUNTERS) and type(before) is type(after):
        return bool(_position(before) == _position(after))
    if type(before) is type(after) and has_attributes(before):
        return same(attributes_of(before), attributes_of(after))
    return True


def _entries(sparse: Tensor) -> list[Tensor]:
    entries = sparse.to_sparse(layout=torch.sparse_coo)
    return [entries._indices(), entries._values()]


def _position(counter: Any) -> Any:
    return repr(counter) if isinstance(counter, itertools.count) else counter.__length_hint__()
