"""What engines of one model share: how inputs and the task's loss become a step's loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from dsframe.engine import Engine, StepResult
from dsframe.errors import EngineError
from dsframe.model.forward import Inputs, MicroBatch, TargetedInputs, Terms, loss_of


class ModelEngine(Engine):
    """An engine of one model. A task with several models has one of these for each
    (``engines.parts``)."""

    _terms: Terms
    """The terms that the loss returned with its value in this step."""

    def _begin_step(self) -> None:
        self._terms = {}

    def _joined(self, inputs: Inputs, targets: Any) -> Inputs:
        """Returns what the model is called with: also the ``targets``, if it computes its loss."""
        return TargetedInputs(inputs, targets) if self.built.computes_loss else inputs

    def _loss(self, outputs: Any, batch: MicroBatch) -> Tensor:
        """Returns the loss of a micro-batch, times its weight."""
        return loss_of(self.plan.task, outputs, batch, self._terms, self.built.watch)

    def _result(
        self,
        loss: Tensor,
        learning_rate: float,
        gradient_norm: Tensor | float | None,
        *,
        skipped: bool,
    ) -> StepResult:
        return StepResult(loss, learning_rate, gradient_norm, skipped, self._terms)

    def outputs(self, inputs: Inputs, module: nn.Module | None = None) -> Any:
        """**Collective**, in the middle of a step. Returns the outputs of ``module``, a part of the
        running model, or of the whole model while another engine trains, with gradients to the
        inputs. For engines with ``Entry.several``."""
        raise EngineError(f"{self.description} trains one model; choose another engine for several")

    def release_outputs(self) -> None:
        """**Collective.** Frees what :meth:`outputs` left, after a step of another engine."""
