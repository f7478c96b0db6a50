"""Base class of single, ddp, horovod, fsdp and the reference engines: torch's optimizer, and the optimizer step.

A subclass decides how gradients are reduced, where parameters are stored, and which part of the model a rank runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dsframe.config.schema.precision import Fp16
from dsframe.engine import StepResult
from dsframe.engines import after_step, optimizer_watch, precision, state_replica
from dsframe.engines.base import ModelEngine, without_gradients
from dsframe.engines.loss_scale import LossScale
from dsframe.engines.masters import MasterWeights
from dsframe.engines.unused import Unused
from dsframe.model import ema, formats, gradient_hooks
from dsframe.model.build import build_model
from dsframe.model.forward import backward, outputs_of
from dsframe.model.micro_batch import Inputs, Measure, MicroBatch, Pair
from dsframe.model.persistent import aliases, load_buffers, persistent_buffers, saved_buffers, saved_parameters
from dsframe.model.plan import Plan
from dsframe.model.rates import keep_ratios
from dsframe.model.spill import Spill
from dsframe.model.state import EngineState, SavedState, ShardedParameters
from dsframe.tasks.task import Sums
from dsframe.values import Tensors, trainable


class ReplicaEngine(ModelEngine):
    """A whole model on every rank, kept equal by averaging gradients."""

    gradient_factor = 1.0
    """Factor on the loss that implements ``gradient_allreduce_op`` "sum" for libraries that cannot sum."""
    cannot_sum = False
    """True if the library can only average gradients."""
    shows_missing = False
    """True if a gradient that is missing on all ranks is None after the backward pass."""
    unit_classes: tuple[type, ...] = ()
    """Classes of modules whose weights the library replaces when they are called."""
    forward_is_collective = False
    """True if a rank without samples must still run the model, because others need its shards."""

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Builds the model from the seed and its optimizer, and makes both the same on all ranks."""
        self.plan = plan
        if self.cannot_sum and plan.config.deepspeed.gradient_allreduce_op == "sum":
            self.gradient_factor = float(plan.world.size)
        self._spill = self._spilled()
        self.model, self.built = build_model(self, keeps_float64=True, spill=self._spill)
        gradient_hooks.take(self.model, self.built.gradient_hooks)
        bits = precision.parameter_dtype(plan.config)
        self._dtype = self.built.dtype if bits == torch.float32 else bits
        self._masters = self._place(self.model)
        self.updates_in_place = self._masters is None
        if self._spill is not None:
            self._spill.close()
        # Stored now: while another model of the task trains, parameters require no gradients.
        self._names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        self._parameters = trainable(self.model) if self._masters is None else self._masters.masters
        self._average_start: dict[Tensor, Tensor] | None = None
        self._loss_scale = self._make_loss_scale()
        self._updates = 0
        if not plan.frozen:
            groups = self.built.groups.split(self._named_parameters())
            self.optimizer = self._distribute(
                optimizer_watch.build(plan.optimizer, groups, shards=self.forward_is_collective)
            )
            keep_ratios(self.optimizer.param_groups, plan.optimizer.learning_rate)
            self.module = self._wrap(self.model)
            self._unused = Unused(self, self.model, self.optimizer, not self.shows_missing, self.unit_classes)

    def _make_loss_scale(self) -> LossScale | None:
        if precision.autocast_dtype(self.plan.config, self.plan.device) == torch.float16:
            return LossScale(Fp16(loss_scale_window=2000, hysteresis=1))  # the defaults of torch.amp.GradScaler
        return LossScale(self.plan.config.deepspeed.fp16) if self._dtype == torch.float16 else None

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(zip(self._names, self._parameters, strict=True))

    # Overridden by subclasses.

    def _spilled(self) -> Spill | None:
        """Returns the store that holds large parameters until ``_place`` has sharded them; None: they stay in memory."""
        return None

    def _place(self, model: nn.Module) -> MasterWeights | None:
        """**Collective.** Sets dtype and storage of the parameters; returns fp32 masters if they have 16 bits."""
        for parameter in model.parameters():  # buffers keep their dtype, as with DeepSpeed
            if parameter.is_floating_point():  # not so for a 4-bit base
                parameter.data = parameter.data.to(torch.float32 if formats.is_kept(parameter) else self._dtype)
        short = precision.is_short(self._dtype) and not self.plan.frozen
        return MasterWeights(model) if short else None

    def _distribute(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """**Collective.** Wraps the optimizer for the library, and makes its state and the model the same on all ranks."""
        return optimizer

    def _wrap(self, model: nn.Module) -> nn.Module:
        """**Collective.** Returns the module whose forward pass is called."""
        return model

    def _accumulating(self) -> AbstractContextManager[Any]:
        """Encloses all micro-batches of a step except the last: no communication."""
        return nullcontext()

    def _touch_unused(self, loss: Tensor) -> Tensor:
        """Returns ``loss`` as the library needs it for the backward pass."""
        return loss

    def _synchronize(self) -> None:
        """**Collective.** Called after the last backward pass: on return, every rank has the global gradients."""

    def _pieces(self) -> list[Tensor]:
        return precision.gradients_of(self._parameters)

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """**Collective.** Returns the L2 norm of all gradients, given this rank's ``_pieces``."""
        return precision.total_norm(gradients)

    def _slot(self, name: str, parameter: Tensor) -> state_replica.ParameterView:
        return state_replica.ParameterView(name, tuple(parameter.shape), parameter)

    def _apply(self) -> None:
        self.optimizer.step()

    # The step.

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """**Collective.** Forward and backward over the micro-batches, synchronize, clip, update."""
        self._begin_step()
        scale = self._loss_scale.scale if self._loss_scale else 1.0
        rates = self.plan.schedule(self._updates)
        rates.apply(self.optimizer.param_groups)
        loss = self._gradients(micro_batches, scale)
        return self._end_step(self._update(loss, rates.learning_rate, scale))

    def _gradients(self, micro_batches: Iterable[MicroBatch], scale: float) -> Tensor:
        """**Collective.** Computes the global gradients, times ``scale``; returns this rank's mean loss."""
        steps = self.plan.batch.accumulation_steps
        factor = scale * self.gradient_factor / steps
        total: Tensor | None = None
        for index, batch in enumerate(micro_batches, start=1):
            with nullcontext() if index == steps else self._accumulating():
                loss = self._pass(batch, factor)
            total = loss if total is None else total + loss
        assert total is not None
        if self._masters:
            self._masters.take_gradients()
        self._synchronize()
        unused = [index for index, parameter in enumerate(self._parameters) if parameter.grad is None]
        for index in unused:  # not part of the loss: zeros, as in ZeRO's flat buffers
            self._parameters[index].grad = torch.zeros_like(self._parameters[index])
        self._unused.missing = {self._names[index] for index in unused}
        return total / steps

    def _pass(self, batch: MicroBatch, factor: float) -> Tensor:
        """Runs forward and backward of one micro-batch, with its loss times ``factor``; returns the loss itself,
        detached."""
        with self._whole_weights():
            outputs = self._forward(self.module, batch.inputs)
            loss = self._touch_unused(self._loss(outputs, batch))
            backward(loss * factor if factor != 1.0 else loss, torch.autograd.backward, self.built.watch)
        return loss.detach()

    def _clip(self, scale: float, *, always: bool) -> Tensor | None:
        """**Collective.** Unscales the gradients by ``scale`` and clips them; returns their norm before clipping."""
        if self.built.gradient_hooks:
            precision.clip(self._pieces(), 0.0, scale)
            scale = 1.0
            with self.built.watch.inside() if self.built.watch else nullcontext():
                for name, hooks in self.built.gradient_hooks.items():
                    view = self.view(name)
                    gradient: Any = view.master.grad
                    view.put(gradient_hooks.call(hooks, view.whole(gradient)), gradient)
        clipping = self.plan.config.deepspeed.gradient_clipping
        return precision.clip(self._pieces(), clipping, scale, self._norm, always=always)

    def _update(self, loss: Tensor, learning_rate: float, scale: float) -> StepResult:
        looks = self._loss_scale is not None or self.plan.config.settings.on_nonfinite == "skip"
        norm = self._clip(scale, always=looks or self.averages_gradients)
        overflow = looks and not precision.finite(norm)
        if not overflow:
            self._apply()
            self._updates += 1
            self._updated()
        if self._loss_scale:
            self._loss_scale.update(overflow)
        self.optimizer.zero_grad()
        shown = norm if self.averages_gradients else None
        return self._result(loss.to(self.built.dtype), learning_rate, shown, skipped=overflow)

    def _updated(self) -> None:
        """**Collective.** After an update of the masters: calls the task's ``after_step``, then updates the model."""
        if after_step.overridden(self.plan.task):
            after_step.call(self.plan.task, self.views())
            self._publish()
        elif self._masters:
            self._masters.give_weights()

    def _forward(self, model: nn.Module, inputs: Inputs) -> Any:
        with precision.autocast(self.plan.config, self.plan.device):
            outputs = outputs_of(model, precision.cast_inputs(inputs, self._dtype), self.built.watch)
        return precision.cast_outputs(outputs)

    def outputs(self, inputs: Inputs, module: nn.Module | None = None) -> Any:
        """Returns the outputs of the model or a part of it. Not of its wrapper, which would expect a backward pass."""
        if module is not None:
            return self._forward(module, inputs)
        with self._whole_weights():
            return self._forward(self.model, inputs)

    @without_gradients
    def eval_step(self, batch: Pair, measure: Measure | None) -> Sums:
        """Runs the bare model, because its wrapper may communicate; waits for no rank."""
        inputs, targets = batch
        self.model.eval()
        with self._whole_weights():
            outputs = self._forward(self.model, inputs) if measure or self.forward_is_collective else None
            try:
                return measure(outputs, targets) if measure else {}  # it may call the model
            finally:
                self.model.train()

    def average(self, decay: float) -> None:
        """Updates the average of the masters, in the optimizer's state. Sends nothing."""
        ema.update(self.optimizer, self._parameters, decay, self._average_start)

    def begin_average(self) -> None:
        """Copies the masters as the start of the average."""
        self._average_start = ema.copies(self._parameters)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the average of the masters is rounded into the model."""
        return ema.swapped(self.optimizer, self._parameters, self._publish)

    def _publish(self) -> None:
        """Copies the masters to the model if they are not its parameters."""
        if self._masters:
            self._masters.give_weights()

    def buffers(self) -> Tensors:
        """Returns this rank's buffers."""
        return persistent_buffers(self.model)

    def state(self) -> EngineState:
        """Returns views of this rank's state, by the model's names; a subclass adds what other ranks hold."""
        held = self.views(), self._frozen(), self.optimizer
        parameters = ShardedParameters(state_replica.shards(*held), state_replica.read(*held))
        loss_scale = self._loss_scale.state if self._loss_scale else None
        return EngineState(self._updates, loss_scale, saved_buffers(self.model), aliases(self.model), parameters)

    def load_state(self, saved: SavedState) -> None:
        """Every rank reads the same; nothing is sent."""
        state_replica.write(self.views(), self._frozen(), self.optimizer, saved)
        load_buffers(self.model, saved)
        if self._masters:
            self._masters.give_weights()
        if self._loss_scale:
            self._loss_scale.restore(saved.loss_scale)
        self._updates = saved.updates

    def views(self) -> list[state_replica.ParameterView]:
        """Returns for each trained parameter a view of the optimizer's tensors."""
        return [self._slot(name, parameter) for name, parameter in self._named_parameters()]

    def _frozen(self) -> list[state_replica.ParameterView]:
        return [self._slot(name, p) for name, p in saved_parameters(self.model) if not p.requires_grad]
