"""What the textbook engines of several processes have in common: the process group, and one model to begin with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe.cluster import process_group
from dsframe.engines import precision
from dsframe.engines.replica import ReplicaEngine
from dsframe.errors import EngineError
from dsframe.model.plan import Plan


class ReferenceEngine(ReplicaEngine):
    """Full replicas over torch.distributed; a subclass says what is sent, and when."""

    sees_overflows = True
    """Whether every rank knows when another's gradients are not finite."""

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises WorldError where the processes cannot meet, before that EngineError for fp16 gradients."""
        if not self.sees_overflows and precision.scales_losses(plan.config, plan.device):
            raise EngineError(
                f'engine "{plan.config.settings.engine}" cannot leave out an update on all ranks because gradients in fp16 '
                'overflow on one; use bf16 or fp32, in "torch_autocast" with "dtype": "bfloat16"'
            )
        process_group.open_process_group(plan.world, plan.device)
        super().__init__(plan)

    @torch.no_grad()
    def _wrap(self, model: nn.Module) -> nn.Module:
        """**Collective.** Rank 0's weights and buffers on every rank, one message for each."""
        for tensor in (*self._parameters, *self._frozen_weights(), *model.buffers()):
            dist.broadcast(tensor, src=0)
        if self._masters:
            self._masters.give_weights()
        return model

    def _frozen_weights(self) -> list[Tensor]:
        return [slot.master for slot in self._frozen()]

    def _fill_gradients(self) -> None:
        """Zeros for parameters that took no part in the loss, so that every rank sends the same messages."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
