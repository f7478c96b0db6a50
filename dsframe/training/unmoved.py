"""A look at a task that leaves no trace: what it and its model change meanwhile is put back."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from xxhash import xxh3_64_hexdigest

from dsframe.checkpoint import generators
from dsframe.engine import Engine
from dsframe.tasks.task import Task

_FEW = 1000
"""Entries of a list or dict that is copied for the look; a data set has more."""
_ELEMENTS = 1 << 22
"""Elements of a tensor that is copied for the look."""
_HELD = 1 << 25
"""Elements of all weights of a task's own modules that are copied for the look: 128 MiB."""


def twin(task: Task) -> Task:
    """Returns a copy of ``task`` whose tensors, numbers and lists may change."""
    copied = copy.copy(task)
    vars(copied).update({name: _copied(value) for name, value in vars(task).items()})
    return copied


def changes(task: Task, copied: Task) -> tuple[set[str], set[str]]:
    """Returns the names of what the twin has changed: of a state that a loss may depend on, and of plain numbers."""
    state: set[str] = set()
    numbers: set[str] = set()
    before = vars(task)
    for name, value in vars(copied).items():
        changed = numbers if isinstance(value, (int, float)) else state
        made = name not in before and isinstance(value, Tensor)
        if name not in ("terms", "context") and (made or not _same(before.get(name), value)):
            changed.add(name)
    return state, numbers


@contextmanager
def unmoved(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back the random generators, and the buffers and attributes of the modules of ``model``."""
    kept = generators.capture(device)
    attributes = Attributes(model)
    buffers = [buffer for buffer in model.buffers() if buffer.layout == torch.strided]
    contents = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        attributes.put_back()
        with torch.no_grad():
            for buffer, content in zip(buffers, contents, strict=True):
                buffer.copy_(content)
        generators.restore(kept, device)


class Attributes:
    """What the modules of a model keep beside parameters and buffers, as it was when this was made: numbers, tensors, and lists or
    dicts of few entries. Those that libraries keep there are left out: the code of the model's classes does not name them."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        tensors = [*model.parameters(), *model.buffers()]
        # A shard of FSDP has no memory that torch shows.
        plain = [
            tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        ]
        self._memory = {tensor.untyped_storage().data_ptr() for tensor in plain}
        classes = {type(module) for module in self._modules.values()}
        self._names = frozenset[str]().union(*map(_names, classes))
        self._held = {
            name: {key: (value, _copied(value)) for key, value in self._plain(module)}
            for name, module in self._modules.items()
        }

    def changed(self) -> set[str]:
        """Returns the names of those that have changed or come since."""
        names = set()
        for name, module in self._modules.items():
            for key, value in self._plain(module):
                before = self._held[name].get(key, (None, None))[1]
                if type(before) is not type(value) or not _same(before, value):
                    names.add(f"{name}.{key}".removeprefix("."))
        return names

    def put_back(self) -> None:
        """Puts them back, in the same objects."""
        for name, module in self._modules.items():
            held = self._held[name]
            for key in {key for key, _ in self._plain(module)} - held.keys():
                del module.__dict__[key]
            for key, (value, content) in held.items():
                _fill(value, content)
                module.__dict__[key] = value

    def _plain(self, module: nn.Module) -> Iterator[tuple[str, Any]]:
        for key, value in list(module.__dict__.items()):
            if key not in self._names:
                continue
            if isinstance(value, tuple) or type(value) in (list, deque, dict):
                if len(value) <= _FEW and all(map(self._is_plain, tree_leaves(value))):
                    yield key, value
            elif self._is_plain(value):
                yield key, value

    def _is_plain(self, value: Any) -> bool:
        """Whether it is a number, a text or None, or a tensor that is no weight, no buffer, and no other name for one."""
        if not isinstance(value, Tensor):
            return isinstance(value, (int, float, str, type(None)))
        if isinstance(value, nn.Parameter) or type(value) is not Tensor or value.layout != torch.strided:
            return False
        return value.untyped_storage().data_ptr() not in self._memory


def _names(cls: type[nn.Module]) -> frozenset[str]:
    """Returns the names and texts in the code of a module's class, but for what each module has."""
    codes = [
        inspect.unwrap(function).__code__
        for base in cls.__mro__
        if base not in nn.Module.__mro__ and not base.__module__.startswith(("torch.", "deepspeed."))
        for function in vars(base).values()
        if isinstance(function, FunctionType) and isinstance(inspect.unwrap(function), FunctionType)
    ]
    names = set[str]()
    while codes:
        code = codes.pop()
        texts = {constant for constant in code.co_consts if isinstance(constant, str)}
        names |= {*code.co_names} | texts
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names - vars(nn.Module()).keys())


@torch.no_grad()
def _fill(value: Any, content: Any) -> None:
    """Gives a tensor, list or dict its former content."""
    if isinstance(value, Tensor):
        if value is not content and not torch.equal(value, content):
            value.copy_(content)
    elif type(value) in (list, deque, dict) and not _same(content, value):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(_copied(content))


def _copied(value: Any, depth: int = 2) -> Any:
    """A copy whose tensors and numbers may change; modules, data sets and what cannot be copied stay as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.numel() <= _ELEMENTS else value
    if isinstance(value, (list, set, dict, deque)) and len(value) <= _FEW:
        if isinstance(value, dict):
            return {key: _copied(item, depth - 1) for key, item in value.items()} if depth else dict(value)
        return type(value)(_copied(item, depth - 1) if depth else item for item in value)
    if isinstance(value, (nn.Module, Dataset)) or not depth or not type(value).__dict__.get("__dict__"):
        return value
    try:
        copied = copy.copy(value)
        vars(copied).update({name: _copied(item, depth - 1) for name, item in vars(value).items()})
    except Exception:  # an object that cannot be copied
        return value
    return copied


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and before.shape == after.shape and torch.equal(before, after)
    if isinstance(before, (int, float, set)):
        return before is after or bool(before == after)
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(value, after[key]) for key, value in before.items())
    if isinstance(before, (list, tuple, deque)) and isinstance(after, type(before)):
        return len(before) == len(after) and all(map(_same, before, after))
    if type(before) is type(after) and type(before).__dict__.get("__dict__") and not isinstance(before, nn.Module):
        return before is after or _same(vars(before), vars(after))
    return True


class HeldBuffers:
    """The buffers of the modules that a task holds, and the weights of those that are not the model's, such as a teacher; as they
    were when this was made. Weights of more than ``_HELD`` elements are not looked at."""

    def __init__(self, engine: Engine) -> None:
        watch, task = engine.built.watch, engine.plan.task
        names = {module: name for name, module in watch.model.named_modules()} if watch else {}  # the task may hold it
        self._held = [
            (
                f"{names.get(module, name)}.{key}".removeprefix("."),
                module in names,
                module._buffers,
                key,
                buffer,
                buffer.clone(),
            )
            for attribute, value in vars(task).items()
            if isinstance(value, nn.Module)
            for name, module in value.named_modules(prefix=attribute)
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.layout == torch.strided
        ]
        of_model = {id(weight) for weight in watch.model.parameters()} if watch else set()
        weights = {
            f"{attribute}.{name}": weight
            for attribute, value in vars(task).items()
            if isinstance(value, nn.Module) and value not in names
            for name, weight in value.named_parameters()
            if id(weight) not in of_model and not is_lazy(weight)
        }
        few = sum(weight.numel() for weight in weights.values()) <= _HELD
        self._weights = {name: (weight, weight.detach().clone()) for name, weight in weights.items() if few}

    def changed_weights(self) -> dict[str, str]:
        """Returns the names of the weights that have changed since, with a digest of what they are now."""
        return {
            name: xxh3_64_hexdigest(weight.detach().cpu().double().numpy().tobytes())
            for name, (weight, before) in self._weights.items()
            if not _same(before, weight.detach())
        }

    def changed(self, *, of_model: bool = False) -> set[str]:
        """Returns the names of those that have changed since: of the task's own modules, or of the model."""
        return {
            name
            for name, models, buffers, key, _, before in self._held
            if models == of_model and not _same(before, buffers[key])
        }

    def put_back(self) -> None:
        """Puts them back."""
        for _, _, buffers, key, was, before in self._held:
            buffers[key] = was
            if not torch.equal(was, before):
                was.data.copy_(before)  # autograd, which may need it as it is now again, sees no write to ``data``
        for weight, before in self._weights.values():
            if not torch.equal(weight, before):
                weight.data.copy_(before)
