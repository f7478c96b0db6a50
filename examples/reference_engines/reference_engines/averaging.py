"""Reference: parameter averaging, also called local SGD (McDonald et al. 2010; Stich 2018, arXiv 1805.09767).

Each rank trains by itself on its own samples, with its own optimizer, and every ``engine_options.every_steps`` steps the
ranks' weights are averaged. Averaging every k steps sends 1 / k of the bytes, and that is all there is to be said for it:

* **It is another training.** The optimizer sees gradients of a rank's samples, never of the global batch, and between two
  averages the ranks have different models. Only for plain SGD (momentum and weight decay may be on), averaging after every
  step, and no clipping that bites, it is the same up to rounding: the update is then linear in the gradient. Adam's is not,
  and clipping by a rank's own norm is not.
* Optimizer state differs between ranks. A checkpoint holds its average, so a resumed run goes on almost, not exactly, as the
  one that was stopped would have; exactly only for SGD without momentum at a step that averages.

Today's engines average gradients instead: then nothing but rounding depends on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dsframe.model.state import EngineState, ParameterState
from reference_engines.common import ReferenceEngine
from reference_engines.options import ParameterAveraging


class ParameterAveragingEngine(ReferenceEngine):
    """Every rank for itself; weights are averaged now and then."""

    sees_overflows = False
    averages_gradients = False

    @property
    def description(self) -> str:
        """For the first line of a run."""
        every = self._every_steps
        return f"reference: parameter averaging, every {f'{every} steps' if every > 1 else 'step'}"

    @property
    def _every_steps(self) -> int:
        return ParameterAveraging.model_validate(self.plan.config.settings.engine_options).every_steps

    def _apply(self) -> None:
        self.optimizer.step()
        if (self._updates + 1) % self._every_steps == 0:
            for parameter in self._parameters:
                parameter.data.copy_(self._mean(parameter.data))

    @torch.no_grad()
    def _mean(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total.div_(self.plan.world.size)

    def state(self) -> EngineState:
        """**Collective** to read to its end: weights and moments averaged over the ranks, whether or not it is their turn."""
        own = super().state()
        return replace(own, parameters=self._averaged(own.parameters))

    def _averaged(self, parameters: Iterable[ParameterState]) -> Iterator[ParameterState]:
        for one in parameters:
            moments = {key: self._mean(moment) for key, moment in one.moments.items()}
            yield replace(one, weight=self._mean(one.weight), moments=moments)
