"""A look at a task that leaves no trace: what it and its model change meanwhile is put back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64_hexdigest

from dsframe.checkpoint import generators
from dsframe.engine import Engine
from dsframe.tasks.task import Task
from dsframe.training import held
from dsframe.training.held import copied, same

_HELD = 1 << 25
"""Elements of all weights of a task's own modules that are copied for the look: 128 MiB."""


def twin(task: Task) -> Task:
    """Returns a copy of ``task`` whose tensors, numbers and lists may change."""
    other = copy.copy(task)
    vars(other).update({name: copied(value) for name, value in vars(task).items()})
    return other


def changes(task: Task, other: Task) -> tuple[set[str], set[str]]:
    """Returns the names of what the twin has changed: of a state that a loss may depend on, and of plain numbers."""
    state: set[str] = set()
    numbers: set[str] = set()
    before = vars(task)
    for name, value in vars(other).items():
        changed = numbers if isinstance(value, (int, float)) else state
        made = name not in before and isinstance(value, Tensor)
        if name not in ("terms", "context") and (made or not same(before.get(name), value)):
            changed.add(name)
    return state, numbers


@contextmanager
def unmoved(engine: Engine, model: nn.Module) -> Iterator[None]:
    """Puts back the random generators, buffers and attributes of the modules of ``model``, and what user code keeps elsewhere."""
    device = engine.plan.device
    kept = generators.capture(device)
    values = (held.attributes(model), held.outside(engine), held.Generators(engine))
    buffers = [buffer for buffer in model.buffers() if buffer.layout == torch.strided]
    contents = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        for value in values:
            value.put_back()
        with torch.no_grad():
            for buffer, content in zip(buffers, contents, strict=True):
                buffer.copy_(content)
        generators.restore(kept, device)


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
            if not same(before, weight.detach())
        }

    def changed(self, *, of_model: bool = False) -> set[str]:
        """Returns the names of those that have changed since: of the task's own modules, or of the model."""
        return {
            name
            for name, models, buffers, key, _, before in self._held
            if models == of_model and not same(before, buffers[key])
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
