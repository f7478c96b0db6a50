"""BatchNorm over the global batch: its statistics cover the micro-batches of all ranks, in the forward and the backward
pass.

Torch's SyncBatchNorm needs GPUs and torch.distributed. This one uses the sum over ranks that every engine has, in two
small collectives for each layer and pass. Names, parameters and buffers do not change, so checkpoints are independent
of it. It runs the layer's own forward, including a subclass's, with a replaced ``torch.nn.functional.batch_norm``.

In a 16-bit model running statistics are float32, and torch requires weights in the same dtype: they are cast for the
call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode

from dsframe.cluster.exchange import Ranks
from dsframe.errors import TaskError


def apply(model: nn.Module, ranks: Ranks, dtype: torch.dtype) -> None:
    """Makes BatchNorm layers use the samples of all ranks in training, if the file asks for it. Also calls
    :func:`accept`. Raises TaskError if the file asks for it and the model has no BatchNorm, or if a step has several
    micro-batches."""
    for layer in model.modules():
        if isinstance(layer.__dict__.get("forward"), _Forward):  # from an earlier training of the module
            del layer.__dict__["forward"]
    plan = ranks.plan
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    # With several models, another may have some.
    if plan.config.settings.model.sync_batch_norm and (layers or not plan.part):
        _refuse(layers, plan)
        for layer in layers if plan.world.size > 1 else ():
            _replace_forward(layer, ranks)
    accept(model, dtype)


def accept(model: nn.Module, dtype: torch.dtype) -> None:
    """Lets layers with running statistics, which are float32, use weights of ``dtype``."""
    for layer in model.modules() if dtype.itemsize < 4 else ():
        if isinstance(layer, _NormBase) and not isinstance(layer.__dict__.get("forward"), _Forward):
            _replace_forward(layer, None)


def _refuse(layers: list[_BatchNorm], plan: Any) -> None:
    if not layers:
        raise TaskError('"sync_batch_norm" has no effect: the model has no BatchNorm; remove it')
    if plan.batch.accumulation_steps > 1:
        raise TaskError(
            f'"sync_batch_norm" sees one micro-batch of each rank, and a step has {plan.batch.accumulation_steps}; write '
            '"gradient_accumulation_steps": 1, so that the statistics are of the global batch'
        )


class _Forward(partial):  # type: ignore[type-arg]
    """A replacement by :func:`_forward`, recognizable by its class."""


def _replace_forward(layer: nn.Module, ranks: Ranks | None) -> None:
    layer.__dict__["forward"] = _Forward(_forward, layer, layer.forward, ranks)


def _forward(layer: nn.Module, forward: Callable[..., Any], ranks: Ranks | None, *args: Any, **kwargs: Any) -> Any:
    """**Collective** in training, with ``ranks``."""
    shared = ranks if layer.training else None
    with _Redirected(shared) as redirected:
        outputs = forward(*args, **kwargs)
    if shared is not None and not redirected.was_called:
        raise TaskError(
            f'"sync_batch_norm": {type(layer).__name__}.forward does not call torch.nn.functional.batch_norm, so its statistics '
            "stay those of one rank; leave sync_batch_norm out, or call that function"
        )
    return outputs


class _Redirected(TorchFunctionMode):
    """Casts 16-bit weights of norms inside the context; with ``ranks``, batch_norm uses the samples of all ranks."""

    def __init__(self, ranks: Ranks | None) -> None:
        super().__init__()
        self._ranks, self.was_called = ranks, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.batch_norm:
            self.was_called = True
            if self._ranks is not None and kwargs["training"]:
                rows, mean, variance = args
                affine = kwargs["weight"], kwargs["bias"]
                return _batch_norm(self._ranks, rows, mean, variance, affine, kwargs["momentum"], kwargs["eps"])
        if func in (functional.batch_norm, functional.instance_norm):
            given = {name: kwargs.get(name) for name in ("weight", "bias")}
            kwargs = {**kwargs, **{name: _wide(value) for name, value in given.items() if value is not None}}
        return func(*args, **kwargs)


def _wide(value: Tensor) -> Tensor:
    return value.float() if value.dtype.itemsize < 4 else value


class _Sum(torch.autograd.Function):
    """Sums over ranks, forward and backward: each rank's loss depends on every rank's summand."""

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


def _batch_norm(
    ranks: Ranks,
    rows: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    affine: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
) -> Tensor:
    """**Collective.** Computes batch_norm in training mode. ``rows``: ``[samples, channels, ...]``."""
    wide = _wide(rows)
    others = [dimension for dimension in range(wide.ndim) if dimension != 1]
    shape = [1, -1, *[1] * (wide.ndim - 2)]
    count = wide.numel() // wide.shape[1]
    sums = _summed(torch.cat([wide.sum(others), wide.new_tensor([float(count)])]), ranks)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centred = wide - mean.view(shape)
    variance = _summed(centred.square().sum(others), ranks) / total
    for statistic, value in ((running_mean, mean), (running_var, variance * total / (total - 1))):
        if statistic is not None:
            statistic.lerp_(value.detach().to(statistic.dtype), momentum)
    normal = centred * torch.rsqrt(variance + eps).view(shape)
    weight, bias = affine
    if weight is not None:
        normal = normal * weight.view(shape)
    if bias is not None:
        normal = normal + bias.view(shape)
    return normal.to(rows.dtype)
