"""What engines of one model share: how inputs and the task's loss become a step's loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.engine import Engine, StepResult
from dsframe.engines.state_replica import ParameterView
from dsframe.errors import EngineError, TaskError
from dsframe.model.forward import Inputs, Measure, MicroBatch, TargetedInputs, Terms, loss_of
from dsframe.model.plan import Plan
from dsframe.tasks.task import Sum

EvalStep = Callable[[Any, tuple[Inputs, Any], Measure | None], Mapping[str, Sum]]


def without_gradients(eval_step: EvalStep) -> EvalStep:
    """Decorates an engine's ``eval_step``: no graph is kept, unless the task asks for gradients."""

    @functools.wraps(eval_step)
    def step(self: ModelEngine, batch: tuple[Inputs, Any], measure: Measure | None) -> Mapping[str, Sum]:
        with torch.set_grad_enabled(self.plan.task.eval_gradients):
            return eval_step(self, batch, measure)

    return step


def refuse_evaluation_gradients(plan: Plan, reason: str) -> None:
    """Raises TaskError if the task takes derivatives in evaluations, and the engine cannot."""
    if plan.task.eval_gradients:
        raise TaskError(
            f"{type(plan.task).__name__}.eval_gradients: {reason}, so an evaluation cannot take "
            "derivatives of the outputs; choose an engine with whole weights"
        )


class ModelEngine(Engine):
    """An engine of one model. A task with several models has one of these for each
    (``engines.parts``)."""

    reduces_repeatedly = True
    """False if a parameter's gradient may come but once in a backward pass."""
    _terms: Terms
    """The terms that the loss returned with its value in this step."""

    @functools.cached_property
    def _views(self) -> dict[str, ParameterView]:
        return {}

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

    def begin_average(self) -> None:
        """The average of the weights begins with the weights that there are now, not with those after the first update."""
        raise EngineError(f"{self.description} trains one model; choose another engine for several")

    def views(self) -> list[ParameterView]:
        """Returns where the optimizer has each trained parameter."""
        raise EngineError(f"{self.description} does not show its weights")

    def view(self, name: str) -> ParameterView:
        """Returns where the optimizer has one trained parameter."""
        if name not in self._views:
            self._views |= {view.name: view for view in self.views()}
        return self._views[name]

    def outputs(self, inputs: Inputs, module: nn.Module | None = None) -> Any:
        """**Collective**, in the middle of a step. Returns the outputs of ``module``, a part of the
        running model, or of the whole model while another engine trains, with gradients to the
        inputs. For engines with ``Entry.several``."""
        raise EngineError(f"{self.description} trains one model; choose another engine for several")

    def release_outputs(self) -> None:
        """**Collective.** Frees what :meth:`outputs` left, after a step of another engine."""
