"""Reference: a synchronous parameter server (Li et al. 2014, OSDI; Dean et al. 2012, NIPS: DistBelief).

Rank 0 alone has the optimizer. After the backward pass every other rank sends it its gradients, it updates the weights, and
sends them back. Rank 0 also trains on its share of the batch, so the training is data parallelism's, up to the order in which
gradients are added. All-reduce has replaced it:

* Every byte passes through the server: it takes in (N - 1) times the gradients and gives out (N - 1) times the weights,
  2 (N - 1) in all, while a ring's ranks send 2 (N - 1) / N each, however many they are.
* While the server adds and updates, everybody else waits; with sharded servers that becomes ZeRO (arXiv 1910.02054): each
  rank is the server of its own share.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dsframe.engine import StepResult
from dsframe.engines.deepspeed.state_pipeline import Column
from dsframe.model.state import EngineState, SavedState
from reference_engines.common import ReferenceEngine


class ParameterServerEngine(ReferenceEngine):
    """Rank 0 updates for all; the others push gradients and pull weights."""

    sees_overflows = False

    @property
    def description(self) -> str:
        """For the first line of a run."""
        return "reference: synchronous parameter server on rank 0"

    @property
    def _serves(self) -> bool:
        return self.plan.world.is_main

    @property
    def _workers(self) -> range:
        return range(1, self.plan.world.size)

    def _synchronize(self) -> None:
        """**Collective.** Push: after it rank 0 has the global gradients, the others have let go of theirs."""
        self._fill_gradients()
        divisor = 1 if self.plan.config.deepspeed.gradient_allreduce_op == "sum" else self.plan.world.size
        for parameter in self._parameters:
            assert parameter.grad is not None
            gradient = parameter.grad.contiguous()
            if self._serves:
                arrived = torch.empty_like(gradient)
                for worker in self._workers:
                    dist.recv(arrived, worker)
                    gradient += arrived
                parameter.grad = gradient.div_(divisor)
            else:
                dist.send(gradient, 0)
                parameter.grad = None

    def _update(self, loss: Tensor, learning_rate: float, scale: float) -> StepResult:
        """**Collective.** Pull: rank 0 clips and updates, then everybody has its weights, and the norm that was clipped by."""
        norm = torch.zeros((), device=self.plan.device)
        if self._serves:
            result = super()._update(loss, learning_rate, scale)
            assert isinstance(result.gradient_norm, Tensor)
            self._pull(norm.copy_(result.gradient_norm))
            return result
        self._pull(norm)
        self._updates += 1
        if self._masters:
            self._masters.give_weights()
        return self._result(loss.float(), learning_rate, norm, skipped=False)

    @torch.no_grad()
    def _pull(self, norm: Tensor) -> None:
        for tensor in (norm, *(parameter.data for parameter in self._parameters)):
            if self._serves:
                for worker in self._workers:
                    dist.send(tensor, worker)
            else:
                dist.recv(tensor, 0)

    def state(self) -> EngineState:
        """**Collective** to read to its end: rank 0 sends the others what it holds, one parameter at a time."""
        own, server = super().state(), Column(None, [0], self.plan.world.rank)
        return replace(own, parameters=server.parameters(own.parameters, frozenset()))

    def load_state(self, saved: SavedState) -> None:
        """Every rank reads the weights, rank 0 alone keeps the optimizer's state."""
        super().load_state(saved)
        if not self._serves:
            self.optimizer.state.clear()
