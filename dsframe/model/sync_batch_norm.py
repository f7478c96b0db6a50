"""BatchNorm over the global batch: statistics of the micro-batches of all ranks, in the forward and the backward pass.

torch's own SyncBatchNorm needs GPUs and torch.distributed; this one uses the sum over ranks that every engine has, in two small
collectives for each layer and pass. Names, parameters and buffers stay, so checkpoints do not know of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.cluster.exchange import Ranks
from dsframe.errors import TaskError


def share_statistics(model: nn.Module, ranks: Ranks) -> None:
    """Makes all BatchNorm layers of ``model`` use the samples of all ranks in training.

    Raises TaskError where the file asks for it and there is none, or where a step has several micro-batches.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    plan = ranks.plan
    if not layers and plan.part:  # of several models another may have some
        return
    if not layers:
        raise TaskError('"sync_batch_norm" has no effect: the model has no BatchNorm; remove it')
    if plan.batch.accumulation_steps > 1:
        raise TaskError(
            f'"sync_batch_norm" sees one micro-batch of each rank, and a step has {plan.batch.accumulation_steps}; write '
            '"gradient_accumulation_steps": 1, so that the statistics are of the global batch'
        )
    for layer in layers:
        layer.__dict__.pop("forward", None)  # of an earlier training of the same module
        if plan.world.size > 1:
            layer.__dict__["forward"] = partial(_forward, layer, ranks)


class _Sum(torch.autograd.Function):
    """Sum over the ranks. Each rank's loss depends on every rank's summand, so the gradient is the sum of all ranks'."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum_over_ranks(value.double()).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return ctx.ranks.sum_over_ranks(gradient.contiguous().double()).to(gradient.dtype), None


def _summed(value: Tensor, ranks: Ranks) -> Tensor:
    total: Tensor = _Sum.apply(value, ranks)  # type: ignore[no-untyped-call]
    return total


def _forward(layer: Any, ranks: Ranks, rows: Tensor) -> Tensor:
    """**Collective** in training. What ``layer`` makes of ``rows``, ``[samples, channels, ...]``."""
    if not layer.training:
        outputs: Tensor = type(layer).forward(layer, rows)
        return outputs
    layer._check_input_dim(rows)
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    others = [dimension for dimension in range(wide.ndim) if dimension != 1]
    shape = [1, -1, *[1] * (wide.ndim - 2)]
    count = wide.numel() // wide.shape[1]
    sums = _summed(torch.cat([wide.sum(others), wide.new_tensor([float(count)])]), ranks)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centred = wide - mean.view(shape)
    variance = _summed(centred.square().sum(others), ranks) / total
    if layer.track_running_stats:
        _track(layer, mean.detach(), variance.detach() * total / (total - 1))
    normal: Tensor = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        normal = normal * layer.weight.view(shape) + layer.bias.view(shape)
    return normal.to(rows.dtype)


@torch.no_grad()
def _track(layer: Any, mean: Tensor, variance: Tensor) -> None:
    """Moves the running statistics, as torch's own layer does."""
    layer.num_batches_tracked.add_(1)
    share = 1.0 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), share)
