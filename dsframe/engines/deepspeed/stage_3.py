"""What a model needs so that ZeRO stage 3 shards it in little memory, and differentiates blocks that it gathers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dsframe.model.gathered import LIBRARIES, Shards
from dsframe.values import tensors_of


class ZeroShards(Shards):
    """Parameters that ``deepspeed.zero`` has cut. DeepSpeed reduces what reaches them as any other gradient."""

    def cuts(self, weight: Any) -> bool:
        """True of a parameter that DeepSpeed has cut."""
        return hasattr(weight, "ds_numel")

    def is_whole(self, weight: Any) -> bool:
        """True while it is gathered."""
        return bool(weight.numel() == weight.ds_numel) and weight.ds_status.name == "AVAILABLE"

    @contextmanager
    def gathering(self, weights: Sequence[Any]) -> Iterator[None]:
        """**Collective.** All at once."""
        missing = [weight for weight in weights if not self.is_whole(weight)]
        if missing:
            missing[0].all_gather(param_list=missing)
        try:
            yield
        finally:
            release(missing)

    def copies(self, weights: Sequence[Any]) -> list[Tensor]:
        """Of what is gathered."""
        return [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def keep(self, weight: Any) -> None:
        """Another module with the same weight gathers it anew."""
        shard = weight.ds_tensor
        flat, size = weight.detach().flatten(), shard.ds_numel
        piece = flat[weight.ds_process_group.rank() * size :][:size]
        shard.view(-1)[: piece.numel()].copy_(piece)

    def gradients(self, weights: Sequence[Any], gradients: Sequence[Tensor]) -> list[Tensor]:
        """**Collective.** As they are; to take them, the weights have to be whole until the end of the backward pass."""
        missing = [weight for weight in weights if not self.is_whole(weight)]
        if missing:
            missing[0].all_gather(param_list=missing)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: release(missing))
        return list(gradients)


def release(weights: Sequence[Any]) -> None:
    """**Collective.** Gives up those that are gathered, and that no module which still runs will give up."""
    if gathered := [
        weight for weight in weights if weight.ds_status.name == "AVAILABLE" and not weight.ds_active_sub_modules
    ]:
        gathered[0].partition(param_list=gathered, has_been_updated=False)


SHARDS = ZeroShards()
LIBRARIES.append(SHARDS)


def copy_shard(parameter: Any, source: Any) -> None:
    """Copies a parameter of another model that is cut alike."""
    parameter.ds_tensor.copy_(source.ds_tensor)
    if parameter.ds_status.name == "AVAILABLE":
        parameter.partition()  # the next forward pass gathers it anew


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
    tensors = tensors_of((args, kwargs))
    if not torch.is_grad_enabled() or any(leaf.requires_grad for leaf in tensors):
        return None
    return tree_map_only(
        torch.Tensor, lambda leaf: leaf.detach().requires_grad_() if leaf.is_floating_point() else leaf, (args, kwargs)
    )
