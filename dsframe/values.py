"""Copies and comparisons of values that user code keeps: numbers, texts, tensors, containers and objects of them."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

FEW = 1000
"""Entries of a list or dict that is copied; a data set has more."""
ELEMENTS = 1 << 22
"""Elements of a tensor or an array that is copied."""
CONTAINERS = (list, deque, set, dict, defaultdict, OrderedDict, Counter)
"""Classes of containers whose content is put back."""


def copied(value: Any, depth: int = 2) -> Any:
    """A copy whose tensors and numbers may change; modules, data sets and what cannot be copied stay as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= ELEMENTS else value
    if isinstance(value, np.ndarray):
        return value.copy() if value.size <= ELEMENTS else value
    if isinstance(value, (list, set, dict, deque)) and len(value) <= FEW:
        if isinstance(value, dict):
            twin = copy.copy(value) if type(value) in CONTAINERS else dict(value)
            dict.update(twin, {key: copied(item, depth - 1) for key, item in value.items()} if depth else {})
            return twin
        return type(value)(copied(item, depth - 1) if depth else item for item in value)
    if isinstance(value, (nn.Module, Dataset)) or not depth or not type(value).__dict__.get("__dict__"):
        return value
    try:
        twin = copy.copy(value)
        vars(twin).update({name: copied(item, depth - 1) for name, item in vars(value).items()})
    except Exception:  # an object that cannot be copied
        return value
    return twin


def same(before: Any, after: Any) -> bool:
    """Returns whether two plain values, or two objects of plain values, are equal; True of what cannot be compared."""
    if before is None or after is None:
        return before is after
    if isinstance(before, Tensor) and before.is_nested:
        return isinstance(after, Tensor) and after.is_nested and same(list(before.unbind()), list(after.unbind()))
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and before.shape == after.shape and torch.equal(before, after)
    if isinstance(before, (np.ndarray, np.generic)) and not before.dtype.hasobject:
        alike = type(before) is type(after) and (before.dtype, before.shape) == (after.dtype, after.shape)
        return alike and before.tobytes() == after.tobytes()
    if isinstance(before, (int, float, complex, str, bytes, set)):
        return before is after or bool(before == after)
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(same(value, after[key]) for key, value in before.items())
    if isinstance(before, (list, tuple, deque)) and isinstance(after, type(before)):
        return len(before) == len(after) and all(map(same, before, after))
    if type(before) is type(after) and type(before).__dict__.get("__dict__") and not isinstance(before, nn.Module):
        return before is after or same(vars(before), vars(after))
    return True
