"""What a model needs so that ZeRO stage 3 shards it in little memory, and differentiates blocks that it gathers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only


class InTurn(nn.Module):
    """A model whose parameters are made ready one by one, each when it is asked for."""

    def __init__(self, model: nn.Module, ready: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.model, self._ready = model, ready

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for parameter in super().parameters(recurse):
            self._ready(parameter)
            yield parameter


def differentiable(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Inputs of a block that runs as one have gradients: without any, DeepSpeed's hook after the backward pass comes before it,
    and gives the weights up too early (0.19.8, ``runtime/zero/parameter_offload.py``)."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not torch.is_grad_enabled() or any(leaf.requires_grad for leaf in tensors):
        return None
    return tree_map_only(
        torch.Tensor, lambda leaf: leaf.detach().requires_grad_() if leaf.is_floating_point() else leaf, (args, kwargs)
    )
