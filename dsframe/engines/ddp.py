"""PyTorch DistributedDataParallel: bucketed all-reduce during the backward pass (Li et al. 2020, arXiv 2006.15704)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from dsframe.cluster import process_group
from dsframe.engines import torch_patches
from dsframe.engines.base import TWICE
from dsframe.engines.buckets import usual_bytes
from dsframe.engines.replica import ReplicaEngine
from dsframe.model.plan import Plan
from dsframe.values import trainable

_HOOKS: dict[str, Any] = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}


class _TouchAllParameters(torch.autograd.Function):
    """Makes the loss a function of all parameters; the gradient of unused ones is None, which counts as zero.

    DDP waits until the backward pass has reached each parameter. Nothing is computed: only C++ iterates over them.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.nothing = (None,) * len(parameters)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *ctx.nothing


class DdpEngine(ReplicaEngine):
    """Full replicas; gradients are averaged in buckets during the backward pass."""

    reduces_repeatedly = False
    cannot_sum = True
    explains: ClassVar[Mapping[str, str]] = {"Expected to mark a variable ready only once": TWICE}

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises WorldError if the processes cannot connect."""
        process_group.open_process_group(plan.world, plan.device, plan.collective_limit)
        super().__init__(plan)

    @property
    def description(self) -> str:
        communication = self.plan.config.settings.ddp.communication
        return "PyTorch DDP" if communication == "none" else f"PyTorch DDP, gradients sent by {communication}"

    def _wrap(self, model: nn.Module) -> nn.Module:
        communication = self.plan.config.settings.ddp.communication
        trained = trainable(model)
        whole = sum(parameter.nbytes for parameter in trained)
        self._reached = trained
        torch_patches.skip_sparse_buffers(model)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.plan.device] if self.plan.device.type == "cuda" else None,
            bucket_cap_mb=usual_bytes(whole) / 2**20,
            gradient_as_bucket_view=True,
        )
        # Later each rank keeps its own buffers, as on every other engine; an evaluation sends rank 0's.
        wrapped.broadcast_buffers = False
        torch_patches.settle_buckets(wrapped, self.plan.device)
        if self._masters:
            self._masters.take_weights()  # DDP has just broadcast rank 0's weights
        if communication in _HOOKS:
            wrapped.register_comm_hook(None, torch_patches.by_another_name(_HOOKS[communication]))
        return wrapped

    def _touch_unused(self, loss: Tensor) -> Tensor:
        # With a backward pass inside of the backward pass, DDP would count parameters as ready twice.
        if not self._reached or (self.built.watch is not None and self.built.watch.recomputes_inside):
            return loss
        # Call the C++ function below torch.autograd.Function.apply, which inspects each argument in Python for
        # functorch.
        reached: Any = super(torch.autograd.Function, _TouchAllParameters)
        return cast(Tensor, reached.apply(loss, *self._reached))

    def _accumulating(self) -> AbstractContextManager[Any]:
        return cast(DistributedDataParallel, self.module).no_sync()
