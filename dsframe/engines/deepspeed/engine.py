"""DeepSpeed ZeRO 0 to 3, with offload to CPU and NVMe (Rajbhandari et al., arXiv 1910.02054 and 2104.07857).

``initialize_config`` makes the configuration that DeepSpeed gets: the user's file, with changes that keep the meaning the same
on every engine (dsframe runs the ``scheduler``, batch sizes are explicit, Adam is torch's) or make ZeRO-3 faster.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsframe.cluster import process_group
from dsframe.config.features import makes_groups
from dsframe.engine import StepResult
from dsframe.engines import after_step, optimizer_watch, precision, torch_patches
from dsframe.engines.base import COPIED, INFERENCE, JVP, TWICE, ModelEngine, stays_gathered, without_gradients
from dsframe.engines.call_order import CallOrder, NoCalls
from dsframe.engines.deepspeed import jit, patches, state, versions
from dsframe.engines.deepspeed.imports import deepspeed, logger, set_z3_leaf_module, z3_leaf_module
from dsframe.engines.deepspeed.initialize_config import initialize_config
from dsframe.engines.deepspeed.refusals import refuse_after_step, refuse_compiled, refuse_empty, refuse_gradient_hooks
from dsframe.engines.deepspeed.stage_3 import SHARDS, InTurn, copy_shard, prepare_leaf_modules
from dsframe.engines.deepspeed.swap import SwapFolders
from dsframe.engines.escapes import Escapes
from dsframe.engines.state_replica import ParameterView
from dsframe.engines.unused import Unused
from dsframe.errors import EngineError
from dsframe.host.restored import at_end
from dsframe.model import ema, gradient_hooks, optimizers, output_classes, rates, switches
from dsframe.model.build import build_model
from dsframe.model.forward import backward, call, outputs_of
from dsframe.model.micro_batch import Inputs, Measure, MicroBatch, Pair
from dsframe.model.persistent import persistent_buffers
from dsframe.model.plan import Plan
from dsframe.model.spill import Spill, on_disk
from dsframe.model.state import EngineState, SavedState
from dsframe.tasks.task import Sums
from dsframe.values import Tensors, elements, trainable

if TYPE_CHECKING:
    from dsframe.engines.deepspeed.sequence import Slices
    from dsframe.engines.deepspeed.state_experts import Part
    from dsframe.engines.deepspeed.state_tensor import Cut
    from dsframe.engines.deepspeed.tensor_trial import Trial, WholeGradients


class ZeroEngine(ModelEngine):
    """DeepSpeed's engine: optimizer state, gradients and parameters sharded as ``zero_optimization`` says."""

    reaches_model = True
    explains: ClassVar[Mapping[str, str]] = {
        **JVP,
        "cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object": COPIED,
        "__reduce_and_partition_ipg_grads": TWICE,  # stage 3's assertion has no message
        "Inference tensors cannot be saved": INFERENCE,
        "The size of tensor a (0) must match": "a block that {} gathers as one unit (activation_checkpointing, compile or "
        "leaf_module) gives the loss a tensor that is not in its outputs, and its weights are not gathered for that: return it",
        "view(): cannot view shape": "a linear layer gets a nested tensor, and {} has no gradient for that: pad the rows",
    }

    def __init__(self, plan: Plan) -> None:
        """**Collective.** Raises EngineError if this machine lacks what the file asks for (fp16, libaio)."""
        versions.check(patches.version(), speaks=plan.world.is_main)
        patches.check_later_ones()
        self.plan = plan
        self._stage = plan.config.deepspeed.zero_optimization.stage
        self.reduces_repeatedly = self._stage < 3
        self._spill: Spill | None = None
        self._slices: Slices | None = None
        self._spreads_experts = plan.config.deepspeed.on("expert_parallel") and not plan.frozen
        self._experts: Mapping[str, Part] = {}
        self._shares: Mapping[str, Cut] = {}
        self._trial: Trial | None = None
        self._whole_gradients: WholeGradients | None = None
        self._compared = 0
        self._dtype = precision.parameter_dtype(plan.config)
        self._refuse_what_the_machine_lacks()
        refuse_after_step(plan)
        for put_back in (patches.release_groups, torch_patches.put_linear_back):  # an error may occur before close()
            at_end(put_back)
        at_end(logger.setLevel, logger.level)
        if plan.config.deepspeed.log_level is None and not plan.verbose:
            logger.setLevel(logging.ERROR)
        patches.leave_out_shm_comm()
        jit.prepare(jit.needed_ops(plan.config, plan.optimizer), plan.world)
        process_group.open_process_group(plan.world, plan.device, plan.collective_limit)
        self._swap = SwapFolders(plan.config.written().get("zero_optimization", {}), plan.world, plan.device)
        if not plan.verbose:
            patches.silence_torch_warnings()
        with contextlib.nullcontext() if plan.verbose else _quiet():
            if plan.optimizer.kind.lower() == "muon" and plan.device.type == "cpu":
                patches.orthogonalize_in_fp32()
            module, self._model = self._build()
            if self._stage == 3:
                patches.fill_lists()
                refuse_empty(self._model)
                refuse_compiled(self._model)
            self._elements = elements(module.parameters())
            if self._stage == 3 and not self._elements:
                made = next(self._model.children(), self._model)
                raise EngineError(
                    f"{type(made).__name__} in models() has no parameters, and DeepSpeed ZeRO-3 starts no model without them: "
                    "call it in the loss, as an attribute of the task"
                )
            self._kept = plan.config.deepspeed.zero_optimization.keeps_whole(self._elements)
            self._initialize_with_hooks(module)
        if not plan.frozen:
            self._prepare_steps(module)
        calls = self._watch_calls(module) if self._stage == 3 and plan.world.size > 1 else None
        self._calls: NoCalls = calls or NoCalls()
        self.built = replace(self.built, calls=calls)
        self.updates_in_place = self._stage == 0 and self._dtype == torch.float32
        self._updates = 0
        self._average_start: dict[Tensor, Tensor] | None = None

    def _initialize_with_hooks(self, module: nn.Module) -> None:
        """**Collective.** Starts DeepSpeed's engine, with hooks before and behind its own."""
        seen = self._stage == 3 and not self.plan.config.settings.model.compile
        finish = patches.keep_writes(module)
        take = output_classes.show(module.modules() if seen else ())
        with patches.scalars_sent():
            self._initialize(module)
        units = self._units(module) if seen and not self.gathers_steps else {}
        self._escapes = Escapes(self, units, _weights, lambda unit: SHARDS.gradients(_weights(unit), []))
        take()
        if self._stage == 3:
            finish(self._engine)

    def _prepare_steps(self, module: nn.Module) -> None:
        plan = self.plan
        rates.keep_ratios(self._engine.basic_optimizer.param_groups, plan.optimizer.learning_rate)
        patches.undo_hidden_step(self._engine)
        patches.keep_norm(self._engine)
        patches.reduce_in_order(self._engine)
        self._end_backward = patches.reduce_leaf_modules(self._engine)
        patches.zero_unused(self._engine)
        self._unused = Unused(self, self._model, self._engine.basic_optimizer)
        patches.scale_until_updated(self._engine.optimizer)
        if plan.config.deepspeed.pipeline.stages == 1:
            self._begin_backward = patches.prologue_of_loss(self._engine)
        if plan.config.settings.on_nonfinite == "skip":
            patches.look_before_each_step(self._engine)

    def _watch_calls(self, model: nn.Module) -> CallOrder | None:
        """Returns the call order of all modules that gather weights; None if the model is compiled."""
        if self.plan.config.settings.model.compile is True:
            return None
        parameters = dict[str, nn.Parameter]()
        for name, module in (units := self._units(model)).items():
            if not z3_leaf_module(module):  # gathered as one unit; missing gradients in it are zeros
                named = module.named_parameters(name, recurse=False)
                parameters.update({full: parameter for full, parameter in named if parameter.requires_grad})
        return CallOrder(self, model, units, parameters)

    def _units(self, model: nn.Module) -> dict[str, nn.Module]:
        """Returns the modules that gather weights at stage 3, by name."""
        inside = {
            part for unit in model.modules() if z3_leaf_module(unit) for part in unit.modules() if part is not unit
        }
        modules = {name: module for name, module in model.named_modules() if module not in inside}
        return {name: module for name, module in modules.items() if z3_leaf_module(module) or _weights(module)}

    def _build(self) -> tuple[nn.Module, nn.Module]:
        """**Collective.** Returns the module that DeepSpeed trains, and the one with the parameter names of the state."""
        # A single rank has the whole model on its device, unless parameters are offloaded.
        zero = self.plan.config.deepspeed.zero_optimization
        if self._stage == 3 and (self.plan.world.size > 1 or zero.parameter_device != "none"):
            self._spill = on_disk(self.plan.directory, self.plan.world.size)
        model, self.built = build_model(self, spill=self._spill)
        gradient_hooks.refuse_nonlinear(model, self.built.gradient_hooks, f"DeepSpeed ZeRO-{self._stage}")
        refuse_gradient_hooks(self.plan, self.built.gradient_hooks)
        if precision.is_short(self._dtype):
            _call_in_fp32(model, self.built.gradient_hooks)
        if self._stage == 3:
            self._settle_gathering(model)
        if self.plan.batch.sequence_parallel_size > 1:
            from dsframe.engines.deepspeed.sequence import Slices

            self._slices = Slices(self.plan, model)
        # A block that is recomputed in the backward pass needs all its parameters throughout. ZeRO-3 must gather and
        # release it as one unit; releasing module by module would free weights that autograd still needs (measured:
        # shapes of 0). A compiled block would have a graph break at each hook.
        if self._stage == 3 and not self.gathers_steps:
            for block in switches.units(model):
                set_z3_leaf_module(block, True)
            prepare_leaf_modules(model, self.plan.config.written()["zero_optimization"].get("leaf_module") or {})
        return model, model

    def _initialize(self, module: nn.Module) -> None:
        """**Collective.** Starts DeepSpeed's engine on ``module``."""
        if self.plan.frozen and self._stage < 3:
            return  # nothing is sharded
        if self._spreads_experts:
            from dsframe.engines.deepspeed import experts, state_experts

            experts.refuse_unsupported(self.plan, module)
            with patches.recorded_routers(), experts.whole_blocks(module):
                self._start(module)
            self._experts = state_experts.parts(module)
            return
        if self.plan.batch.tensor_parallel_size == 1:
            self._start(module)
            return
        from dsframe.engines.deepspeed import tensor, tensor_trial

        section = tensor.completed(self.plan.config.written()["tensor_parallel"], module, self.plan)
        with tensor_trial.whole_layers(module):
            self._start(module, section)
        self._shares = tensor.cuts(self._model)
        self._whole_gradients = tensor_trial.WholeGradients(self._model, self._shares, self.plan.device)

    def _start(self, module: nn.Module, tensor_parallel: Mapping[str, Any] | None = None) -> None:
        document = initialize_config(
            self.plan,
            elements=self._elements,
            keeps_weights=self._kept,
            swap_paths=self._swap.paths,
            tensor_parallel=tensor_parallel,
        )
        if self._spill is not None:
            self._shard(module, document, self._spill)
        if tensor_parallel is not None:
            from dsframe.engines.deepspeed.tensor_trial import Trial

            self._trial = Trial.of(module)
        if self.gathers_steps:
            document["zero_optimization"].pop("leaf_module", None)
        if self.plan.frozen:
            del document["optimizer"]
            document["zero_optimization"].pop("offload_optimizer", None)
            document.pop("expert_parallel", None)  # nothing is trained: expert weights are whole, or sharded by stage 3
        optimizer, parameters = None, self._split()
        if self.plan.optimizer.is_custom and not self.plan.frozen:
            if self._stage:
                from dsframe.engines.deepspeed import optimizer_trial

                optimizer_trial.refuse_dependent(self.plan.optimizer, self._stage)
            del document["optimizer"]
            optimizer = partial(optimizer_watch.build, self.plan.optimizer, shards=self._stage > 0)
            parameters = parameters or trainable(module)
        if self._spreads_experts:
            from dsframe.engines.deepspeed import experts

            optimizer, parameters = experts.prepared(optimizer, parameters)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, model_parameters=parameters, config=document, dist_init_required=False
        )
        if self.plan.frozen:
            return
        if self.built.groups.options:  # Muon makes its own groups, with a decay, and has no defaults
            optimizers.refuse_decay(self._engine.basic_optimizer)
        patches.coalesce_gathers(self._engine)

    def _shard(self, module: nn.Module, document: dict[str, Any], spill: Spill) -> None:
        """**Collective.** Shards ``module`` parameter by parameter. It is never whole on the device, nor in memory,
        unless it is split for tensor parallelism.

        ``initialize`` would first move all of an unsharded module to the device and broadcast it from rank 0 (deepspeed
        0.19.8, ``runtime/engine.py``: _configure_distributed_model).
        """
        if self.plan.batch.tensor_parallel_size > 1:
            # ``initialize`` splits the layers first and needs them whole on the device; in memory they are loaded one
            # by one.
            for parameter in module.parameters():
                spill.fetch(parameter, self._dtype)
                parameter.data = parameter.data.to(self.plan.device)
            module.to(self.plan.device)
        else:
            deepspeed.init_distributed(dist_init_required=False)
            in_turn = InTurn(module, lambda parameter: spill.fetch(parameter, self._dtype))
            deepspeed.zero.Init(module=in_turn, config_dict_or_path=copy.deepcopy(document))
            module.to(self.plan.device)  # its buffers
        spill.close()

    def _split(self) -> list[Any] | None:
        """Returns the parameter groups; None without group options: DeepSpeed makes one itself. Raises EngineError."""
        if not self.built.groups.options:
            return None
        if who := makes_groups(self.plan.config.deepspeed):
            raise EngineError(
                f"parameter groups: {who} makes its own in DeepSpeed; use another optimizer, or no groups"
            )
        return self.built.groups.split(
            (name, parameter) for name, parameter in self._model.named_parameters() if parameter.requires_grad
        )

    def _tensor_group(self) -> dist.ProcessGroup:
        from dsframe.engines.deepspeed import tensor

        return tensor.group()

    def _refuse_what_the_machine_lacks(self) -> None:
        accelerator = deepspeed.get_accelerator()
        if self._dtype == torch.float16 and not accelerator.is_fp16_supported():
            raise EngineError("fp16: DeepSpeed does not run it on this processor; use bf16, or torch_autocast")
        if precision.autocast_dtype(self.plan.config, self.plan.device) == torch.float16:  # the file names no dtype
            raise EngineError('torch_autocast: float16 here, with losses not scaled; write "dtype": "bfloat16"')

    def views(self) -> list[ParameterView]:
        """Returns the views of DeepSpeed's optimizer state, one for each trained parameter."""
        return state.views(self._engine, self._model)

    @property
    def description(self) -> str:
        """Name of the engine for the first line of a run."""
        zero = self.plan.config.deepspeed.zero_optimization
        parts = [f"DeepSpeed ZeRO-{self._stage}"]
        for what, section in (("optimizer", zero.offload_optimizer), ("parameters", zero.offload_param)):
            if section is not None and section.device != "none":
                parts.append(f"{what} on {section.device.upper() if section.device == 'cpu' else 'NVMe'}")
        if self._kept:
            parts.append("weights not resharded")
        if self.gathers_steps:
            parts.append("weights gathered for each step")
        if self.plan.batch.tensor_parallel_size > 1:
            parts.append(f"tensor parallel, {self.plan.batch.tensor_parallel_size} ranks")
        if self.plan.batch.sequence_parallel_size > 1:
            parts.append(f"sequence parallel, {self.plan.batch.sequence_parallel_size} ranks")
        if self._experts:
            parts.append(f"expert parallel, {self.plan.config.deepspeed.expert_parallel.autoep_size} ranks")
        return ", ".join(parts)

    @property
    def _tensor_rank(self) -> int:
        """Index of this rank's shard of each split layer."""
        return self.plan.world.rank % self.plan.batch.tensor_parallel_size

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> StepResult:
        """**Collective.** Makes one optimizer update through DeepSpeed's forward, backward and step."""
        self._begin_step()
        rates = self.plan.schedule(self._updates)
        rates.apply(self._engine.basic_optimizer.param_groups)
        if self._slices is not None:
            micro_batches = map(self._slices.cut_micro_batch, micro_batches)
        total = self._accumulate(micro_batches)
        self._calls.check(waits=self.plan.device.type == "cpu")
        applied = bool(self._engine.was_step_applied())
        self._updates += applied
        if applied and after_step.overridden(self.plan.task):
            after_step.call(self.plan.task, self.views())
            state.publish(self._engine)
        loss = (total / self.plan.batch.accumulation_steps).float()
        self._compare_losses(loss)
        if self._slices is not None:
            loss = self._slices.mean(loss)
        norm = self._engine.get_global_grad_norm()
        return self._end_step(self._result(loss, rates.learning_rate, norm, skipped=not applied))

    def _compare_losses(self, loss: Tensor) -> None:
        """**Collective.** Compares losses (first two steps) and gradients (first step) of ranks that split layers.
        Losses differ after a step in which ranks draw different amounts of random numbers. Raises EngineError."""
        if self._shares and self._compared < 2:
            from dsframe.engines.deepspeed.tensor_trial import refuse_different

            self._compared += 1
            refuse_different(loss, self._dtype, self._tensor_group())
        if self._whole_gradients is not None:
            gradients, self._whole_gradients = self._whole_gradients, None
            gradients.refuse_different(self._dtype, self._tensor_group())

    def _accumulate(self, micro_batches: Iterator[MicroBatch]) -> Tensor:
        """Reduces as DeepSpeed does: once per step at stages 0 and 1, else per micro-batch. Returns the sum of
        losses."""
        losses: list[Tensor] = []
        for batch in micro_batches:
            with self._whole_weights():
                loss = self._loss(self._forward(batch.inputs), batch)
                self._backward(loss, last=len(losses) + 1 == self.plan.batch.accumulation_steps)
            self._engine.step()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def _backward(self, loss: Tensor, *, last: bool) -> None:
        self._calls.backward(loss)
        self._escapes.gather(loss)
        loss.register_hook(lambda _: self._begin_backward())  # type: ignore[no-untyped-call]
        backward(loss, self._engine.backward, self.built.watch)
        if names := self._end_backward():
            raise EngineError(
                f"{', '.join(names)}: {self.description} gathers it as one unit (activation_checkpointing, compile or leaf_module) "
                "and reduces its gradients after the backward pass of its calls. A part of it was called while it did not run "
                "itself, or the loss does not depend on each of its calls. Call the module itself, under torch.no_grad() where "
                "the loss does not depend on it, or name other modules in the file"
            )
        if last:
            self._calls.compare()

    def _forward(self, inputs: Inputs) -> Any:
        inputs = precision.cast_inputs(inputs, self._dtype)
        if self._trial is not None:
            trial, self._trial = self._trial, None
            with self._without_hooks() if self._stage == 3 else contextlib.nullcontext():
                trial(self._model, inputs, self._shares, self._tensor_rank)
        return precision.cast_outputs(outputs_of(self._engine, inputs, self.built.watch))

    @contextlib.contextmanager
    def _whole_weights(self) -> Iterator[None]:
        if not self.gathers_steps:
            yield
            return
        with patches.hooks_set_aside(self._engine), SHARDS.gathering(list(self._model.parameters())):
            yield

    def copy_shard(self, parameter: Any, source: Any) -> None:
        """At stage 3 copies this rank's shard."""
        (copy_shard if self._stage == 3 else super().copy_shard)(parameter, source)

    def outputs(self, inputs: Inputs, module: nn.Module | None = None) -> Any:
        """**Collective** at stage 3. Runs the model or a part, not the engine, which would expect a backward pass."""
        with self._whole_weights() if module is None else contextlib.nullcontext():
            outputs = call(self._model if module is None else module, precision.cast_inputs(inputs, self._dtype))
        return precision.cast_outputs(outputs)

    def release_outputs(self) -> None:
        """**Collective** at stage 3. Compares the calls and removes them from DeepSpeed's trace."""
        self._calls.compare()
        self._calls.check(waits=self.plan.device.type == "cpu")
        if self._stage == 3 and not self.plan.frozen:
            patches.forget_evaluation(self._engine)

    @without_gradients
    def eval_step(self, batch: Pair, measure: Measure | None) -> Sums:
        """**Collective.** At stage 3 every rank's forward pass gathers the others' parameters."""
        inputs, targets = batch if self._slices is None else self._slices.cut(batch)
        alone = self._model.training  # DeepSpeed sets no mode of its own engine
        if alone:
            self._engine.eval()
        with self._whole_weights():
            outputs = self._forward(inputs)
            measured = measure(outputs, targets) if measure and self._tensor_rank == 0 else {}
        if alone:
            self._engine.train()
        if self._calls.watches:
            self._calls.compare()
            self._calls.check(waits=alone)
        if self._stage == 3:
            patches.forget_evaluation(self._engine)
        return measured

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """**Collective** at stage 3. Inside, the model is in evaluation mode, and weights stay gathered if memory
        allows. If all are gathered already, nothing is sent, and ranks need not call the same modules."""
        self._engine.eval()
        with self._gathered():
            yield
        self._engine.train()
        self._calls.check()

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        if (
            self._stage != 3
            or self.gathers_steps
            or self.plan.config.settings.model.compile  # the compiled model includes the hooks
            or self.plan.config.deepspeed.zero_optimization.parameter_device == "nvme"
        ):
            return contextlib.nullcontext()
        size = self._elements * self._dtype.itemsize
        if not (self._kept or stays_gathered(self, size)):
            return contextlib.nullcontext()
        return self._without_hooks()

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        """**Collective** if a weight is not gathered. Inside, all are gathered and modules run without DeepSpeed's
        hooks, which would gather them again."""
        self._calls.watches = False
        try:
            with patches.hooks_set_aside(self._engine), SHARDS.gathering(list(self._model.parameters())):
                yield
        finally:
            self._calls.watches = True

    def average(self, decay: float) -> None:
        """Updates the average of this rank's shards in the optimizer's state. Sends nothing."""
        ema.update(*state.masters(self._engine, self._model), decay, self._average_start)

    def begin_average(self) -> None:
        """Copies this rank's shards as the start of the average."""
        self._average_start = ema.copies(state.masters(self._engine, self._model)[1])

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """**Collective.** Inside, every rank's model has the averages."""
        optimizer, masters = state.masters(self._engine, self._model)
        return ema.swapped(optimizer, masters, lambda: state.publish(self._engine))

    def buffers(self) -> Tensors:
        """Returns this rank's buffers; in a pipeline those of its stage."""
        return persistent_buffers(self._model)

    def state(self) -> EngineState:
        """**Collective** to read to its end; at stages 1 to 3 parameters are gathered one at a time."""
        collected = state.state(self._engine, self._model, self._updates)
        if self._experts:
            from dsframe.engines.deepspeed import experts, state_experts

            size = self.plan.config.deepspeed.expert_parallel.autoep_size
            return state_experts.whole(collected, self._experts, experts.group(size))
        if not self._shares:
            return collected
        from dsframe.engines.deepspeed import state_tensor

        return state_tensor.whole(collected, self._shares, self._tensor_group())

    def load_state(self, saved: SavedState) -> None:
        """**Collective.** Each rank takes its shards of the whole parameters."""
        whole, updates, batch = saved, saved.updates, self.plan.batch
        if self._shares:
            from dsframe.engines.deepspeed import state_tensor

            saved = state_tensor.Shares(saved, state.shapes(self._model), self._shares, self._tensor_rank)
        if self._experts:
            from dsframe.engines.deepspeed import state_experts

            saved = state_experts.Experts(saved, self._experts)
        state.load_state(self._engine, self._model, saved, batch.accumulation_steps, batch.train_batch_size)
        if self._trial is not None:
            self._trial.load(whole)
        self._updates = updates

    def close(self) -> None:
        """**Collective.** Frees DeepSpeed's buffers and hooks, and leaves the process group."""
        self._calls.close()
        if self._stage == 3 or not self.plan.frozen:
            self._engine.destroy()
        if self._stage == 3:
            patches.release_model(self._engine.module)
        process_group.close_process_group()
        patches.release_groups()
        torch_patches.put_linear_back()
        self._swap.remove()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses DeepSpeed's warnings about its use of torch, and a pipeline's list of layers, during set-up."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _weights(unit: nn.Module) -> list[nn.Parameter]:
    return [*unit.parameters(recurse=z3_leaf_module(unit))]


def _call_in_fp32(model: nn.Module, hooks: gradient_hooks.GradientHooks) -> None:
    """Gives ``hooks``, which torch calls, fp32 gradients where ``model`` has 16-bit ones."""
    for name in hooks:
        of_parameter: Any = model.get_parameter(name)._backward_hooks
        for key, hook in of_parameter.items():
            of_parameter[key] = partial(_in_fp32, hook)


def _in_fp32(hook: Callable[[Tensor], Any], gradient: Tensor) -> Tensor:
    return gradient_hooks.call([hook], gradient.float()).to(gradient.dtype)
