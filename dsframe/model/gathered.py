"""Whole weights for a moment, where ranks hold shards of them: for losses and penalties that read weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module

from dsframe.errors import TaskError


@contextmanager
def gathered(module: nn.Module) -> Iterator[nn.Module]:
    """**Collective.** ``with dsframe.gathered(self.net) as net:`` all weights of ``net`` are whole
    inside, on every engine, for a loss that reads them::

        with dsframe.gathered(self.net) as net:
            penalty = sum(weight.square().sum() for weight in net.parameters())

    Gradients reach the weights. Take the weights from the module inside: what was kept from before is
    a shard. Where ranks hold shards (ZeRO-3, FSDP) each gets a copy of the module's weights, which
    lives until the backward pass. Raises TaskError where the copy was written to:
    :meth:`Task.after_step <dsframe.Task.after_step>` writes.
    """
    sharded = {name: weight for name, weight in module.named_parameters() if not is_whole(weight)}
    if not sharded:
        yield module
        return
    whole = _whole(list(sharded.values()))
    versions = [weight._version for weight in whole]
    with (
        _reparametrize_module(module, dict(zip(sharded, whole, strict=True)), tie_weights=True),
        register_module_forward_pre_hook(_refuse_calls(module)),
    ):
        yield module
    for name, weight, version in zip(sharded, whole, versions, strict=True):
        if weight._version != version:
            raise TaskError(
                f"{name} was written inside of dsframe.gathered(), which changes only a copy of it; define "
                "after_step(name, weight) in the task to write to weights"
            )


def _refuse_calls(module: nn.Module) -> Any:
    """DeepSpeed's hooks look for its own weights in a module that is called."""
    inside = set(module.modules())

    def refuse(called: nn.Module, _: Any) -> None:
        if called in inside:
            raise TaskError(
                f"{type(called).__name__} is called inside of dsframe.gathered(), which is for reading "
                "weights; call it before or after"
            )

    return refuse


def is_dtensor(weight: Any) -> bool:
    """True of a weight that FSDP has cut."""
    return type(weight).__name__ == "DTensor"  # whose import takes a second


def is_whole(weight: Any) -> bool:
    """False where this rank has a shard of ``weight`` at the moment."""
    elements = getattr(weight, "ds_numel", None)
    if elements is not None:  # ZeRO stage 3
        return bool(weight.numel() == elements) and weight.ds_status.name == "AVAILABLE"
    return not is_dtensor(weight)


def _whole(weights: list[Any]) -> list[Tensor]:
    """**Collective.** Copies of ``weights``, all of which are cut, with gradients to them."""
    if is_dtensor(weights[0]):
        return [_apply(_FromFsdp, weight) for weight in weights]
    weights[0].all_gather(param_list=weights)
    copies = [_apply(_FromZero, weight) for weight in weights]
    weights[0].partition(param_list=weights, has_been_updated=False)
    return copies


def _apply(function: Any, weight: Any) -> Tensor:
    copy: Tensor = function.apply(weight)
    return copy


class _FromZero(torch.autograd.Function):
    """A copy of a weight. DeepSpeed reduces what reaches the weight as any other gradient of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _FromFsdp(torch.autograd.Function):
    """A weight gathered by FSDP's mesh; its gradient is the mean over the ranks, as FSDP's own."""

    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        ctx.shape, ctx.stride = weight.shape, weight.stride()
        full: Tensor = weight.full_tensor()
        return full.clone() if ctx.mesh.size() == 1 else full

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        of_rank = (gradient / ctx.mesh.size()).contiguous()
        summed = [Partial()] * ctx.mesh.ndim
        return DTensor.from_local(of_rank, ctx.mesh, summed).redistribute(placements=ctx.placements)
