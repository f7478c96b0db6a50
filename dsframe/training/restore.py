"""Restores everything that a test of a task changes in it and its model."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64_hexdigest

from dsframe.engine import Engine
from dsframe.host import generators
from dsframe.model import extra_state
from dsframe.tasks.task import Task
from dsframe.training import user_values
from dsframe.values import copied, elements, same

_HELD = 1 << 25
"""Largest number of weight elements in a task's own modules that are copied for a test: 128 MiB."""


def twin(task: Task) -> Task:
    """Returns a copy of ``task`` whose tensors, numbers and lists may change."""
    other = copy.copy(task)
    vars(other).update({name: copied(value) for name, value in vars(task).items() if name != "context"})
    return other


def changes(task: Task, other: Task) -> tuple[set[str], set[str]]:
    """Returns the attributes that ``other``, a twin, has changed: state, and plain numbers."""
    state: set[str] = set()
    numbers: set[str] = set()
    for name, value in vars(other).items():
        if not same(vars(task).get(name), value):
            (numbers if isinstance(value, (int, float)) else state).add(name)
    return state, numbers


class Buffers:
    """A copy of the strided buffers of some modules."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], most_elements: float = math.inf) -> None:
        """``modules``: by name, as from ``named_modules``. Larger buffers, such as quantised weights, are not
        copied."""
        self._most_elements = most_elements
        self._held = [(name, module, dict(module._buffers)) for name, module in modules]
        self._contents = self.contents()

    def contents(self) -> dict[str, Tensor]:
        """Returns copies of their current contents, by name."""
        return {
            f"{name}.{key}".removeprefix("."): buffer.detach().clone()
            for name, module, _ in self._held
            for key, buffer in module._buffers.items()
            if buffer is not None and buffer.layout == torch.strided and buffer.numel() <= self._most_elements
        }

    def changed(self) -> set[str]:
        """Returns the names of buffers that have changed or are missing since then, without new ones."""
        now = self.contents()
        return {name for name, before in self._contents.items() if name not in now or not same(before, now[name])}

    def put_back(self) -> None:
        """Restores the same tensors with their former contents."""
        for name, module, before_of in self._held:
            if isinstance(module._buffers, dict):  # not those of torch.jit
                module._buffers.clear()
                module._buffers.update(before_of)
            for key, buffer in before_of.items():
                before = self._contents.get(f"{name}.{key}".removeprefix("."))
                if buffer is None or before is None or torch.equal(buffer, before):
                    continue
                # Autograd does not see writes to ``data``; it may need the tensor, whose content is now the former one.
                buffer.data = buffer.data.copy_(before) if buffer.shape == before.shape else before.clone()


@contextmanager
def task_unmoved(engine: Engine) -> Iterator[None]:
    """Gives the task copies of its attributes inside the context. Restores the state of the modules in them, such as
    metrics, and all of :class:`Kept`."""
    attributes, kept = vars(engine.plan.task), Kept(engine)
    now, of_modules = dict(attributes), user_values.attributes(user_values.modules_of(engine.plan.task))
    attributes.update(vars(twin(engine.plan.task)))
    try:
        yield
    finally:
        attributes.clear()
        attributes.update(now)
        of_modules.put_back()
        kept.put_back()


@contextmanager
def unmoved(engine: Engine, model: nn.Module) -> Iterator[None]:
    """Restores the random generators, buffers, attributes and modes of the modules of ``model``, and values elsewhere
    in user code."""
    plain = (user_values.attributes(model), user_values.outside(engine), user_values.Generators(engine))
    changing = (*plain, Buffers(model.named_modules()))
    extra, modes = extra_state.pack(model), {module: module.training for module in model.modules()}
    with generators.kept(engine.plan.device):
        try:
            yield
        finally:
            for values in changing:
                values.put_back()
            extra_state.load(model, extra)
            for module, mode in modes.items():
                module.training = mode  # a hook may have a part in evaluation mode


class HeldBuffers:
    """A copy of the buffers of a task's modules, and of the weights of those outside the model, such as a teacher,
    unless they have more than ``_HELD`` elements."""

    def __init__(self, engine: Engine) -> None:
        watch, task = engine.built.watch, engine.plan.task
        names = {module: name for name, module in watch.model.named_modules()} if watch else {}  # the task may hold it
        modules = {
            module: names.get(module, name)
            for attribute, value in vars(task).items()
            if isinstance(value, nn.Module)
            for name, module in value.named_modules(prefix=attribute)
        }
        self._of_task = Buffers((name, module) for module, name in modules.items() if module not in names)
        self._of_model = Buffers((name, module) for module, name in modules.items() if module in names)
        of_model = {id(weight) for weight in watch.model.parameters()} if watch else set()
        weights = {
            f"{attribute}.{name}": weight
            for attribute, value in vars(task).items()
            if isinstance(value, nn.Module)
            for name, weight in value.named_parameters()
            if id(weight) not in of_model and not is_lazy(weight)
        }
        few = elements(weights.values()) <= _HELD
        self._weights = {name: (weight, weight.detach().clone()) for name, weight in weights.items() if few}

    def changed_weights(self) -> dict[str, str]:
        """Returns the names of the weights that have changed since then, with a digest of their current values."""
        return {
            name: xxh3_64_hexdigest(weight.detach().cpu().double().numpy().tobytes())
            for name, (weight, before) in self._weights.items()
            if not same(before, weight.detach())
        }

    def changed(self, *, of_model: bool = False) -> set[str]:
        """Returns the names of changed buffers: of the task's own modules, or of the model's."""
        return (self._of_model if of_model else self._of_task).changed()

    def put_back(self) -> None:
        """Restores all buffers and weights."""
        self._of_model.put_back()
        self._of_task.put_back()
        for weight, before in self._weights.values():
            if not torch.equal(weight, before):
                weight.data.copy_(before)


class Kept:
    """A copy of everything that a test of a loss may change: random generators, buffers and teachers in the task, and
    values elsewhere in user code."""

    def __init__(self, engine: Engine) -> None:
        self._device = engine.plan.device
        self._drawn = generators.capture(self._device)
        self.buffers = HeldBuffers(engine)
        self._others = (user_values.outside(engine), user_values.Generators(engine))

    @property
    def drew(self) -> bool:
        """True if one of torch's generators has moved since then."""
        return generators.capture(self._device) != self._drawn

    def put_back(self) -> None:
        """Restores all of it."""
        generators.restore(self._drawn, self._device)
        for values in (self.buffers, *self._others):
            values.put_back()
