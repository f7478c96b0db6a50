"""Base class of engines for one model: from inputs and the task's loss to a step's loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.jit import ScriptModule

from dsframe.cluster import process_group
from dsframe.cluster.exchange import any_rank
from dsframe.engine import Engine, StepResult
from dsframe.engines.state_replica import ParameterView
from dsframe.engines.unused import Unused
from dsframe.errors import EngineError
from dsframe.host.memory import available_bytes
from dsframe.model import derivatives
from dsframe.model.built import Dependence
from dsframe.model.forward import loss_of
from dsframe.model.micro_batch import Inputs, Measure, MicroBatch, Pair, Terms
from dsframe.tasks.task import Sums

EvalStep = Callable[[Any, Pair, Measure | None], Sums]


_JVP = (
    "the model takes derivatives in forward mode (torch.func.jvp, torch.autograd.forward_ad), which functions of {} do not "
    "have: use torch.autograd.grad with create_graph=True"
)
JVP = {"You must implement the jvp function": _JVP, "the jvp is not returning a view": _JVP}
INFERENCE = (
    "the backward pass needs a tensor that torch.inference_mode() made, such as a weight that {} gathers there: write "
    "torch.no_grad() in its place"
)
TWICE = (
    "a backward pass inside of the backward pass (torch.autograd.backward in an autograd.Function, or use_reentrant=True) reaches "
    "a weight several times, and {} reduces a gradient once: return gradients (torch.autograd.grad)"
)
COPIED = (
    "copy.deepcopy of a module whose weights {} shards: make copies in model() or models(), or by run.model() in a hook"
)


def without_gradients(eval_step: EvalStep) -> EvalStep:
    """Decorates an engine's ``eval_step``: keeps no graph, unless the task asks for gradients. If ranks must call the
    same modules, disables the fast path of torch's transformer layers, which reads weights without calling modules."""

    @functools.wraps(eval_step)
    def step(self: ModelEngine, batch: Pair, measure: Measure | None) -> Sums:
        fast = mha.get_fastpath_enabled()
        mha.set_fastpath_enabled(fast and self.built.calls is None)
        try:
            with torch.set_grad_enabled(self.plan.task.eval_gradients):
                return eval_step(self, batch, measure)
        finally:
            mha.set_fastpath_enabled(fast)

    return step


class ModelEngine(Engine):
    """An engine of one model. A task with several models has one for each (``engines.parts``)."""

    averages_gradients = True
    """True if the optimizer sees the global gradients, so that their norm is meaningful."""
    reduces_repeatedly = True
    """False if a parameter's gradient may arrive only once in a backward pass."""
    reaches_model = False
    """True if each backward pass must go through the model, so that all ranks make the same calls."""
    explains: ClassVar[Mapping[str, str]] = {}
    """Explanations of errors that the engine causes in a forward or backward pass: part of the error's text, or the
    name of the raising function if there is no text -> message with a placeholder for the engine's description."""
    gathers_steps = False
    """True if ranks hold shards, but weights are gathered whole during each step."""
    _unused: Unused
    """Set if something is trained."""
    _terms: Terms
    """Terms that the loss returned with its value in this step."""

    def _settle_gathering(self, model: nn.Module) -> None:
        """**Collective.** Decides, before ``model`` is sharded, whether weights are whole during each step.

        Raises EngineError if they must be and cannot be, and for modules that no library can gather.
        """
        plan, task = self.plan, self.plan.task
        if any(isinstance(module, ScriptModule) for module in model.modules()):
            raise EngineError(
                f"{type(task).__name__}.model: a part of it is compiled by torch.jit, and its weights cannot be gathered "
                "when it is called; leave torch.jit out, or choose an engine that keeps whole weights on each rank"
            )
        if plan.frozen or task.whole_weights is False:
            return
        asked = "whole_weights" if task.whole_weights else "eval_gradients" if task.eval_gradients else ""
        line = derivatives.line_of(task, model)
        why = f"{line} takes derivatives" if line else asked
        if not why:
            return
        size = sum(parameter.nbytes for parameter in model.parameters())
        cannot = ""
        if plan.config.deepspeed.zero_optimization.parameter_device == "nvme":
            cannot = "weights are on NVMe"
        elif plan.config.settings.model.compile:
            cannot = "the model is compiled"
        elif not stays_gathered(self, size):
            cannot = "memory does not hold them"
        if cannot:
            raise EngineError(
                f"{why}: weights must be whole during each step, and {cannot}; choose an engine that keeps whole weights on "
                "each rank (ddp, horovod, or ZeRO 0 to 2), or, if none are taken, write whole_weights = False in the task"
            )
        self.gathers_steps = True
        if self.built.watch is not None:
            self.built.watch.whole_steps = True
        text = f"weights are sharded, and gathered for each whole step ({why})"
        self.built = replace(self.built, depends=(*self.built.depends, Dependence(text)))

    def _whole_weights(self) -> AbstractContextManager[None]:
        """**Collective.** Encloses forward pass, loss and backward pass: weights are whole if :attr:`gathers_steps`."""
        return nullcontext()

    def copy_shard(self, parameter: Any, source: Any) -> None:
        """Copies this rank's shard of ``source``, a parameter of another model that is sharded the same way."""
        parameter.data.copy_(source.data)

    def _begin_step(self) -> None:
        self._terms = {}
        self._unused.begin()

    def _loss(self, outputs: Any, batch: MicroBatch) -> Tensor:
        """Returns the loss of a micro-batch, times its weight."""
        return loss_of(self.plan.task, outputs, batch, self._terms, self.built.watch, reaches=self.reaches_model)

    def _result(
        self, loss: Tensor, learning_rate: float, gradient_norm: Tensor | float | None, *, skipped: bool
    ) -> StepResult:
        return StepResult(loss, learning_rate, gradient_norm, skipped, self._terms)

    def _end_step(self, result: StepResult) -> StepResult:
        """**Collective.** Adds the unused parameters."""
        unused = self._unused.end()
        return replace(result, unused=unused) if unused else result

    def begin_average(self) -> None:
        """Starts the average with the current weights instead of those after the first update."""
        raise EngineError(f"{self.description} trains one model; choose another engine for several")

    def views(self) -> list[ParameterView]:
        """Returns for each trained parameter a view of the optimizer's tensors."""
        raise EngineError(f"{self.description} does not show its weights")

    def view(self, name: str) -> ParameterView:
        """Returns the view of one trained parameter."""
        return next(view for view in self.views() if view.name == name)

    def outputs(self, inputs: Inputs, module: nn.Module | None = None) -> Any:
        """**Collective** within a step. Returns the outputs of ``module``, a part of the running model, or of the whole
        model while another engine trains, with gradients to the inputs. For engines with ``Entry.several``."""
        raise EngineError(f"{self.description} trains one model; choose another engine for several")

    def release_outputs(self) -> None:
        """**Collective.** Frees what :meth:`outputs` kept, after a step of another engine."""

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """**Collective.** Sums element-wise over the ranks with torch.distributed."""
        return process_group.sum_over_ranks(values)

    def close(self) -> None:
        """**Collective.** Leaves the process group."""
        process_group.close_process_group()


def stays_gathered(engine: Engine, size: int) -> bool:
    """**Collective.** True if every rank can keep ``size`` bytes of weights gathered during an evaluation, in a quarter
    of its free memory. They are then gathered once, not once a batch, and metrics may call the model any number of
    times."""
    plan = engine.plan
    return not any_rank(engine, size > 0.25 * available_bytes(plan.device, plan.world.local_size))
