"""Remembers the memory of weights when ``model()`` returned them. A module may keep another tensor in a weight's
memory: ``self.w = self.linear.weight.detach()``. An engine that moves weights (shards, flat buffers, 16 bits) does not
update that tensor: it keeps the initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


class BuiltMemory:
    """The storage address of each weight, without keeping its memory alive."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        weak: Callable[[torch.UntypedStorage], Any] = StorageWeakRef
        self._of = {
            name: (storage_of(weight), weak(weight.untyped_storage()))
            for name, weight in weights
            if type(weight) is nn.Parameter and weight.layout == torch.strided and weight.numel()
        }

    @classmethod
    def together(cls, of_models: Iterable[BuiltMemory]) -> BuiltMemory:
        """Returns the memory of several models as one."""
        joined = cls([])
        for memory in of_models:
            joined._of |= memory._of
        return joined

    def keep_left(self, model: nn.Module) -> None:
        """Forgets weights of ``model`` that were not moved, and memory that has been freed."""
        now = {name: storage_of(weight) for name, weight in model.named_parameters()}
        self._of = {
            name: (storage, held)
            for name, (storage, held) in self._of.items()
            if name in now and now[name] != storage and not held.expired()
        }

    def name_of(self, tensor: Tensor) -> str:
        """Returns the name of the weight that was moved out of the memory of ``tensor``; "" if there is none."""
        storage = storage_of(tensor) if self._of else 0
        return next((name for name, (of, held) in self._of.items() if of == storage and not held.expired()), "")


def storage_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 if torch does not provide one."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, a shard of FSDP, or without memory
        return 0
