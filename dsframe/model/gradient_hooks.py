"""Hooks on gradients of parameters, which are to get the gradient of the global batch, once a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.errors import EngineError, TaskError

GradientHooks = Mapping[str, Sequence[Callable[[Tensor], Any]]]
"""Arguments of ``Tensor.register_hook``, in order, by parameter name."""


def find(model: nn.Module) -> GradientHooks:
    """Returns the hooks of ``model``. Raises TaskError for hooks that torch calls after accumulating a gradient."""
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    if names := [name for name, parameter in parameters if parameter._post_accumulate_grad_hooks]:
        raise TaskError(
            f"{', '.join(names)} has a hook from register_post_accumulate_grad_hook, which would get the gradient of one rank's "
            "micro-batch, or none; use register_hook, which gets that of the global batch"
        )
    return {
        name: list(parameter._backward_hooks.values()) for name, parameter in parameters if parameter._backward_hooks
    }


def take(model: nn.Module, hooks: GradientHooks) -> None:
    """Removes ``hooks`` from ``model``, because the engine calls them."""
    for name in hooks:
        parameter: Any = model.get_parameter(name)
        parameter._backward_hooks.clear()


def call(hooks: Sequence[Callable[[Tensor], Any]], gradient: Tensor) -> Tensor:
    """Returns the result of ``hooks`` for ``gradient``, as torch would compute it."""
    for hook in hooks:
        returned = hook(gradient)
        gradient = gradient if returned is None else returned
    return gradient


@torch.no_grad()
def refuse_nonlinear(model: nn.Module, hooks: GradientHooks, engine: str) -> None:
    """Raises EngineError if a hook is nonlinear; torch calls them with parts of the global gradient."""
    draw = torch.Generator().manual_seed(0)
    for name, of_parameter in hooks.items():
        shape = model.get_parameter(name).shape
        first, second = (torch.randn(shape, generator=draw) for _ in range(2))
        parts = call(of_parameter, first.clone()) + call(of_parameter, second.clone())
        if not torch.allclose(call(of_parameter, first + second), parts, rtol=1e-3, atol=1e-5):
            raise EngineError(
                f"the hook on the gradient of {name} is not linear, and {engine} calls it with that of one rank's micro-batch; "
                'choose engine "single", "ddp", "horovod" or "fsdp", where it gets that of the global batch'
            )
