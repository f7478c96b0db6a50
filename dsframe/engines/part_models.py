"""The module that one of several engines trains: a model under its name, whose forward pass is the loss that trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dsframe.model.forward import call
from dsframe.model.micro_batch import Arguments, Inputs
from dsframe.values import elements, tensors_of


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a loss, opaque to libraries."""

    inputs: Inputs
    targets: Any


class Part(nn.Module):
    """One model under its name. Its forward pass is its loss for ``LossInputs``, otherwise the model's own."""

    def __init__(self, name: str, model: nn.Module, loss: Callable[[LossInputs], Any] | None) -> None:
        super().__init__()
        self.add_module(name, model)
        self._loss, self._trained = loss, loss is not None
        self.size = elements(model.parameters())

    @property
    def inner(self) -> nn.Module:
        """The model."""
        return next(self.children())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._loss is not None and args and isinstance(args[0], LossInputs):
            return self._loss(args[0])
        return call(self.inner, Arguments(args, kwargs))

    def train(self, mode: bool = True) -> Part:
        return super().train(mode and self._trained)


class Pass(nn.Module):
    """A loss as a module, so that its random draws can be detected (a model also runs for other losses)."""

    def forward(self, loss: Callable[..., Any], models: Mapping[str, Any], batch: LossInputs) -> Any:
        return loss(models, batch.inputs, batch.targets)


class Drawn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records which tensors were filled with random numbers and not overwritten since."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._filled: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._filled.update(_storage(result) for result in tensors_of(results))
        elif func is torch.ops.aten.copy_.default and isinstance(args[1], Tensor):
            change = self._filled.add if _storage(args[1]) in self._filled else self._filled.discard
            change(_storage(args[0]))
        return results

    def among(self, model: nn.Module) -> str:
        """Returns the name of the first parameter with random numbers; "" if there is none."""
        return next((name for name, parameter in model.named_parameters() if _storage(parameter) in self._filled), "")


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.detach().untyped_storage())  # type: ignore[no-untyped-call]
