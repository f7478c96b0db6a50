"""Gives a model buffers that libraries can send, shard and write to."""

from __future__ import annotations

import torch
from torch import nn


def plain_buffers(model: nn.Module) -> None:
    """Copies buffers made by ``expand`` or a conjugation: torch refuses writes, or libraries read raw memory."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.layout != torch.strided:
                continue
            expanded = any(size > 1 and not stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
            if expanded or buffer.is_conj() or buffer.is_neg():
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def integers_as_buffers(model: nn.Module) -> None:
    """Replaces integer parameters, such as codes and hashes, by buffers of the same names, because nothing trains them.
    Sharding or rounding would convert them to floats. Weights in 4 bits, which have classes of their own, do not
    change."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            exact = parameter.is_floating_point() or parameter.is_complex()
            if not exact and type(parameter) is nn.Parameter:
                delattr(module, name)
                module.register_buffer(name, parameter.data)
