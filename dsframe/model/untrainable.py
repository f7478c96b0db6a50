"""Refuses parameters that no engine can train, before one is created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dsframe.errors import TaskError

_UNUSUAL: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda parameter: parameter.is_complex(),
        "is complex; optimizers, norms and shards are of real numbers. Keep it as pairs, nn.Parameter(torch.view_as_real(weight)), "
        "and use torch.view_as_complex(self.weight) in the forward pass; a frozen one may be a buffer",
    ),
    (
        is_lazy,
        "have no shape before the first forward pass, and the optimizer is made before it. Call the model once in model(), or give "
        "the layer its sizes",
    ),
    (
        lambda parameter: parameter.is_meta,
        'have no memory (device "meta"), so there is nothing to train; make them on the CPU, or give them memory and numbers in '
        'model(): to_empty(device="cpu"), then an initialisation or load_state_dict()',
    ),
    (
        lambda parameter: parameter.layout != torch.strided,
        "is a sparse tensor, which no engine can send; train its values() as a dense parameter, and make the sparse tensor of them "
        "in the forward pass; a frozen one may be a buffer",
    ),
)
"""Tests for parameters that no engine trains, with the messages."""


def refuse_untrainable(model: nn.Module, whose: str) -> None:
    """Raises TaskError for lazy, complex, meta and sparse parameters, and a trained one that shares memory."""
    for is_unusual, text in _UNUSUAL:
        if names := [name for name, parameter in model.named_parameters() if is_unusual(parameter)]:
            raise TaskError(f"{whose}.model: {', '.join(names)} {text}")
    if pair := _shared_memory(model):
        raise TaskError(
            f"{whose}.model: {pair[0]} and {pair[1]} are two tensors in the same memory, which come apart where an engine moves "
            "weights. To share a weight, give both modules the one parameter (head.weight = embedding.weight); else clone() it"
        )


def _shared_memory(model: nn.Module) -> tuple[str, str] | None:
    """Returns the names of two tensors, at least one of them trained, that have an element in common."""
    tensors = [
        (name, tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.numel() and tensor.layout == torch.strided and tensor.device.type != "meta"
    ]
    end, before = 0, None
    for name, tensor in sorted(tensors, key=lambda entry: entry[1].data_ptr()):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if before and tensor.data_ptr() < end and (before[1].requires_grad or tensor.requires_grad):
            places = (_places(tensor), _places(before[1]))
            if torch.isin(*places).any():
                return before[0], name
        if (reaches := tensor.data_ptr() + (last + 1) * tensor.element_size()) > end:
            end, before = reaches, (name, tensor)
    return None


def _places(tensor: Tensor) -> Tensor:
    """Returns the positions of a tensor's elements in its storage."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return torch.arange(elements).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten()
