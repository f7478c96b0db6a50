"""Tensors that a library calls a module with, in the memory of its caller's, for hooks in the backward pass. What the
module writes to one is in the history of the caller's tensor, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from dsframe.values import tensors_of


def lend(own: Tensor, lent: Tensor) -> Tensor:
    """Returns ``lent``, which a module gets for its caller's ``own``."""
    if not own.is_inference():  # such have no version
        lent.own, lent.own_version = own, own._version  # type: ignore[attr-defined]
    return lent


class Alike:
    """Other tensors for some, one for each, and views for the views of others: a write to one is in the history of all."""

    def __init__(self, make: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> None:
        """``make``: returns another tensor in the memory of the given one. ``tensors``: all that are to be replaced."""
        self._make, self._made, self._all = make, dict[Tensor, Tensor](), set(tensors)

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor not in self._made:
            base = tensor._base
            if base is not None and base in self._all:
                made = self(base).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
            else:
                made = self._make(tensor)
            self._made[tensor] = made
        return self._made[tensor]


def take_back(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
    """A forward hook: gives the caller's tensors that the module has written to the history of the lent ones, and
    returns the outputs with the caller's own tensors, or views of them, in the place of lent ones."""
    if not torch.is_grad_enabled():
        return None
    owners = dict[Tensor, Tensor]()
    lent: Any
    for lent in tensors_of((args, kwargs)):
        own: Tensor | None = getattr(lent, "own", None)
        if own is None:
            continue
        owners[lent] = own
        if lent._version != lent.own_version:
            with _unsafe_preserve_version_counter(own):  # the numbers are the same
                own.copy_(lent)

    if owners.keys().isdisjoint(part for output in tensors_of(outputs) for part in (output, output._base)):
        return None

    def owned(output: Any) -> Any:
        base = output._base
        return output._view_func(owners[base]) if base in owners else owners.get(output, output)

    return tree_map_only(Tensor, owned, outputs)


def root_of(output: Tensor) -> Tensor:
    """Returns the tensor whose hook sees the gradient of ``output``, also after a write to one of its views: such a write
    gives views, but not the tensor that they are views of, another history (torch 2.13, ``CopySlices``)."""
    base = output._base
    return base if base is not None and base.grad_fn is not None else output


class Writable(torch.autograd.Function):
    """The identity, whose output is no view: autograd lets a module write to it."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
