"""The optimizer's fp32 copies of weights that have 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dsframe.engines.precision import gradients_of
from dsframe.values import trainable


class MasterWeights:
    """fp32 copies of 16-bit parameters, for an optimizer of full replicas."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: its trainable parameters have 16 bits."""
        self.parameters = trainable(model)
        self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self._windows = list(_windows([parameter.numel() for parameter in self.parameters]))

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Moves the model's gradients to the masters, in fp32, and clears the model's.

        One call converts the gradients of a window; the 16-bit gradients are freed before the next window begins.
        """
        for window in self._windows:
            pairs = list(zip(self.parameters[window], self.masters[window], strict=True))
            short = gradients_of([parameter for parameter, _ in pairs])
            full = [torch.empty_like(gradient, dtype=torch.float32) for gradient in short]
            if full:
                torch._foreach_copy_(full, short)
            del short
            converted = iter(full)
            for parameter, master in pairs:
                master.grad = None if parameter.grad is None else next(converted)
                parameter.grad = None

    @torch.no_grad()
    def take_weights(self) -> None:
        """Copies the model's weights to the masters."""
        torch._foreach_copy_(list[Tensor](self.masters), list[Tensor](self.parameters))

    @torch.no_grad()
    def give_weights(self) -> None:
        """Rounds the masters into the model's weights."""
        torch._foreach_copy_(list[Tensor](self.parameters), list[Tensor](self.masters))


def _windows(sizes: Sequence[int]) -> Iterator[slice]:
    """Yields consecutive slices of ``sizes`` of at most 2^24 elements (32 MiB in 16 bits), or one larger parameter."""
    first, total = 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > 1 << 24:
            yield slice(first, index)
            first, total = index, 0
        total += size
    if first < len(sizes):
        yield slice(first, len(sizes))
