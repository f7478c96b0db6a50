"""Reference: an asynchronous parameter server (Dean et al. 2012, "Large scale distributed deep networks", NIPS: Downpour SGD;
Recht et al. 2011, arXiv 1106.5730: Hogwild, where even the server takes no lock).

A thread of rank 0 keeps the weights and the optimizer. Each worker, rank 0's own training among them, computes gradients of its
share of the batch, pushes them, and pulls the weights as they are by then. Nobody waits for another worker: a slow one holds
nobody up, and one that stops is not missed. The price:

* **It is another training.** A gradient is computed from weights that others have changed by the time it arrives, and the optimizer
  makes N small updates where other engines make one. The order in which gradients arrive is nobody's choice, so that no two
  runs are alike, and more workers mean older gradients (Chen et al. 2016, arXiv 1604.00981, measured what that costs).
* Every byte still passes through the server, as in ``server.py``.

Hardware became alike, so that little is waited for, and all-reduce cheap: today's engines wait, and are reproducible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe.engines import state_replica
from dsframe.engines.deepspeed.state_pipeline import Column
from dsframe.errors import TrainingError
from dsframe.model.built import ParameterGroups
from dsframe.model.micro_batch import Inputs, Measure
from dsframe.model.plan import Plan
from dsframe.model.state import EngineState, SavedState
from dsframe.tasks.task import Sum
from reference_engines.common import ReferenceEngine

_FOR_EVER = timedelta(days=365)
"""The server listens while workers evaluate, however long that takes. dsframe's own watchdog says when a rank hangs."""


class AsyncParameterServerEngine(ReferenceEngine):
    """A thread of rank 0 updates for all, whenever gradients arrive."""

    sees_overflows = False
    averages_gradients = False

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Rank 0 also starts the server."""
        super().__init__(plan)
        self._trained = False
        """Whether ranks may have different weights, because a step has been made since they last met."""
        self._line = dist.new_group(
            backend="gloo", timeout=_FOR_EVER
        )  # its messages wait for no collective of the others
        self._server = (
            Server(plan, self._named_parameters(), self.built.groups, self._line) if plan.world.is_main else None
        )

    @property
    def description(self) -> str:
        """For the first line of a run."""
        workers = self.plan.world.size
        return f"reference: asynchronous parameter server on rank 0, {workers} worker{'s' * (workers > 1)}"

    @torch.no_grad()
    def _apply(self) -> None:
        """Push, and pull. Waits for the server, and for no worker."""
        gradients = _flat([p.grad for p in self._parameters if p.grad is not None])
        if self.plan.config.deepspeed.gradient_allreduce_op != "sum":
            gradients /= self.plan.world.size
        if self._server:
            weights = self._server.update(gradients)
        else:
            weights = torch.empty(gradients.shape)
            dist.send(torch.cat([torch.ones(1), gradients]), 0, group=self._line)
            dist.recv(weights, 0, group=self._line)
        _unflatten(weights, self._parameters)
        self._trained = True

    @torch.no_grad()
    def _meet(self) -> None:
        """**Collective.** The server's weights on every rank, when all have made their step."""
        if not self._trained:
            return
        self._trained = False
        dist.barrier()  # each has pulled what it asked for: nothing is under way
        weights = self._server.weights() if self._server else torch.empty(sum(p.numel() for p in self._parameters))
        dist.broadcast(weights, src=0, group=self._line)
        _unflatten(weights, self._parameters)
        if self._masters:
            self._masters.give_weights()

    def eval_step(self, batch: tuple[Inputs, Any], measure: Measure | None) -> Mapping[str, Sum]:
        """**Collective** after a step: one model is evaluated, the server's."""
        self._meet()
        return super().eval_step(batch, measure)

    def state(self) -> EngineState:
        """**Collective.** The server's weights and moments, sent to the others when their turn comes."""
        self._meet()
        own = super().state()
        if self._server:
            views = self._server.views([name for name, _ in self._named_parameters()])
            own = replace(own, parameters=state_replica.read(views, self._frozen(), self._server.optimizer))
        return replace(own, parameters=self._column().parameters(own.parameters, frozenset()))

    def _column(self) -> Column:
        return Column(None, [0], self.plan.world.rank)

    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Every rank reads the weights, the server the optimizer's state too."""
        self._meet()
        super().load_state(saved)
        self.optimizer.state.clear()
        if self._server:
            views = self._server.views([name for name, _ in self._named_parameters()])
            state_replica.write(views, self._frozen(), self._server.optimizer, saved)
            self._server.updates = saved.updates * self.plan.world.size

    def leave(self) -> None:
        """**Collective.** Tells the server that no more will come; it ends when all have."""
        if self._server:
            self._server.join()
        else:
            dist.send(torch.zeros(1 + sum(p.numel() for p in self._parameters)), 0, group=self._line)

    def close(self) -> None:
        """**Collective.** Ends the server and leaves the process group."""
        self.leave()
        super().close()


class Server(Thread):
    """The weights and the optimizer, on the CPU, and who answers the workers on other ranks."""

    def __init__(
        self,
        plan: Plan,
        named: Sequence[tuple[str, Tensor]],
        groups: ParameterGroups,
        line: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(name="parameter server", daemon=True)
        self.parameters = [nn.Parameter(parameter.detach().to("cpu", copy=True)) for _, parameter in named]
        names = [name for name, _ in named]
        self.optimizer = plan.optimizer.build(groups.split(zip(names, self.parameters, strict=True)))
        self.updates = 0
        self._plan, self._line = plan, line
        self._lock = Lock()
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Answers in the order of arrival, until every worker has left."""
        message = torch.empty(1 + sum(parameter.numel() for parameter in self.parameters))
        workers = self._plan.world.size - 1
        try:
            while workers:
                worker = dist.recv(message, group=self._line)  # from anybody
                if message[0]:
                    dist.send(self.update(message[1:]), worker, group=self._line)
                else:
                    workers -= 1
        except Exception as error:  # told by rank 0 at its next step, since nobody waits for a thread
            self._failure = error

    @torch.no_grad()
    def update(self, gradients: Tensor) -> Tensor:
        """The weights after one update by a worker's gradients."""
        if self._failure:
            raise TrainingError(f"the parameter server has stopped: {self._failure}") from self._failure
        with self._lock:
            for parameter, gradient in zip(self.parameters, _pieces(gradients, self.parameters), strict=True):
                parameter.grad = gradient
            # The schedule counts steps of the whole training, of which each worker makes its part.
            self._plan.schedule(self.updates // self._plan.world.size).apply(self.optimizer.param_groups)
            self.optimizer.step()
            self.updates += 1
            return _flat(self.parameters)

    def weights(self) -> Tensor:
        """As they are now."""
        with self._lock:
            return _flat(self.parameters)

    def views(self, names: Sequence[str]) -> list[state_replica.ParameterView]:
        """Where each parameter's state lies."""
        pairs = zip(names, self.parameters, strict=True)
        return [state_replica.ParameterView(name, tuple(one.shape), one) for name, one in pairs]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).cpu()


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split_with_sizes([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


def _unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, piece in zip(tensors, _pieces(flat, tensors), strict=True):
        tensor.copy_(piece)
