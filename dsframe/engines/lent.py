"""Tensors that a library calls a module with, in the memory of its caller's, for hooks in the backward pass. What the
module writes to one is in the history of the caller's tensor, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from dsframe.values import tensors_of


def lend(own: Tensor, lent: Tensor) -> Tensor:
    """Returns ``lent``, which a module gets for its caller's ``own``."""
    if not own.is_inference():  # those have no history
        lent.own, lent.own_version = own, own._version  # type: ignore[attr-defined]
    return lent


def take_back(_: nn.Module, args: Any, kwargs: Any, __: Any) -> None:
    """A forward hook: gives the caller's tensors that the module has written to the history of the lent ones."""
    for lent in tensors_of((args, kwargs)) if torch.is_grad_enabled() else ():
        own: Tensor | None = getattr(lent, "own", None)
        if own is not None and lent._version != lent.own_version:  # type: ignore[attr-defined]
            with _unsafe_preserve_version_counter(own):  # the numbers are the same
                own.copy_(lent)


class Writable(torch.autograd.Function):
    """The identity, whose output is no view: autograd lets a module write to it."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
